"""SALAAD (paper, Algorithm 1): one block's L, S and dual in `surrogate`, all blocks of a model in `plugin`.

Begin with `surrogate`; `method` puts them behind the interface of every method, `storage` into a checkpoint.
"""
