"""What every room uses and what knows no model: errors for a person, checks, files, locks, ranks, signals, formats.

Begin with `errors`: a `UserError` is one sentence with the value, the limit and the cure; a command ends with code 2.
"""
