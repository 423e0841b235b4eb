"""What compress.py prints about the folder it wrote: size, how to open and measure it; and the folder's model card."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import PreTrainedModel, logging

import salaad  # noqa: F401  so that from_pretrained opens factored folders
from salaad.common.errors import UserError
from salaad.config.commands import CompressOptions
from salaad.factored.fixed_size import slr_modules
from salaad.runs.model_on_disk import ModelOnDisk
from tests.helpers.deploying import compress, evaluate, ok, rows_of
from tests.helpers.models import logits, open_folder, save_gpt2

logging.set_verbosity_error()
logging.disable_progress_bar()
pytestmark = pytest.mark.usefixtures("own_caches")


def record_of(folder: Path) -> dict:
    return json.loads((folder / "compression.json").read_text())


@pytest.fixture(scope="module")
def gpt2(tiny_tokenizer_dir, tmp_path_factory) -> Path:
    """A random GPT-2 with the tests' tokenizer; robust PCA of random weights gives more numbers than they have."""
    folder = tmp_path_factory.mktemp("gpt2") / "gpt2"
    shutil.copytree(tiny_tokenizer_dir, folder)
    return save_gpt2(folder)


def test_a_tilde_after_the_sign_of_equality_is_the_home_folder(gpt2, tmp_path, monkeypatch):
    """The shell leaves it there as it is; a folder of this name would appear in the working directory."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "gpt2").symlink_to(gpt2)
    said = ok("compress.py", "--checkpoint=~/gpt2", "--output=~/made", "--godec", "--roles=re:h.0.attn.c_proj")
    assert f'from_pretrained("{tmp_path / "made"}")' in said and record_of(tmp_path / "made")["from"] == "gpt2"
    ok("evaluate.py", "rpca", "--checkpoint=~/gpt2", "--output=~/tables", "--roles=re:h.0.attn.c_proj")
    assert len(rows_of(tmp_path / "tables", "rpca")) == 1
    assert not list((tmp_path / "here").iterdir())


# ---- warnings


@pytest.mark.parametrize(
    ("options", "cure"),
    [
        (("--rpca",), "since 8 of 8 blocks would take more as U, V and S than dense; give a --budget."),
        (("--rpca", "--budget", "0.98"), "as U, V and S than dense; give a smaller --budget."),
        (("--rpca", "--elastic"), "leave --elastic out and give a --budget for a smaller folder of one size."),
        (("--rpca", "--budget", "0.6", "--format", "dense"), "leave that out for a smaller one."),
    ],
)
def test_a_folder_that_is_no_smaller_than_the_dense_model_is_written_with_a_warning_and_its_cure(
    gpt2, tmp_path, options, cure
):
    said = compress(gpt2, tmp_path / "made", *options)
    dense, on_disk = record_of(tmp_path / "made")["bytes_on_disk"]
    assert on_disk >= dense
    [warning] = [line for line in said.splitlines() if line.startswith("Warning: ")]
    assert f"({on_disk / 1e6:.2f} MB, dense {dense / 1e6:.2f} MB)" in warning and warning.endswith(cure)


def test_the_cure_helps_and_a_smaller_folder_is_written_without_a_warning(gpt2, tmp_path):
    said = compress(gpt2, tmp_path / "made", rpca=True, budget="0.6")
    dense, on_disk = record_of(tmp_path / "made")["bytes_on_disk"]
    assert on_disk < dense and "Warning" not in said


# ---- GoDec


@pytest.mark.parametrize("budget", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("given", [(), ("--rank_ratio", 0.2), ("--density", 0.2)], ids=["none", "rank", "density"])
def test_godec_fills_the_budget_it_is_given(gpt2, tmp_path, budget, given):
    compress(gpt2, tmp_path / "made", *given, godec=True, budget=budget)
    dense, kept = record_of(tmp_path / "made")["parameters"]
    assert 0 <= round(budget * dense) - kept < 32 + 128  # the largest block's n + m: one unit


def test_godec_keeps_to_both_ratios_where_both_are_given(gpt2, tmp_path):
    for name, budget in (("all", ()), ("below", ("--budget", "0.95"))):
        compress(gpt2, tmp_path / name, *budget, godec=True, rank_ratio=0.2, density=0.1)
    assert record_of(tmp_path / "all")["parameters"] == record_of(tmp_path / "below")["parameters"]


# ---- the lines that it prints


def printed(said: str, language: str) -> str:
    [code] = re.findall(rf"```{language}\n(.*?)\n```", said, re.DOTALL)
    return code


def run_python(code: str) -> PreTrainedModel:
    names: dict[str, object] = {}
    exec(code, names)
    return names["model"]


@pytest.mark.parametrize(
    ("folder", "options", "imported"),
    [
        ("of one size", ("--budget", "0.6"), True),
        ("quote's", ("--budget", "0.5", "--kappa", 0.5), True),
        ("dense", ("--budget", "0.6", "--format", "dense"), False),
        ("whole", ("--elastic",), True),
        ("fitted", ("--elastic", "--budget", "0.7"), True),
        ("beyond", ("--elastic", "--budget", "100M"), True),
    ],
)
def test_the_lines_that_are_printed_run_as_they_are(runs, tmp_path, monkeypatch, folder, options, imported):
    monkeypatch.chdir(tmp_path)
    said = compress(runs / "salaad", folder, *options, dtype="float32")
    record = record_of(tmp_path / folder)
    code = printed(said, "python")
    assert code.startswith("import salaad") == imported
    model = run_python(code)
    assert bool(slr_modules(model)) == imported
    command = shlex.split(printed(said, "bash"))
    assert command[:2] == ["python", "evaluate.py"]
    ok(*command[1:], "--output", tmp_path, "--dtype", "float32")
    [row] = rows_of(tmp_path, "perplexity")
    whole = record["parameters"][1]
    assert row["parameters"] == whole or ("elastic" in options[0] and 0 < row["parameters"] < whole)


def test_a_folder_of_a_model_with_few_positions_and_no_run_is_measured_by_the_line_as_well(gpt2, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = shlex.split(printed(compress(gpt2, "made", godec=True), "bash"))
    assert command[-2:] == ["--data.sequence_length", "32"]


# ---- the card

LEFT = "as they were trained with SALAAD, where training left any, and else found by robust PCA in the finished weights"


def test_the_card_says_what_the_folder_is_and_how_it_is_opened(runs, gpt2, tmp_path):
    (source := tmp_path / "gpt2").mkdir()
    shutil.copytree(gpt2, source, dirs_exist_ok=True)
    (source / "README.md").write_text("---\nlicense: mit\nlanguage: en\n---\n# GPT\n")
    for checkpoint, folder, options, words in (
        (runs / "salaad", "energy", ("--budget", "0.6"), ("energy per parameter, refined by 20 alternating", LEFT)),
        (runs / "salaad", "alone", ("--budget", "0.6", "--lm_head=false"), ("as they were trained with SALAAD; they",)),
        (runs / "salaad", "hpa", ("--budget", "0.6", "--kappa", 0.5), ("by HPA with κ = 0.5.", "trained with SALAAD")),
        (runs / "salaad", "elastic", ("--elastic",), ("all units are kept", 'budget="')),
        (source, "split", ("--rpca",), ("found by robust PCA", "[README.source.md](README.source.md)")),
    ):
        said = compress(checkpoint, tmp_path / folder, *options)
        card = ModelCard.load(tmp_path / folder / "README.md")
        assert card.data.library_name == "transformers" and "salaad" in card.data.tags
        assert card.data.license == ("mit" if folder == "split" else None)
        shown = said.replace(str(tmp_path / folder), folder)  # not where the writer has it
        assert shown.partition("\n\nOpen it")[0] in card.text and printed(shown, "python") in card.text
        assert printed(shown, "bash") in card.text and str(tmp_path) not in card.text
        assert ("`pip install -e .`" in card.text) == ("import salaad" in card.text)
        assert all(word in card.text for word in words), card.text


def test_what_is_measured_enters_the_card_and_spoils_no_checksum(runs, tmp_path):
    made = tmp_path / "made"
    compress(runs / "salaad", made, budget="0.6", dtype="float32")
    digest, card = ModelOnDisk.open(made).digest, (made / "README.md").read_text()
    for _ in range(2):
        evaluate("perplexity", made, tmp_path, dtype="float32")
    [*_, row] = rows_of(tmp_path, "perplexity")
    found = (made / "README.md").read_text()
    assert f"{row['perplexity']:.2f}" in found and "Not measured" in card and "Not measured" not in found
    assert found.partition("## Perplexity")[0] == card.partition("## Perplexity")[0]
    assert ModelOnDisk.open(made).digest == digest


def test_a_card_that_is_not_ours_and_one_behind_a_link_are_left_alone(gpt2, tmp_path, text_files):
    made = tmp_path / "made"
    shutil.copytree(gpt2, made)
    text = {"data.source": "files", "data.validation_files": text_files["validation"][0], "data.sequence_length": 32}
    theirs = "<!-- perplexity:begin -->\ntheirs\n<!-- perplexity:end -->"
    for place, content in ((made / "README.md", "# Theirs"), (tmp_path / "elsewhere.md", theirs)):
        place.write_text(content)
        if place.parent != made:
            (made / "README.md").unlink()
            (made / "README.md").symlink_to(place)
        evaluate("perplexity", made, tmp_path, **text)
        assert place.read_text() == content
    assert (made / "README.md").is_symlink()


@pytest.mark.parametrize("theirs", ["---\n: [\n---\n", "---\nlicense: [mit]\n---\n", "no metadata", "---\n- a\n---\n"])
def test_a_card_of_the_source_that_cannot_be_read_is_carried_over_and_names_no_licence(gpt2, tmp_path, theirs):
    source = tmp_path / "source"
    shutil.copytree(gpt2, source)
    (source / "README.md").write_text(theirs)
    compress(source, tmp_path / "made", godec=True)
    assert (tmp_path / "made" / "README.source.md").read_text() == theirs
    assert ModelCard.load(tmp_path / "made" / "README.md").data.license is None


# ---- back to dense, and on to int8


def test_a_folder_in_parts_becomes_an_ordinary_one(gpt2, tmp_path):
    made, back, sizes, back_too = (tmp_path / name for name in ("made", "back", "sizes", "back_too"))
    compress(gpt2, made, rpca=True, budget="0.6", dtype="float32")
    assert slr_modules(open_folder(made))
    compress(made, back, format="dense", dtype="float32")
    assert "quantization_config" not in (back / "config.json").read_text()
    dense = open_folder(made).dequantize().state_dict()
    assert all(torch.equal(tensor, dense[name]) for name, tensor in open_folder(back).state_dict().items())
    assert ModelOnDisk.open(made).parameters == ModelOnDisk.open(back).parameters
    compress(gpt2, sizes, rpca=True, elastic=True)
    compress(sizes, back_too, budget="0.6", format="dense")
    assert open_folder(back_too).dtype == torch.bfloat16 and not slr_modules(open_folder(back_too))
    card = (back / "README.md").read_text()
    assert "import salaad" not in card and "those of a folder of one size" in card


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_what_is_said_of_memory_and_file_is_what_the_folder_takes(gpt2, tmp_path, dtype):
    """At 0.85 of the parameters most blocks, and in int8 all, are stored in parts; some of these are opened dense."""
    said = compress(gpt2, tmp_path / "made", rpca=True, budget="0.85", dtype=dtype)
    record, opened = record_of(tmp_path / "made"), open_folder(tmp_path / "made")
    assert record["bytes_in_memory"][1] == sum(t.nbytes for t in (*opened.parameters(), *opened.buffers()))
    in_parts = sum(key.endswith(".S_packed") for key in load_file(tmp_path / "made" / "model.safetensors"))
    assert record["factored_blocks"] == in_parts > len(slr_modules(opened))
    assert f"{in_parts - len(slr_modules(opened))} of them become dense when the folder is opened" in said
    if dtype == "int8":
        assert in_parts == record["blocks"]  # in int8, places included, parts take less than dense bfloat16


def test_a_folder_in_parts_is_stored_anew_in_int8(gpt2, tmp_path):
    made, small = tmp_path / "made", tmp_path / "small"
    compress(gpt2, made, rpca=True, budget="0.6", dtype="float32")
    assert "; U, V and S in int8, all else in bfloat16." in compress(made, small, dtype="int8")
    before, after = (slr_modules(open_folder(folder, dtype=torch.float32)) for folder in (made, small))
    assert before and before.keys() == after.keys()
    for name, layer in after.items():
        values = before[name].S_values
        # Half a step of int8 in the largest group, and the rounding to bfloat16 before it.
        assert ((layer.S_values - values).abs() <= 0.51 * values.abs().max() / 127 + values.abs() / 128).all()
    assert record_of(small)["bytes_on_disk"][1] < 0.6 * record_of(made)["bytes_on_disk"][1]
    logits_before, logits_after = (logits(open_folder(folder, dtype=torch.float32)) for folder in (made, small))
    assert (logits_before - logits_after).norm() < 0.05 * logits_before.norm()


@pytest.mark.parametrize("other", [{"elastic": True}, {"format": "dense"}])
def test_int8_is_for_the_parts_of_one_size(gpt2, tmp_path, other):
    with pytest.raises(UserError, match="--dtype int8 stores U, V and S of one size; leave it out"):
        CompressOptions(checkpoint=str(gpt2), output="made", rpca=True, dtype="int8", **other)
