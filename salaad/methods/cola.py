"""CoLA: two factors with an activation between them in place of every projection (2502.10940).

    y = B·SiLU(A·x),   A (r×in), B (out×r), entries normal with variance (r·(in + out))^(−1/2)

The layer is no matrix, so it cannot be merged into one: a checkpoint keeps the factors and opens as a folder of this
package's own format. At 60m and 130m the feed-forward layer keeps the SiLU it has, at 350m and 1b it does not
(`keep_swiglu`; the folder's config.json says so as hidden_act). Different from the released code: the pad token is that
of the tokenizer, whose row of the embedding gets no gradient.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from salaad.config.methods import ColaConfig
from salaad.config.run import RunConfig
from salaad.factored.slr import Slr
from salaad.methods.float32 import at_least_float32
from salaad.methods.low_rank_layers import (
    LowRankMethod,
    SlrFactored,
    no_entries,
)


class ColaLinear(SlrFactored):
    """y = B·SiLU(A·x).

    Args:
        linear: whose place it takes; its weight (out×in) is not kept.
        settings: rank.
    """

    activation = "silu"

    def __init__(self, linear: nn.Linear, settings: ColaConfig) -> None:
        super().__init__()
        (out, width), device = linear.weight.shape, linear.weight.device
        std = (settings.rank * (width + out)) ** -0.25
        self.A = nn.Parameter(torch.empty(settings.rank, width, device=device).normal_(std=std))
        self.B = nn.Parameter(torch.empty(out, settings.rank, device=device).normal_(std=std))
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Y (…×out) of x (…×in)."""
        return F.linear(F.silu(F.linear(x, self.A)), self.B, self.bias)

    def slr(self) -> Slr:
        """B and A."""
        A, B = at_least_float32(self.A, self.B)
        return Slr((len(B), A.shape[1]), B, A, *no_entries(B))


class Cola(LowRankMethod):
    """Bottlenecks with an activation in place of projections."""

    Settings = ColaConfig
    Layer = ColaLinear

    @classmethod
    def rebuild(cls, model: PreTrainedModel, config: RunConfig) -> None:  # noqa: D102
        super().rebuild(model, config)
        if not config.settings.keep_swiglu:
            model.config.hidden_act = "linear"
            for module in model.modules():
                if hasattr(module, "act_fn"):
                    module.act_fn = nn.Identity()
