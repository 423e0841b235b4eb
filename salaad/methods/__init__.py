"""The ways to train, each one object behind the interface of `base`: the training loop knows none of them by name.

Begin with `base`, then `full_rank`, which overrides nothing, then the folder `salaad`, the paper's own.
"""
