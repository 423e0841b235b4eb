"""LORO: two factors, trained so that their product moves on the manifold of matrices of rank r (ICLR 2025).

    W = M·Nᵀ,   M (out×r) and N (in×r) Xavier-normal, or with the deviation √(σ/√r) that gives W the σ of dense weights

Most steps follow the gradients of the factors alone: M −= lr·(r/d)·dM and N −= lr·(r/d)·dN, where d is the width of the
model and dM, dN are Adam's directions. Every K-th step is exact: in the tangent space of the manifold at W, at the full
learning rate:

    M = Q_M·R_M,  N = Q_N·R_N (QR);     G·Q_N ≈ dM·R_N⁻¹,   Q_Mᵀ·G ≈ R_M⁻ᵀ·dNᵀ
    W − lr·(Q_M·Q_Mᵀ·G + (1 − Q_M·Q_Mᵀ)·G·Q_N·Q_Nᵀ), reduced to rank r by the SVD of a 2r×2r core;  √σ in each

After an exact step the moments of *all* weights are set to zero and the learning rate rises again over a few steps. The
settings for each size are those of the released code. Different from that code: ε is added after the bias correction;
the learning rate begins near zero, peaks when the warm-up ends and ends at a tenth (theirs, by a shift of its cosine,
begins at a tenth, is at 97 % when the warm-up ends, peaks at 13 to 20 % of the run and ends at 12 to 13 %), and its
rise after an exact step begins at a fifth (theirs at 1e-6); with several ranks, each takes the exact steps of some of
the layers; an exact step that is not finite is skipped.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from salaad.common import distributed
from salaad.common.errors import UserError
from salaad.config.methods import LoroConfig
from salaad.config.run import RunConfig
from salaad.factored.slr import Slr
from salaad.methods.float32 import at_least_float32, true_float32
from salaad.methods.low_rank_layers import LowRankMethod, SlrFactored, factored_layers, no_entries
from salaad.methods.optimizer import build_optimizer, restarted
from salaad.methods.salaad.ownership import loads, owners_of
from salaad.methods.work import Work, qr_seconds, svd_seconds
from salaad.spectral.cost import Rates


class LoroLinear(SlrFactored):
    """The linear layer y = M·Nᵀ·x.

    Args:
        linear: the layer to replace; its weight (out×in) is not kept.
        settings: rank, and how M and N begin.
    """

    def __init__(self, linear: nn.Linear, settings: LoroConfig) -> None:
        super().__init__()
        (out, width), device = linear.weight.shape, linear.weight.device
        self.M = nn.Parameter(torch.empty(out, settings.rank, device=device))
        self.N = nn.Parameter(torch.empty(width, settings.rank, device=device))
        self.bias = linear.bias
        for factor in (self.M, self.N):
            if settings.init == "xavier":
                nn.init.xavier_normal_(factor)
            else:  # an entry of M·Nᵀ is a sum of r products
                nn.init.normal_(factor)
                factor.data *= (linear.weight.data.float().std() / settings.rank**0.5).sqrt()

    def forward(self, x: Tensor) -> Tensor:
        """Return y (…×out) for the input x (…×in)."""
        return nn.functional.linear(x @ self.N, self.M, self.bias)

    def slr(self) -> Slr:
        """Return U = M and V = Nᵀ, without entries of S."""
        M, N = at_least_float32(self.M, self.N)
        return Slr((len(M), len(N)), M, N.mT, *no_entries(M))


def exact_step(M: Tensor, N: Tensor, dM: Tensor, dN: Tensor, lr: Tensor | float) -> tuple[Tensor, Tensor]:
    """Return new M, N after the exact step from W = M·Nᵀ (M out×r, N in×r) along dM ≈ G·N and dN ≈ Gᵀ·M."""
    (Q_M, R_M), (Q_N, R_N), r = torch.linalg.qr(M), torch.linalg.qr(N), M.shape[1]
    GQ = torch.linalg.solve_triangular(R_N, dM, upper=True, left=False)  # out×r: G·Q_N
    QG = torch.linalg.solve_triangular(R_M, dN, upper=True, left=False)  # in×r: Gᵀ·Q_M
    inner = QG.mT @ Q_N
    outside_M, K_M = torch.linalg.qr(GQ - Q_M @ (Q_M.mT @ GQ))
    outside_N, K_N = torch.linalg.qr(QG - Q_N @ (Q_N.mT @ QG))
    top = torch.cat([R_M @ R_N.mT - lr * inner, -lr * K_N.mT], 1)
    core = torch.cat([top, torch.cat([-lr * K_M, torch.zeros_like(K_M)], 1)])
    # A core that is not finite has no singular values; then the result is not finite either.
    sound = core.isfinite().all()
    left, sigma, right = torch.linalg.svd(torch.where(sound, core, 0))
    sigma = torch.where(sound, sigma, torch.nan)
    root = sigma[:r].sqrt()
    new_M = torch.cat([Q_M, outside_M], 1) @ (left[:, :r] * root)
    new_N = torch.cat([Q_N, outside_N], 1) @ (right[:r].mT * root)
    return new_M, new_N


class Loro(LowRankMethod):
    """Pretraining of two factors M·Nᵀ with exact steps on the manifold of rank r (LORO)."""

    Settings = LoroConfig
    Layer = LoroLinear
    keeps_weights = False
    own_projection_rate = True
    reads_moments = True  # an exact step follows Adam's directions

    @classmethod
    def check(cls, model: PreTrainedModel, config: RunConfig) -> None:  # noqa: D102
        super().check(model, config)
        if config.optimizer.name not in ("Adam", "AdamW"):
            raise UserError(
                f"optimizer.name is {config.optimizer.name}, but loro steps along Adam's direction; give Adam or AdamW"
            )

    @classmethod
    def work(cls, model: PreTrainedModel, config: RunConfig, ranks: int, rates: Rates) -> Work:  # noqa: D102
        layers, r, exact = factored_layers(model), config.settings.rank, {}
        for name, layer in layers.items():  # QR of each factor and of the gradient outside its span
            decompositions = sum(2 * qr_seconds(len(factor), r, rates) for factor in (layer.M, layer.N))
            exact[name] = decompositions + svd_seconds(2 * r, 2 * r, rates)
        owners = owners_of({name: layer.M for name, layer in layers.items()}, ranks)
        periodic = max(loads(exact, owners, ranks))
        return replace(super().work(model, config, ranks, rates), periodic=periodic, every=config.settings.every)

    def build_optimizer(self) -> tuple[Optimizer, LambdaLR]:
        """Build the optimizer, whose factors learn at r/d of the learning rate, with restarts after exact steps."""
        config, settings = self.config.optimizer, self.config.settings
        factors = [p for layer in factored_layers(self.model).values() for p in (layer.M, layer.N)]
        taken = {id(p) for p in factors}
        others = [p for p in self.model.parameters() if id(p) not in taken]
        optimizer, schedule = build_optimizer(others, config, self.config.train.steps)
        share = settings.rank / self.model.config.hidden_size
        optimizer.add_param_group({"params": factors, "lr": config.lr * share})
        self.rate = restarted(*schedule.lr_lambdas, settings.every, settings.rewarmup)

        def ordinary(step: int) -> float:
            """Return the factors' rate: 0 before an exact step, when the optimizer is to update moments alone."""
            return 0.0 if self.is_exact(step + 1) else self.rate(step)

        return optimizer, LambdaLR(optimizer, [self.rate, ordinary])

    def is_exact(self, step: int) -> bool:
        """Whether step number `step`, counted from 1, is exact."""
        return step % self.config.settings.every == 0

    @torch.no_grad()
    def after_step(self, optimizer: Optimizer, step: int, discarded: Tensor) -> None:
        """Take the exact step of every layer after each K-th step; its owner computes it, all ranks receive it."""
        if not self.is_exact(step):
            return
        lr = self.config.optimizer.lr * self.rate(step - 1)
        layers = factored_layers(self.model)
        owners = owners_of({name: layer.M for name, layer in layers.items()}, distributed.world_size())
        for name, layer in layers.items():
            if owners[name] == distributed.rank():
                directions = [adam_direction(optimizer, p) for p in (layer.M, layer.N)]
                with true_float32(layer.M.device):
                    found = exact_step(*at_least_float32(layer.M, layer.N), *directions, lr)
                sound = torch.stack([part.isfinite().all() for part in found]).all() & (discarded == 0)
                for p, new in zip((layer.M, layer.N), found, strict=True):
                    p.copy_(torch.where(sound, new.to(p.dtype), p))
        for name, layer in layers.items():
            for p in (layer.M, layer.N):
                distributed.broadcast(p.data, owners[name])
        for state in optimizer.state.values():
            for value in state.values():
                value.mul_(discarded.to(value.device))


def adam_direction(optimizer: Optimizer, parameter: nn.Parameter) -> Tensor:
    """Adam's direction m̂/(√v̂ + ε) for a parameter in the last step, in float32 at least."""
    [group] = [group for group in optimizer.param_groups if any(p is parameter for p in group["params"])]
    state = optimizer.state[parameter]
    mean, square = at_least_float32(state["exp_avg"], state["exp_avg_sq"])
    step = state["step"].to(mean.device)
    # In float32, 1 - β^step itself would lose five digits in the first steps.
    logs = [math.log(beta) if beta else -math.inf for beta in group["betas"]]
    correction1, correction2 = (-torch.expm1(step * log) for log in logs)
    return mean / correction1 / ((square / correction2).sqrt() + group["eps"])
