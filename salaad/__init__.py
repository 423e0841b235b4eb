"""SALAAD: pretrain a language model whose weights are drawn towards low-rank plus sparse, deploy it at any size."""

import salaad.factored  # noqa: F401  enters our folders into transformers' registry, so that from_pretrained opens them
from salaad.config import SalaadConfig
from salaad.salaad import Salaad

__all__ = ["Salaad", "SalaadConfig"]
