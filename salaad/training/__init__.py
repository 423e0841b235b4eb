"""What the loop of `train.py` needs around Algorithm 1: ranks, clipping, agreement, the state of a run, the plan.

Begin with `train.py`; each file here is one of its lines.
"""
