"""LOST: two factors plus some whole columns, both taken from the initial random weights (our reading).

    y = γ·B·φ(A·x) + (1 − γ)·W_S·x_I
    W₀ = Σ σᵢ·uᵢ·vᵢᵀ;   B (out×r) and A (r×in): the leading r terms, √σ each;
    I: the ⌊δ·in⌋ columns, but at least one, with the largest norm in what these terms leave of W₀
    W_S (out×|I|): these columns of W₀

No code was released. This is our reading of the paper and of its public reviews: W_S holds columns of W₀ itself, not of
the remainder; φ is SiLU, or nothing (`activation`), which makes the layer U·V + S. γ, the learning rate and the place
of φ are not published: γ and the place of φ are our choice, the learning rate is SLTrain's. Where W₀ has fewer terms
than r, as after pruning, the rest begin as LoRA's adapters do, with a random row of A and a column of B that is zero.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from salaad.config.methods import LostConfig
from salaad.factored.slr import Slr
from salaad.methods.float32 import at_least_float32
from salaad.methods.lora import draw
from salaad.methods.low_rank_layers import LowRankMethod, SlrFactored, added, factored_layers
from salaad.spectral import leading_left_vectors


class LostLinear(SlrFactored):
    """The layer y = γ·B·φ(A·x) + (1 − γ)·W_S·x_I.

    Args:
        linear: the layer to replace; B, A and W_S are taken from its weight W₀ (out×in), on "meta" their shapes alone.
        settings: rank, δ, γ and φ.
    """

    def __init__(self, linear: nn.Linear, settings: LostConfig) -> None:
        super().__init__()
        W, r = linear.weight.detach(), settings.rank
        count = int(settings.density * W.shape[1]) or int(settings.density > 0)
        if W.is_meta:
            B, A, chosen = W[:, :1].expand(-1, r), W[:1].expand(r, -1), W[0, :count].long()
        else:
            B, A = leading_terms(W, r)
            left = torch.linalg.vector_norm(W - B @ A, dim=0)
            chosen = left.topk(count).indices.sort().values
            fresh = torch.empty_like(A)
            draw(fresh)
            A = torch.where(A.any(1, keepdim=True), A, fresh)  # a term that is zero in both factors never learns
        # Contiguous, as they are after a resume, so that products round alike.
        parts = (part.clone(memory_format=torch.contiguous_format) for part in (B, A, W[:, chosen]))
        self.B, self.A, self.W_S = map(nn.Parameter, parts)
        self.register_buffer("columns", chosen)
        self.bias = linear.bias
        self.gamma, self.activation = settings.gamma, settings.activation

    def forward(self, x: Tensor) -> Tensor:
        """Return y (…×out) for the input x (…×in)."""
        inside = F.linear(x, self.A)
        inside = F.silu(inside) if self.activation == "silu" else inside
        low_rank = F.linear(inside, self.gamma * self.B, self.bias)
        return added(low_rank, x.index_select(-1, self.columns), self.W_S, 1 - self.gamma)

    def slr(self) -> Slr:
        """Return U = γ·B, V = A and S, which is (1 − γ)·W_S at the columns I."""
        A, B, W_S = at_least_float32(self.A, self.B, self.W_S)
        out, width = len(B), A.shape[1]
        places = torch.arange(out, device=B.device)[:, None] * width + self.columns
        return Slr((out, width), self.gamma * B, A, places.flatten(), (1 - self.gamma) * W_S.flatten())


def leading_terms(W: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """B (out×rank) and A (rank×in) whose product is the `rank` leading singular terms of W, with √σ in each.

    Both factors are zero in a term that W does not have, or has only by rounding.
    """
    if W.shape[0] > W.shape[1]:
        A, B = leading_terms(W.mT, rank)
        return B.mT, A.mT
    U = leading_left_vectors(W, rank)
    projected = U.mT @ W
    sigma = torch.linalg.vector_norm(projected, dim=1)
    root, has = sigma.sqrt(), sigma > torch.finfo(W.dtype).eps * sigma.max()
    return U * root.where(has, 0), (projected / root[:, None]).where(has[:, None], 0)


class Lost(LowRankMethod):
    """Pretraining of two factors with an activation, plus dense columns (LOST)."""

    Settings = LostConfig
    Layer = LostLinear

    @classmethod
    def stored(cls, model: nn.Module) -> dict[str, int]:
        """Return the counts with the columns W_S, and `parameters_printed` without them, as the paper prints it."""
        found = super().stored(model)
        columns = sum(layer.W_S.numel() for layer in factored_layers(model).values())
        return {**found, "parameters_printed": found["parameters"] - columns}
