"""CoLA: two factors with an activation between them in place of every projection (2502.10940).

    y = B·SiLU(A·x),   A (r×in), B (out×r), entries normal with variance (r·(in + out))^(−1/2)

The layer is not linear, so it cannot be merged into a dense weight: a checkpoint keeps the factors, in a folder of this
package's own format. At 60m and 130m the feed-forward layer keeps its own SiLU, at 350m and 1b it does not
(`keep_swiglu`, stored in the folder's config.json as hidden_act). Different from the released code: the pad token is
the tokenizer's, and its row of the embedding gets no gradient.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from salaad.common.errors import UserError
from salaad.config.methods import ColaConfig
from salaad.config.run import RunConfig
from salaad.factored.slr import Slr
from salaad.methods.float32 import at_least_float32
from salaad.methods.low_rank_layers import LowRankMethod, SlrFactored, no_entries


class ColaLinear(SlrFactored):
    """The layer y = B·SiLU(A·x).

    Args:
        linear: the layer to replace; its weight (out×in) is not kept.
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
        """Return y (…×out) for the input x (…×in)."""
        return F.linear(F.silu(F.linear(x, self.A)), self.B, self.bias)

    def slr(self) -> Slr:
        """Return U = B and V = A, without entries of S."""
        A, B = at_least_float32(self.A, self.B)
        return Slr((len(B), A.shape[1]), B, A, *no_entries(B))


class Cola(LowRankMethod):
    """Pretraining of two factors with an activation between them in place of every projection (CoLA)."""

    Settings = ColaConfig
    Layer = ColaLinear
    keeps_weights = False

    @classmethod
    def check(cls, model: PreTrainedModel, config: RunConfig) -> None:
        """Raise a UserError for a model whose activation `rebuild` would not leave out in both training and folder."""
        super().check(model, config)
        if config.settings.keep_swiglu:
            return
        linear = copy.deepcopy(model.config)
        linear.hidden_act = "linear"
        with torch.device("meta"):
            activations = [module.act_fn for module in type(model)(linear).modules() if hasattr(module, "act_fn")]
        x = torch.tensor([-1.0, 2.0])
        if not activations or not all(torch.equal(one(x), x) for one in activations):
            raise UserError(
                f"cola.keep_swiglu is false, but hidden_act does not set the activation of a {model.config.model_type} "
                "model; keep it, or give a LLaMA-like model"
            )

    @classmethod
    def rebuild(cls, model: PreTrainedModel, config: RunConfig) -> None:  # noqa: D102
        super().rebuild(model, config)
        if not config.settings.keep_swiglu:
            model.config.hidden_act = "linear"
            for module in model.modules():
                if hasattr(module, "act_fn"):
                    module.act_fn = nn.Identity()
