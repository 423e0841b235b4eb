"""LoRA as a way to pretrain: frozen random weights with trained low-rank adapters (2106.09685).

    y = W₀·x + (α/r)·B·A·dropout(x),   A (r×in) Kaiming-uniform, B (out×r) = 0

W₀ keeps its random initial values; embedding, head and norms are trained as usual. This is the row "LoRA" of GaLore's
table and of papers that copy that table. Different from the released code: W₀ is kept where no merge follows (that code
drops it there and then fails an assertion of its own). With dropout, several ranks draw other masks than one.
"""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from salaad.config.methods import LoraConfig
from salaad.config.run import RunConfig
from salaad.methods.float32 import at_least_float32, true_float32
from salaad.methods.low_rank_layers import Factored, LowRankMethod, added, factored_layers
from salaad.methods.work import Work
from salaad.model.parameters import count_parameters
from salaad.spectral.cost import Rates


class LoraLinear(Factored):
    """The linear layer y = W₀·x + (α/r)·B·A·dropout(x), of which only A and B are trained.

    Args:
        linear: the layer to replace; its weight becomes W₀ (out×in).
        settings: rank, α and dropout.
    """

    def __init__(self, linear: nn.Linear, settings: LoraConfig) -> None:
        super().__init__()
        (out, width), device = linear.weight.shape, linear.weight.device
        self.scale, self.dropout = settings.alpha / settings.rank, settings.dropout
        self.weight = nn.Parameter(linear.weight.detach(), requires_grad=False)
        self.bias = linear.bias
        self.A = nn.Parameter(torch.empty(settings.rank, width, device=device))
        self.B = nn.Parameter(torch.zeros(out, settings.rank, device=device))
        draw(self.A)

    def forward(self, x: Tensor) -> Tensor:
        """Return y (…×out) for the input x (…×in)."""
        inside = F.linear(F.dropout(x, self.dropout, self.training), self.A)
        return added(F.linear(x, self.weight, self.bias), inside, self.B, self.scale)

    def dense_weight(self) -> Tensor:
        """Return W₀ + (α/r)·B·A in the dtype of W₀, summed in float32 at least."""
        W, A, B = at_least_float32(self.weight, self.A, self.B)
        with true_float32(W.device):
            return (W + self.scale * (B @ A)).to(self.weight.dtype)


def draw(A: Tensor, generator: torch.Generator | None = None) -> None:
    """Fill A (r×in) as peft does: uniform with the bound 1/√in, which is Kaiming's for a = √5."""
    nn.init.kaiming_uniform_(A, a=math.sqrt(5), generator=generator)


class Lora(LowRankMethod):
    """Pretraining of adapters on frozen random weights (LoRA), merged for export and counted as merged."""

    Settings = LoraConfig
    Layer = LoraLinear

    @classmethod
    def work(cls, model: PreTrainedModel, config: RunConfig, ranks: int, rates: Rates) -> Work:
        """Return the work of a step, in whose passes W₀ counts two thirds, as it has no gradient of its own."""
        work = super().work(model, config, ranks, rates)
        frozen = sum(layer.weight.numel() for layer in factored_layers(model).values())
        return replace(work, passes=tuple(size - frozen / 3 for size in work.passes))

    @classmethod
    def stored(cls, model: nn.Module) -> dict[str, int]:
        """Return the parameters and bytes of the merged model."""
        adapters = [p for layer in factored_layers(model).values() for p in (layer.A, layer.B)]
        found = super().stored(model)
        return {
            "parameters": count_parameters(model) - sum(p.numel() for p in adapters),
            "bytes": found["bytes"] - sum(p.nbytes for p in adapters),
        }
