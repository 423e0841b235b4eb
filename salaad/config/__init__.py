"""The settings of a run and the options of every command, typed and checked before anything heavy starts.

Begin with `run`: `RunConfig` and its sections; `command_line` builds them from YAML and `--section.key value`.
"""
