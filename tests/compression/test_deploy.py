"""From a trained checkpoint to models of other sizes, with the commands a user types."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

import salaad  # noqa: F401  so that from_pretrained opens factored folders
from salaad.common.files import write_checksums
from salaad.runs.model_on_disk import ModelOnDisk
from tests.helpers.deploying import compress, evaluate, ok, rows_of
from tests.helpers.surrogates import best_rank, dense_parts, l_plus_s
from tests.helpers.training import ROOT, last_checkpoint

logging.set_verbosity_error()
logging.disable_progress_bar()
pytestmark = pytest.mark.usefixtures("own_caches")


def perplexity_by_hand(model: torch.nn.Module, tokenizer_folder: Path, files: list[str], length: int) -> float:
    """Exp of the mean loss over every token but a row's first, one document a row, truncated."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    total, count = 0.0, 0
    for line in Path(files[0]).read_text().splitlines():
        ids = tokenizer(json.loads(line)["text"], add_special_tokens=False)["input_ids"]
        row = torch.tensor([[*ids[: length - 1], tokenizer.eos_token_id]])
        with torch.no_grad():
            logits = model(row).logits[0, :-1].double()
        total += torch.nn.functional.cross_entropy(logits, row[0, 1:], reduction="sum").item()
        count += row.shape[1] - 1
    return float(torch.tensor(total / count).exp())


def test_perplexity_of_x_and_of_l_plus_s_are_those_of_plain_torch(runs, text_files, tmp_path):
    table = evaluate("perplexity", runs / "salaad", tmp_path, dtype="float32")
    rows = {row["variant"]: row for row in rows_of(tmp_path, "perplexity")}
    folder = last_checkpoint(runs / "salaad") / "model"
    model = AutoModelForCausalLM.from_pretrained(folder).double()
    expected = perplexity_by_hand(model, folder, text_files["validation"], 32)
    assert rows["X"]["perplexity"] == pytest.approx(expected, rel=1e-5)
    for name, W in l_plus_s(runs / "salaad").items():
        model.get_submodule(name).weight.data = W
    expected = perplexity_by_hand(model, folder, text_files["validation"], 32)
    assert rows["L+S"]["perplexity"] == pytest.approx(expected, rel=1e-5)
    assert f"{expected:.2f}" in table


def test_the_training_run_reported_the_same(runs, tmp_path):
    evaluate("perplexity", runs / "salaad", tmp_path, dtype="float32", tokens=2000)
    reported = json.loads((runs / "salaad" / "summary.json").read_text())["variants"]
    for row in rows_of(tmp_path, "perplexity"):
        assert row["perplexity"] == pytest.approx(reported[row["variant"]]["perplexity"], rel=1e-5)
        assert row["parameters"] == reported[row["variant"]]["parameters"]
        assert row["tokens"] == reported[row["variant"]]["tokens"]


def test_compress_keeps_the_largest_of_every_block_and_meets_the_budget(runs, tmp_path):
    """The folder holds, block by block, the best approximation of the rank it names plus the largest entries of S."""
    made = tmp_path / "made"
    dense = sum(t.numel() for t in load_file(last_checkpoint(runs / "salaad") / "model/model.safetensors").values())
    parts = dense_parts(runs / "salaad")
    whole = dense - sum(L.numel() - r * sum(L.shape) - int((S != 0).sum()) for L, S, r in parts.values())
    fixed = dense - sum(L.numel() for L, _, _ in parts.values())
    budget = fixed + (whole - fixed) // 2
    compress(runs / "salaad", made, budget=budget, kappa=0.4, dtype="float32")
    record = json.loads((made / "compression.json").read_text())
    unit = max(sum(L.shape) for L, _, _ in parts.values())
    assert budget - unit < record["parameters"][1] <= budget
    model = AutoModelForCausalLM.from_pretrained(made)
    assert model.num_parameters() <= max(budget, dense)
    for name, (L, S, _) in parts.items():
        module = model.get_submodule(name)
        if not hasattr(module, "U"):
            continue
        rank, nnz = module.U.shape[1], len(module.S_values)
        largest = torch.zeros_like(S).flatten()
        kept = S.flatten().abs().argsort(descending=True)[:nnz]
        largest[kept] = S.flatten()[kept]
        expected = best_rank(L, rank) + largest.view_as(S)
        torch.testing.assert_close(module.weight.double(), expected, rtol=1e-4, atol=1e-5 * float(L.abs().max()))


def test_without_a_kappa_both_sides_lose_the_same_fraction(runs, tmp_path):
    parts, kept = dense_parts(runs / "salaad"), 0.3
    low_rank = sum(rank * sum(L.shape) for L, _, rank in parts.values())
    sparse = sum(int((S != 0).sum()) for _, S, _ in parts.values())
    whole = low_rank + sparse
    dense = sum(t.numel() for t in load_file(last_checkpoint(runs / "salaad") / "model/model.safetensors").values())
    budget = dense - sum(L.numel() for L, _, _ in parts.values()) + round(kept * whole)
    compress(runs / "salaad", tmp_path / "made", budget=budget, allocation="hpa")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    modules = [model.get_submodule(name) for name in parts]
    ranks = sum(module.U.shape[1] * sum(module.shape) for module in modules)
    entries = sum(len(module.S_values) for module in modules)
    half_a_unit = sum(sum(L.shape) for L, _, _ in parts.values()) / 2  # ranks are whole numbers
    assert abs(ranks - kept * low_rank) <= half_a_unit
    assert abs(entries - kept * sparse) <= half_a_unit
    record = json.loads((tmp_path / "made/compression.json").read_text())
    assert record["kappa"] == pytest.approx(low_rank / whole, abs=half_a_unit / (1 - kept) / whole)
    named = record["variant"].partition("@")[2]
    assert float(named) == pytest.approx(low_rank / whole, abs=1e-3)
    compress(runs / "salaad", tmp_path / "again", budget=budget, kappa=named)
    assert (tmp_path / "again/model.safetensors").read_bytes() == (tmp_path / "made/model.safetensors").read_bytes()


def test_a_factored_folder_and_a_dense_one_of_the_same_cut_have_the_perplexity_of_the_variant(runs, tmp_path):
    for form in ("factored", "dense"):
        compress(runs / "salaad", tmp_path / form, budget="0.6", kappa=0.3, format=form, dtype="float32")
        evaluate("perplexity", tmp_path / form, tmp_path, dtype="float32")
    evaluate("perplexity", runs / "salaad", tmp_path, variants="0.6@0.3", dtype="float32")
    rows = {row["model"]: row for row in rows_of(tmp_path, "perplexity")}
    assert len(rows) == 3
    reference = rows.pop(next(model for model in rows if model.startswith("salaad")))
    for row in rows.values():
        assert row["perplexity"] == pytest.approx(reference["perplexity"], rel=1e-5)
        assert row["parameters"] == reference["parameters"]
    config = json.loads((tmp_path / "dense" / "config.json").read_text())
    assert "quantization_config" not in config
    assert json.loads((tmp_path / "factored" / "config.json").read_text())["architectures"] == config["architectures"]


def test_an_allocation_by_energy_meets_the_budget_and_is_the_same_in_both_commands(runs, tmp_path):
    compress(runs / "salaad", tmp_path / "made", budget="0.7", allocation="energy", refine=0, dtype="float32")
    record = json.loads((tmp_path / "made" / "compression.json").read_text())
    dense, kept = record["parameters"]
    assert 0 <= round(0.7 * dense) - kept < 544  # the largest block's n + m: one unit
    for checkpoint, variant in ((runs / "salaad", record["variant"]), (tmp_path / "made", "X")):
        evaluate("perplexity", checkpoint, tmp_path, variants=variant, dtype="float32")
    through_variant, through_folder = rows_of(tmp_path, "perplexity")
    assert through_variant["perplexity"] == pytest.approx(through_folder["perplexity"], rel=1e-5)
    assert through_variant["parameters"] == through_folder["parameters"] == kept
    assert through_variant["implied_kappa"] == record["kappa"]


def test_a_budget_above_l_plus_s_is_l_plus_s_and_said_so(runs, tmp_path):
    said = compress(runs / "salaad", tmp_path / "a", budget="100M")
    assert "at or above L + S" in said
    card = (tmp_path / "a" / "README.md").read_text()
    assert "all of L + S is kept" in card and "100M" not in card and "refined" not in card
    record = json.loads((tmp_path / "a" / "compression.json").read_text())
    assert (record["variant"], record["budget"], record["refine"]) == ("L+S", None, 0)
    compress(runs / "salaad", tmp_path / "b")
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_the_line_of_the_readme_opens_the_model_and_it_writes(runs, tmp_path, monkeypatch):
    [line] = re.findall(r"After `import salaad`[^`]*`(.*?)`", (ROOT / "README.md").read_text())
    compress(runs / "salaad", tmp_path / "salaad-194m", budget="0.7")
    monkeypatch.chdir(tmp_path)
    model, tokenizer = eval(line), AutoTokenizer.from_pretrained("salaad-194m")
    assert model.generate(**tokenizer("the rank", return_tensors="pt"), max_new_tokens=4, min_new_tokens=4).shape[1] > 4


def test_a_factored_folder_saved_again_has_the_parameters_of_the_first(runs, tmp_path):
    compress(runs / "salaad", tmp_path / "made", budget="0.5", dtype="float32")
    record = json.loads((tmp_path / "made" / "compression.json").read_text())
    assert 0 < record["factored_blocks"] < record["blocks"]  # the count of a block that is stored dense is kept too
    AutoModelForCausalLM.from_pretrained(tmp_path / "made").save_pretrained(tmp_path / "again")
    AutoTokenizer.from_pretrained(tmp_path / "made").save_pretrained(tmp_path / "again")
    compress(runs / "salaad", tmp_path / "elastic", elastic=True)
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "elastic", budget=record["budget"])
    small.save_pretrained(tmp_path / "small")
    shutil.copytree(tmp_path / "again", tmp_path / "older")
    config = json.loads((tmp_path / "older" / "config.json").read_text())
    del config["quantization_config"]["parameters"]
    (tmp_path / "older" / "config.json").write_text(json.dumps(config))
    text = {"data.source": "files", "data.validation_files": record["run"]["data"]["validation_files"][0]}
    for name in ("made", "again"):
        evaluate("perplexity", tmp_path / name, tmp_path, **text, **{"data.sequence_length": 32}, dtype="float32")
    made, again = rows_of(tmp_path, "perplexity")
    assert made["parameters"] == again["parameters"] == record["parameters"][1]
    assert made["perplexity"] == again["perplexity"]
    of_size = ModelOnDisk.open(tmp_path / "small").parameters
    assert record["budget"] - 544 < of_size <= record["budget"]  # the largest block's n + m: one unit
    # An earlier version wrote no count into config.json: then all numbers in the tensors count, dense blocks whole.
    stored = load_file(tmp_path / "older" / "model.safetensors")
    numbers = sum(tensor.numel() for name, tensor in stored.items() if not name.endswith("S_packed"))
    assert ModelOnDisk.open(tmp_path / "older").parameters == numbers


def test_rpca_of_a_vanilla_model_adds_up_to_it(runs, tmp_path):
    compress(runs / "full_rank", tmp_path / "made", rpca=True, dtype="float32", format="dense")
    made = load_file(tmp_path / "made" / "model.safetensors")
    original = load_file(last_checkpoint(runs / "full_rank") / "model" / "model.safetensors")
    for key, X in original.items():
        torch.testing.assert_close(made[key], X, rtol=0, atol=2e-3 * float(X.norm()))


def test_a_sweep_finds_the_best_kappa_and_keeps_finished_cells(runs, tmp_path):
    arguments = ("evaluate.py", "sweep", "--checkpoint", runs / "salaad", "--vanilla", runs / "full_rank", "--budgets",
                 "0.9,0.7", "--kappas", "0:1:0.5", "--dtype", "float32", "--output", tmp_path)  # fmt: skip
    first = ok(*arguments)
    cut = [row for row in rows_of(tmp_path, "sweep") if row["label"] == "SALAAD" and row["budget"] is not None]
    assert sum(row["variant"].endswith("@energy") for row in cut) == 2
    rows = [row for row in cut if row["kappa"] is not None]
    assert len(rows) == 6
    for budget in {row["budget"] for row in rows}:
        best = min((row for row in rows if row["budget"] == budget), key=lambda row: row["perplexity"])
        assert f"**{best['perplexity']:.2f}**" in first
    for name in ("sweep.png", "elastic.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    cells = next((runs / "salaad" / "cache").glob("*/perplexity.jsonl"))
    before = cells.read_text()
    assert ok(*arguments) == first
    assert cells.read_text() == before
    assert not any(path.name == "cache" for path in last_checkpoint(runs / "salaad").rglob("*"))


def test_harness_scores_are_the_same_through_evaluate_and_by_hand_on_the_dense_folder(runs, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    data = tmp_path / "tasks"
    data.mkdir()
    task_rows = [
        {"goal": f"to {word} the matrix", "sol1": f"use the {word}", "sol2": "the loss", "label": i % 2}
        for i, word in enumerate(("rank", "sparse", "train", "model", "step", "weight"))
    ]
    (data / "piqa.validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in task_rows))
    compress(runs / "salaad", tmp_path / "dense", budget="0.7", kappa=0.5, format="dense", dtype="float32")
    common = ("--tasks", "piqa", "--task-data=~/tasks", "--dtype", "float32", "--output", tmp_path)
    ok("evaluate.py", "lm-eval", "--checkpoint", runs / "salaad", "--variants", "0.7@0.5", *common)
    ok("evaluate.py", "lm-eval", "--checkpoint", tmp_path / "dense", *common)
    through_variant, through_folder = rows_of(tmp_path, "lm-eval")
    by_hand = [0, 0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "dense")
    for row in task_rows:
        context = f"Question: {row['goal']}\nAnswer:"
        scores = []
        for choice in (row["sol1"], row["sol2"]):
            start = len(tokenizer(context)["input_ids"])
            ids = torch.tensor([tokenizer(f"{context} {choice}")["input_ids"]])
            with torch.no_grad():
                log_p = model(ids).logits[0].log_softmax(-1)
            scores.append(sum(float(log_p[i - 1, ids[0, i]]) for i in range(start, ids.shape[1])))
        by_hand[0] += scores.index(max(scores)) == row["label"]
        normed = [score / len(choice) for score, choice in zip(scores, (row["sol1"], row["sol2"]), strict=True)]
        by_hand[1] += normed.index(max(normed)) == row["label"]
    for found in (through_variant, through_folder):
        assert (found["acc"], found["acc_norm"]) == (by_hand[0] / 6, by_hand[1] / 6)


def test_the_harness_run_by_hand_on_the_dense_folder_gives_the_same_numbers_in_bfloat16(runs, tmp_path):
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    words = ("rank", "sparse", "train", "model", "step", "weight", "loss", "token")
    task_rows = [
        {"goal": f"to {word} a {words[i - 1]}", "sol1": f"the {word} and a row", "sol2": "the loss is", "label": i % 2}
        for i, word in enumerate(words)
    ]
    data = tmp_path / "piqa.validation.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in task_rows))
    made = tmp_path / "dense"
    compress(runs / "salaad", made, budget="0.7", kappa=0.5, format="dense")
    ok("evaluate.py", "lm-eval", "--checkpoint", runs / "salaad", "--variants", "0.7@0.5", "--tasks", "piqa",
       "--task-data", tmp_path, "--output", tmp_path)  # fmt: skip
    [ours] = rows_of(tmp_path, "lm-eval")
    folder = Path(lm_eval.__file__).parent / "tasks" / "piqa"
    local = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"validation": str(data)}}}
    known = TaskManager(include_defaults=False, include_path=str(folder)).task_index["piqa"].cfg
    task = {**known, **local, "dataset_name": None, "training_split": None, "test_split": None}
    model = HFLM(
        pretrained=AutoModelForCausalLM.from_pretrained(made),
        tokenizer=AutoTokenizer.from_pretrained(made),
        batch_size=8,
    )
    found = lm_eval.simple_evaluate(model=model, tasks=[task], bootstrap_iters=0)["results"]["piqa"]
    assert model.model.dtype == torch.bfloat16
    assert (ours["acc"], ours["acc_norm"]) == (found["acc,none"], found["acc_norm,none"])


def evaluated(runs: Path, output: Path, **options: object) -> dict[str, float]:
    """Evaluate the SALAAD run; return variant → perplexity."""
    evaluate("perplexity", runs / "salaad", output, dtype="float32", **options)
    return {row["variant"]: row["perplexity"] for row in rows_of(output, "perplexity")}


def test_other_text_of_the_same_name_and_size_is_not_taken_for_the_first(runs, tmp_path, text_files):
    text = tmp_path / "text.jsonl"
    found = []
    for turn in range(2):
        lines = Path(text_files["validation"][0]).read_text().splitlines(keepends=True)
        text.write_text("".join(lines[:20] if turn == 0 else [line.replace("rank", "loss") for line in lines[:20]]))
        source = {"data.source": "files", "data.validation_files": text}
        found.append(evaluated(runs, tmp_path / str(turn), variants="X", **source)["X"])
    assert found[0] != found[1]
    assert len(rows_of(tmp_path / "0", "perplexity")) == 1


def test_an_unfinished_line_in_the_cache_costs_nothing_but_that_cell(runs, tmp_path):
    before = evaluated(runs, tmp_path / "a", variants="X,0.8@0.5")
    cells = next((runs / "salaad" / "cache").glob("*/perplexity.jsonl"))
    cells.write_text(cells.read_text()[:-20])
    assert evaluated(runs, tmp_path / "b", variants="X,0.8@0.5") == before


def test_a_checkpoint_copied_out_of_its_run_is_evaluated_and_leaves_its_neighbours_alone(runs, tmp_path, monkeypatch):
    copy = tmp_path / "alone" / "step"
    shutil.copytree(last_checkpoint(runs / "salaad"), copy)
    monkeypatch.setenv("SALAAD_CACHE", str(tmp_path / "caches"))
    table = evaluate("perplexity", copy, tmp_path / "out")
    assert "L+S" in table
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "caches", "out"]
    assert [path.name for path in copy.parent.iterdir()] == ["step"]


def test_rpca_statistics_stand_beside_those_of_noise(runs, tmp_path):
    table = evaluate("rpca", runs / "full_rank", tmp_path)
    rows = rows_of(tmp_path, "rpca")
    assert len(rows) == 14
    assert all(row["control_density"] > 0 for row in rows)
    mean = sum(row["rank_ratio"] for row in rows) / len(rows)
    assert f"{mean:.3f} ±" in table.strip().splitlines()[-3]


def test_a_checkpoint_of_two_processes_gives_the_model_of_one(runs, tmp_path):
    """The same surrogates, spread over two shards as two ranks write them."""
    copy = tmp_path / "two"
    shutil.copytree(runs / "salaad", copy, ignore=shutil.ignore_patterns("cache", "evaluation"))
    checkpoint = last_checkpoint(copy)
    index = json.loads((checkpoint / "surrogate" / "index.json").read_text())
    tensors = load_file(checkpoint / "surrogate" / "shard-00000-of-00001.safetensors")
    for rank in range(2):
        shard = f"shard-0000{rank}-of-00002.safetensors"
        names = list(index["blocks"])[rank::2]
        save_file({k: v for k, v in tensors.items() if k.rpartition("/")[0] in names}, checkpoint / "surrogate" / shard)
        for name in names:
            index["blocks"][name]["file"] = shard
    (checkpoint / "surrogate" / "shard-00000-of-00001.safetensors").unlink()
    (checkpoint / "surrogate" / "index.json").write_text(json.dumps(index))
    write_checksums(checkpoint)
    for run_folder, made in ((runs / "salaad", "a"), (copy, "b")):
        compress(run_folder, tmp_path / made, budget="0.8")
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()


def distance(model: torch.nn.Module, targets: dict[str, torch.Tensor]) -> float:
    """‖targets − the model's weights‖_F over all blocks."""
    weights = {name: model.get_submodule(name).weight.detach().double() for name in targets}
    return sum(float((weights[name] - T).square().sum()) for name, T in targets.items()) ** 0.5


@pytest.mark.parametrize("allocation", [("--kappa", 0.7), ("--allocation", "energy")], ids=["hpa", "energy"])
def test_refinement_brings_a_cut_nearer_to_l_plus_s_at_the_same_size(runs, tmp_path, allocation):
    targets = l_plus_s(runs / "salaad")
    distances, records = [], []
    for alternations in (0, 1, 5):
        made = tmp_path / str(alternations)
        compress(runs / "salaad", made, *allocation, budget="0.6", refine=alternations, dtype="float32")
        records.append(json.loads((made / "compression.json").read_text()))
        distances.append(distance(AutoModelForCausalLM.from_pretrained(made), targets))
    assert distances[2] < distances[1] < distances[0]
    assert distances[2] < 0.97 * distances[0]
    for key in ("parameters", "numbers_stored", "bytes_in_memory", "kappa"):
        assert records[0][key] == records[1][key] == records[2][key], key
    assert [record["refine"] for record in records] == [0, 1, 5]


def test_a_budget_alone_is_cut_by_energy_and_refined_and_a_kappa_or_hpa_is_the_papers_cut(runs, tmp_path):
    """Omitted options give the same bits as their values written out."""
    for short, long in (
        ((), ("--allocation", "energy", "--refine", 20)),
        (("--kappa", 0.5), ("--allocation", "hpa", "--kappa", 0.5, "--refine", 0)),
        (("--allocation", "hpa"), ("--allocation", "hpa", "--refine", 0)),
        (("--elastic",), ("--elastic", "--refine", 20)),
    ):
        folders = [tmp_path / "-".join(map(str, ("cut", *options))) for options in (short, long)]
        for folder, options in zip(folders, (short, long), strict=True):
            compress(runs / "salaad", folder, *options, budget="0.6")
        assert len({(folder / "model.safetensors").read_bytes() for folder in folders}) == 1, short
        records = [json.loads((folder / "compression.json").read_text()) for folder in folders]
        assert records[0]["refine"] == records[1]["refine"] == long[-1]
    assert len({path.read_bytes() for path in tmp_path.glob("*/model.safetensors")}) == 4


def test_refinement_of_what_is_not_cut_changes_nothing(runs, tmp_path):
    for made, refine in (("a", ("--refine", 0)), ("b", ())):
        compress(runs / "salaad", tmp_path / made, *refine, budget="100M")
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_godec_of_a_vanilla_model_has_the_ranks_and_counts_asked_for_and_is_nearer_than_one_step(runs, tmp_path):
    """One step is the best approximation of that rank, and the largest entries of the remainder."""
    compress(runs / "full_rank", tmp_path / "made", godec=True, rank_ratio=0.3, density=0.1, dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    original = load_file(last_checkpoint(runs / "full_rank") / "model" / "model.safetensors")
    blocks = {name: module for name, module in model.named_modules() if hasattr(module, "U")}
    # The projections, and the embedding as in the run; the head is never split unless it is named.
    assert len(blocks) == 15 and "model.embed_tokens" in blocks
    parameters = sum(X.numel() for X in original.values())
    for name, module in blocks.items():
        X = original[f"{name}.weight"].double()
        (n, m), rank, nnz = X.shape, round(0.3 * min(X.shape)), round(0.1 * X.numel())
        assert (module.U.shape, module.V.shape) == ((n, rank), (rank, m))
        assert len(module.S_values) == int(module.S_values.count_nonzero()) == nnz
        rest = X - best_rank(X, rank)
        one_step = rest.flatten().abs().sort().values[: X.numel() - nnz].norm()
        assert (X - module.weight.detach()).norm() < one_step
        parameters += rank * (n + m) + nnz - X.numel()
    record = json.loads((tmp_path / "made" / "compression.json").read_text())
    assert record["parameters"] == [sum(X.numel() for X in original.values()), parameters]


def test_calibration_changes_what_is_kept_within_the_same_budget(runs, tmp_path):
    """The entries kept are still entries of S, but others than those that the training's gradients choose."""
    parts, kept = dense_parts(runs / "salaad"), []
    for sequences in (0, 8):
        made = tmp_path / str(sequences)
        compress(runs / "salaad", made, budget="0.5", refine=0, calibrate=sequences, dtype="float32")
        record = json.loads((made / "compression.json").read_text())
        dense, size = record["parameters"]
        assert record["calibrate"] == sequences and 0 <= round(0.5 * dense) - size < 544
        model, places = AutoModelForCausalLM.from_pretrained(made), {}
        for name, (_, S, _) in parts.items():
            module = model.get_submodule(name)
            if hasattr(module, "U"):
                found, rows = torch.zeros_like(S), torch.arange(S.shape[0])
                rows = rows.repeat_interleave(module.S_starts.diff())
                found[rows, module.S_columns.long()] = module.S_values.detach().double()
                places[name] = found != 0
                torch.testing.assert_close(found, S * places[name], rtol=1e-5, atol=0)
        kept.append(places)

    common = kept[0].keys() & kept[1].keys()
    assert "model.embed_tokens" in common and len(common) > 5
    assert any(not torch.equal(kept[0][name], kept[1][name]) for name in common)


def test_a_calibrated_cut_is_refined_towards_l_plus_s_as_well(runs, tmp_path):
    targets = l_plus_s(runs / "salaad")
    distances = []
    for alternations in (0, 5):
        made = tmp_path / str(alternations)
        fit = {"refine": alternations, "calibrate": 8}
        compress(runs / "salaad", made, budget="0.7", lm_head="false", dtype="float32", **fit)
        distances.append(distance(AutoModelForCausalLM.from_pretrained(made), targets))
    assert distances[1] < 0.9 * distances[0]


def test_refined_and_calibrated_variants_are_the_folders_made_with_the_same_options(runs, tmp_path):
    fit = ("--refine", 5, "--calibrate", 8)
    common = ("--dtype", "float32", "--output", tmp_path)
    for variants, options in (("0.7@energy+head,0.7@0.5", fit), ("0.7@energy+head", ())):
        ok("evaluate.py", "perplexity", "--checkpoint", runs / "salaad", "--variants", variants, *common, *options)
    energy, by_hpa, plain = rows_of(tmp_path, "perplexity")
    assert [(row["refine"], row["calibrate"]) for row in (energy, by_hpa, plain)] == [(5, 8), (5, 8), (0, 0)]
    assert len({row["perplexity"] for row in (energy, by_hpa, plain)}) == 3
    for row, how in ((energy, ("--allocation", "energy")), (by_hpa, ("--kappa", 0.5))):
        made = tmp_path / how[0].strip("-")
        compress(runs / "salaad", made, *how, *fit, budget="0.7", dtype="float32")
        ok("evaluate.py", "perplexity", "--checkpoint", made, *common)
        folder = rows_of(tmp_path, "perplexity")[-1]
        assert row["perplexity"] == pytest.approx(folder["perplexity"], rel=1e-5)
        assert row["parameters"] == folder["parameters"]
        assert row["implied_kappa"] == json.loads((made / "compression.json").read_text())["kappa"]


FIT = {"refine": 3, "calibrate": 4, "dtype": "float32"}


@pytest.fixture(scope="module")
def sweep(runs, tmp_path_factory) -> tuple[str, list[dict]]:
    """What a sweep over the run and two rivals prints, and the rows that it writes."""
    folder = tmp_path_factory.mktemp("sweep")
    models = {"vanilla": runs / "full_rank", "rivals": "rpca,godec"}
    said = evaluate("sweep", runs / "salaad", folder, **models, budgets="0.7,0.5", kappas="0.5", **FIT)
    return said, rows_of(folder, "sweep")


def test_a_sweep_shows_every_way_to_cut_of_every_model_and_records_it(sweep):
    said, rows = sweep
    labels = ["SALAAD", "vanilla + RPCA", "vanilla + GoDec"]
    ways = ["HPA at κ*", "energy", "energy, refined", "energy, refined, calibrated"]
    table = said[said.index("| model") :].splitlines()
    assert [cell.strip() for cell in table[0].strip("|").split("|")] == ["model", "X", "budget", *ways]
    cells = {}
    for line in table[2:8]:
        label, X, budget, *shown = (cell.strip() for cell in line.strip("|").split("|"))
        cells[label, budget] = (X, [cell.split(" (")[0] for cell in shown])
    dense = next(row["parameters"] for row in rows if row["variant"] == "X")
    for label in labels:
        mine = [row for row in rows if row["label"] == label]
        X = next(row["perplexity"] for row in mine if row["variant"] == "X")
        assert sum(row["variant"] == "L+S" for row in mine) == 1
        for budget in (round(0.7 * dense), round(0.5 * dense)):
            cut = [row for row in mine if row["budget"] == budget]
            found = {(row["kappa"], row["refine"], row["calibrate"]): row["perplexity"] for row in cut}
            expected = [found.pop(key) for key in ((0.5, 0, 0), (None, 0, 0), (None, 3, 0), (None, 3, 4))]
            assert not found and len(set(expected)) == 4
            assert cells[label, f"{budget / 1e6:.2f} M"] == (f"{X:.2f}", [f"{value:.2f}" for value in expected])
    for part in labels[1:]:
        assert f"{part}\n\n| budget" in said


@pytest.mark.parametrize(("rival", "label"), [("rpca", "vanilla + RPCA"), ("godec", "vanilla + GoDec")])
def test_a_rival_in_a_sweep_is_the_folder_that_compress_makes_of_the_vanilla_run(sweep, runs, tmp_path, rival, label):
    compress(runs / "full_rank", tmp_path / "made", f"--{rival}", budget="0.5", lm_head="false", **FIT)
    evaluate("perplexity", tmp_path / "made", tmp_path, dtype="float32")
    [folder] = rows_of(tmp_path, "perplexity")
    mine = [row for row in sweep[1] if row["label"] == label and row["calibrate"]]
    row = min(mine, key=lambda row: row["budget"])  # half of the parameters
    assert row["perplexity"] == pytest.approx(folder["perplexity"], rel=1e-5)
    assert row["parameters"] == folder["parameters"]
