"""The parts of scripts/torture.py: toy runs that are broken from outside, and damaged files that are opened.

Begin with `drills` (one method per fault); `toy_run` and `training_process` start a run as users do and compare two of
them; `faulty_hub` stands in for the hub; `fuzz` opens what `config_damage` and `folder_damage` have tampered with.
"""
