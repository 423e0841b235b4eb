"""Which trainings every item of the paper needs; its grids of ρ, Δα and Δβ as factors on a scale's own settings."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

from salaad.model.build import describe_model, outline
from salaad.model.roles import find_blocks
from scripts.reproduction.grid import Run, Scale

RHO, ALPHA, BETA, K = "salaad.rho_constant", "salaad.delta_alpha", "salaad.delta_beta", "salaad.every"
KS = (5, 10, 20)  # at J = 1
HEAD_RHOS = (0.1, 1)  # 1e-7 and 1e-6

VANILLA, SALAAD = Run("full_rank"), Run()
WITH_EMBEDDING = Run(settings=(("salaad.embedding", "true"),))
WITHOUT_EMBEDDING = Run(settings=(("salaad.embedding", "false"),))
HALF = ("train.precision", "bf16")
FREQUENCIES = tuple(Run(settings=((K, str(every)),)) for every in KS)
HEADS = tuple(Run(factors=((RHO, factor),), settings=(("salaad.lm_head", "true"),)) for factor in HEAD_RHOS)
EMBEDDINGS = tuple(Run(factors=((RHO, factor),), settings=WITH_EMBEDDING.settings) for factor in HEAD_RHOS)
VANILLA_BF16, SALAAD_BF16 = Run("full_rank", settings=(HALF,)), Run(settings=(HALF, *WITH_EMBEDDING.settings))


def scaled(alpha: float = 1, beta: float = 1, rho: float = 1) -> Run:
    """SALAAD with its three knobs turned by factors."""
    return Run(factors=((ALPHA, alpha), (BETA, beta), (RHO, rho)))


# The paper's settings over those it calls its own: 350M Δα 0.2, Δβ 0.005, ρ 5e-8; 130M Δα 0.5, Δβ 0.005, ρ 1e-7.
BETAS_350M = tuple(scaled(beta=factor) for factor in (0.6, 1, 2, 10, 20))
ALPHAS_350M = tuple(scaled(alpha=factor) for factor in (0.4, 0.5, 0.75, 0.9, 1))
RHO_PAIRS_350M = tuple(scaled(*factors) for factors in product((0.5,), (2, 10), (1, 2)))  # (Δα, Δβ, ρ)
BETAS_130M = tuple(scaled(beta=factor) for factor in (0.1, 1, 100))
ALPHAS_130M = tuple(scaled(alpha=factor) for factor in (0.01, 0.1, 0.4))
PAIRS_130M = tuple(scaled(*factors) for factors in product((0.01, 0.1, 1), (0.1, 1, 10), (0.1, 1, 10)))
# Trainings whose L + S is made of more or less L, all with the scale's own ρ.
SHARES = tuple(scaled(alpha, beta) for alpha, beta in product((0.01, 0.1, 1), (0.1, 1, 10)))

Runs = Callable[[Scale], list[Run]]


def once(*runs: Run) -> Runs:
    """These alone; none at all without any."""
    return lambda scale: list(runs)


def every_seed(*runs: Run) -> Runs:
    """Each run with every seed of the scale."""
    return lambda scale: [run.seeded(seed) for run in runs for seed in scale.seeds]


def small_dense(scale: Scale) -> dict[str, Run]:
    """Budget of the elastic curve → the model of that size, with the same proportions, trained full-rank."""
    like = ("model.like", scale.size or scale.name)
    return {budget: Run("full_rank", settings=(like, ("model.parameters", budget))) for budget in scale.budgets}


def embedding_why(scale: Scale) -> dict[str, Run]:
    """What might give the embedding a structure where the settings of Table 1 do not.

    One ρ for all blocks is what eq. 7 gives a square block of the model's width.
    """
    config = scale.config
    blocks = len(find_blocks(outline(describe_model(config.model, config.data.sequence_length)), config.salaad))
    absolute = config.salaad.rho_constant / (blocks * config.model.hidden_size)
    return {
        "as in Table 1": WITH_EMBEDDING,
        "five times the updates": replace(WITH_EMBEDDING, factors=((K, 0.2),)),
        "one ρ for all blocks": Run(settings=(*WITH_EMBEDDING.settings, ("salaad.rho", f"{absolute:.3g}"))),
        "ρ × 10": replace(WITH_EMBEDDING, factors=((RHO, 10),)),
        "Δβ × 10": replace(WITH_EMBEDDING, factors=((BETA, 10),)),
        "Δβ × 10, ρ × 10": replace(WITH_EMBEDDING, factors=((BETA, 10), (RHO, 10))),
    }
