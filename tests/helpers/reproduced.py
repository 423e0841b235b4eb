"""Made-up rows of every item of the reproduction, with which each claim holds."""

from itertools import product

from scripts.reproduction.grid import SCALES

NANO = SCALES["nano"]
BUDGETS = {1_400_000: 100.0, 1_200_000: 103.0, 890_000: 130.0}


def spread(*values: float) -> dict:
    mean = sum(values) / len(values)
    return {"mean": mean, "deviation": (sum((v - mean) ** 2 for v in values) / len(values)) ** 0.5, "values": [*values]}


def variant(method: str, name: str, perplexities: tuple, parameters: float, **more) -> dict:
    sizes = spread(*[parameters] * len(perplexities))
    return {"method": method, "variant": name, "perplexity": spread(*perplexities), "parameters": sizes, **more}


def cell(label: str, seed: int, name: str, perplexity: float, parameters: float, **more) -> dict:
    plain = {"budget": None, "kappa": None, "refine": 0, "calibrate": 0}
    about = {"label": label, "seed": seed, "variant": name, "perplexity": perplexity, "parameters": parameters}
    return {**plain, **about, **more}


def curve(label: str, seed: int, whole: int, dear: float = 1.0) -> list[dict]:
    """Return rows of X, of L + S, and of every budget by HPA, best at κ = 0.6, and by energy, refined and not."""
    rows = [cell(label, seed, "X", 99.0, 1_800_000), cell(label, seed, "L+S", 99.5, whole)]
    for budget, perplexity in BUDGETS.items():
        of = {"budget": budget, "parameters": budget - 5}
        for kappa in (k / 20 for k in range(10, 21)):
            factor = {0.5: 1.1, 0.6: 1.0, 1: 1.05}.get(kappa, 1.2)
            rows.append(
                cell(label, seed, "HPA", 0, 0) | of | {"kappa": kappa, "perplexity": dear * factor * perplexity}
            )
        for refine in (0, 20):
            rows.append(cell(label, seed, "energy", 0, 0) | of | {"refine": refine, "perplexity": dear * 99.8})
    return rows


def grid(alphas, betas, rhos) -> list[dict]:
    return [
        {"alpha": a, "beta": b, "rho": r, "X": 90 + a + b + r, "L+S": 91 + a + b + r, "parameters": 9e6 - a - b - r}
        for a, b, r in product(alphas, betas, rhos)
    ]


def robust(prefix: str, found: tuple, beside: tuple) -> dict:
    pairs = zip(("rank_ratio", "density"), found, beside, strict=True)
    return {name: value for key, own, other in pairs for name, value in ((key, own), (f"{prefix}_{key}", other))}


def all_rows() -> dict[str, list[dict]]:
    """Rows of every item that a claim is judged from, all as the paper says."""
    elastic = [row for seed in (0, 1) for row in curve("SALAAD", seed, 1_600_000)]
    rivals = [row for seed in (0, 1) for row in curve("vanilla + RPCA", seed, 2_300_000, dear=1.2)]
    for row in rivals:  # falls apart at the smallest budget
        row["perplexity"] *= 3 if row["budget"] == 890_000 else 1
    return {
        "table1": [
            variant("full_rank", "X", (107.0, 107.0), 1_800_000),
            variant("salaad", "X", (100.0, 102.0), 1_800_000),
            variant("salaad", "L+S", (98.7, 100.0), 1_600_000),
        ],
        "flexible": [row for row in elastic + rivals if row["kappa"] in (None, 0.6)],  # κ* was chosen elsewhere
        "one_training": [
            {"label": label, "variant": name, "budget": budget, "parameters": size, "perplexity": perplexity}
            for label, name, budget, size, perplexity in (
                ("SALAAD", "X", None, 1_800_000, 99.0),
                ("SALAAD", "L+S", None, 1_600_000, 99.5),
                ("SALAAD", "a", 1_400_000, 1_399_990, 99.8),
                ("SALAAD", "b", 900_000, 899_990, 104.0),
                ("full-rank, cut", "X", None, 1_800_000, 97.0),
                ("dense", "X", "1", 1_800_000, 97.0),
                ("dense", "X", "0.7", 1_400_100, 101.0),
                ("dense", "X", "0.5", 900_200, 105.0),
            )
        ],
        "kappa": [row for row in elastic if row["variant"] != "energy"],
        "embedding": [
            variant("salaad", "X", (100.4, 101.6), 1_800_000, blocks="embedding included"),
            variant("salaad", "L+S", (100.3, 101.1), 1_400_000, blocks="embedding included")
            | {"embedding_rank_ratio": spread(0.2, 0.21), "embedding_density": spread(0.1, 0.12)},
            variant("salaad", "X", (100.0, 102.0), 1_800_000, blocks="without the embedding"),
            variant("salaad", "L+S", (100.5, 101.0), 1_600_000, blocks="without the embedding"),
            variant("salaad", "L̃+S̃", (103.0, 104.0), 1_200_000, blocks="embedding included"),
            variant("salaad", "L̃+S̃", (150.0, 160.0), 1_200_000, blocks="without the embedding"),
        ],
        "lm_head": [
            {"block": block, "rho": rho, "seed": seed, "loss": loss, "X": X + change}
            | {"L+S": 100.0 + change, "rank_ratio": rank, "density": density}
            for seed, change in enumerate((-1, 1))
            for block, rho, loss, X, rank, density in (
                ("LM head", 0.1, 4.50, 100.0, 0.9, 0.8),
                ("embedding", 0.1, 4.49, 100.0, 0.28, 0.2),
                ("LM head", 1, 4.60, 110.0, 0.25, 0.1),
                ("embedding", 1, 4.51, 101.0, 0.2, 0.1),
            )
        ],
        "ablation350m": grid((1, 2), (1,), (1,)),
        "ablation350m_rho": grid((1,), (1, 2), (1, 2)),
        "ablation130m": grid((0.1, 1), (1,), (1,)),
        "ablation130m_pairs": grid((0.1, 1), (0.1, 1), (0.1, 1)),
        "frequency": [
            {
                **{"K": K, "seed": seed, "loss": loss + 0.1 * seed, "delta": delta},
                **{"rank_ratio": rank, "density": rank / 3, "parameters": size},
            }
            for seed in (0, 1)
            for K, loss, delta, rank, size in (
                (5, 2.84, 10.16, 0.15, 7e6),
                (10, 2.84, 7.74, 0.2, 8e6),
                (20, 2.78, 5.73, 0.3, 9e6),
            )
        ],
        "dynamics": [
            {"seed": seed, "step": 5 * i, "delta": factor * delta, "error": factor * 0.1}
            | {"errors": {"a": factor * 0.14, "b": 0.06}, "tau_growth": {"a": 1.0, "b": 1.05}}
            for seed, factor in enumerate((1.0, 2.0))
            for i, delta in enumerate((2, 4, 6, 7, 8, 8, 7, 8))
        ],
        "bf16": [
            variant(method, name, perplexities, 1, precision=precision)
            for method, name, precision, perplexities in (
                ("salaad", "X", "fp32", (100.0, 102.0)),
                ("salaad", "X", "bf16", (104.0, 107.1)),
                ("salaad", "L+S", "fp32", (100.0, 102.0)),
                ("salaad", "L+S", "bf16", (106.0, 109.7)),
                ("full_rank", "X", "fp32", (97.0, 97.0)),
                ("full_rank", "X", "bf16", (99.0, 99.0)),
            )
        ],
        "rpca_vanilla": [robust("control", (0.5, 0.6), (0.57, 0.7)), robust("control", (0.52, 0.64), (0.57, 0.7))],
        "rpca_salaad": [
            {"of": of, **robust("true", found, (0.2, 0.05))}
            for of in ("L+S", "L̃+S̃")
            for found in ((0.25, 0.09), (0.15, 0.07))
        ],
    }
