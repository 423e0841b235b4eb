"""What compress.py and evaluate.py refuse: one sentence, exit code 2, nothing left behind."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, logging

import salaad  # noqa: F401  so that from_pretrained opens factored folders
from salaad.common.errors import UserError
from tests.helpers.deploying import ok, refused
from tests.helpers.training import ROOT, last_checkpoint

logging.set_verbosity_error()
logging.disable_progress_bar()
pytestmark = pytest.mark.usefixtures("own_caches")


def test_a_program_says_its_sentence_on_standard_error_and_exits_with_2(tmp_path):
    for program in (["compress.py", "--output", tmp_path / "made"], ["evaluate.py", "perplexity"]):
        command = [sys.executable, *map(str, program), "--checkpoint", str(tmp_path)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: --checkpoint ")
        assert len(done.stderr.splitlines()) == 1


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
    from salaad.common.files import write_checksums

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
    assert "variant 'B7' is unknown" in evaluate("perplexity", "--checkpoint", salaad_run, "--variants", "B7")
    assert "was not written with --elastic" in evaluate("perplexity", "--checkpoint", salaad_run, "--variants", "7B")
    assert "holds no L and S" in evaluate("perplexity", "--checkpoint", vanilla, "--variants", "L+S")
    assert "is no number" in evaluate("perplexity", "--checkpoint", salaad_run, "--tokens", "many")
    a_file = tmp_path / "file"
    a_file.write_text("")
    assert "cannot be made" in evaluate("perplexity", "--checkpoint", salaad_run, "--output", a_file)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "perplexity.json").write_text("[]")
    assert "no table of ours" in evaluate("perplexity", "--checkpoint", salaad_run, "--output", foreign)
    assert "positions" in evaluate("perplexity", "--checkpoint", salaad_run, "--data.sequence_length", 64)
    assert "holds no L and S" in evaluate("sweep", "--checkpoint", vanilla, "--budgets", "0.9")
    assert "below the floor" in evaluate("sweep", "--checkpoint", salaad_run, "--budgets", "1K")
    assert "outside [0, 1]" in evaluate("sweep", "--checkpoint", salaad_run, "--budgets", "0.9", "--kappas", "0:2:1")
    assert "piqa" in evaluate("lm-eval", "--checkpoint", salaad_run, "--tasks", "piqua")
    assert "names nothing" in evaluate("lm-eval", "--checkpoint", salaad_run, "--tasks", "piqa,,copa")
    missing = evaluate("lm-eval", "--checkpoint", salaad_run, "--tasks", "piqa", "--task-data", empty)
    assert "piqa.validation.jsonl" in missing


@pytest.mark.parametrize("form", ["factored", "dense", "trained"])
def test_a_budget_is_refused_of_a_folder_of_one_size(runs, tmp_path, form):
    """By from_pretrained, and by evaluate.py, which says how a checkpoint is cut."""
    folder, checkpoint = last_checkpoint(runs / "salaad") / "model", runs / "salaad"
    if form != "trained":
        folder = checkpoint = tmp_path / "made"
        ok("compress.py", "--checkpoint", runs / "salaad", "--budget", "0.6", "--format", form, "--output", folder)
    for opener in (AutoModelForCausalLM, AutoModel):
        for budget in (0.7, "30K", 30_000):
            with pytest.raises(UserError) as caught:
                opener.from_pretrained(folder, budget=budget)
            assert str(caught.value) == (
                f"budget {budget} is asked of a folder that holds one size; leave it out, or give a folder that was "
                "written with --elastic"
            )
    assert AutoModelForCausalLM.from_pretrained(folder).config.budget is None
    sentence = refused("evaluate.py", "perplexity", "--checkpoint", checkpoint, "--variants", "X,0.7")
    cure = "give 0.7@energy" if form == "trained" else "give the checkpoint"
    assert "was not written with --elastic" in sentence and cure in sentence
    sentence = refused("evaluate.py", "lm-eval", "--checkpoint", checkpoint, "--tasks", "piqa", "--variants", "30K")
    assert "was not written with --elastic" in sentence and cure.replace("0.7", "30K") in sentence


def test_a_rival_that_is_none_is_named(runs):
    arguments = ("--checkpoint", runs / "salaad", "--vanilla", runs / "full_rank", "--budgets", "0.7")
    assert "--rivals names 'pca'" in refused("evaluate.py", "sweep", *arguments, "--rivals", "rpca,pca")
    alone = ("--checkpoint", runs / "salaad", "--budgets", "0.7", "--rivals", "godec")
    assert "add --vanilla" in refused("evaluate.py", "sweep", *alone)


def test_what_is_godecs_is_refused_without_it(runs, tmp_path):
    arguments = ("--checkpoint", runs / "full_rank", "--output", tmp_path / "made", "--rpca", "--density", 0.5)
    assert "--density is 0.5, which is GoDec's" in refused("compress.py", *arguments)


def test_an_elastic_folder_is_asked_for_nothing_but_a_size_that_it_holds(runs, tmp_path):
    folder, made = tmp_path / "elastic", tmp_path / "made"
    ok("compress.py", "--checkpoint", runs / "salaad", "--elastic", "--output", folder)
    entry = json.loads((folder / "config.json").read_text())["quantization_config"]
    largest = entry["fixed"] + sum(rank * (n + m) + nnz for n, m, rank, nnz in entry["blocks"].values())

    def three_ways(budget: int) -> set[str]:
        """What from_pretrained, evaluate.py and compress.py say."""
        with pytest.raises(UserError) as caught:
            AutoModelForCausalLM.from_pretrained(folder, budget=budget)
        common = ("--checkpoint", folder, "--output", made)
        return {
            f"error: {caught.value}",
            refused("evaluate.py", "perplexity", *common, "--variants", budget),
            refused("compress.py", *common, "--budget", budget),
        }

    [above] = three_ways(largest + 1)
    cure = f"{largest // 1000}.{largest % 1000:03d}".rstrip("0").rstrip(".") + "K"
    assert above.endswith(f"is above the {cure} that the folder holds; give {cure} or less")
    [below] = three_ways(entry["fixed"] - 1)
    floor = f"{entry['fixed'] / 1000:.3f}".rstrip("0").rstrip(".") + "K"
    assert below.endswith(f"is below the floor of {floor} (the parts that are never compressed); give {floor} or more")
    for budget, words in (("0", "less than 1 parameter"), (-1, "less than 1 parameter"), ("half", "is no number")):
        with pytest.raises(UserError, match=words):
            AutoModelForCausalLM.from_pretrained(folder, budget=budget)
    for held in (cure, floor):
        AutoModelForCausalLM.from_pretrained(folder, budget=held)

    def evaluate(*arguments: object) -> str:
        return refused("evaluate.py", "perplexity", "--checkpoint", folder, "--output", made, *arguments)

    for variant in ("0.7@0.6", "0.7@energy"):
        assert f"so {variant} cannot be cut from it; give 0.7 alone, or the checkpoint" in evaluate(
            "--variants", variant
        )
    for option in ("--refine", "--calibrate"):
        assert "nothing can be refined or calibrated; leave" in evaluate("--variants", "0.7", option, 3)
    assert "keeps its units in one order" in refused("evaluate.py", "sweep", "--checkpoint", folder, "--budgets", "0.7")

    def compress(*arguments: object) -> str:
        return refused("compress.py", "--checkpoint", folder, "--output", made, *arguments)

    for option in (
        ("--refine", 3),
        ("--calibrate", 3),
        ("--kappa", 0.5),
        ("--allocation", "energy"),
        ("--format", "dense"),
    ):
        sentence = compress("--budget", "0.7", *option)
        named = " ".join(option) if isinstance(option[1], str) else option[0]
        assert f"is an elastic folder, which is cut as it is, without {named}; leave that out" in sentence
    assert "cut as it is, without --elastic; leave that out" in compress("--elastic")
    for split in ("--rpca", "--godec"):
        assert "stored in parts already; give the dense model it was made of" in compress(split)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elastic"]


def test_options_that_do_not_go_together_are_one_sentence_with_the_cure(runs, tmp_path, text_files):
    def compress(*arguments: object) -> str:
        sentence = refused("compress.py", "--checkpoint", runs / "salaad", "--output", tmp_path / "made", *arguments)
        assert sentence.startswith("error: ") and "; " in sentence
        return sentence

    for option in ("--refine", "--calibrate"):
        assert "fit what is cut, but nothing is; give a --budget too" in compress(option, 3)
        assert "give 0 or more" in compress("--budget", "0.7", option, -1)
    for some in (("--refine", 3), ("--budget", "0.7")):
        assert "give both, or neither" in compress("--elastic", *some)
    both = ("--elastic", "--refine", 3, "--budget", "0.7")
    assert "leave one of them out" in compress("--elastic", "--format", "dense")
    assert "leave one of them out" in compress(*both, "--format", "dense")
    assert "--kappa" in compress("--elastic", "--kappa", 0.5)
    assert "energy finds its own; leave it out" in compress(*both, "--kappa", 0.5)
    assert "is below the floor of" in compress("--elastic", "--refine", 3, "--budget", "1K")
    assert "two ways to split; give one of them" in compress("--rpca", "--godec")
    for option in ("--density", "--rank_ratio"):
        for value in (0, -0.5, 1.5):
            assert f"{option} is {float(value)}, outside (0, 1]" in compress("--godec", option, value)
    documents = sum(len(Path(file).read_text().splitlines()) for file in text_files["train"])
    said = f"holds {documents} sequences of 32 tokens, 100000 are asked for; give {documents} or fewer, or more text"
    assert said in compress("--budget", "0.7", "--calibrate", 100_000)
    assert said in compress("--elastic", "--calibrate", 100_000)
    assert not list(tmp_path.iterdir())
    common = ("--checkpoint", runs / "salaad", "--output", tmp_path)
    for command in (("perplexity", "--variants", "0.7@0.5"), ("sweep", "--budgets", "0.9")):
        assert said in refused("evaluate.py", *command, *common, "--calibrate", 100_000)
        assert "--refine is -1, but the least is 0; give 0 or more" in refused(
            "evaluate.py", *command, *common, "--refine", -1
        )
