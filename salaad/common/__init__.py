"""Helpers without knowledge of models: errors, checks, files, locks, torch.distributed, signals, tables, provenance.

Begin with `errors`: a `UserError` is one sentence with the value, the limit and the cure; a command ends with code 2.
"""
