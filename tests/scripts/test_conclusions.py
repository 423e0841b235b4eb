"""The report's conclusions: the numbers in its sentences against sums by hand, and no sentence where one is missing."""

import json
from math import log

from scripts.reproduction.conclusions import FIRST, PAIR, conclusions


def row(label: str, seed: int, X: float, **ways: dict[float, float]) -> dict:
    sizes = {
        way.replace("_", ", "): [{"share": share, "perplexity": value} for share, value in found.items()]
        for way, found in ways.items()
    }
    config = {"optimizer": {"lr": 0.01 if label.startswith("dense, ") else 0.005}}
    return {"label": label, "seed": seed, "X": {"perplexity": X}, "ways": sizes, "config": config}


def said(tmp_path, *rows: dict) -> list[str]:
    (tmp_path / "elastic").mkdir(exist_ok=True)
    (tmp_path / "elastic" / "nano-20.json").write_text(json.dumps({"rows": rows}))
    return conclusions(tmp_path)


def test_nothing_is_concluded_from_nothing(tmp_path):
    assert conclusions(tmp_path) == []
    assert said(tmp_path, row("full-rank", 0, 50.0), row("SALAAD", 0, 51.0)) == []


def test_what_a_sentence_compares_is_compared_over_the_seeds_that_all_of_it_has(tmp_path):
    many, head = said(
        tmp_path,
        row("full-rank", 0, 50.0, rpca_head={0.5: 55.0, 0.2: 60.0}),
        row("full-rank", 1, 40.0),
        row("SALAAD", 0, 51.0, cut={0.2: 90.0}, cut_head={0.5: 51.0, 0.2: 55.0}),
        row("SALAAD", 1, 41.0, cut={0.2: 80.0}, cut_head={0.5: 42.0, 0.2: 46.0}),
        row("SALAAD", 2, 9.0, cut={0.2: 9.0}, cut_head={0.5: 9.0, 0.2: 9.0}),
    )
    # Only seed 0 has cuts of both models; the sentence on the head has two seeds: 10 % and 15 %, 80 % and 100 %.
    assert "SALAAD's model is +2.0% and +10.0% in perplexity relative to the uncut full-rank model" in many
    assert f"the same tools, is +10.0% and +20.0% ({FIRST}, seed 0)" in many
    assert many.endswith("So, judged over all tokens, train SALAAD for both sizes.")
    assert "is +12.5% in perplexity relative to the uncut full-rank model with the head split, and +90.0% with" in head
    assert head.endswith("seeds 0, 1).")


def test_what_to_train_is_judged_over_the_seeds_that_the_sentence_names(tmp_path):
    [found] = said(
        tmp_path,
        row("full-rank", 0, 50.0, rpca_head={0.5: 50.0, 0.2: 60.0}),
        row("SALAAD", 0, 50.0, cut_head={0.5: 48.0, 0.2: 57.0}),
        row("SALAAD", 1, 50.0, cut_head={0.5: 99.0, 0.2: 99.0}),
        # Split, but not measured whole, so that nothing is relative to it.
        {**row("full-rank", 1, 50.0, rpca_head={0.5: 50.0, 0.2: 60.0}), "X": None},
    )
    assert "seed 0). So, judged over all tokens, train SALAAD for both sizes." in found


def test_one_folder_of_all_sizes_stands_beside_that_of_the_full_rank_model_and_says_its_price(tmp_path):
    full = row("full-rank", 0, 50.0, rpca_head_tuned={0.5: 48.0, 0.2: 55.0})
    mine = row("SALAAD", 0, 51.0, head_tuned={0.5: 49.0, 0.2: 52.0})
    costs = {"train": {"operations": 2e12}, "head, tuned": {"operations": 5e11, "bytes": 22_000_000}}
    [found] = said(tmp_path, full, mine | {"costs": costs})
    assert "all sizes (22.00 MB), matched" in found and "tokens, for 25% of the training's operations" in found
    assert "SALAAD's folder is -2.0% and +4.0% in perplexity relative to the uncut full-rank model" in found
    assert "a folder made of the full-rank model is -4.0% and +10.0%" in found
    # 49 to 48, and 52 to 55
    assert found.endswith("So, judged over all tokens, train full-rank for half, and SALAAD for a fifth.")
    mine["ways"]["head, tuned"][0]["perplexity"] = 48.4
    [found] = said(tmp_path, full, mine)
    assert found.endswith("So, judged over all tokens, train either for half, and SALAAD for a fifth.")


def test_sizes_made_one_by_one_and_dense_models_stand_beside_the_whole_model(tmp_path):
    small = [row("dense, 0.5", 0, 52.0), row("dense, 0.2", 0, 60.0)]
    mine = row("SALAAD", 0, 51.0, head_tuned_each={0.5: 50.5, 0.2: 58.0})
    full = row("full-rank", 0, 50.0, rpca_head_tuned_each={0.5: 49.0, 0.2: 60.0})
    [tuned, dense] = said(tmp_path, full, mine, *small)
    assert "SALAAD's model is +1.0% and +16.0% in perplexity relative to the uncut full-rank model" in tuned
    assert "and the full-rank model is -2.0% and +20.0%" in tuned
    assert "is +4.0% (half) and +20.0% (a fifth)" in dense


def test_both_ways_to_cut_are_compared_on_one_model_at_every_scale_that_has_both(tmp_path):
    ways = {"hpa": {0.5: 60.0, 0.2: 100.0}, "energy": {0.5: 52.0, 0.2: 105.0}, "cut_head": {0.5: 55.0, 0.2: 110.0}}
    paper = row("SALAAD, as in the paper", 1, 55.0, **ways)
    hpa_alone = row("SALAAD, as in the paper", 0, 55.0, hpa={0.5: 60.0, 0.2: 100.0})
    rows = [row("full-rank", 0, 9.0), row("full-rank", 1, 50.0)]
    assert said(tmp_path, *rows, hpa_alone) == []
    (tmp_path / "elastic" / "micro.json").write_text(json.dumps({"rows": [*rows, paper]}))
    [cut] = said(tmp_path, *rows, hpa_alone)
    assert "model: at micro it is +20.0% and +100.0% by HPA at κ*, +4.0% and +110.0% by energy with equal" in cut
    assert "+10.0% and +120.0% with our defaults ([elastic]" in cut and "energy alone is worse than HPA at a" in cut
    paper["ways"]["energy"][1]["perplexity"] = 99.0
    (tmp_path / "elastic" / "micro.json").write_text(json.dumps({"rows": [*rows, paper]}))
    [cut] = said(tmp_path, *rows, hpa_alone)
    assert "+4.0% and +98.0% by energy" in cut and "energy alone" not in cut


def test_other_methods_stand_by_their_whole_trainings_and_else_by_their_best_short_ones(tmp_path):
    def tried(*perplexities: float) -> dict:
        of_all = {"lr": 1.0, "projection_lr": 0.25}
        runs = [{**of_all, "variants": {"X": {"perplexity": value}}} for value in perplexities]
        return {"search": [*runs, {**of_all, "variants": {}}]}  # the last has diverged

    (tmp_path / "methods").mkdir()
    methods = {"full_rank": tried(90.0, 80.0), "galore": tried(1.0), "lora": tried(84.0, 99.0), "cola": tried(82.0)}
    (tmp_path / "methods" / "nano-20.json").write_text(json.dumps({"methods": methods | {"salaad": tried(1.0)}}))
    rows = [row("full-rank", 0, 50.0), row("galore", 0, 60.0), row("matformer", 0, 51.0)]
    [found] = said(tmp_path, *rows)
    assert f"training's seed 0: matformer +2.0%, galore +20.0% ({FIRST}, seed 0). The rest" in found
    more = [row("full-rank", 1, 40.0), row("galore", 1, 56.0)]
    [found] = said(tmp_path, *rows, *more)
    # Relative to 45, the mean of both seeds.
    assert f"seeds 0, 1: matformer +13.3% (seed 0), galore +28.9% (seeds 0, 1) ({FIRST}). The rest" in found
    assert "that length, each at the best rates found: cola +2.5%, lora +5.0% ([methods]" in found
    rows[1]["X"]["in_context"], more[0]["X"]["in_context"] = {"other": [4.0 + log(1.1), 9]}, {"other": [4.0, 9]}
    [found] = said(tmp_path, *rows, *more)  # galore's tokens not copied with seed 0, full-rank training's with seed 1
    assert "0, 1 (in parentheses over the tokens that are not copied): matformer +13.3% (seed 0)" in found
    assert "galore +28.9% (+10.0%) (seeds 0, 1)" in found


def test_a_method_that_is_better_only_with_dearer_settings_is_named_with_them(tmp_path):
    def tried(perplexity: float, projections: float = 0.25, *settings: str) -> dict:
        found = {"X": {"perplexity": perplexity}}
        return {"lr": 1.0, "projection_lr": projections, "settings": list(settings), "variants": found}

    bench(tmp_path)
    (tmp_path / "methods").mkdir()
    methods = {
        "full_rank": {"search": [tried(80.0), tried(84.0), tried(100.0, 1), tried(92.0, 1)]},
        "matformer": {"search": [tried(82.0), tried(78.0, 0.25, "--matformer.train=summed")]},
    }
    (tmp_path / "methods" / "nano-20.json").write_text(json.dumps({"methods": methods}))
    whole, rates = said(tmp_path, row("full-rank", 0, 50.0), row("SALAAD", 0, 51.0))
    assert "full-rank training at its best rate: matformer with train=summed -2.5%, but for several" in whole
    assert "With the best one rate for all, full-rank training is +15.0% in perplexity relative to that with" in rates
    methods["matformer"]["search"][1]["variants"]["X"]["perplexity"] = 79.9
    (tmp_path / "methods" / "nano-20.json").write_text(json.dumps({"methods": methods}))
    whole, _ = said(tmp_path, row("full-rank", 0, 50.0), row("SALAAD", 0, 51.0))
    assert "summed" not in whole


def bench(folder) -> None:
    costs = {"optimizer_bytes": 1_000_000, "method_bytes": 500_000, "over_full_rank": 1.25}
    (folder / "bench").mkdir()
    (folder / "bench" / "methods-nano.json").write_text(json.dumps({"methods": dict.fromkeys(PAIR, costs)}))


def test_what_to_train_goes_by_the_sign(tmp_path):
    bench(tmp_path)
    [whole] = said(tmp_path, row("full-rank", 0, 50.0), row("SALAAD", 0, 51.0))
    assert "of the methods trained in full, train full-rank. SALAAD's X is +2.0% in perplexity relative" in whole
    assert "its steps take 1.25 times as long" in whole and "keep 1.50 MB in memory instead of 1.50 MB" in whole
    [whole] = said(tmp_path, row("full-rank", 0, 50.0), row("SALAAD", 0, 49.6))  # better by less than seeds differ
    assert "train full-rank. SALAAD's X is -0.8% in" in whole
    others = [row("full-rank", 0, 50.0), row("SALAAD", 0, 49.0), row("galore", 0, 48.0)]
    for one, loss in zip(others, (4.0, 4.0 + log(1.03)), strict=False):
        one["X"]["in_context"] = {"other": [loss, 9], "copied": [1.0, 1]}
    [whole] = said(tmp_path, *others)
    assert "to full-rank training (over the tokens that are not copied: +3.0%), its" in whole
    assert "train galore (-4.0% in perplexity relative to full-rank training, seed 0). SALAAD's X is -2.0%" in whole
    more = [row("full-rank", 1, 100.0), row("SALAAD", 1, 98.0)]
    [whole] = said(tmp_path, *others, *more)
    assert "full-rank training, seed 0). SALAAD" in whole and whole.endswith("seeds 0, 1).")


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
    headline, bfloat16 = conclusions(tmp_path)
    assert "at nano is -1.0% in perplexity relative to X, with 90% of X's parameters, and +23.8% relative" in headline
    assert "change perplexity at nano by +3.0% for SALAAD's X and by +2.5% for full-rank training" in bfloat16
    write("nano-20", table1=[*table, trained("salaad", "L+S", 80.0, 50.0)])
    headline, bfloat16 = conclusions(tmp_path)
    assert "at nano-20 is -20.0% in perplexity relative to X, with 50%" in headline and "at nano by" in bfloat16


def test_small_dense_models_are_compared_over_tokens_that_cannot_be_copied_too(tmp_path):
    rows = [row("full-rank", seed, X) for seed, X in ((0, 40.0), (1, 60.0))]
    rows += [row("dense, 0.5", 0, 60.0), row("dense, 0.2", 0, 75.0)]
    [plain] = said(tmp_path, *rows)
    assert plain.endswith(
        "with a learning rate of 0.01 (the large model's: 0.005), is +20.0% (half) and +50.0% (a fifth) in perplexity "
        f"relative to the mean of the full-rank model's seeds 0, 1 ({FIRST}, seed 0)."
    )
    for one, loss in zip(rows[1:], (3.0, 3.0 + log(1.1), 3.0 + log(1.25)), strict=True):
        one["X"]["in_context"] = {"other": [loss, 9]}
    [more] = said(tmp_path, *rows)  # full-rank training's with seed 1, theirs with seed 0
    assert more.startswith(plain) and "are not copied it is +10.0% and +25.0%; the rest" in more
    del rows[2]["X"]["in_context"]
    assert said(tmp_path, *rows) == [plain]


def test_what_small_dense_models_and_tuned_cuts_cost_stands_beside_them(tmp_path):
    costs = {"train": {"operations": 4e12}, "head, tuned": {"operations": 1e12, "bytes": 9}}
    rows = [
        row("full-rank", 0, 50.0) | {"costs": costs},
        row("SALAAD", 0, 50.0, cut_head={0.5: 52.0, 0.2: 60.0}) | {"costs": costs},
        row("dense, 0.5", 0, 60.0) | {"costs": {"train": {"operations": 3e12}}},
        row("dense, 0.2", 0, 75.0) | {"costs": {"train": {"operations": 2e12}}},
    ]
    (tmp_path / "elastic").mkdir()
    (tmp_path / "elastic" / "nano.json").write_text(json.dumps({"rows": rows}))
    [found] = said(tmp_path, *rows)
    assert (
        "takes 75% and 50% of the operations of the large one" in found and "with a tuned folder it needs 125%" in found
    )
    assert "After 1.1" not in found  # SALAAD's cuts are better there too
    rows[2]["X"]["perplexity"], rows[3]["X"]["perplexity"] = 50.0, 50.0
    (tmp_path / "elastic" / "nano.json").write_text(json.dumps({"rows": rows}))
    [found] = said(tmp_path, *rows)
    assert "(nano) SALAAD's cuts without text are +4.0% and +20.0% relative to dense models" in found
