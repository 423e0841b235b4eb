"""Claims from hand-made rows, and the report from made-up results."""

import json
import math
import subprocess
from copy import deepcopy
from itertools import combinations, product

import pytest

from salaad.common.budgets import parse_budget
from salaad.common.files import read_json
from salaad.config.command_line import read_command_line
from salaad.config.commands import DEFAULT_TASKS
from salaad.model.build import describe_model, outline
from salaad.model.parameters import count_parameters
from salaad.model.roles import find_blocks
from scripts.reproduction import freshness, judges, report, trainings
from scripts.reproduction.appendix_c import memory_and_operations
from scripts.reproduction.catalogue import ITEMS
from scripts.reproduction.claims import CLAIMS, Verdict, claims_tables, verdicts
from scripts.reproduction.curves import growth
from scripts.reproduction.deployments import accuracies
from scripts.reproduction.diagrams import overview
from scripts.reproduction.evidence import NOT_SHOWN
from scripts.reproduction.experiments import NUMBERS, embedding_numbers, kappa_numbers, limit_numbers, recovery
from scripts.reproduction.grid import SCALES, distinct
from scripts.reproduction.report import write_report
from scripts.reproduction.tables import PAPER, ablation_table, paper

NANO = SCALES["nano"]
BUDGETS = {1_400_000: 100.0, 1_200_000: 104.0, 900_000: 130.0}


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


@pytest.fixture
def rows() -> dict[str, list[dict]]:
    """Rows of every item that a claim is judged from, all as the paper says."""
    elastic = [row for seed in (0, 1) for row in curve("SALAAD", seed, 1_600_000)]
    rivals = [row for seed in (0, 1) for row in curve("vanilla + RPCA", seed, 2_300_000, dear=1.2)]
    for row in rivals:  # falls apart at the smallest budget
        row["perplexity"] *= 3 if row["budget"] == 900_000 else 1
    return {
        "table1": [
            variant("full_rank", "X", (107.0, 107.0), 1_800_000),
            variant("salaad", "X", (100.0, 102.0), 1_800_000),
            variant("salaad", "L+S", (99.7, 101.0), 1_600_000),
        ],
        "flexible": elastic + rivals,
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


@pytest.fixture
def judged(tmp_path):
    """A function that writes item → rows as results and returns claim → verdict."""

    def judge(rows: dict[str, list[dict]]) -> dict[str, Verdict]:
        for old in tmp_path.glob("*.json"):
            old.unlink()
        for item, mine in rows.items():
            (tmp_path / f"{item}.json").write_text(json.dumps({"rows": mine, "commit": "HEAD", "trainings": []}))
        return {claim.judge.__name__: found for claim, found in verdicts(NANO, tmp_path)}

    return judge


def failed(found: Verdict) -> list[str]:
    """Return the names of the numbers that do not keep their limits."""
    return [number.what for number in found.numbers if number.holds is False]


def ours(found: Verdict) -> dict[str, str]:
    return {number.what: number.ours for number in found.numbers}


def test_the_claims_are_there_and_judged_from_items_of_the_list():
    beyond = ["against_full_rank", "elastic_by_hpa", "elastic_by_energy", "against_small_dense"]
    assert [claim.judge.__name__ for claim in CLAIMS] == (
        ["central", *beyond, "kappa", "embedding", "lm_head", "knobs", "frequency", "bounded", "bf16", "rpca"]
    )
    names = {item.name for item in ITEMS}
    for claim in CLAIMS:
        assert claim.items and set(claim.items) <= names
        assert all((claim.name, claim.section, claim.statement, claim.measure, claim.paper))


def test_rows_as_the_paper_says_agree(rows, judged):
    for name, found in judged(rows).items():
        assert found.agrees is True, (name, found)
        assert failed(found) == [] and not found.missing


def printed(method: str, name: str, row: list, factor: float = 1.0, **more) -> dict:
    """A row of a table of the paper, its perplexity times a factor."""
    return variant(method, name, (factor * row[0],), row[1], **more)


def test_no_limit_is_weaker_than_the_papers_number_at_its_worst_size():
    """The paper's tables keep every limit; with perplexities half a percent higher, at least one size does not."""
    table, embedding = (read_json(PAPER)[name] for name in ("table1", "embedding"))

    def beside_X(factor: float) -> list[bool]:
        found = []
        for size in table.values():
            whole = printed("salaad", "L+S", size["L+S"], factor)
            rows = [printed("full_rank", "X", size["full-rank"]), printed("salaad", "X", size["X"]), whole]
            found += [judges.central({"table1": {"rows": rows}}), judges.against_full_rank({"table1": {"rows": rows}})]
        return [all(number.holds is not False for number in numbers) for numbers in found]

    def with_embedding(factor: float) -> list[bool]:
        found = []
        for size, inside in embedding.items():
            rows = [
                printed("salaad", name, row, scaled, blocks=blocks)
                | {"embedding_rank_ratio": spread(0.21), "embedding_density": spread(0.12)}
                for blocks, cells, scaled in zip(judges.BLOCKS, (inside, table[size]), (factor, 1.0), strict=True)
                for name, row in ((name, (cells[name][0], cells[name][1])) for name in ("X", "L+S"))
            ]
            rows += [variant("salaad", "L̃+S̃", (1.0,), 1, blocks=blocks) for blocks in judges.BLOCKS]
            numbers = judges.embedding({"embedding": {"rows": rows}})
            found.append(all(number.holds is not False for number in numbers))
        return found

    assert all(beside_X(1)) and not all(beside_X(1.005))
    assert all(with_embedding(1)) and not all(with_embedding(1.005))


def test_the_papers_grid_keeps_the_limits_of_the_three_settings_and_some_pairs_less_do_not():
    cells = read_json(PAPER)["ablation130m_pairs"]["130m"]
    points = product((0.01, 0.1, 1), (0.1, 1, 10), (0.1, 1, 10))
    rows = [
        dict(zip(("alpha", "beta", "rho", "X", "L+S", "parameters"), (*point, *cell), strict=True))
        for point, cell in zip(points, cells, strict=True)
    ]
    results = {"ablation130m_pairs": {"rows": rows}}
    results |= {item: {"rows": rows[:2]} for item in ("ablation350m", "ablation350m_rho", "ablation130m")}
    assert all(number.holds is not False for number in judges.knobs(results))
    rows[0]["parameters"] = 0  # below those of every larger setting
    fewer = [number.holds for number in judges.knobs(results) if "fewer" in number.what]
    assert fewer.count(False) == 3 and True not in fewer


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.judge.__name__)
def test_without_one_of_its_items_a_claim_says_what_to_run(claim, rows, judged):
    missing = claim.items[-1]
    del rows[missing]
    found = judged(rows)[claim.judge.__name__]
    assert (found.agrees, found.missing) == (None, f"python scripts/reproduce.py --scale nano {missing}")


def change(item: str, key: str, value: object, **where: object):
    """Return a function that sets `key` to `value` in the item's rows that match `where`."""

    def apply(rows: dict) -> None:
        hit = [row for row in rows[item] if all(row[name] == wanted for name, wanted in where.items())]
        assert hit
        for row in hit:
            row[key] = value

    return apply


def course(*deltas: float):
    """Return a function that sets δ at the steps of seed 1 to `deltas`."""

    def apply(rows: dict) -> None:
        second = [row for row in rows["dynamics"] if row["seed"] == 1]
        for row, delta in zip(second, deltas, strict=True):
            row["delta"] = delta

    return apply


SALAAD = {"label": "SALAAD", "seed": 1, "budget": 1_200_000}
DISAGREEING = (
    ("central", "PPL of L + S over X", change("table1", "perplexity", spread(99.0, 102.0), variant="L+S")),
    ("central", "parameters of L + S", change("table1", "parameters", spread(1.7e6, 1.72e6), variant="L+S")),
    ("central", "PPL of L + S over X", change("table1", "perplexity", spread(100.0, float("nan")), variant="L+S")),
    ("against_full_rank", "PPL of L + S", change("table1", "perplexity", spread(107.0, 105.0), method="full_rank")),
    ("elastic_by_hpa", "below", change("flexible", "perplexity", 130.0, **SALAAD, refine=0)),
    ("elastic_by_hpa", "below", change("flexible", "perplexity", float("nan"), **SALAAD, refine=0)),
    ("elastic_by_hpa", "largest step", change("flexible", "perplexity", 150.0, label="vanilla + RPCA", refine=0)),
    ("elastic_by_energy", "below", change("flexible", "perplexity", 130.0, **SALAAD, refine=20)),
    ("against_small_dense", "at 0.90 M", change("one_training", "perplexity", 103.9, label="dense", budget="0.5")),
    ("kappa", "at least 0.55", change("kappa", "perplexity", 1.0, kappa=0.5)),
    ("kappa", "in a band", change("kappa", "perplexity", 1.0, kappa=1, budget=900_000)),
    (
        "embedding",
        "PPL of X over",
        change("embedding", "perplexity", spread(99.0, 100.0), blocks="without the embedding"),
    ),
    ("embedding", "fewer", change("embedding", "parameters", spread(1.4e6, 1.3e6), blocks="without the embedding")),
    ("embedding", "at most 0.21", change("embedding", "embedding_density", spread(0.1, 0.13), variant="L+S")),
    ("lm_head", "1·ρ: rank ratio and density of the head", change("lm_head", "X", 100.0, rho=1)),
    ("lm_head", "training loss", change("lm_head", "loss", 4.60, rho=1)),
    ("lm_head", "1·ρ: rank ratio and density of the head", change("lm_head", "X", 100.0, rho=1, seed=1)),
    ("lm_head", "rise of the", change("lm_head", "loss", 4.50, rho=1, seed=1, block="LM head")),
    ("lm_head", "lowers the head's", change("lm_head", "density", 0.85, rho=1, seed=1, block="LM head")),
    (
        "lm_head",
        "0.1·ρ: rank ratio and density of the emb",
        change("lm_head", "density", 0.9, rho=0.1, block="embedding"),
    ),
    ("knobs", "larger Δα: fewer", change("ablation130m_pairs", "parameters", 9.9e6, alpha=1)),
    ("knobs", "larger ρ: higher PPL of X", change("ablation130m_pairs", "X", 50.0, rho=1)),
    ("frequency", "mean δ", change("frequency", "delta", 11.0, K=20, seed=1)),
    ("frequency", "rank ratio", change("frequency", "rank_ratio", 0.2, K=20, seed=1)),
    ("frequency", "density", change("frequency", "density", 0.05, K=20, seed=0)),
    ("frequency", "2.2%", change("frequency", "loss", 2.7, K=20, seed=1)),
    ("bounded", "1.5 times", course(2, 4, 4, 4, 6.1, 6, 6, 6)),
    ("bounded", "last quarter", course(8, 8, 8, 8, 6, 6, 6, 7.3)),
    ("bounded", "worst block", change("dynamics", "errors", {"a": 0.1, "b": 0.31}, seed=1)),
    ("bounded", "τ_S", change("dynamics", "tau_growth", {"a": 1.2, "b": 1.0}, seed=0)),
    ("bf16", "PPL of X", change("bf16", "perplexity", spread(112.0, 113.0), variant="X", precision="bf16")),
    ("rpca", "vanilla's L + S", change("flexible", "parameters", 1.7e6, label="vanilla + RPCA", variant="L+S")),
    ("rpca", "density of vanilla", change("rpca_vanilla", "density", 0.3)),
    ("rpca", "rank ratio of SALAAD, L + S", change("rpca_salaad", "rank_ratio", 0.4, of="L+S")),
    ("rpca", "density of SALAAD, the cut", change("rpca_salaad", "density", 0.2, of="L̃+S̃")),
)


@pytest.mark.parametrize(("name", "part", "change"), DISAGREEING, ids=[f"{n}, {p}" for n, p, _ in DISAGREEING])
def test_a_claim_fails_by_the_number_that_does_not_keep_its_limit(name, part, change, rows, judged):
    change(rows)
    found = judged(rows)[name]
    assert found.agrees is False
    assert any(part in what for what in failed(found)), failed(found)


def test_verdicts_hold_the_numbers_of_the_rows(rows, judged):
    found = {name: ours(verdict) for name, verdict in judged(rows).items()}
    assert found["central"]["PPL of L + S"] == "100.35 ± 0.65" and found["central"]["PPL of X"] == "101.00 ± 1.00"
    assert found["central"]["parameters of L + S over X, at most 94% in every seed"] == "88.9 %, 88.9 %"
    assert (
        found["against_full_rank"]["PPL of L + S over full-rank training, at most −4.0 % in every seed"]
        == "−6.8 %, −5.6 %"
    )
    assert found["elastic_by_hpa"]["PPL below vanilla + RPCA, at every budget below L + S in every seed"] == "6 of 6"
    assert found["elastic_by_energy"]["PPL of SALAAD over its own X"] == "+0.8 % to +0.8 %"
    assert found["elastic_by_energy"]["PPL of vanilla + RPCA over its own X"] == "+21.0 % to +262.9 %"
    assert found["against_small_dense"]["PPL of the cut over the dense model's at 0.90 M, below 0 %"] == "−1.0 %"
    assert found["kappa"]["κ*, in a band of at most 0.25"] == "0.6"
    assert (
        found["embedding"]["parameters of L + S with and without the embedding, in every seed fewer with it"]
        == "1.40 M, 1.60 M"
    )
    assert found["embedding"]["PPL of the cut by HPA to 1.20 M, embedding included"] == "103.50 ± 0.50"
    assert "+0.080, +0.080" in found["lm_head"].values()
    assert found["frequency"]["final loss, within 2.2% in every seed"] == "2.890, 2.890, 2.830"
    assert found["frequency"]["mean δ, falls with K in every seed"] == "10.16, 7.74, 5.73"
    assert list(found["bounded"].values())[:2] == ["7 to 14", "8 to 16"]
    assert found["bounded"]["‖X−L−S‖ over ‖X‖ at the end, mean over the blocks"] == "10 to 20 %"
    assert found["bounded"]["blocks above 30%"] == "0, 0 of 2"
    assert found["rpca"]["SALAAD: rank ratio and density found"] == "0.20 ± 0.05, 0.08 ± 0.01"


def test_budgets_above_the_structured_model_do_not_count(rows, judged):
    what = "PPL below vanilla + RPCA, at every budget below L + S in every seed"
    assert ours(judged(rows)["elastic_by_energy"])[what] == "6 of 6"
    change("flexible", "parameters", 1_300_000, label="SALAAD", variant="L+S")(rows)
    change("flexible", "perplexity", 500.0, label="SALAAD", budget=1_400_000)(rows)
    for name in ("elastic_by_hpa", "elastic_by_energy"):
        found = judged(rows)[name]
        assert found.agrees is True and ours(found)[what] == "4 of 4"
    change("flexible", "parameters", 800_000, label="SALAAD", variant="L+S")(rows)
    assert judged(rows)["elastic_by_hpa"].agrees is None


def test_the_first_step_of_the_elastic_curve_counts(rows, judged):
    change("flexible", "perplexity", 20.0, label="SALAAD", variant="L+S")(rows)
    found = judged(rows)["elastic_by_hpa"]
    assert found.agrees is False
    assert any("largest step" in number.what and number.ours.startswith("×5.00") for number in found.numbers)


def test_what_older_results_do_not_say_is_not_shown(rows, judged):
    for row in rows["dynamics"]:
        del row["errors"], row["tau_growth"]
    rows["rpca_salaad"] = [row for row in rows["rpca_salaad"] if row["of"] == "L+S"]
    for name, numbers in (("bounded", 2), ("rpca", 4)):
        found = judged(rows)[name]
        assert found.agrees is None and [number.holds for number in found.numbers].count(NOT_SHOWN) == numbers


def test_growth_compares_the_last_two_quarters():
    assert growth([1, 1, 1, 1, 2, 2, 3, 3]) == 1.5
    assert growth([0.0] * 8) == 1 and growth([0.0] * 6 + [1, 1]) == math.inf
    assert growth([5.0]) == 1


def test_a_head_beside_which_nothing_is_structured_shows_nothing(rows, judged):
    change("lm_head", "rank_ratio", 0.5, rho=0.1, block="embedding", seed=1)(rows)
    found = judged(rows)["lm_head"]
    assert found.agrees is None and failed(found) == []
    assert [number.holds for number in found.numbers].count(
        NOT_SHOWN
    ) == 2  # of the head, and of the embedding beside it


def test_a_grid_of_few_kappas_has_to_be_measured_anew(rows, judged):
    rows["kappa"] = [row for row in rows["kappa"] if row["kappa"] in (None, 0.5, 0.6, 0.7, 0.8, 0.9, 1)]
    found = judged(rows)["kappa"]
    assert not found.numbers and "kappa --again (for ValueError('steps of κ of at most 0.05')" in found.missing


def test_where_nothing_is_removed_no_kappa_is_best(rows, judged):
    change("kappa", "parameters", 1.3e6, variant="L+S")(rows)
    change("kappa", "parameters", 1.29e6, budget=1_400_000)(rows)
    change("kappa", "perplexity", 1.0, budget=1_400_000, kappa=0.5)(rows)
    assert judged(rows)["kappa"].agrees is True
    change("kappa", "parameters", 0.9e6, variant="L+S")(rows)
    for budget in BUDGETS:
        change("kappa", "parameters", 0.9e6, budget=budget)(rows)
    assert judged(rows)["kappa"].agrees is None


def test_an_experiment_stands_beside_the_verdict_and_does_not_decide_it(rows, judged):
    away = [{"share": share, "kappa": kappa} for share, kappa in ((0.2, 0.3), (0.5, 0.5), (0.8, 0.7))]
    numbers = {number.what: number.ours for number in kappa_numbers(away)}
    assert numbers["correlation of κ* with the share"] == "1.00" and numbers["slope of κ* over the share"] == "0.67"
    assert numbers["κ* less the share"].endswith("0.00 ± 0.08")
    before = judged(rows)["kappa"]
    found = judged({**rows, "kappa_share": away})["kappa"]
    assert found.agrees == before.agrees and ours(found) == ours(before) | numbers
    alike = [{"share": 0.5, "kappa": 0.5}, {"share": 0.6, "kappa": 0.5}]
    assert not any("correlation" in number.what for number in kappa_numbers(alike))


def test_the_robust_pca_experiment_counts_the_blocks_that_are_found():
    rows = [
        {"true_rank_ratio": rank, "true_density": density, "density": found}
        for rank, density, found in ((0.12, 0.08, 0.1), (0.12, 0.15, 0.4), (0.14, 0.08, 0.17), (0.3, 0.3, 0.7))
    ]
    cells = recovery(rows)
    assert cells["0.1 to 0.15", "0.05 to 0.1"] == (2, 2) and cells["0.1 to 0.15", "0.1 to 0.2"] == (0, 1)
    assert cells["0.2 to 1", "0.2 to 1"] == (0, 1) and sum(of for _, of in cells.values()) == len(rows)
    assert [number.ours for number in limit_numbers(rows)] == ["2 of 3", "0 of 1"]


def test_the_embeddings_experiment_names_every_setting_and_its_cost():
    row = {"setting": "as in Table 1", "rank_ratio": 0.6, "density": 0.5, "X": 100.0}
    numbers = embedding_numbers([row, row | {"setting": "ρ × 10", "rank_ratio": 0.25, "X": 104.0}])
    assert [number.ours for number in numbers] == ["0.60, 0.50; +0.0 %", "0.25, 0.50; +4.0 %"]
    assert "as in Table 1" in numbers[0].what and "ρ × 10" in numbers[1].what


def test_the_same_training_asked_for_in_two_ways_is_one():
    same = [trainings.SALAAD, trainings.scaled(1, 1, 1), trainings.WITH_EMBEDDING]  # nano includes the embedding
    assert distinct([*same, trainings.VANILLA], NANO) == [trainings.SALAAD, trainings.VANILLA]
    assert len(distinct(same, SCALES["350m"])) == 2


@pytest.mark.parametrize("scale", SCALES.values(), ids=lambda scale: scale.name)
def test_every_budget_of_a_scale_is_above_what_is_never_compressed(scale):
    config = scale.config
    model = outline(describe_model(config.model, config.data.sequence_length))
    dense = count_parameters(model)
    for run, budgets in (
        (trainings.SALAAD, (*scale.budgets, scale.table_budget)),
        (trainings.WITH_EMBEDDING, (scale.embedding_budget or scale.table_budget,)),
    ):
        salaad = read_command_line([*run.command(scale)[1:]])[0].salaad
        floor = dense - sum(weight.numel() for weight in find_blocks(model, salaad).values())
        assert floor < min(parse_budget(budget, dense) for budget in budgets) < dense


def test_rows_of_another_kind_are_measured_again(rows, judged):
    for row in rows["frequency"]:
        del row["delta"]
    found = judged(rows)
    assert found["frequency"].agrees is None and found["central"].agrees is True
    assert found["frequency"].missing.startswith("python scripts/reproduce.py --scale nano frequency --again")
    assert "KeyError('delta')" in found["frequency"].missing


# The report


def made_up(item, rows: list[dict], picture) -> dict:
    training = {
        "name": f"run of {item.name}",
        "command": f"python train.py --seed 1 --output runs/{item.name}",
        "commit": "abc123",
        "machine": "toy machine, 1 thread",
        "tokens": 2_000_000,
        "hours": 0.5,
    }
    return {
        "item": item.name,
        "title": item.title,
        "section": item.section,
        "scale": "nano",
        "command": item.command(NANO),
        "hub": item.hub,
        "versions": "none",
        "commit": "def456",
        "machine": "the measuring machine",
        "trainings": [training, training | {"name": f"other of {item.name}"}],
        "rows": rows,
        "tables": {f"caption <of> {item.name}": "first words\n\n| name | PPL |\n| ---- | --: |\n| **a<b** | 12.34 |"},
        "pictures": {f"picture of {item.name}": picture.name},
        "notes": [f"note of {item.name} & more"],
    }


@pytest.fixture
def results(tmp_path, rows):
    """A folder of results at nano in which one item is missing."""
    folder = tmp_path / "results" / "nano" / "reproduce"
    folder.mkdir(parents=True)
    rows |= {
        "kappa_share": [{"share": 0.5, "kappa": 0.5}],
        "rpca_limit": [robust("true", (0.1, 0.1), (0.1, 0.1))],
        "embedding_why": [{"setting": "as in Table 1", "rank_ratio": 0.6, "density": 0.5, "X": 100.0}],
    }
    for item in ITEMS:
        picture = folder / f"{item.name}.png"
        picture.touch()
        if item.name != "downstream":
            kept = made_up(item, deepcopy(rows.get(item.name, [])), picture)
            (folder / f"{item.name}.json").write_text(json.dumps(kept))
    return tmp_path / "results"


def test_the_report_holds_everything_that_was_measured(results):
    path = write_report(results, ITEMS, list(SCALES.values()))
    assert path == results / "README.md"
    text = path.read_text()
    for item in ITEMS:
        assert item.title in text and item.command(NANO) in text
        if item.name != "downstream":
            for said in ("caption <of> {}", "picture of {}", "run of {}", "--output runs/{}"):
                assert said.format(item.name) in text
            assert (f"note of {item.name} & more" in text) == (item.name not in NUMBERS)
    assert "| their κ* | 0.5 |" in text
    for claim in CLAIMS:
        assert all(said in text for said in (claim.statement, claim.measure, claim.paper))
    assert "| PPL of L + S | 100.35 ± 0.65 |" in text
    for said in ("needs a model from the hub", "def456", "the measuring machine", "2 runs, 4.0 M tokens, 1.00 h"):
        assert said in text
    assert "## micro" not in text and text.count("12.34") == len(ITEMS) - 1
    assert text.index(CLAIMS[0].measure) < text.index("caption <of>")


def test_the_report_says_what_changed_since_an_item_was_measured(results, monkeypatch):
    kept = json.loads((results / "nano" / "reproduce" / "table1.json").read_text())
    changed = {kept["commit"]: ["train.py"]}
    for module in (report, freshness):
        monkeypatch.setattr(module, "changed_since", lambda commit: changed.get(commit, []))
    text = write_report(results, ITEMS, list(SCALES.values())).read_text()
    assert "since then changed: train.py" in text and "table1" in text.split("were measured before some of the code")[1]
    changed.clear()
    text = write_report(results, ITEMS, list(SCALES.values())).read_text()
    assert "since then changed" not in text and "All items were measured with the code as it is." in text


def test_a_verdict_from_a_training_with_uncommitted_changes_is_marked(results):
    path = results / "nano" / "reproduce" / "table1.json"
    kept = json.loads(path.read_text())
    kept["trainings"][0]["commit"] += "-dirty"
    path.write_text(json.dumps(kept))
    text = write_report(results, ITEMS, list(SCALES.values())).read_text()
    assert f"| {CLAIMS[0].name} | yes † | not measured |" in text and f"| {CLAIMS[2].name} | yes | not" in text
    assert "1 of 22 items" in text and "not committed: table1." in text


def test_only_what_computes_something_else_counts_as_changed(tmp_path, monkeypatch):
    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    def committed(text: str, config: str) -> str:
        (tmp_path / "train.py").write_text(text)
        (tmp_path / "configs" / "nano.yaml").write_text(config)
        git("add", ".")
        git("commit", "-qm", "more")
        freshness.changed_since.cache_clear()
        freshness._meaning.cache_clear()
        return git("rev-parse", "--short", "HEAD").strip()

    monkeypatch.setattr(freshness, "ROOT", tmp_path)
    (tmp_path / "configs").mkdir()
    git("init", "-q")
    first = committed('def f():\n    """Old."""\n    return 1\n', "lr: 1\n")
    second = committed('def f():\n    """New."""\n    return 1  # one\n', "lr: 1\n")
    assert freshness.is_fresh([first, second]) and not freshness.is_fresh([f"{second}-dirty"])
    committed('def f():\n    """New."""\n    return 2\n', "lr: 2\n")
    assert freshness.changed_since(first) == ["train.py", "configs"] and not freshness.is_fresh([second])
    assert freshness.changed_since("no-such-commit") == []
    freshness.changed_since.cache_clear()
    freshness._meaning.cache_clear()


def test_pictures_of_the_report_are_where_it_points(results):
    text = write_report(results, ITEMS, [NANO]).read_text()
    shown = [line.split("](")[1].rstrip(")") for line in text.splitlines() if line[:2] == "!["]
    assert len(shown) == len(ITEMS) - 1
    assert all((results / path).exists() for path in shown)


def test_two_scales_stand_one_after_the_other_under_one_table(results, rows):
    folder = results / "micro" / "reproduce"
    folder.mkdir(parents=True)
    (folder / "table1.json").write_text((results / "nano" / "reproduce" / "table1.json").read_text())
    text = write_report(results, ITEMS, list(SCALES.values())).read_text()
    assert text.index("## nano") < text.index("## micro")
    assert f"| {CLAIMS[0].name} | yes | not measured | yes | not measured |" in text  # nano, nano-20, micro, micro-20
    assert f"| {CLAIMS[2].name} | yes | not measured | not measured | not measured |" in text
    assert "not measured yet | `python scripts/reproduce.py --scale micro flexible`" in text


def test_every_line_of_the_claims_tables_has_as_many_cells(results):
    judged, numbers = claims_tables(NANO, results / "nano" / "reproduce").split("\n\n")
    assert len(judged.splitlines()) == 2 + len(CLAIMS)
    for table in (judged, numbers):
        assert {line.count(" | ") for line in table.splitlines()} == {3}


def test_the_overviews_are_diagrams_that_github_draws():
    tables = overview(NANO).tables
    assert list(tables) == ["pretraining", "deployment"]
    for text in tables.values():
        kind, *lines, end = text.splitlines()
        assert (kind, end) == ("```mermaid", "```") and lines[0].startswith("flowchart")
        assert sum(line.strip().startswith("subgraph") for line in lines) == lines.count("  end")


# The paper's numbers


@pytest.mark.parametrize(
    ("table", "scale", "runs"),
    [
        ("ablation350m", "350m", (*trainings.BETAS_350M, *trainings.ALPHAS_350M)),
        ("ablation350m_rho", "350m", trainings.RHO_PAIRS_350M),
        ("ablation130m", "130m", (*trainings.BETAS_130M, *trainings.ALPHAS_130M)),
        ("ablation130m_pairs", "130m", trainings.PAIRS_130M),
    ],
)
def test_every_training_of_an_ablation_has_its_number_in_the_paper(table, scale, runs):
    printed, mine = paper(table, SCALES[scale]), runs
    assert len(printed) == len(mine)
    # Where the paper prints one setting twice, it trained it twice: the numbers differ by little.
    for (one, a), (other, b) in combinations(zip(mine, printed, strict=True), 2):
        if one == other:
            assert abs(a[0] - b[0]) < 0.05 and a[2] == b[2]
    # A larger ρ alone never has more parameters, as the paper says.
    sizes = {tuple(dict(run.factors).values()): numbers[2] for run, numbers in zip(mine, printed, strict=True)}
    for (alpha, beta, rho), size in sizes.items():
        assert all(size >= other for (a, b, r), other in sizes.items() if (a, b) == (alpha, beta) and r > rho)


@pytest.mark.parametrize(
    ("scale", "runs", "rhos"),
    [
        ("350m", trainings.RHO_PAIRS_350M, {5e-8, 1e-7}),
        ("130m", trainings.PAIRS_130M, {1e-8, 1e-7, 1e-6}),
        ("60m", trainings.HEADS, {1e-7, 1e-6}),
    ],
)
def test_the_papers_scales_train_its_absolute_settings_and_ours_the_same_factors(scale, runs, rhos):
    configs = [read_command_line(run.command(SCALES[scale])[1:])[0].salaad for run in runs]
    assert {float(f"{config.rho:.6g}") for config in configs} == rhos
    if scale == "350m":  # Δα 0.1, Δβ 0.01 and 0.05
        assert [(c.delta_alpha, c.delta_beta) for c in configs] == [(0.1, 0.01)] * 2 + [(0.1, 0.05)] * 2
    if scale == "130m":
        assert {c.delta_alpha for c in configs} == {0.005, 0.05, 0.5}
        assert {c.delta_beta for c in configs} == {0.0005, 0.005, 0.05}
    own = NANO.config.salaad.rho_constant
    at_nano = [read_command_line(run.command(NANO)[1:])[0].salaad for run in runs]
    assert all(config.rho is None for config in at_nano)
    ratios = sorted({round(config.rho_constant / own, 6) for config in at_nano})
    assert [ratio / ratios[0] for ratio in ratios] == pytest.approx([rho / min(rhos) for rho in sorted(rhos)], rel=1e-4)


def test_the_study_of_k_has_the_embedding_among_its_blocks_as_the_papers():
    for run in trainings.FREQUENCIES:
        assert read_command_line(run.command(SCALES["1b"])[1:])[0].salaad.embedding


def test_the_costs_of_the_admm_are_the_papers_where_it_prints_them():
    measured = memory_and_operations(NANO)
    blocks = [row for row in measured.rows if "block" in row]
    for row in blocks:
        assert row["svd_flops"] == pytest.approx(row["printed_svd_flops"], rel=0.05)  # two digits are printed
        n, m = row["shape"]
        assert row["bytes"] >= 2 * 4 * n * m  # two matrices in float32
    seventy = next(row for row in measured.rows if row.get("size") == "70b")
    assert seventy["blocks"] == 560 and 6e10 < seventy["parameters"] < 8e10
    # With a GPU for every block, a GPU holds at most the largest block's matrices.
    assert seventy["bytes_many"] == max(row["bytes"] for row in blocks)
    small = next(row for row in measured.rows if row.get("size") == "60m")
    assert small["step_flops"] == pytest.approx(6 * 58.07e6 * 512 * 256, rel=0.1)


def test_tables_hold_the_papers_numbers_beside_ours():
    row = {"alpha": 1, "beta": 0.6, "rho": 1, "X": 20.0, "L+S": 21.0, "parameters": 3e6, "paper": [18.62, 18.43, 241]}
    row["own"] = {"alpha": 0.2, "beta": 0.002}
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in ablation_table([row], "beta").split("\n")
    ]
    assert dict(lines[2:])["paper PPL (X)"] == "18.62" and dict(lines[2:])["PPL (L+S)"] == "21.00"
    assert dict(lines)["Δβ ×"] == "0.6" and dict(lines)["Δβ"] == "0.0012"
    scores = [{"variant": "X", "task": task, "acc": 0.25} for task in DEFAULT_TASKS]
    shown = accuracies(scores, paper("downstream", SCALES["1b"])).split("\n")
    assert [line.split("|")[1].strip() for line in shown[2:]] == ["X", "paper X", "paper L̃+S̃", "paper Vanilla"]
    assert "25.0" in shown[2] and "71.0" in shown[3]


def test_the_small_dense_models_of_a_scale_have_the_sizes_of_its_cuts():
    scale = SCALES["micro"]
    runs = trainings.small_dense(scale)
    assert list(runs) == list(scale.budgets)
    whole = scale.config.model
    dense = count_parameters(outline(describe_model(whole, 256)))
    for budget, run in runs.items():
        words = run.command(scale)
        config, _ = read_command_line(words[1:])
        count = count_parameters(outline(describe_model(config.model, 256)))
        assert count == pytest.approx(parse_budget(budget, dense), rel=0.002)
        assert (config.method, config.model.vocab_size) == ("full_rank", whole.vocab_size)
        assert run.name(scale) == f"full_rank,like=micro,parameters={budget}"
        assert run.flops(scale) < trainings.VANILLA.flops(scale)
