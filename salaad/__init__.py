"""SALAAD: pretrain a language model whose weights are drawn towards low-rank plus sparse, deploy it at any size."""

import salaad.elastic
import salaad.factored  # noqa: F401  both enter folders of ours into transformers' registry: from_pretrained opens them
from salaad.config import SalaadConfig
from salaad.salaad import Salaad

__all__ = ["Salaad", "SalaadConfig"]
