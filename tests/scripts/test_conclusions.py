"""The report's conclusions: the numbers in its sentences against sums by hand, and no sentence where one is missing."""

import json
from math import log

from scripts.reproduction.conclusions import FIRST, PAIR, conclusions


def row(label: str, seed: int, X: float, **ways: dict[float, float]) -> dict:
    sizes = {
        way.replace("_", ", "): [{"share": share, "perplexity": value, "bytes": 10} for share, value in found.items()]
        for way, found in ways.items()
    }
    return {"label": label, "seed": seed, "X": {"perplexity": X, "bytes": 9}, "ways": sizes}


def said(tmp_path, *rows: dict) -> list[str]:
    (tmp_path / "elastic").mkdir(exist_ok=True)
    (tmp_path / "elastic" / "nano-20.json").write_text(json.dumps({"rows": rows}))
    return conclusions(tmp_path)


def test_nothing_is_concluded_from_nothing(tmp_path):
    assert conclusions(tmp_path) == []
    assert said(tmp_path, row("full-rank", 0, 50.0), row("SALAAD", 0, 51.0)) == []


def test_a_sentence_compares_over_the_seeds_that_all_of_it_has(tmp_path):
    [many] = said(
        tmp_path,
        row("full-rank", 0, 50.0, rpca_head={0.5: 55.0, 0.2: 60.0}),
        row("full-rank", 1, 40.0),
        row("SALAAD", 0, 51.0, cut_head={0.5: 51.0, 0.2: 55.0}),
        row("SALAAD", 1, 41.0, cut_head={0.5: 99.0, 0.2: 99.0}),
        row("SALAAD", 2, 9.0, cut_head={0.5: 9.0, 0.2: 9.0}),
    )
    assert "text**: train SALAAD. Cut to half and to a fifth, SALAAD's model is +2.0% and +10.0%; a" in many
    assert many.endswith(f"the same tools, is +10.0% and +20.0% ({FIRST}).")


def test_what_to_train_is_judged_over_the_seeds_of_the_figures(tmp_path):
    [found] = said(
        tmp_path,
        row("full-rank", 0, 50.0, rpca_head={0.5: 50.0, 0.2: 60.0}),
        row("SALAAD", 0, 50.0, cut_head={0.5: 48.0, 0.2: 57.0}),
        row("SALAAD", 1, 50.0, cut_head={0.5: 99.0, 0.2: 99.0}),
        # Split, but not measured whole, so that nothing is relative to it.
        {**row("full-rank", 1, 50.0, rpca_head={0.5: 50.0, 0.2: 60.0}), "X": None},
    )
    assert "train SALAAD." in found


def test_one_folder_of_all_sizes_stands_beside_that_of_the_full_rank_model_and_says_its_price(tmp_path):
    full = row("full-rank", 0, 50.0, rpca_head_tuned={0.5: 48.0, 0.2: 55.0})
    mine = row("SALAAD", 0, 51.0, head_tuned={0.5: 49.0, 0.2: 52.0})
    assert said(tmp_path, full, mine) == []  # its price is not known
    mine["costs"] = {"train": {"operations": 2e12}, "head, tuned": {"operations": 5e11, "bytes": 22_000_000}}
    [found] = said(tmp_path, full, mine)
    assert "all sizes (22.00 MB), matched" in found and "tokens, for 25% of the training's operations." in found
    assert "a fifth are -2.0% and +4.0% in SALAAD's folder, and -4.0% and +10.0% in one made of the full" in found
    # 49 to 48, and 52 to 55
    assert "for half train full-rank, for a fifth SALAAD; then" in found
    mine["ways"]["head, tuned"][0]["perplexity"] = 48.4
    [found] = said(tmp_path, full, mine)
    assert "for half train either model, for a fifth SALAAD; then" in found


def test_both_ways_to_cut_are_compared_on_one_model_of_the_first_scale_that_has_both(tmp_path):
    ways = {"hpa": {0.5: 60.0, 0.2: 100.0}, "hpa_head": {0.5: 52.0, 0.2: 105.0}, "cut_head": {0.5: 55.0, 0.2: 110.0}}
    paper = row("SALAAD, as in the paper", 1, 55.0, **ways)
    hpa_alone = row("SALAAD, as in the paper", 0, 55.0, hpa={0.5: 60.0, 0.2: 100.0})
    rows = [row("full-rank", 0, 9.0), row("full-rank", 1, 50.0)]
    assert said(tmp_path, *rows, hpa_alone) == []
    (tmp_path / "elastic" / "micro.json").write_text(json.dumps({"rows": [*rows, paper]}))
    [cut] = said(tmp_path, *rows, hpa_alone)
    assert "is +10.0% and +120.0% so, +20.0% and +100.0% by HPA at κ*, and +4.0% and +110.0% by HPA with" in cut
    assert cut.endswith("([elastic](elastic/README.md#micro)).")
    [cut] = said(tmp_path, *rows, {**paper, "ways": paper["ways"] | {"hpa": hpa_alone["ways"]["hpa"]}})
    assert cut.endswith("([elastic](elastic/README.md#nano-20)).")


def test_other_methods_stand_by_their_whole_trainings_the_best_first(tmp_path):
    rows = [row("full-rank", 0, 50.0), row("galore", 0, 60.0), row("matformer", 0, 51.0)]
    assert said(tmp_path, *rows) == [
        "**Other methods** after as many tokens: none is 1% better than full-rank training: matformer +2.0%, galore "
        f"+20.0% ({FIRST})."
    ]
    [found] = said(tmp_path, *rows, row("dense, as galore", 0, 55.0))
    assert "galore +20.0%, a dense model of galore's size +10.0% (" in found
    rows += [row("full-rank", 1, 40.0), row("galore", 1, 56.0)]
    rows[1]["X"]["in_context"], rows[3]["X"]["in_context"] = {"other": [4.0 + log(1.1), 9]}, {"other": [4.0, 9]}
    # Relative to 45, the mean of both seeds; galore's tokens not copied with seed 0, full-rank training's with seed 1.
    assert "training: matformer +13.3%, galore +28.9% (+10.0%) (" in said(tmp_path, *rows)[0]
    rows.append(row("lost", 0, 44.0))  # 2 % better than the mean
    assert "tokens: lost -2.2%, matformer +13.3%, galore" in said(tmp_path, *rows)[0]


def test_one_rate_for_all_weights_is_compared_with_the_best_two(tmp_path):
    def tried(perplexity: float, projections: float) -> dict:
        found = {"X": {"perplexity": perplexity}} if perplexity else {}
        return {"lr": 1.0, "projection_lr": projections, "settings": [], "variants": found}

    (tmp_path / "methods").mkdir()
    searched = [tried(80.0, 0.25), tried(84.0, 0.25), tried(100.0, 1), tried(92.0, 1), tried(0, 1)]  # the last diverged
    path = tmp_path / "methods" / "nano-20.json"
    path.write_text(json.dumps({"methods": {"full_rank": {"search": searched}}}))
    [rates] = said(tmp_path, row("full-rank", 0, 50.0))
    assert "training with the best one rate for all is +15.0% relative to that with the best two" in rates
    path.write_text(json.dumps({"methods": {"full_rank": {"search": searched[:2]}}}))
    assert said(tmp_path, row("full-rank", 0, 50.0)) == []


def test_what_to_train_goes_by_the_sign(tmp_path):
    costs = {"optimizer_bytes": 1_000_000, "method_bytes": 500_000, "over_full_rank": 1.25}
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "methods-nano.json").write_text(json.dumps({"methods": dict.fromkeys(PAIR, costs)}))
    [whole] = said(tmp_path, row("full-rank", 0, 50.0), row("SALAAD", 0, 51.0))
    assert "train full-rank, as no method is 1% better. SALAAD's X is +2.0%; its steps take 1.25 times as long" in whole
    assert "keep 1.50 MB in memory instead of 1.50 MB" in whole
    [whole] = said(tmp_path, row("full-rank", 0, 50.0), row("SALAAD", 0, 49.6))  # better by less than seeds differ
    assert "train full-rank, as no method is 1% better. SALAAD's X is -0.8%;" in whole
    others = [row("full-rank", 0, 50.0), row("SALAAD", 0, 49.0), row("galore", 0, 48.0)]
    for one, loss in zip(others, (4.0, 4.0 + log(1.03)), strict=False):
        one["X"]["in_context"] = {"other": [loss, 9], "copied": [1.0, 1]}
    whole, _ = said(tmp_path, *others)
    assert "train galore (-4.0%). SALAAD's X is -2.0% (+3.0%); its" in whole
    # At other rates a training does not begin like the others, so it is relative to the mean of their seeds, 60.
    seeds = [row("full-rank", 0, 50.0), row("full-rank", 1, 70.0), row("SALAAD", 0, 50.0)]
    searched = row("full-rank, as searched", 0, 48.0)
    [whole] = said(tmp_path, *seeds, searched)
    told = "At the best rates of its search full-rank training is"
    assert f"as no method is 1% better. {told} -20.0% with seed 0. SALAAD's X is +0.0%; its" in whole
    for loss, copies in ((4.0 - log(1.03), ""), (4.0 - log(1.005), ", as it copies more")):
        for one, value in ((seeds[0], 4.0), (seeds[1], 4.0), (searched, loss)):
            one["X"]["in_context"] = {"other": [value, 9], "copied": [1.0, 1]}
        [whole] = said(tmp_path, *seeds, searched)
        assert f"{told} -20.0% ({1 / (1.03 if not copies else 1.005) - 1:+.1%}) with seed 0{copies}." in whole


def test_small_dense_models_stand_beside_cuts_of_their_size_with_what_they_cost(tmp_path):
    def rows(half: float, fifth: float) -> list[dict]:
        found = [
            row("full-rank", 0, 40.0),
            row("full-rank", 1, 60.0),
            row("SALAAD", 0, 40.0, cut_head={0.5: 42.0, 0.2: 48.0}),
            row("SALAAD", 1, 60.0, cut_head={0.5: 63.0, 0.2: 72.0}),
            row("dense, 0.5", 0, half),
            row("dense, 0.2", 0, fifth),
        ]
        costs = {"full-rank": 4e12, "dense, 0.5": 3e12, "dense, 0.2": 2e12}
        return [one | {"costs": {"train": {"operations": costs.get(one["label"])}}} for one in found]

    [found] = said(tmp_path, *rows(60.0, 75.0))
    assert "known beforehand**: cut a large model, as for many sizes, instead of training a small one. Dense" in found
    assert "Dense models trained at half and at a fifth are +20.0% and +50.0% after as many tokens, for 75%" in found
    assert "for 75% and 50% of the large one's operations, and have 90% and 90% of the bytes" in found
    [found] = said(tmp_path, *rows(52.5, 50.0))  # SALAAD's cuts have 52.5 and 60
    assert "for half train either model, for a fifth a dense model of that size." in found
    more = rows(60.0, 75.0)
    for one, loss in zip((more[1], *more[4:]), (3.0, 3.0 + log(1.1), 3.0 + log(1.25)), strict=True):
        one["X"]["in_context"] = {"other": [loss, 9]}  # full-rank training's with seed 1, theirs with seed 0
    assert "a fifth are +20.0% (+10.0%) and +50.0% (+25.0%) after as many tokens, for" in said(tmp_path, *more)[0]


def test_after_few_tokens_small_models_are_named_where_they_are_better(tmp_path):
    def rows(half: float) -> str:
        small = [row("dense, 0.5", 0, half), row("dense, 0.2", 0, 50.0)]
        return json.dumps(
            {"rows": [row("full-rank", 0, 9.0), row("SALAAD", 0, 9.0, cut_head={0.5: 52, 0.2: 60}), *small]}
        )

    (tmp_path / "elastic").mkdir()
    (tmp_path / "elastic" / "nano.json").write_text(rows(50.0))
    [found] = said(tmp_path, row("full-rank", 0, 50.0))
    assert "to a fifth are +4.0% and +20.0% relative to dense models of their sizes" in found
    at_micro = [row("full-rank", 0, 9.0, rpca_head={0.5: 40.0, 0.2: 50.0}), row("dense, 0.5", 0, 52.0)]
    at_micro += [row("dense, 0.2", 0, 48.0), row("SALAAD", 0, 9.0, cut_head={0.5: 39.0, 0.2: 48.0})]
    (tmp_path / "elastic" / "micro.json").write_text(json.dumps({"rows": at_micro}))
    [found] = said(tmp_path, row("full-rank", 0, 50.0))
    assert "(micro) they are -25.0% and +0.0%, and -2.5% and -4.0% relative to cuts of a full-rank model" in found
    (tmp_path / "elastic" / "nano.json").write_text(rows(51.9))
    assert said(tmp_path, row("full-rank", 0, 50.0)) == []


def test_items_of_the_paper_give_the_rest_by_the_longer_training(tmp_path):
    def trained(method: str, variant: str, perplexity: float, parameters: float, **more: str) -> dict:
        means = {"perplexity": {"mean": perplexity}, "parameters": {"mean": parameters}}
        return {"method": method, "variant": variant, **means, **more}

    def write(scale: str, **items: list[dict]) -> None:
        folder = tmp_path / scale / "reproduce"
        folder.mkdir(parents=True, exist_ok=True)
        for name, found in items.items():
            (folder / f"{name}.json").write_text(json.dumps({"rows": found}))

    table = [trained("full_rank", "X", 80.0, 100.0), trained("salaad", "X", 100.0, 100.0)]
    rounded = [trained("salaad", "X", 103.0, 100.0), trained("full_rank", "X", 82.0, 100.0)]
    short = [*table, trained("salaad", "L+S", 99.0, 90.0)]
    both = [{**one, "precision": name} for name, some in (("bf16", rounded), ("fp32", table)) for one in some]
    write("nano", table1=short, bf16=both)
    [bfloat16] = conclusions(tmp_path)  # L + S is told of scales with the paper's tokens
    assert "cost +3.0% at nano for SALAAD's X, and +2.5% for full-rank training" in bfloat16
    write("nano-20", table1=[*table, trained("salaad", "L+S", 80.0, 50.0)])
    headline, bfloat16 = conclusions(tmp_path)
    first = "-20.0% relative to X, with 50% of its parameters, and +0.0% relative to full-rank training at nano-20"
    assert first in headline and "micro" not in headline and "at nano for" in bfloat16
    write("micro-20", table1=short)
    headline, _ = conclusions(tmp_path)
    longer = "-1.0% relative to X, with 90% of its parameters, and +23.8% relative to full-rank training at micro-20"
    assert first in headline and longer in headline
