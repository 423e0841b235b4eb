"""From a checkpoint to a model of any size: split into parts, cut to a budget, refined, written as a folder.

Begin with `cut`, which is arithmetic on parts; `deployment` says what a folder can be cut to, `write` makes the folder.
"""
