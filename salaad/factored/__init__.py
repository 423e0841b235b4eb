"""Models that compute with U·V + S as it is stored, and the two folder formats that `from_pretrained` opens.

Begin with `slr`, then `slr_weight` and `layers`. Importing the package registers both formats with transformers.
"""

from salaad.common.lazy import later
from salaad.factored import registration

registration.register()

__all__ = ["SlrEmbedding", "SlrLinear"]
__getattr__ = later(__name__, dict.fromkeys(__all__, "salaad.factored.layers"))
