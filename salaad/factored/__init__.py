"""Models that compute with U·V + S as it is stored, and the two folder formats that `from_pretrained` opens.

Begin with `slr`, one weight as U·V + S; then `layers`. Importing the package registers both with transformers.
"""

from salaad.factored import any_size, fixed_size  # noqa: F401  entering the registry
from salaad.factored.layers import SlrEmbedding, SlrLinear

__all__ = ["SlrEmbedding", "SlrLinear"]
