"""From a trained checkpoint to models of other sizes, with the commands a user types."""

import contextlib
import importlib
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from training import ROOT, last_checkpoint, run_training, toy_arguments
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

import salaad  # noqa: F401  so that from_pretrained opens factored folders
from salaad.errors import UserError
from salaad.sources import open_source

logging.set_verbosity_error()
logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def own_caches(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("SALAAD_CACHE", str(tmp_path_factory.mktemp("caches")))


@pytest.fixture(scope="module")
def runs(tmp_path_factory, text_files, tiny_tokenizer_dir) -> Path:
    """A folder with a toy run of each method; the embedding is among the blocks."""
    folder = tmp_path_factory.mktemp("runs")
    for method in ("salaad", "full_rank"):
        arguments = toy_arguments(text_files, tiny_tokenizer_dir, method=method, salaad__embedding="true")
        run_training(arguments, folder / method)
    return folder


def run(program: str, *arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output and error of a program, called in this process: starting one takes six seconds."""
    open_source.cache_clear()
    out, err, code = io.StringIO(), "", 0
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(sys, "argv", [program, *map(str, arguments)])
        try:
            importlib.import_module(program.removesuffix(".py")).main()
        except UserError as error:
            code, err = 2, f"error: {error}"
    return code, out.getvalue(), err


def ok(program: str, *arguments: object) -> str:
    code, out, err = run(program, *arguments)
    assert code == 0, err
    return out


def refused(program: str, *arguments: object) -> str:
    code, out, err = run(program, *arguments)
    assert (code, out) == (2, "")
    assert "\n" not in err
    return err


def test_a_program_says_its_sentence_on_standard_error_and_exits_with_2(tmp_path):
    for program in (["compress.py", "--output", tmp_path / "made"], ["evaluate.py", "perplexity"]):
        command = [sys.executable, *map(str, program), "--checkpoint", str(tmp_path)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: --checkpoint ")
        assert len(done.stderr.splitlines()) == 1


def rows_of(folder: Path, name: str) -> list[dict]:
    return json.loads((folder / f"{name}.json").read_text())["rows"]


def dense_parts(run_folder: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor, int]]:
    """L, S and the effective rank of every block, straight from the files, by the definitions of the paper."""
    surrogate = last_checkpoint(run_folder) / "surrogate"
    index = json.loads((surrogate / "index.json").read_text())["blocks"]
    parts = {}
    for name, entry in index.items():
        state = load_file(surrogate / entry["file"])
        R, tau = state[f"{name}/residual"].double(), state[f"{name}/thresholds"][2].double()
        S = torch.sign(R) * (R.abs() - tau).clamp_min(0)
        L = state[f"{name}/low_rank"].double()
        sigma = torch.linalg.svdvals(L)
        rank = int((sigma.cumsum(0) < 0.999 * sigma.sum()).sum()) + 1
        parts[name] = (L, S, rank)
    return parts


def best_rank(L: torch.Tensor, rank: int) -> torch.Tensor:
    U, sigma, Vh = torch.linalg.svd(L, full_matrices=False)
    return (U[:, :rank] * sigma[:rank]) @ Vh[:rank]


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
    table = ok("evaluate.py", "perplexity", "--checkpoint", runs / "salaad", "--dtype", "float32", "--output", tmp_path)
    rows = {row["variant"]: row for row in rows_of(tmp_path, "perplexity")}
    folder = last_checkpoint(runs / "salaad") / "model"
    model = AutoModelForCausalLM.from_pretrained(folder).double()
    expected = perplexity_by_hand(model, folder, text_files["validation"], 32)
    assert rows["X"]["perplexity"] == pytest.approx(expected, rel=1e-5)
    for name, (L, S, rank) in dense_parts(runs / "salaad").items():
        model.get_submodule(name).weight.data = best_rank(L, rank) + S
    expected = perplexity_by_hand(model, folder, text_files["validation"], 32)
    assert rows["L+S"]["perplexity"] == pytest.approx(expected, rel=1e-5)
    assert f"{expected:.2f}" in table


def test_the_training_run_reported_the_same(runs, tmp_path):
    ok("evaluate.py", "perplexity", "--checkpoint", runs / "salaad", "--dtype", "float32", "--output", tmp_path,
       "--tokens", 2000)  # fmt: skip
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
    ok("compress.py", "--checkpoint", runs / "salaad", "--budget", budget, "--kappa", 0.4, "--output", made,
       "--dtype", "float32")  # fmt: skip
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


def test_a_factored_folder_and_a_dense_one_of_the_same_cut_have_the_perplexity_of_the_variant(runs, tmp_path):
    for form in ("factored", "dense"):
        ok("compress.py", "--checkpoint", runs / "salaad", "--budget", "0.6", "--kappa", 0.3, "--format", form,
           "--output", tmp_path / form, "--dtype", "float32")  # fmt: skip
        ok("evaluate.py", "perplexity", "--checkpoint", tmp_path / form, "--dtype", "float32", "--output", tmp_path)
    ok("evaluate.py", "perplexity", "--checkpoint", runs / "salaad", "--variants", "0.6@0.3", "--dtype", "float32",
       "--output", tmp_path)  # fmt: skip
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
    ok("compress.py", "--checkpoint", runs / "salaad", "--budget", "0.7", "--allocation", "energy", "--output",
       tmp_path / "made", "--dtype", "float32")  # fmt: skip
    record = json.loads((tmp_path / "made" / "compression.json").read_text())
    dense, kept = record["parameters"]
    assert 0 <= round(0.7 * dense) - kept < 544  # the largest block's n + m: one unit
    for checkpoint, variant in ((runs / "salaad", "0.7@energy"), (tmp_path / "made", "X")):
        ok("evaluate.py", "perplexity", "--checkpoint", checkpoint, "--variants", variant, "--dtype", "float32",
           "--output", tmp_path)  # fmt: skip
    through_variant, through_folder = rows_of(tmp_path, "perplexity")
    assert through_variant["perplexity"] == pytest.approx(through_folder["perplexity"], rel=1e-5)
    assert through_variant["parameters"] == through_folder["parameters"] == kept
    assert through_variant["implied_kappa"] == record["kappa"]


def test_a_budget_above_l_plus_s_is_l_plus_s_and_said_so(runs, tmp_path):
    said = ok("compress.py", "--checkpoint", runs / "salaad", "--budget", "100M", "--output", tmp_path / "a")
    assert "at or above L + S" in said
    ok("compress.py", "--checkpoint", runs / "salaad", "--output", tmp_path / "b")
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_the_lines_of_the_readme_open_the_model_and_it_writes(runs, tmp_path, monkeypatch):
    [_, code] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    ok("compress.py", "--checkpoint", runs / "salaad", "--budget", "0.7", "--output", tmp_path / "salaad-194m")
    monkeypatch.chdir(tmp_path)
    namespace: dict = {}
    exec(code, namespace)
    model, tokenizer = namespace["model"], AutoTokenizer.from_pretrained("salaad-194m")
    assert model.generate(**tokenizer("the rank", return_tensors="pt"), max_new_tokens=4, min_new_tokens=4).shape[1] > 4


def test_rpca_of_a_vanilla_model_adds_up_to_it(runs, tmp_path):
    ok("compress.py", "--checkpoint", runs / "full_rank", "--rpca", "--output", tmp_path / "made", "--dtype", "float32",
       "--format", "dense")  # fmt: skip
    made = load_file(tmp_path / "made" / "model.safetensors")
    original = load_file(last_checkpoint(runs / "full_rank") / "model" / "model.safetensors")
    for key, X in original.items():
        torch.testing.assert_close(made[key], X, rtol=0, atol=2e-3 * float(X.norm()))


def test_a_sweep_finds_the_best_kappa_and_keeps_finished_cells(runs, tmp_path):
    arguments = ("evaluate.py", "sweep", "--checkpoint", runs / "salaad", "--vanilla", runs / "full_rank", "--budgets",
                 "0.9,0.7", "--kappas", "0:1:0.5", "--dtype", "float32", "--output", tmp_path)  # fmt: skip
    first = ok(*arguments)
    rows = [row for row in rows_of(tmp_path, "sweep") if row["label"] == "SALAAD" and row["budget"] is not None]
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


def test_harness_scores_are_the_same_through_evaluate_and_by_hand_on_the_dense_folder(runs, tmp_path):
    data = tmp_path / "tasks"
    data.mkdir()
    task_rows = [
        {"goal": f"to {word} the matrix", "sol1": f"use the {word}", "sol2": "the loss", "label": i % 2}
        for i, word in enumerate(("rank", "sparse", "train", "model", "step", "weight"))
    ]
    (data / "piqa.validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in task_rows))
    ok("compress.py", "--checkpoint", runs / "salaad", "--budget", "0.7", "--output", tmp_path / "dense", "--format",
       "dense", "--dtype", "float32")  # fmt: skip
    common = ("--tasks", "piqa", "--task-data", data, "--dtype", "float32", "--output", tmp_path)
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
    ok("compress.py", "--checkpoint", runs / "salaad", "--budget", "0.7", "--output", made, "--format", "dense")
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


def broken_copy(runs: Path, tmp_path: Path, change) -> Path:
    """A copy of the SALAAD run in which `change` was made to the checkpoint."""
    copy = tmp_path / "broken"
    shutil.copytree(runs / "salaad", copy, ignore=shutil.ignore_patterns("cache"))
    change(last_checkpoint(copy))
    return copy


def shard_of(checkpoint: Path) -> Path:
    return next((checkpoint / "surrogate").glob("*.safetensors"))


def truncate(checkpoint: Path) -> None:
    shard = shard_of(checkpoint)
    shard.write_bytes(shard.read_bytes()[:-100])


def alter(checkpoint: Path) -> None:
    tensors = load_file(shard_of(checkpoint))
    key = next(iter(tensors))
    save_file({**tensors, key: tensors[key] + 1}, shard_of(checkpoint))


def older_format(checkpoint: Path) -> None:
    from salaad.files import write_checksums

    path = checkpoint / "surrogate" / "index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 0}))
    write_checksums(checkpoint)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (truncate, ("shard-00000-of-00001.safetensors is not as it was written", "give a whole copy")),
        (alter, ("shard-00000-of-00001.safetensors is not as it was written", "give a whole copy")),
        (lambda checkpoint: shard_of(checkpoint).unlink(), ("safetensors is missing", "give a whole copy")),
        (older_format, ("has format 0, this version reads", "use the version that wrote it")),
    ],
)
def test_a_broken_checkpoint_is_named_and_nothing_is_left_behind(runs, tmp_path, change, words):
    copy = broken_copy(runs, tmp_path, change)
    sentence = refused("compress.py", "--checkpoint", copy, "--output", tmp_path / "made")
    assert all(word in sentence for word in words), sentence
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken"]


def evaluated(runs: Path, output: Path, *arguments: object) -> dict[str, float]:
    """Perplexity by variant of the SALAAD run."""
    ok(
        "evaluate.py",
        "perplexity",
        "--checkpoint",
        runs / "salaad",
        "--dtype",
        "float32",
        "--output",
        output,
        *arguments,
    )
    return {row["variant"]: row["perplexity"] for row in rows_of(output, "perplexity")}


def test_other_text_of_the_same_name_and_size_is_not_taken_for_the_first(runs, tmp_path, text_files):
    text = tmp_path / "text.jsonl"
    found = []
    for turn in range(2):
        lines = Path(text_files["validation"][0]).read_text().splitlines(keepends=True)
        text.write_text("".join(lines[:20] if turn == 0 else [line.replace("rank", "loss") for line in lines[:20]]))
        source = ("--data.source", "files", "--data.validation_files", text)
        found.append(evaluated(runs, tmp_path / str(turn), "--variants", "X", *source)["X"])
    assert found[0] != found[1]
    assert len(rows_of(tmp_path / "0", "perplexity")) == 1


def test_an_unfinished_line_in_the_cache_costs_nothing_but_that_cell(runs, tmp_path):
    before = evaluated(runs, tmp_path / "a", "--variants", "X,0.8@0.5")
    cells = next((runs / "salaad" / "cache").glob("*/perplexity.jsonl"))
    cells.write_text(cells.read_text()[:-20])
    assert evaluated(runs, tmp_path / "b", "--variants", "X,0.8@0.5") == before


def test_a_checkpoint_copied_out_of_its_run_is_evaluated_and_leaves_its_neighbours_alone(runs, tmp_path, monkeypatch):
    copy = tmp_path / "alone" / "step"
    shutil.copytree(last_checkpoint(runs / "salaad"), copy)
    monkeypatch.setenv("SALAAD_CACHE", str(tmp_path / "caches"))
    table = ok("evaluate.py", "perplexity", "--checkpoint", copy, "--output", tmp_path / "out")
    assert "L+S" in table
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "caches", "out"]
    assert [path.name for path in copy.parent.iterdir()] == ["step"]


def test_without_our_import_the_folder_does_not_open_as_noise(runs, tmp_path):
    ok("compress.py", "--checkpoint", runs / "salaad", "--budget", "0.7", "--output", tmp_path / "made")
    code = "import sys, transformers as t; t.AutoModelForCausalLM.from_pretrained(sys.argv[1]); print('opened')"
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "made"], capture_output=True, text=True)
    assert done.returncode != 0
    assert "opened" not in done.stdout


def test_rpca_statistics_stand_beside_those_of_noise(runs, tmp_path):
    table = ok("evaluate.py", "rpca", "--checkpoint", runs / "full_rank", "--output", tmp_path)
    rows = rows_of(tmp_path, "rpca")
    assert len(rows) == 14
    assert all(row["control_density"] > 0 for row in rows)
    mean = sum(row["rank_ratio"] for row in rows) / len(rows)
    assert f"{mean:.3f} ±" in table.strip().splitlines()[-3]


def compressed(runs: Path, tmp_path: Path) -> Path:
    """A factored folder of the SALAAD run."""
    ok("compress.py", "--checkpoint", runs / "salaad", "--budget", "0.7", "--output", tmp_path / "factored")
    return tmp_path / "factored"


def test_wrong_requests_are_one_sentence_with_the_cure(runs, tmp_path):
    salaad_run, vanilla = runs / "salaad", runs / "full_rank"
    made = tmp_path / "made"

    def compress(*arguments: object) -> str:
        return refused("compress.py", "--checkpoint", salaad_run, "--output", made, *arguments)

    assert "is below the floor of" in compress("--budget", "1K")
    assert "outside [0, 1]" in compress("--kappa", 1.5)
    assert "--checkpoint is not given; add it" in refused("compress.py", "--output", made)
    assert "did you mean kappa?" in compress("--kapa", 1)
    assert "format" in compress("--format", "gguf")
    assert "need --rpca" in compress("--embedding")
    made.mkdir()
    assert "exists, and nothing is overwritten" in compress()
    made.rmdir()
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "is no run, no checkpoint" in refused("compress.py", "--checkpoint", empty, "--output", made)
    assert "holds no L and S" in refused("compress.py", "--checkpoint", vanilla, "--output", made)
    assert not made.exists()
    assert "stored in parts already" in refused(
        "compress.py", "--checkpoint", compressed(runs, tmp_path), "--rpca", "--output", made
    )
    assert "energy finds its own" in compress("--budget", "0.9", "--allocation", "energy", "--kappa", 0.5)
    assert "give a --budget too" in compress("--kappa", 0.5)

    def evaluate(*arguments: object) -> str:
        return refused("evaluate.py", *arguments)

    assert "give one of perplexity, sweep, lm-eval" in evaluate("perplexty", "--checkpoint", salaad_run)
    assert "variant '7B' is unknown" in evaluate("perplexity", "--checkpoint", salaad_run, "--variants", "7B")
    assert "holds no L and S" in evaluate("perplexity", "--checkpoint", vanilla, "--variants", "L+S")
    assert "is no number" in evaluate("perplexity", "--checkpoint", salaad_run, "--tokens", "many")
    a_file = tmp_path / "file"
    a_file.write_text("")
    assert "cannot be made" in evaluate("perplexity", "--checkpoint", salaad_run, "--output", a_file)
    assert "positions" in evaluate("perplexity", "--checkpoint", salaad_run, "--data.sequence_length", 64)
    assert "holds no L and S" in evaluate("sweep", "--checkpoint", vanilla, "--budgets", "0.9")
    assert "below the floor" in evaluate("sweep", "--checkpoint", salaad_run, "--budgets", "1K")
    assert "outside [0, 1]" in evaluate("sweep", "--checkpoint", salaad_run, "--budgets", "0.9", "--kappas", "0:2:1")
    assert "piqa" in evaluate("lm-eval", "--checkpoint", salaad_run, "--tasks", "piqua")
    assert "names nothing" in evaluate("lm-eval", "--checkpoint", salaad_run, "--tasks", "piqa,,copa")
    missing = evaluate("lm-eval", "--checkpoint", salaad_run, "--tasks", "piqa", "--task-data", empty)
    assert "piqa.validation.jsonl" in missing
