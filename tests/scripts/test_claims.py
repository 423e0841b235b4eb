"""The verdict on every claim, from hand-made rows."""

import json
import math
from itertools import product

import pytest

from salaad.common.files import read_json
from scripts.reproduction import judges
from scripts.reproduction.catalogue import ITEMS
from scripts.reproduction.claims import CLAIMS, Claim, Verdict, verdicts
from scripts.reproduction.curves import growth
from scripts.reproduction.deployment_judges import elastic_by_hpa
from scripts.reproduction.evidence import NOT_SHOWN
from scripts.reproduction.experiments import embedding_numbers, kappa_numbers, limit_numbers, recovery
from scripts.reproduction.tables import PAPER
from tests.helpers.reproduced import BUDGETS, NANO, cell, spread, variant


@pytest.fixture
def judged(tmp_path):
    """A function that writes item → rows as results and returns claim → verdict."""

    def judge(rows: dict[str, list[dict]]) -> dict[str, Verdict]:
        for old in tmp_path.glob("*.json"):
            old.unlink()
        for item, mine in rows.items():
            (tmp_path / f"{item}.json").write_text(json.dumps({"rows": mine, "commit": "HEAD", "trainings": []}))
        return {name_of(claim): found for claim, found in verdicts(NANO, tmp_path)}

    return judge


def name_of(claim: Claim) -> str:
    return (claim.judge or claim.compared).__name__


def failed(found: Verdict) -> list[str]:
    """Return the names of the numbers that do not keep their limits."""
    return [f"{number.what}, {number.limit}" for number in found.numbers if number.holds is False]


def ours(found: Verdict) -> dict[str, str]:
    return {number.what: number.ours for number in found.numbers}


def test_the_claims_are_there_and_judged_from_items_of_the_list():
    beyond = ["against_full_rank", "other_methods", "elastic_by_hpa", "elastic_by_energy", "against_small_dense"]
    assert [name_of(claim) for claim in CLAIMS] == (
        ["central", *beyond, "kappa", "embedding", "lm_head", "knobs", "frequency", "bounded", "bf16", "rpca"]
    )
    names = {item.name for item in ITEMS}
    for claim in CLAIMS:
        assert claim.items or claim.compared
        assert set(claim.items) <= names and bool(claim.items) == bool(claim.judge)
        assert all((claim.name, claim.section, claim.statement, claim.measure, claim.paper))


def test_rows_as_the_paper_says_agree(rows, judged):
    for name, found in judged(rows).items():
        if name != "other_methods":  # which has no item
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

    def cut_by_hpa(factor: float) -> list[bool]:
        found = []
        for size in embedding.values():
            wholes = [("X", size["X"]), ("L+S", size["L+S"])]
            perplexity, parameters = float(size["L̃+S̃"][0].split()[0]), size["L̃+S̃"][1]
            rows = []
            for label, dear in (("SALAAD", 1.0), ("vanilla + RPCA", 10.0)):
                rows += [cell(label, 0, name, *one) for name, one in wholes]
                about = {"budget": parameters, "kappa": 0.6}
                rows.append(cell(label, 0, "HPA", dear * factor * perplexity, parameters, **about))
            found.append(all(number.holds is not False for number in elastic_by_hpa({"flexible": {"rows": rows}})))
        return found

    assert all(beside_X(1)) and not all(beside_X(1.005))
    assert all(cut_by_hpa(1)) and not all(cut_by_hpa(1.005))
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


@pytest.mark.parametrize("claim", [claim for claim in CLAIMS if claim.items], ids=name_of)
def test_without_one_of_its_items_a_claim_says_what_to_run(claim, rows, judged):
    missing = claim.items[-1]
    del rows[missing]
    found = judged(rows)[name_of(claim)]
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
    ("central", "PPL of L + S over X", change("table1", "perplexity", spread(98.0, 101.5), variant="L+S")),
    ("central", "parameters of L + S", change("table1", "parameters", spread(1.6e6, 1.72e6), variant="L+S")),
    ("central", "PPL of L + S over X", change("table1", "perplexity", spread(100.0, float("nan")), variant="L+S")),
    ("against_full_rank", "PPL of L + S", change("table1", "perplexity", spread(107.0, 104.0), method="full_rank")),
    ("elastic_by_hpa", "below", change("flexible", "perplexity", 130.0, **SALAAD, refine=0)),
    ("elastic_by_hpa", "below", change("flexible", "perplexity", float("nan"), **SALAAD, refine=0)),
    ("elastic_by_hpa", "largest ratio", change("flexible", "perplexity", 150.0, label="vanilla + RPCA", refine=0)),
    ("elastic_by_hpa", "at least 50%", change("flexible", "perplexity", 105.0, **SALAAD, refine=0, kappa=0.6)),
    ("elastic_by_energy", "below", change("flexible", "perplexity", 130.0, **SALAAD, refine=20)),
    ("against_small_dense", "at 0.90 M", change("one_training", "perplexity", 103.9, label="dense", budget="0.5")),
    ("kappa", "at least 0.55", change("kappa", "perplexity", 1.0, kappa=0.5)),
    ("kappa", "in a band", change("kappa", "perplexity", 1.0, kappa=1, budget=890_000)),
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
    ("frequency", "0.06 nats", change("frequency", "loss", 2.7, K=20, seed=1)),
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
    assert found["central"]["PPL of L + S"] == "99.35 ± 0.65" and found["central"]["PPL of X"] == "101.00 ± 1.00"
    assert "−1.3 % at 88.9%, −2.0 % at 88.9%" in found["central"].values()
    assert found["against_full_rank"]["PPL of L + S over full-rank training"] == "−7.8 %, −6.5 %"
    assert (
        found["elastic_by_hpa"]["budgets below L + S, over all seeds, at which PPL is below vanilla + RPCA's"]
        == "6 of 6"
    )
    assert found["elastic_by_energy"]["PPL of SALAAD over its own X"] == "+0.8 %"
    assert found["elastic_by_energy"]["PPL of vanilla + RPCA over its own X"] == "+21.0 % to +262.9 %"
    assert found["against_small_dense"]["PPL of the cut over the dense model's at 0.90 M"] == "−1.0 %"
    assert found["kappa"]["κ*"] == "0.6"
    assert found["embedding"]["parameters of L + S with and without the embedding"] == "1.40 M, 1.60 M"
    assert found["embedding"]["PPL of the cut by HPA to 1.20 M, embedding included"] == "103.50 ± 0.50"
    assert "+0.080, +0.080" in found["lm_head"].values()
    assert found["frequency"]["final loss"] == "2.890, 2.890, 2.830"
    assert found["frequency"]["mean δ"] == "10.16, 7.74, 5.73"
    assert list(found["bounded"].values())[:2] == ["7 to 14", "8 to 16"]
    assert found["bounded"]["‖X−L−S‖ over ‖X‖ at the end, mean over the blocks"] == "10 to 20 %"
    assert found["bounded"]["blocks above 30%"] == "0, 0 of 2"
    assert found["rpca"]["SALAAD: rank ratio and density found"] == "0.20 ± 0.05, 0.08 ± 0.01"


def test_budgets_above_the_structured_model_do_not_count(rows, judged):
    what = "budgets below L + S, over all seeds, at which PPL is below vanilla + RPCA's"
    assert ours(judged(rows)["elastic_by_energy"])[what] == "6 of 6"
    change("flexible", "parameters", 1_300_000, label="SALAAD", variant="L+S")(rows)
    change("flexible", "perplexity", 500.0, label="SALAAD", budget=1_400_000)(rows)
    for name in ("elastic_by_hpa", "elastic_by_energy"):
        found = judged(rows)[name]
        assert found.agrees is True and ours(found)[what] == "4 of 4"
    change("flexible", "parameters", 800_000, label="SALAAD", variant="L+S")(rows)
    assert judged(rows)["elastic_by_hpa"].agrees is None


def test_a_kappa_that_was_chosen_on_the_text_of_the_measurement_shows_nothing(rows, judged):
    seen = [{**row, "kappa": 0.5} for row in rows["flexible"] if row["kappa"] == 0.6]
    rows["flexible"] += [row | {"perplexity": 1.1 * row["perplexity"]} for row in seen]
    found = judged(rows)
    assert found["elastic_by_hpa"].agrees is None and failed(found["elastic_by_hpa"]) == []
    assert found["elastic_by_energy"].agrees is True


def test_the_first_step_of_the_elastic_curve_counts(rows, judged):
    change("flexible", "perplexity", 20.0, label="SALAAD", variant="L+S")(rows)
    found = judged(rows)["elastic_by_hpa"]
    assert found.agrees is False
    assert any("largest ratio" in number.what and number.ours.startswith("×5.00") for number in found.numbers)


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
    assert not found.numbers and "kappa --again (a grid of κ with steps of 0.05 is not in kappa.json)" in found.missing


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
    assert "as in Table 1" in numbers[0].what
    assert numbers[1].what.startswith("embedding, ρ × 10:") and numbers[1].what.endswith("of a training as in Table 1")


def test_rows_of_another_kind_are_measured_again(rows, judged):
    for row in rows["frequency"]:
        del row["delta"]
    found = judged(rows)
    assert found["frequency"].agrees is None and found["central"].agrees is True
    assert found["frequency"].missing.startswith("python scripts/reproduce.py --scale nano frequency --again")
    assert "('delta' is not in frequency.json)" in found["frequency"].missing


def compared(tmp_path, half: float = 1.2e6, **ways) -> Verdict:
    """Return the verdict on small dense models from rows of compare_elastic.py; every way has four perplexities.

    `half` is the parameters of the model cut to half; the dense model has 1.2 M.
    """
    sizes = {0.75: 1.5e6, 0.5: 1.2e6, 0.35: 1.0e6, 0.2: 0.8e6}
    of_all = {"seed": 0, "commit": "HEAD", "commits": {}}
    rows = [
        {**of_all, "label": f"dense, {share:g}", "X": {"parameters": size, "perplexity": 60.0}, "ways": {}}
        for share, size in sizes.items()
    ]
    cuts = [1.5e6, half, 1.0e6, 0.8e6]
    cut = {
        way: [{"parameters": size - 2000, "perplexity": one} for size, one in zip(cuts, all_, strict=True)]
        for way, all_ in ways.items()
    }
    rows.append({**of_all, "label": "SALAAD, as in the paper", "L+S": {"parameters": 1.4e6}, "ways": cut})
    (tmp_path / "elastic").mkdir(exist_ok=True)
    (tmp_path / "elastic" / f"{NANO.name}.json").write_text(json.dumps({"rows": rows}))
    folder = tmp_path / NANO.name / "reproduce"
    return {name_of(claim): found for claim, found in verdicts(NANO, folder)}["against_small_dense"]


def test_small_dense_models_of_the_comparison_decide_where_the_item_is_missing(tmp_path):
    """The size above L + S does not count; of the cuts that which weights entries counts alone."""
    won = compared(tmp_path, energy=[99, 50, 55, 61], cut=[99, 50, 55, 59])
    assert won.agrees is True and list(ours(won).values())[:3] == ["−16.7 %", "−8.3 %", "−1.7 %"]
    assert len(ours(won)) == 4 and any("weighted" in name for name in ours(won))
    lost = compared(tmp_path, cut=[40, 50, 55, 61])
    assert lost.agrees is False and ["at 0.80 M" in name for name in failed(lost)] == [True]
    assert compared(tmp_path, hpa=[40, 50, 55, 59], energy=[40, 50, 55, 59]).answer == "not measured"


def test_small_dense_models_of_the_comparison_decide_where_both_are_there_too(judged, rows, tmp_path):
    assert judged(rows)["against_small_dense"].agrees is True
    lost = compared(tmp_path, cut=[40, 50, 55, 61])
    assert lost.agrees is False and not any("0.90 M" in name for name in ours(lost))


def test_a_cut_stands_beside_a_small_dense_model_of_its_size_alone(rows, judged, tmp_path):
    """A size at which one of the two is missing shows nothing, instead of being passed over."""
    for row in rows["one_training"]:
        row["parameters"] += 7000 if (row["label"], row["budget"]) == ("dense", "0.5") else 0  # of 900,000
    one = judged(rows)["against_small_dense"]
    assert one.agrees is None and [number.holds for number in one.numbers] == [True, NOT_SHOWN]
    without_half = compared(tmp_path, half=1.22e6, cut=[99, 50, 55, 59])
    assert without_half.agrees is None
    assert [number.holds for number in without_half.numbers if number.limit] == [NOT_SHOWN, True, True]
    assert compared(tmp_path, half=1.22e6, cut=[99, 50, 55, 61]).agrees is False


def test_what_overflowed_beats_nothing_and_shows_nothing(rows, judged, tmp_path):
    assert compared(tmp_path, cut=[99, 50, 55, math.nan]).agrees is False
    beaten = [{**row, "perplexity": math.nan} if row["label"] == "dense" else row for row in rows["one_training"]]
    assert judged(rows | {"one_training": beaten})["against_small_dense"].agrees is None
    change("lm_head", "rank_ratio", 0.1, rho=0.1, block="LM head", seed=0)(rows)
    change("lm_head", "density", 0.1, rho=0.1, block="LM head", seed=0)(rows)
    change("lm_head", "L+S", math.nan, rho=0.1, block="LM head", seed=0)(rows)
    assert not any("0.1·ρ: rank ratio and density of the head" in name for name in failed(judged(rows)["lm_head"]))
    change("frequency", "loss", math.nan, K=10, seed=0)(rows)
    assert [name.split(",")[0] for name in failed(judged(rows)["frequency"])] == ["final loss"]


@pytest.mark.parametrize("item", ["table1", "flexible", "embedding", "lm_head", "frequency", "bf16"])
def test_a_claim_whose_result_lacks_rows_says_which_and_what_to_run(item, rows, judged):
    """Any row may be missing, as after an interruption by hand: no claim agrees then, and the others are judged."""
    for lacking in range(len(rows[item])):
        kept = rows | {item: [row for i, row in enumerate(rows[item]) if i != lacking]}
        found = judged(kept)
        assert found["central" if item != "table1" else "kappa"].agrees is True
        unjudged = [one for one in found.values() if not one.numbers and f"{item}.json" in one.missing]
        assert all(" --again (" in one.missing for one in unjudged)
    for empty in ("lm_head", "frequency"):
        assert judged(rows | {empty: []})[empty].agrees is None


def beside_methods(tmp_path, scale=NANO, **rows: dict) -> Verdict:
    """Return the verdict on other methods from rows of compare_elastic.py, or without any from other results."""
    if rows:
        (tmp_path / "elastic").mkdir(exist_ok=True)
        found = [
            {"label": label, "seed": 0, "commit": "HEAD", "ways": {}, **row}
            for label, row in ({"SALAAD, as in the paper": rows.pop("ours")} | rows).items()
        ]
        (tmp_path / "elastic" / f"{scale.name}.json").write_text(json.dumps({"rows": found}))
    folder = tmp_path / scale.name / "reproduce"
    return {name_of(claim): found for claim, found in verdicts(scale, folder)}["other_methods"]


def figures(perplexity: float, parameters: float) -> dict:
    return {"perplexity": perplexity, "parameters": parameters}


def test_the_papers_rows_of_other_methods_keep_the_limits_and_half_a_percent_more_does_not(tmp_path):
    found = read_json(PAPER)

    def kept(factor: float) -> list[bool]:
        answers = []
        for size, table in found["embedding"].items():
            cut = figures(factor * float(table["L̃+S̃"][0].split()[0]), table["L̃+S̃"][1])
            mine = {"L+S": figures(factor * table["L+S"][0], table["L+S"][1]), "ways": {"hpa": [cut]}}
            rivals = {name.lower(): {"X": figures(*row)} for name, row in found["baselines"][size].items()}
            answers.append(beside_methods(tmp_path, ours=mine, **rivals).agrees)
        return answers

    more = [
        table["L̃+S̃"][1] / row[1] - 1
        for size, table in found["table1"].items()
        for row in found["baselines"][size].values()
    ]
    [claim] = [claim for claim in CLAIMS if name_of(claim) == "other_methods"]
    assert f"with up to {max(more):.0%} more".replace("%", " %") in claim.paper
    assert kept(1) == [True] * 3
    assert kept(1.005) == [True, True, False]


def test_a_cut_is_compared_with_methods_that_are_no_smaller(tmp_path):
    cuts = [figures(50.0, 1.5e6), figures(52.0, 1.3e6), figures(60.0, 1.1e6)]
    mine = {"L+S": figures(48.0, 1.8e6), "ways": {"hpa": cuts}}
    rivals = {"galore": {"X": figures(60.0, 2e6)}, "cola": {"X": figures(52.0, 1.35e6)}}
    found = beside_methods(tmp_path, ours=mine, **rivals)
    told = {name.split(" over ")[1]: value for name, value in ours(found).items()}
    assert (told["GaLore's"], told["CoLA's"]) == ("−20.0 %", "+0.0 %")
    assert told["LoRA's"] == "there is no model of the method"
    assert found.agrees is None and found.answer == "not shown"
    larger = mine | {"L+S": figures(48.0, 2.1e6)}
    number = next(one for one in beside_methods(tmp_path, ours=larger, **rivals).numbers if "GaLore" in one.what)
    assert number.ours == "−20.0 %, with more parameters" and number.holds is False
    rivals["lost"] = {"X": figures(49.0, 1.0e6)}  # smaller than every cut
    assert (
        ours(beside_methods(tmp_path, ours=mine, **rivals))["PPL of L + S, cut by HPA to at most its size, over LOST's"]
        == "there is no cut of this size"
    )
    rivals["loro"] = {"X": figures(49.0, 1.49e6)}  # more than a tenth above the next cut
    assert beside_methods(tmp_path, ours=mine, **rivals).answer == "not shown"
    rivals["loro"] = {"X": figures(49.0, 1.44e6)}  # 52 over 49
    assert beside_methods(tmp_path, ours=mine, **rivals).agrees is False


def test_where_methods_were_only_compared_among_themselves_that_decides(tmp_path):
    def entry(perplexity: float, variant: str = "X") -> dict:
        return {"full": {"commit": "HEAD", "variants": {variant: figures(perplexity, 1e6)}}}

    others = ("lora", "relora", "galore", "loro", "cola", "sltrain", "lost")
    (tmp_path / "methods").mkdir()
    methods = {"salaad": entry(60.0, "L+S"), "full_rank": entry(55.0)} | {name: entry(50.0) for name in others}
    assert beside_methods(tmp_path).answer == "not measured"
    (tmp_path / "methods" / f"{NANO.name}.json").write_text(json.dumps({"methods": methods}))
    found = beside_methods(tmp_path)
    assert found.agrees is False and ours(found)["PPL of L + S over LoRA's"] == "+20.0 %"
    [beside] = [number.ours for number in found.numbers if number.what.endswith("weights there, over LoRA's")]
    assert beside == "+10.0 %"


@pytest.mark.parametrize("unfinished", [{}, {"full": {"commit": "HEAD", "variants": {}}}], ids=["searched", "diverged"])
def test_a_method_whose_full_run_has_not_ended_shows_nothing(unfinished, tmp_path):
    def entry(perplexity: float, variant: str = "X") -> dict:
        return {"full": {"commit": "HEAD", "variants": {variant: figures(perplexity, 1e6)}}}

    def verdict(**methods: dict) -> Verdict:
        (tmp_path / "methods").mkdir(exist_ok=True)
        (tmp_path / "methods" / f"{NANO.name}.json").write_text(json.dumps({"methods": methods}))
        return beside_methods(tmp_path)

    ended = {"salaad": entry(45.0, "L+S"), "full_rank": entry(55.0), "galore": entry(50.0)}
    found = verdict(**ended, lora=unfinished)
    assert found.answer == "not shown" and ours(found)["PPL of L + S over GaLore's"] == "−10.0 %"
    assert ours(found)["PPL of L + S over LoRA's"] == "there is no model of the method"
    assert not [number for number in found.numbers if number.what.endswith("weights there, over LoRA's")]
    assert verdict(**(ended | {"salaad": unfinished})).answer == "not measured"


def test_kappa_of_the_comparison_decides_where_the_item_is_missing(tmp_path):
    def verdict(*kappas: float) -> Verdict:
        cuts = [figures(50.0, size) | {"kappa": one} for size, one in zip((1.75e6, 1.5e6, 1e6), kappas, strict=True)]
        beside_methods(tmp_path, ours={"L+S": figures(48.0, 1.8e6), "ways": {"hpa": cuts}})
        return {name_of(claim): one for claim, one in verdicts(NANO, tmp_path / NANO.name / "reproduce")}["kappa"]

    assert verdict(0.1, 0.55, 0.8).agrees is True  # the first removes less than 5 % of L + S
    assert verdict(0.6, 0.55, 0.85).agrees is False and verdict(0.6, 0.5, 0.6).agrees is False
