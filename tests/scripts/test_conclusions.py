"""What the report concludes: the numbers of its sentences against sums by hand, and silence where one is missing."""

import json

from scripts.reproduction.conclusions import PAIR, conclusions


def row(label: str, seed: int, X: float, **ways: dict[float, float]) -> dict:
    sizes = {
        way.replace("_", ", "): [{"share": share, "perplexity": value} for share, value in found.items()]
        for way, found in ways.items()
    }
    return {"label": label, "seed": seed, "X": {"perplexity": X}, "ways": sizes}


def said(tmp_path, *rows: dict) -> list[str]:
    (tmp_path / "elastic").mkdir(exist_ok=True)
    (tmp_path / "elastic" / "nano-20.json").write_text(json.dumps({"rows": rows}))
    return conclusions(tmp_path)


def test_nothing_is_concluded_from_nothing(tmp_path):
    assert conclusions(tmp_path) == []
    assert said(tmp_path, row("full-rank", 0, 50.0), row("SALAAD", 0, 51.0)) == []


def test_cuts_are_compared_seed_by_seed_and_only_where_there_is_a_full_rank_model_of_that_seed(tmp_path):
    many, head = said(
        tmp_path,
        row("full-rank", 0, 50.0, rpca_head={0.5: 55.0, 0.2: 60.0}),
        row("full-rank", 1, 40.0),
        row("SALAAD", 0, 51.0, cut={0.2: 90.0}, cut_head={0.5: 51.0, 0.2: 55.0}),
        row("SALAAD", 1, 41.0, cut={0.2: 80.0}, cut_head={0.5: 42.0, 0.2: 46.0}),
        row("SALAAD", 2, 9.0, cut={0.2: 9.0}, cut_head={0.5: 9.0, 0.2: 9.0}),
    )
    assert "SALAAD's model is +3.5% and +12.5% from" in many  # means of +2 % and +5 %, +10 % and +15 %
    assert "the same tools, is +10.0% and +20.0%" in many
    assert "is +12.5% from the whole full-rank model with it split and +90.0% with it whole" in head


def test_one_folder_of_all_sizes_is_compared_with_the_whole_full_rank_model(tmp_path):
    full, mine = row("full-rank", 0, 50.0), row("SALAAD", 0, 51.0, head_tuned={0.5: 49.0, 0.2: 52.0})
    [found] = said(tmp_path, full, mine)
    assert "Its half is -2.0% and its fifth +4.0% from the whole full-rank model" in found


def test_of_two_ways_with_text_the_better_counts_at_each_size(tmp_path):
    ways = {"rpca_tuned_each": {0.5: 49.0, 0.2: 70.0}, "rpca_head_tuned_each": {0.5: 50.0, 0.2: 60.0}}
    small = [row("dense, 0.5", 0, 52.0), row("dense, 0.2", 0, 60.0)]
    mine = row("SALAAD", 0, 51.0, tuned_each={0.5: 50.5, 0.2: 58.0})
    [tuned, dense] = said(tmp_path, row("full-rank", 0, 50.0, **ways), mine, *small)
    assert "SALAAD's half is +1.0% from it and its fifth +16.0%" in tuned
    assert "full-rank's half is -2.0% from it and its fifth +20.0%" in tuned
    assert "a dense model trained at it is +4.0% (half) and +20.0% (a fifth)" in dense


def test_what_to_train_goes_by_the_sign_and_the_rates_by_the_longer_training(tmp_path):
    costs = {"optimizer_bytes": 1_000_000, "method_bytes": 500_000, "over_full_rank": 1.25}
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "methods-nano.json").write_text(json.dumps({"methods": dict.fromkeys(PAIR, costs)}))
    one_rate = row("full-rank, one rate", 0, 75.0)
    whole, rates = said(tmp_path, row("full-rank", 0, 50.0), row("SALAAD", 0, 51.0), one_rate)
    assert "train full-rank. SALAAD's X is +2.0% from full-rank training, a step takes 1.25 times as long" in whole
    assert "1.50 MB of state instead of 1.50 MB" in whole
    assert "full-rank training at nano-20 is +50.0% from that with two" in rates
    [whole] = said(tmp_path, row("full-rank", 0, 50.0), row("SALAAD", 0, 49.0))
    assert "train with SALAAD. SALAAD's X is -2.0% from" in whole


def test_items_of_the_paper_give_the_rest(tmp_path):
    folder = tmp_path / "nano" / "reproduce"
    folder.mkdir(parents=True)

    def trained(method: str, variant: str, perplexity: float, parameters: float, **more: str) -> dict:
        means = {"perplexity": {"mean": perplexity}, "parameters": {"mean": parameters}}
        return {"method": method, "variant": variant, **means, **more}

    table = [trained("full_rank", "X", 80.0, 100.0), trained("salaad", "X", 100.0, 100.0)]
    rounded = [trained("salaad", "X", 103.0, 100.0), trained("full_rank", "X", 82.0, 100.0)]
    cuts = [(2_000_000, 0.5, 90.0), (1_000_000, 0.5, 300.0), (1_000_000, 0.6, 200.0), (1_000_000, None, 110.0)]
    kept = [{"label": "SALAAD", "seed": 0, "budget": b, "kappa": k, "perplexity": value} for b, k, value in cuts]
    rows = {
        "table1": [*table, trained("salaad", "L+S", 99.0, 90.0)],
        "bf16": [{**one, "precision": "bf16"} for one in rounded],
        "flexible": kept,
    }
    for name, found in rows.items():
        (folder / f"{name}.json").write_text(json.dumps({"rows": found}))
    way, headline, bfloat16 = conclusions(tmp_path)
    assert "a cut to 1.00 M parameters has perplexity 110.0 by energy and refined, and 200.0 by HPA" in way
    assert "is at nano -1.0% from X, with 90% of its parameters, and +23.8% from full-rank training" in headline
    assert "change SALAAD's X by +3.0% and full-rank training by +2.5% at nano" in bfloat16
