"""The trainings that every item of the paper needs; grids of ρ, Δα and Δβ are factors on a scale's own settings."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

from salaad.model.roles import find_blocks
from scripts.outlines import outline_of
from scripts.reproduction.grid import Run, Scale

RHO, ALPHA, BETA, K = "salaad.rho_constant", "salaad.delta_alpha", "salaad.delta_beta", "salaad.every"
ABSOLUTE_RHO = "salaad.rho"
KS = (5, 10, 20)  # the values of K/J, at J = 1
HEAD_RHOS = (0.1, 1)  # factors on ρ: 1e-7 and 1e-6 in the paper

VANILLA, SALAAD = Run("full_rank"), Run()
WITH_EMBEDDING = Run(settings=(("salaad.embedding", "true"),))
WITHOUT_EMBEDDING = Run(settings=(("salaad.embedding", "false"),))
HALF = ("train.precision", "bf16")
FREQUENCIES = tuple(Run(settings=((K, str(every)), *WITH_EMBEDDING.settings)) for every in KS)
# The (Δα, Δβ, ρ) that the paper calls its own in an ablation; its other values are factors on them.
OWN_350M, OWN_130M = (0.2, 0.005, 5e-8), (0.5, 0.005, 1e-7)
_HEAD_RHO = 1e-6  # the larger of the paper's two ρ at 60M


def head_study(factor: float, *settings: tuple[str, str]) -> Run:
    """A training with one of the two ρ of the paper's study of the LM head."""
    return Run(factors=((RHO, factor),), settings=settings, printed=((ABSOLUTE_RHO, f"{_HEAD_RHO * factor:g}"),))


# HEADS have the embedding among the blocks too, so that they differ from EMBEDDINGS in the head alone.
HEADS = tuple(head_study(factor, ("salaad.lm_head", "true"), *WITH_EMBEDDING.settings) for factor in HEAD_RHOS)
EMBEDDINGS = tuple(head_study(factor, *WITH_EMBEDDING.settings) for factor in HEAD_RHOS)
VANILLA_BF16 = Run("full_rank", settings=(HALF,))
SALAAD_BF16 = Run(factors=((RHO, 1.2),), settings=(HALF, *WITH_EMBEDDING.settings))  # the paper raises ρ slightly


def scaled(alpha: float = 1, beta: float = 1, rho: float = 1, own: tuple[float, float, float] | None = None) -> Run:
    """Return a SALAAD training with Δα, Δβ and ρ times these factors; on `own` at the paper's scales, if given."""
    factors, names = (alpha, beta, rho), (ALPHA, BETA, ABSOLUTE_RHO)
    printed = [(name, f"{value * factor:g}") for name, value, factor in zip(names, own or (), factors, strict=False)]
    return Run(factors=((ALPHA, alpha), (BETA, beta), (RHO, rho)), printed=tuple(printed))


BETAS_350M = tuple(scaled(beta=factor, own=OWN_350M) for factor in (0.6, 1, 2, 10, 20))
ALPHAS_350M = tuple(scaled(alpha=factor, own=OWN_350M) for factor in (0.4, 0.5, 0.75, 0.9, 1))
RHO_PAIRS_350M = tuple(scaled(*factors, OWN_350M) for factors in product((0.5,), (2, 10), (1, 2)))  # (Δα, Δβ, ρ)
BETAS_130M = tuple(scaled(beta=factor, own=OWN_130M) for factor in (0.1, 1, 100))
ALPHAS_130M = tuple(scaled(alpha=factor, own=OWN_130M) for factor in (0.01, 0.1, 0.4))
PAIRS_130M = tuple(scaled(*factors, OWN_130M) for factors in product((0.01, 0.1, 1), (0.1, 1, 10), (0.1, 1, 10)))
# Trainings that differ in L's share of L + S, all with the scale's own ρ.
SHARES = tuple(scaled(alpha, beta) for alpha, beta in product((0.01, 0.1, 1), (0.1, 1, 10)))

Runs = Callable[[Scale], list[Run]]


def once(*runs: Run) -> Runs:
    """Return a function that lists exactly these runs at any scale; without arguments, no run."""
    return lambda scale: list(runs)


def every_seed(*runs: Run) -> Runs:
    """Return a function that lists each run with every seed of the scale."""
    return lambda scale: [run.seeded(seed) for run in runs for seed in scale.seeds]


def small_dense(scale: Scale) -> dict[str, Run]:
    """Return budget → full-rank training of a model of that size and the same proportions, for the elastic curve."""
    like = ("model.like", scale.size or scale.name)
    return {budget: Run("full_rank", settings=(like, ("model.parameters", budget))) for budget in scale.budgets}


def embedding_is_in_table_1(scale: Scale) -> bool:
    """Return whether a scale's own settings, with which its Table 1 is trained, have the embedding among the blocks."""
    return WITH_EMBEDDING.name(scale) == SALAAD.name(scale)


def embedding_why(scale: Scale) -> dict[str, Run]:
    """Return setting → training: the scale's settings with the embedding, then some that may give it more structure.

    The one ρ for all blocks is the ρ that eq. 7 gives to a square block of the model's width.
    """
    config = scale.config
    blocks = len(find_blocks(outline_of(config), config.salaad))
    absolute = config.salaad.rho_constant / (blocks * config.model.hidden_size)
    own = "as in Table 1" if embedding_is_in_table_1(scale) else "with the embedding among the blocks"
    return {
        own: WITH_EMBEDDING,
        "five times the updates": replace(WITH_EMBEDDING, factors=((K, 0.2),)),
        "one ρ for all blocks": Run(settings=(*WITH_EMBEDDING.settings, (ABSOLUTE_RHO, f"{absolute:.3g}"))),
        "ρ × 10": replace(WITH_EMBEDDING, factors=((RHO, 10),)),
        "Δβ × 10": replace(WITH_EMBEDDING, factors=((BETA, 10),)),
        "Δβ × 10, ρ × 10": replace(WITH_EMBEDDING, factors=((BETA, 10), (RHO, 10))),
    }
