"""SALAAD: pretrain a language model whose weights are drawn towards low-rank plus sparse, deploy it at any size."""

from salaad.config import SalaadConfig
from salaad.salaad import Salaad

__all__ = ["Salaad", "SalaadConfig"]
