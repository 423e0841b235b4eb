"""What compress.py and evaluate.py refuse: one sentence, exit code 2, nothing left behind."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PhiConfig, PhiForCausalLM, logging

from salaad import Salaad, SalaadConfig
from salaad.common.errors import UserError
from salaad.compression import from_checkpoint
from salaad.factored.fixed_size import slr_modules
from tests.helpers.deploying import compress, ok, refused
from tests.helpers.models import open_folder
from tests.helpers.training import ROOT, last_checkpoint

logging.set_verbosity_error()
logging.disable_progress_bar()
pytestmark = pytest.mark.usefixtures("own_caches")


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
    compress(runs / "salaad", tmp_path / "factored", budget="0.7")
    return tmp_path / "factored"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--budget", 100), "is below the floor of"),
        (("--kappa", 1.5), "outside [0, 1]"),
        (("--kappa", 0.5), "give a --budget too"),
        (("--budget", "0.9", "--allocation", "energy", "--kappa", 0.5), "energy finds its own"),
        (("--allocation", "hpa"), "--allocation is hpa, but nothing is cut; give a --budget too"),
        (("--kapa", 1), "did you mean --kappa?"),
        (("--format", "gguf"), "format"),
        (("--roles", "q"), "--roles needs --rpca or --godec"),
        (("--rpca", "--godec"), "two ways to split; give one of them"),
        (("--refine", 3), "fit what is cut, but nothing is; give a --budget too"),
        (("--calibrate", 3), "fit what is cut, but nothing is; give a --budget too"),
        (("--budget", "0.7", "--refine", -1), "give 0 or more"),
        (("--budget", "0.7", "--calibrate", -1), "give 0 or more"),
        (("--elastic", "--refine", 3), "give both, or neither"),
        (("--elastic", "--budget", "0.7", "--refine", 0), "give both, or neither"),
        (("--elastic", "--allocation", "hpa"), "leave --allocation hpa out"),
        (("--elastic", "--format", "dense"), "leave one of them out"),
        (("--elastic", "--refine", 3, "--budget", "0.7", "--format", "dense"), "leave one of them out"),
        (("--elastic", "--kappa", 0.5), "--kappa"),
        (("--elastic", "--refine", 3, "--budget", "0.7", "--kappa", 0.5), "energy finds its own; leave it out"),
        (("--elastic", "--refine", 3, "--budget", 100), "is below the floor of"),
        *(
            (("--godec", option, value), f"{option} is {float(value)}, outside (0, 1]")
            for option in ("--density", "--rank-ratio")
            for value in (0, -0.5, 1.5)
        ),
    ],
)
def test_compress_refuses_options_that_are_wrong_or_do_not_go_together(runs, tmp_path, arguments, words):
    sentence = refused("compress.py", "--checkpoint", runs / "salaad", "--output", tmp_path / "made", *arguments)
    assert words in sentence and "; " in sentence
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "cure"),
    [(("--calibrate=4",), "leave --calibrate out"), (("--match=4",), "leave --match and --distill out")],
)
def test_a_model_whose_loss_cannot_be_computed_is_refused_before_it_is_split(tmp_path, monkeypatch, options, cure):
    monkeypatch.setattr(from_checkpoint, "post_hoc_parts", lambda *_: pytest.fail("weights were split"))
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_hidden_layers": 1}
    PhiForCausalLM(PhiConfig(**sizes, vocab_size=16)).save_pretrained(tmp_path / "phi")
    arguments = ("--checkpoint", tmp_path / "phi", "--output", tmp_path / "made", "--rpca", "--roles", "re:layers")
    said = refused("compress.py", *arguments, "--budget", "0.9", *options)
    assert said == f"error: the model's logits have a bias, which this loss does not know; {cure}"


def test_compress_refuses_a_checkpoint_that_it_cannot_cut_and_an_output_that_exists(runs, tmp_path):
    made, empty = tmp_path / "made", tmp_path / "empty"
    assert "--checkpoint is not given; add it" in refused("compress.py", "--output", made)
    empty.mkdir()
    for checkpoint, words in (
        (empty, "is no run, no checkpoint"),
        (runs / "full_rank", "holds no L and S"),
        (compressed(runs, tmp_path), "stored in parts already"),
    ):
        rpca = ("--rpca",) if checkpoint.name == "factored" else ()
        assert words in refused("compress.py", "--checkpoint", checkpoint, "--output", made, *rpca)
    assert not made.exists()
    for output in (empty, tmp_path / "factored"):
        sentence = refused("compress.py", "--checkpoint", runs / "salaad", "--output", output)
        assert "exists, and nothing is overwritten" in sentence


@pytest.mark.parametrize(("options", "size"), [({"budget": "0.6"}, {}), ({"elastic": True}, {"budget": "0.6"})])
def test_a_folder_that_its_user_has_saved_over_is_refused_with_a_cure_that_works(runs, tmp_path, options, size):
    folder = tmp_path / "made"
    compress(runs / "salaad", folder, **options)
    AutoModelForCausalLM.from_pretrained(folder, **size).save_pretrained(folder)
    command = ("compress.py", "--checkpoint", folder, "--output", tmp_path / "int8", "--dtype", "int8")
    assert "or delete checksums.json and compression.json in it if you changed it yourself" in refused(*command)
    for name in ("checksums.json", "compression.json"):
        (folder / name).unlink()
    ok(*command)


@pytest.mark.parametrize(
    ("command", "run", "arguments", "words"),
    [
        ("perplexty", "salaad", (), "give one of perplexity, sweep, lm-eval"),
        ("perplexity", "salaad", ("--variants", "B7"), "variant 'B7' is unknown"),
        ("perplexity", "salaad", ("--variants", "7B"), "was not written with --elastic"),
        ("perplexity", "full_rank", ("--variants", "L+S"), "holds no L and S"),
        ("perplexity", "salaad", ("--tokens", "many"), "is no number"),
        ("perplexity", "salaad", ("--data.sequence_length", 64), "positions"),
        ("perplexity", "salaad", ("--variants", "X,L+S", "--refine", 20), "--refine is 20, but nothing is cut; give"),
        ("perplexity", "salaad", ("--calibrate", 4), "--calibrate is 4, but nothing is cut; give --variants a budget"),
        ("lm-eval", "salaad", ("--tasks", "piqa", "--refine", 3), "--refine is 3, but nothing is cut; give --variants"),
        ("sweep", "full_rank", ("--budgets", "0.9"), "holds no L and S"),
        ("sweep", "salaad", ("--budgets", "1K"), "below the floor"),
        ("sweep", "salaad", ("--budgets", "0.9", "--kappas", "0:2:1"), "outside [0, 1]"),
        ("lm-eval", "salaad", ("--tasks", "piqua"), "piqa"),
        ("lm-eval", "salaad", ("--tasks", ","), "names nothing"),
        ("lm-eval", "salaad", ("--tasks", "piqa", "--task-data", ROOT / "configs"), "piqa.validation.jsonl"),
    ],
)
def test_evaluate_refuses_what_it_does_not_know_or_cannot_do(runs, command, run, arguments, words):
    assert words in refused("evaluate.py", command, "--checkpoint", runs / run, *arguments)


def test_evaluate_asks_for_a_command_before_its_options():
    assert "needs a command before --checkpoint; give one of perplexity, sweep, lm-eval" in (
        refused("evaluate.py", "--checkpoint", "x")
    )


def test_evaluate_refuses_a_folder_without_a_model(tmp_path):
    assert "is no run, no checkpoint" in refused("evaluate.py", "perplexity", "--checkpoint", tmp_path)


def test_evaluate_refuses_an_output_that_is_not_its_own(runs, tmp_path):
    evaluate = ("evaluate.py", "perplexity", "--checkpoint", runs / "salaad", "--output")
    (tmp_path / "file").write_text("")
    assert "cannot be made" in refused(*evaluate, tmp_path / "file")
    (tmp_path / "perplexity.json").write_text("[]")
    assert "no table of ours" in refused(*evaluate, tmp_path)


@pytest.mark.parametrize("form", ["factored", "dense", "trained"])
def test_a_budget_is_refused_of_a_folder_of_one_size(runs, tmp_path, form):
    """Both from_pretrained and evaluate.py refuse the budget; evaluate.py also says how to cut a checkpoint."""
    folder, checkpoint = last_checkpoint(runs / "salaad") / "model", runs / "salaad"
    if form != "trained":
        folder = checkpoint = tmp_path / "made"
        compress(runs / "salaad", folder, budget="0.6", format=form)
    for opener in (AutoModelForCausalLM, AutoModel):
        for budget in (0.7, "30K", 30_000):
            with pytest.raises(UserError) as caught:
                opener.from_pretrained(folder, budget=budget)
            assert str(caught.value) == (
                f"budget {budget} is asked of a folder that holds one size; leave it out, or give a folder that was "
                "written with --elastic"
            )
    assert not hasattr(AutoModelForCausalLM.from_pretrained(folder).config, "budget")
    sentence = refused("evaluate.py", "perplexity", "--checkpoint", checkpoint, "--variants", "X,0.7")
    fault, cure = {
        "trained": ("was not written with --elastic", "give 0.7@energy"),
        "dense": ("holds no L and S", "give the checkpoint that this one size was cut from, or split it anew"),
        # Options that split a model anew refuse it.
        "factored": ("holds one size in parts", "give the checkpoint or dense model it was made of"),
    }[form]
    assert fault in sentence and cure in sentence
    sentence = refused("evaluate.py", "lm-eval", "--checkpoint", checkpoint, "--tasks", "piqa", "--variants", "30K")
    assert fault in sentence and cure.replace("0.7", "30K") in sentence


def test_a_vanilla_run_that_is_none_is_named_by_its_own_option(runs, tmp_path):
    arguments = ("--checkpoint", runs / "salaad", "--budgets", "0.7", "--vanilla", tmp_path)
    assert refused("evaluate.py", "sweep", *arguments).startswith(f"error: --vanilla {tmp_path} is no run")
    arguments = ("--checkpoint", runs / "salaad", "--budgets", "0.7", "--vanilla", runs / "salaad")
    assert "is of method salaad; give a run of method full_rank" in refused("evaluate.py", "sweep", *arguments)


def test_a_rival_that_is_none_is_named(runs):
    arguments = ("--checkpoint", runs / "salaad", "--vanilla", runs / "full_rank", "--budgets", "0.7")
    assert "--rivals names 'pca'" in refused("evaluate.py", "sweep", *arguments, "--rivals", "rpca,pca")
    alone = ("--checkpoint", runs / "salaad", "--budgets", "0.7", "--rivals", "godec")
    assert "add --vanilla" in refused("evaluate.py", "sweep", *alone)


def test_what_is_godecs_is_refused_without_it(runs, tmp_path):
    arguments = ("--checkpoint", runs / "full_rank", "--output", tmp_path / "made", "--rpca", "--density", 0.5)
    assert "--density is 0.5, which is GoDec's" in refused("compress.py", *arguments)


@pytest.fixture(scope="module")
def elastic(runs, tmp_path_factory) -> Path:
    """An elastic folder made of the SALAAD run."""
    folder = tmp_path_factory.mktemp("elastic") / "elastic"
    compress(runs / "salaad", folder, elastic=True, lm_head="false")
    return folder


def test_a_size_that_an_elastic_folder_does_not_hold_is_refused_alike_in_three_ways(elastic, tmp_path):
    """from_pretrained, evaluate.py and compress.py print the same sentence, and the size that it proposes opens."""
    entry = json.loads((elastic / "config.json").read_text())["quantization_config"]
    largest = entry["fixed"] + sum(min(n * m, rank * (n + m) + nnz) for n, m, rank, nnz in entry["blocks"].values())

    def three_ways(budget: int) -> set[str]:
        with pytest.raises(UserError) as caught:
            AutoModelForCausalLM.from_pretrained(elastic, budget=budget)
        common = ("--checkpoint", elastic, "--output", tmp_path / "made")
        return {
            f"error: {caught.value}",
            refused("evaluate.py", "perplexity", *common, "--variants", budget),
            refused("compress.py", *common, "--budget", budget),
        }

    def in_thousands(count: int) -> str:
        return f"{count / 1000:.3f}".rstrip("0").rstrip(".") + "K"

    most, floor = in_thousands(largest), in_thousands(entry["fixed"])
    [above], [below] = three_ways(max(largest, entry["dense"]) + 1), three_ways(entry["fixed"] - 1)
    assert above.endswith(f"is above the {most} that the folder holds; give {most} or less")
    assert below.endswith(f"is below the floor of {floor} (the parts that are never compressed); give {floor} or more")
    for held in (most, floor):
        AutoModelForCausalLM.from_pretrained(elastic, budget=held)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        ("0", "less than 1 parameter"),
        (-1, "less than 1 parameter"),
        ("half", "is no number"),
        ("K", "budget 'K' is no number"),
        (1.5, "budget '1.5' is neither a fraction up to 1 nor a whole number of parameters"),
    ],
)
def test_a_budget_that_is_no_size_is_refused(elastic, budget, words):
    with pytest.raises(UserError, match=words):
        AutoModelForCausalLM.from_pretrained(elastic, budget=budget)


@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    [
        *(
            (
                ("evaluate.py", "perplexity"),
                ("--variants", variant),
                f"so {variant} cannot be cut from it; give 0.7 alone",
            )
            for variant in ("0.7@0.6", "0.7@energy")
        ),
        *(
            (
                ("evaluate.py", "perplexity"),
                ("--variants", "0.7", option, 3),
                "nothing can be refined or calibrated; leave",
            )
            for option in ("--refine", "--calibrate")
        ),
        (("evaluate.py", "sweep"), ("--budgets", "0.7"), "keeps its units in one order"),
        *(
            (("compress.py",), ("--budget", "0.7", *option), f"cut as it is, without {named}; leave that out")
            for *option, named in (
                ("--refine", 3, "--refine"),
                ("--calibrate", 3, "--calibrate"),
                ("--kappa", 0.5, "--kappa"),
                ("--allocation", "energy", "--allocation energy"),
                ("--allocation", "hpa", "--allocation hpa"),
            )
        ),
        (("compress.py",), ("--elastic",), "cut as it is, without --elastic; leave that out"),
        (("evaluate.py", "rpca"), (), "stored in parts, of which robust PCA would see the dense weights alone"),
        (("compress.py",), ("--rpca",), "stored in parts already; give the dense model it was made of"),
        (("compress.py",), ("--godec",), "stored in parts already; give the dense model it was made of"),
    ],
)
def test_an_elastic_folder_is_asked_for_nothing_but_a_size(elastic, tmp_path, command, arguments, words):
    made = tmp_path / "made"
    assert words in refused(*command, "--checkpoint", elastic, "--output", made, *arguments)
    assert not made.exists()


def test_more_text_to_calibrate_with_than_there_is_is_refused(runs, tmp_path, text_files):
    documents = sum(len(Path(file).read_text().splitlines()) for file in text_files["train"])
    said = f"holds {documents} sequences of 32 tokens, 100000 are asked for; give --calibrate {documents} or fewer"
    common = ("--checkpoint", runs / "salaad", "--output", tmp_path / "made", "--calibrate", 100_000)
    for size in (("--budget", "0.7"), ("--elastic",)):
        assert said in refused("compress.py", *common, *size)
    assert not list(tmp_path.iterdir())
    for command in (("perplexity", "--variants", "0.7@0.5"), ("sweep", "--budgets", "0.9")):
        assert said in refused("evaluate.py", *command, *common)


@pytest.mark.parametrize("command", [("perplexity", "--variants", "0.7@0.5"), ("sweep", "--budgets", "0.9")])
def test_evaluate_refuses_to_refine_less_than_nothing(runs, tmp_path, command):
    common = ("--checkpoint", runs / "salaad", "--output", tmp_path, "--refine", -1)
    assert "--refine is -1, but the least is 0; give 0 or more" in refused("evaluate.py", *command, *common)


def test_a_training_beside_blocks_in_parts_is_stored_anew_but_not_cut(runs, tmp_path, tiny_tokenizer_dir):
    compress(runs / "salaad", tmp_path / "small", budget=0.4, dtype="float32", **{"lm-head": "false"})
    model = open_folder(tmp_path / "small")
    assert slr_modules(model)
    with Salaad(model, SalaadConfig(roles=("lm_head",), lm_head=True)) as plugin:
        plugin.save(tmp_path / "trained", AutoTokenizer.from_pretrained(tiny_tokenizer_dir))
    compress(tmp_path / "trained", tmp_path / "dense", format="dense")
    assert not slr_modules(open_folder(tmp_path / "dense"))
    words = (f"--checkpoint={tmp_path / 'trained'}", f"--output={tmp_path / 'half'}", "--budget=0.3")
    said = refused("compress.py", *words)
    assert "was trained from a folder with blocks in parts, beside which no others can be cut; train from the" in said
    assert not (tmp_path / "half").exists()
