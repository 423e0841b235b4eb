"""SALAAD (paper, Algorithm 1): one block's L, S and dual in `update` and `surrogate`, all blocks in `plugin`.

Begin with `update`, the equations; `schedule` says when blocks are updated, `round` updates many at once, and `pull`
moves the weights. `method` has the interface of all methods, `storage` saves in a checkpoint.
"""
