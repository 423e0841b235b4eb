"""Plain pretraining: the optimizer follows the gradient of the loss alone."""

from salaad.methods.base import Method


class FullRank(Method):
    """Plain pretraining, with which every other method is compared; it overrides nothing of the interface."""
