"""What the loop of `train.py` needs around Algorithm 1: ranks, clipping, agreement, the state of a run, the plan.

Begin with `train.py`, which calls what these files define.
"""
