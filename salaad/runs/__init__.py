"""What lies on disk: the folder of a run, its checkpoints and records, and whatever model a command is pointed at.

Begin with `run` (a run's folder) or with `model_on_disk` (what `--checkpoint` names).
"""
