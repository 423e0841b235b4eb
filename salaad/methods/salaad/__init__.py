"""SALAAD (paper, Algorithm 1): one block's L, S and dual in `surrogate`, all blocks of a model in `plugin`.

Begin with `surrogate`; `method` gives them the interface of all methods, `storage` saves them in a checkpoint.
"""
