"""Which trainings every item of the paper needs; its grids of ρ, Δα and Δβ as factors on a scale's own settings."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

from salaad.model.build import describe_model, outline
from salaad.model.roles import find_blocks
from scripts.reproduction.grid import Run, Scale

RHO, ALPHA, BETA, K = "salaad.rho_constant", "salaad.delta_alpha", "salaad.delta_beta", "salaad.every"
# The paper's settings over those it calls its own: 350M Δα 0.2, Δβ 0.005, ρ 5e-8; 130M Δα 0.5, Δβ 0.005, ρ 1e-7.
BETAS_350M, ALPHAS_350M = (0.6, 1, 2, 10, 20), (0.4, 0.5, 0.75, 0.9, 1)
RHO_PAIRS_350M = tuple(product((0.5,), (2, 10), (1, 2)))  # (Δα, Δβ, ρ)
BETAS_130M, ALPHAS_130M = (0.1, 1, 100), (0.01, 0.1, 0.4)
PAIRS_130M = tuple(product((0.01, 0.1, 1), (0.1, 1, 10), (0.1, 1, 10)))
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


def seeded(scale: Scale, *runs: Run) -> list[Run]:
    """Each run with every seed of the scale."""
    return [run.seeded(seed) for run in runs for seed in scale.seeds]


def scaled(alpha: float = 1, beta: float = 1, rho: float = 1) -> Run:
    """SALAAD with its three knobs turned by factors."""
    return Run(factors=((ALPHA, alpha), (BETA, beta), (RHO, rho)))


def table1(scale: Scale) -> list[Run]:
    """Full-rank and SALAAD."""
    return seeded(scale, VANILLA, SALAAD)


def embedding(scale: Scale) -> list[Run]:
    """With the embedding among the blocks, and without."""
    return seeded(scale, WITH_EMBEDDING, WITHOUT_EMBEDDING)


def bf16(scale: Scale) -> list[Run]:
    """Both methods in pure bfloat16, with the embedding; and the same in float32."""
    return seeded(scale, VANILLA_BF16, SALAAD_BF16, VANILLA, WITH_EMBEDDING)


def ablation_350m(scale: Scale) -> list[Run]:
    """Δβ at one Δα, and Δα at one Δβ."""
    return [scaled(beta=factor) for factor in BETAS_350M] + [scaled(alpha=factor) for factor in ALPHAS_350M]


def ablation_rho_350m(scale: Scale) -> list[Run]:
    """Two ρ at two pairs of (Δα, Δβ)."""
    return [scaled(*factors) for factors in RHO_PAIRS_350M]


def ablation_130m(scale: Scale) -> list[Run]:
    """Δβ over four decades, and Δα over two."""
    return [scaled(beta=factor) for factor in BETAS_130M] + [scaled(alpha=factor) for factor in ALPHAS_130M]


def ablation_pairs_130m(scale: Scale) -> list[Run]:
    """Three ρ at nine pairs of (Δα, Δβ)."""
    return [scaled(*factors) for factors in PAIRS_130M]


def update_frequency(scale: Scale) -> list[Run]:
    """Three K at J = 1."""
    return seeded(scale, *FREQUENCIES)


def lm_head(scale: Scale) -> list[Run]:
    """The LM head among the blocks at two ρ; the embedding at the same two, to compare."""
    return seeded(scale, *HEADS, *EMBEDDINGS)


def kappa_share(scale: Scale) -> list[Run]:
    """Trainings whose L + S is made of more or less L: those of the grid of pairs that have the scale's own ρ."""
    return [scaled(*factors) for factors in PAIRS_130M if factors[-1] == 1]


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


def first_seeds(*runs: Run) -> Callable[[Scale], list[Run]]:
    """These alone, whose folders the pictures need."""
    return lambda scale: list(runs)


def one_of_each(scale: Scale) -> list[Run]:
    """A vanilla and a SALAAD run."""
    return [VANILLA, SALAAD]


def salaad_alone(scale: Scale) -> list[Run]:
    """A SALAAD run."""
    return [SALAAD]


def salaad_seeds(scale: Scale) -> list[Run]:
    """SALAAD with every seed."""
    return seeded(scale, SALAAD)


def none(scale: Scale) -> list[Run]:
    """Nothing."""
    return []


def vanilla_seeds(scale: Scale) -> list[Run]:
    """Vanilla with every seed."""
    return seeded(scale, VANILLA)
