"""The settings of each way to train, one frozen dataclass a method, in sections that are named like the methods."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from salaad.common.errors import UserError
from salaad.common.validation import at_least, check, one_or_more, require_types


@dataclass(frozen=True)
class MethodConfig:
    """What the settings of all methods share.

    `tunable` names those that a new run may change when it goes on from another run's checkpoint, `free` those that any
    run may change when it goes on, as they do not change what is computed.
    """

    tunable: ClassVar[tuple[str, ...]] = ()
    free: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True)
class FullRankConfig(MethodConfig):
    """Plain pretraining has no settings of its own."""


@dataclass(frozen=True)
class SalaadConfig(MethodConfig):
    """The ADMM, its controller and its schedule (paper, Algorithm 1 and section 4.2).

    Args:
        rank_ratio: target Γ̂ of the effective rank ratio, in (0, 1].
        density: target Υ̂ of the density of S, in [0, 1].
        gamma: energy γ that the effective rank covers (Definition 4.1).
        energy: nuclear sums σ as the paper does; squared sums σ² as the authors' training code does.
        every: K, optimizer steps between two ADMM updates of a block.
        inner: J, inner iterations of one ADMM update.
        delta_alpha: step size Δα of the controller for the low-rank threshold.
        delta_beta: step size Δβ of the controller for the sparse threshold.
        rho_constant: c in ρ = c / (N·sqrt(n·m)), eq. 7.
        rho: an absolute ρ for every block, instead of eq. 7.
        pull: coupled adds ρ(X − T) to the gradient, as the paper does; decoupled moves X by lr·λ(X − T) after the
            optimizer's step, as AdamW decouples weight decay.
        pull_rate: mean λ over the blocks of a decoupled pull; a block's own goes by its ρ.
        onset: part of the run, at its beginning, in which nothing draws X yet, and L is X.
        release: part of the run, at its end, in which nothing draws X any more; L and S follow it all the same, with
            the thresholds that they had.
        roles: which weights become blocks: q k v o gate up down embedding lm_head, or re:PATTERN over module names;
            none given means all projections of a known model family.
        embedding: add the embedding to the blocks.
        lm_head: add the LM head to the blocks.
        schedule: synchronous updates all blocks at once; staggered spreads an owner's blocks over the K steps.
        owners: how the blocks are dealt to the processes: round_robin in order of cost, or balanced, each to the one
            that has least to do so far.
        overlap: a GPU computes the ADMM updates beside the next step's forward pass, with the same results; the weights
            must then not be changed between the optimizer's step and the next backward. Only products are beside all
            of it; eigenvectors make the host wait before it begins.
        method: how the singular-value threshold is computed: exact (full SVD), gram (eigh of the Gram matrix), subspace
            (its leading eigenvectors from those of the last update, to a tolerance that is checked), products (matrix
            products alone, checked as well) or auto, the one predicted to be the cheapest on the device. On a GPU the
            host waits once an update by products, and once more for each stack of blocks by gram.
    """

    tunable = (
        *("rank_ratio", "density", "every", "inner", "delta_alpha", "delta_beta", "rho_constant", "rho"),
        *("pull", "pull_rate", "onset", "release", "owners"),
    )
    free = ("overlap",)

    rank_ratio: float = 0.15
    density: float = 0.05
    gamma: float = 0.999
    energy: Literal["nuclear", "squared"] = "nuclear"
    every: int = 10
    inner: int = 1
    delta_alpha: float = 0.2
    delta_beta: float = 0.002
    rho_constant: float = 0.03
    rho: float | None = None
    pull: Literal["coupled", "decoupled"] = "coupled"
    pull_rate: float = 0.3
    onset: float = 0.0
    release: float = 0.0
    roles: tuple[str, ...] | str = ()
    embedding: bool = False
    lm_head: bool = False
    schedule: Literal["synchronous", "staggered"] = "synchronous"
    owners: Literal["round_robin", "balanced"] = "round_robin"
    overlap: bool = False
    method: Literal["auto", "exact", "gram", "subspace", "products"] = "auto"

    def __post_init__(self) -> None:
        one_or_more(self, "roles")
        require_types(type(self), vars(self), "salaad")
        for name in ("rank_ratio", "gamma"):
            value = getattr(self, name)
            check(0 < value <= 1, f"salaad.{name} is {value}, outside (0, 1]; give a fraction above 0 and at most 1")
        check(0 <= self.density <= 1, f"salaad.density is {self.density}, outside [0, 1]; give a fraction")
        at_least(self, 1, "every", "inner")
        at_least(self, 0, "delta_alpha", "delta_beta", "rho_constant", "pull_rate")
        for name in ("onset", "release"):
            value = getattr(self, name)
            check(0 <= value <= 1, f"salaad.{name} is {value}, outside [0, 1]; give a part of the run")
        check(
            self.onset + self.release <= 1,
            f"salaad.onset {self.onset} and salaad.release {self.release} are more than the whole run together; give "
            "parts whose sum is at most 1",
        )
        if self.rho is not None:
            at_least(self, 0, "rho")


@dataclass(frozen=True)
class LoraConfig(MethodConfig):
    """Low-rank adapters on frozen random weights.

    Args:
        rank: r of each product B·A.
        alpha: α; the product is scaled by α/r.
        dropout: of the adapter's input.
    """

    rank: int = 128
    alpha: float = 32.0
    dropout: float = 0.05

    def __post_init__(self) -> None:
        name = type(self).__name__.removesuffix("Config").lower()
        require_types(type(self), vars(self), name)
        at_least(self, 1, "rank")
        at_least(self, 0, "alpha")
        check(0 <= self.dropout < 1, f"{name}.dropout is {self.dropout}, outside [0, 1); give a fraction below 1")


@dataclass(frozen=True)
class ReloraConfig(LoraConfig):
    """Adapters that are merged into the weights now and then, and begun anew.

    Args:
        rank: r of each product B·A.
        alpha: α; the product is scaled by α/r.
        dropout: of the adapter's input.
        every: q, optimizer steps between two merges.
        rewarmup: steps in which the learning rate rises again after a merge.
        prune: part of the adapters' moments that a merge sets to zero, chosen at random.
    """

    dropout: float = 0.1
    every: int = 1000
    rewarmup: int = 100
    prune: float = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "every")
        at_least(self, 0, "rewarmup")
        check(0 <= self.prune <= 1, f"relora.prune is {self.prune}, outside [0, 1]; give a fraction")
        check(
            self.rewarmup < self.every,
            f"relora.rewarmup is {self.rewarmup}, as long as the {self.every} steps between two merges; give less",
        )


@dataclass(frozen=True)
class SltrainConfig(MethodConfig):
    """A low-rank product plus a sparse matrix of random, fixed support, both trained.

    Args:
        rank: r of the product B·A.
        alpha: α; the product is scaled by α/r.
        density: δ, part of the entries that the support holds.
    """

    rank: int = 128
    alpha: float = 32.0
    density: float = 0.03

    def __post_init__(self) -> None:
        require_types(type(self), vars(self), "sltrain")
        at_least(self, 1, "rank")
        at_least(self, 0, "alpha")
        check(0 <= self.density <= 1, f"sltrain.density is {self.density}, outside [0, 1]; give a fraction")


@dataclass(frozen=True)
class GaloreConfig(MethodConfig):
    """Dense weights whose gradients the optimizer sees projected to a subspace.

    Args:
        rank: r, dimensions of the subspace.
        every: T, optimizer steps between two choices of the subspace.
        scale: of a projected update when it is lifted back.
    """

    rank: int = 128
    every: int = 200
    scale: float = 0.25

    def __post_init__(self) -> None:
        require_types(type(self), vars(self), "galore")
        at_least(self, 1, "rank", "every")
        at_least(self, 0, "scale")


@dataclass(frozen=True)
class LoroConfig(MethodConfig):
    """Two factors that follow the manifold of rank r.

    Args:
        rank: r of the product M·Nᵀ.
        every: K, optimizer steps between two exact steps on the manifold.
        rewarmup: steps in which the learning rate rises again after an exact step.
        init: M and N Xavier-normal, or scaled to make M·Nᵀ as large as the dense weight in its place. Xavier's product
            is 3.5 times as large at width 128, 1.8 times at 512 and 0.9 times at 2048.
    """

    rank: int = 128
    every: int = 500
    rewarmup: int = 5
    init: Literal["xavier", "scaled"] = "xavier"

    def __post_init__(self) -> None:
        require_types(type(self), vars(self), "loro")
        at_least(self, 1, "rank", "every")
        at_least(self, 0, "rewarmup")
        check(
            self.rewarmup < self.every,
            f"loro.rewarmup is {self.rewarmup}, as long as the {self.every} steps between two exact steps; give less",
        )


@dataclass(frozen=True)
class ColaConfig(MethodConfig):
    """Two factors with an activation between them.

    Args:
        rank: r, outputs of the first factor.
        keep_swiglu: whether the feed-forward layer keeps an activation of its own beside those between the factors.
    """

    rank: int = 128
    keep_swiglu: bool = True

    def __post_init__(self) -> None:
        require_types(type(self), vars(self), "cola")
        at_least(self, 1, "rank")


@dataclass(frozen=True)
class LostConfig(MethodConfig):
    """Two factors plus some whole columns, both from the singular values of the first weights.

    Args:
        rank: r of the two factors.
        density: δ, part of the columns that are trained as they are, at least one unless δ is 0.
        gamma: γ, weight of the two factors; the columns have 1 − γ. Ours, as the source does not say it.
        activation: what stands between the two factors; linear makes the layer a low-rank plus a sparse matrix.
    """

    rank: int = 128
    density: float = 0.01
    gamma: float = 0.7
    activation: Literal["silu", "linear"] = "silu"

    def __post_init__(self) -> None:
        require_types(type(self), vars(self), "lost")
        at_least(self, 1, "rank")
        for name in ("density", "gamma"):
            value = getattr(self, name)
            check(0 <= value <= 1, f"lost.{name} is {value}, outside [0, 1]; give a fraction")


@dataclass(frozen=True)
class MatformerConfig(MethodConfig):
    """One model with smaller ones in it, whose feed-forward layers are narrower.

    Args:
        halvings: smaller widths; m/2, m/4, … of the feed-forward width m, which has to be divisible that often.
        train: sampled trains one width a step, summed all of them in every step.
    """

    halvings: int = 3
    train: Literal["sampled", "summed"] = "sampled"

    def __post_init__(self) -> None:
        require_types(type(self), vars(self), "matformer")
        at_least(self, 1, "halvings")
        check(self.halvings <= 16, f"matformer.halvings is {self.halvings}, more than any width has; give 16 or less")


# Method → its settings. `salaad.methods.registry` adds those of a method that is registered from outside.
SETTINGS: dict[str, type[MethodConfig]] = {
    "full_rank": FullRankConfig,
    "salaad": SalaadConfig,
    "lora": LoraConfig,
    "relora": ReloraConfig,
    "galore": GaloreConfig,
    "loro": LoroConfig,
    "cola": ColaConfig,
    "sltrain": SltrainConfig,
    "lost": LostConfig,
    "matformer": MatformerConfig,
}


def settings_class(method: str) -> type[MethodConfig]:
    """The dataclass of a method's settings; a `UserError` names the methods there are."""
    if method not in SETTINGS:
        raise UserError(f"method is {method!r}, which is none; give one of {', '.join(SETTINGS)}")
    return SETTINGS[method]
