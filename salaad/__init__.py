"""SALAAD: pretrain a language model whose weights are drawn towards low-rank plus sparse, deploy it at any size."""

import salaad.factored  # noqa: F401  enters the folder formats into transformers' registry: from_pretrained opens them
from salaad.config.methods import SalaadConfig
from salaad.methods.salaad.plugin import Salaad

__all__ = ["Salaad", "SalaadConfig"]
