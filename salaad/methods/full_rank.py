"""Plain pretraining: the optimizer follows the gradient of the loss alone."""

from salaad.methods.base import Method


class FullRank(Method):
    """The run that every other method is compared with; nothing of the interface is changed."""
