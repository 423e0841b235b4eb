"""SLTrain: a low-rank product plus a sparse matrix of random, fixed support (2406.02214).

    W = (α/r)·B·A + S,   A (r×in) Kaiming-uniform, B (out×r) = 0, the δ·out·in entries of S uniform in ±1/√in

The support is drawn once, uniformly over all entries, and only the values of S are trained: their gradient is that of
the dense W, gathered at the support. Different from the released code: positions are int32 and lie in the checkpoint
(there int64, drawn anew), and W is built once per micro-batch, for the forward and the backward pass together: faster,
at the price of a dense weight per layer until its backward, unless activations are recomputed.
"""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from salaad.config.methods import SltrainConfig
from salaad.config.run import RunConfig
from salaad.factored.slr import Slr
from salaad.methods.float32 import at_least_float32
from salaad.methods.lora import draw
from salaad.methods.low_rank_layers import LowRankMethod, SlrFactored, factored_layers
from salaad.methods.optimizer import build_optimizer, projection_weights
from salaad.methods.work import Work
from salaad.model.parameters import count_parameters
from salaad.spectral.cost import Rates


class SltrainLinear(SlrFactored):
    """The linear layer y = ((α/r)·B·A + S)·x.

    Args:
        linear: the layer to replace; its weight (out×in) is not kept.
        settings: rank, α and density.
    """

    def __init__(self, linear: nn.Linear, settings: SltrainConfig) -> None:
        super().__init__()
        (out, width), device = linear.weight.shape, linear.weight.device
        self.shape, self.scale = (out, width), settings.alpha / settings.rank
        self.bias = linear.bias
        self.A = nn.Parameter(torch.empty(settings.rank, width, device=device))
        self.B = nn.Parameter(torch.zeros(out, settings.rank, device=device))
        draw(self.A)
        nnz = int(settings.density * out * width)
        self.S_values = nn.Parameter(torch.empty(nnz, device=device).uniform_(-(width**-0.5), width**-0.5))
        positions = torch.randperm(out * width, device=device)[:nnz].sort().values
        self.register_buffer("S_positions", positions.int() if out * width < 2**31 else positions)

    def forward(self, x: Tensor) -> Tensor:
        """Return y (…×out) for the input x (…×in)."""
        product = (self.B * self.scale) @ self.A
        W = product.view(-1).index_add_(0, self.S_positions, self.S_values.to(product.dtype)).view(self.shape)
        return F.linear(x, W, self.bias)

    def slr(self) -> Slr:
        """Return U = (α/r)·B, V = A and the entries of S."""
        A, B, values = at_least_float32(self.A, self.B, self.S_values)
        return Slr(self.shape, self.scale * B, A, self.S_positions, values)


class Sltrain(LowRankMethod):
    """Pretraining of a low-rank product plus a sparse matrix of fixed support (SLTrain)."""

    Settings = SltrainConfig
    Layer = SltrainLinear
    keeps_weights = False

    def build_optimizer(self) -> tuple[Optimizer, LambdaLR]:
        """Build the optimizer, in which the entries of S, a vector, learn at the projections' rate as A and B do."""
        entries = [layer.S_values for layer in factored_layers(self.model).values()]
        optimizer = self.config.optimizer
        projections = [*projection_weights(self.model), *entries]
        return build_optimizer(self.model.parameters(), optimizer, self.config.train.steps, projections)

    @classmethod
    def work(cls, model: PreTrainedModel, config: RunConfig, ranks: int, rates: Rates) -> Work:
        """Return the work of a step: products with the dense W, and B·A once per micro-batch in both passes."""
        layers, work = factored_layers(model).values(), super().work(model, config, ranks, rates)
        dense = sum(
            math.prod(layer.shape) - sum(p.numel() for p in (layer.A, layer.B, layer.S_values)) for layer in layers
        )
        tokens = min(config.train.micro_batch, config.train.batch // ranks) * config.data.sequence_length
        product = config.settings.rank * sum(math.prod(layer.shape) for layer in layers) / tokens
        whole = (count_parameters(model) + dense + product,)
        return replace(work, passes=whole, variants=whole)

    @classmethod
    def memory(cls, model: PreTrainedModel, config: RunConfig, ranks: int) -> dict[str, float]:  # noqa: D102
        layers = factored_layers(model).values()
        element = 2 if config.train.precision.startswith("bf16") else 4
        held = 0 if config.train.gradient_checkpointing else sum(math.prod(layer.shape) for layer in layers) * element
        positions = sum(layer.S_positions.nbytes for layer in layers)
        return super().memory(model, config, ranks) | {"positions of S": positions, "dense weights in a step": held}

    @classmethod
    def stored(cls, model: nn.Module) -> dict[str, int]:
        """Return the parameters as they are trained, and their bytes plus those of the positions of S's entries."""
        found = super().stored(model)
        positions = sum(layer.S_positions.nbytes for layer in factored_layers(model).values())
        return {"parameters": found["parameters"], "bytes": found["bytes"] + positions}
