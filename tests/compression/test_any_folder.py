"""Hugging Face folders as others made them: named as on the hub, without a tokenizer, with a licence and a card."""

import json
import shutil
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard, constants
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BertTokenizer, ByT5Tokenizer, logging

import salaad  # noqa: F401  so that from_pretrained opens factored folders
from salaad.common.errors import UserError
from salaad.data.tokenizer import load_tokenizer
from salaad.model import folders
from tests.helpers.deploying import compress, evaluate, ok, refused, rows_of
from tests.helpers.models import save_gpt2
from tests.helpers.training import last_checkpoint, run_training

logging.set_verbosity_error()
logging.disable_progress_bar()
pytestmark = pytest.mark.usefixtures("own_caches")

NAME = "some-people/tiny-gpt2"
LICENSE, CARD = "Do what you like.\n", "---\nlicense: mit\n---\n# Tiny\n"


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """A GPT-2 as transformers saves it: config and weights, nothing else."""
    return save_gpt2(tmp_path_factory.mktemp("plain") / "plain")


@pytest.fixture(scope="module")
def whole(plain, tiny_tokenizer_dir, tmp_path_factory) -> Path:
    """The folder `plain` together with a tokenizer, a licence, a notice, a model card and a file of other text."""
    folder = tmp_path_factory.mktemp("whole") / "whole"
    shutil.copytree(tiny_tokenizer_dir, folder)
    shutil.copytree(plain, folder, dirs_exist_ok=True)
    for name, text in (("LICENSE.txt", LICENSE), ("NOTICE", "By us.\n"), ("README.md", CARD), ("notes.txt", "mine")):
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    """An empty cache of the hub."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def put_into_cache(hub: Path, folder: Path, *names: str) -> Path:
    """Put the folder's files (those named, if any) into the hub's cache; return the snapshot, which links to blobs."""
    place = hub / f"models--{NAME.replace('/', '--')}"
    snapshot = place / "snapshots" / ("0123456789" * 4)
    for part in (snapshot, place / "blobs", place / "refs"):
        part.mkdir(parents=True)
    (place / "refs" / "main").write_text(snapshot.name)
    for file in folder.iterdir():
        if not names or file.name in names:
            blob = place / "blobs" / sha256(file.read_bytes()).hexdigest()
            shutil.copyfile(file, blob)
            (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot


def test_a_name_on_the_hub_is_the_folder_in_its_cache(hub, whole, tmp_path, text_files):
    put_into_cache(hub, whole)
    for checkpoint, output in ((NAME, "named"), (whole, "local")):
        compress(checkpoint, tmp_path / output, godec=True, dtype="float32")
        text = {"data.source": "files", "data.validation_files": text_files["validation"][0]}
        evaluate("perplexity", checkpoint, tmp_path / "tables", **text, **{"data.sequence_length": 32}, dtype="float32")
    named, local = (load_file(tmp_path / output / "model.safetensors") for output in ("named", "local"))
    assert named.keys() == local.keys() and all(torch.equal(named[key], local[key]) for key in named)
    rows = rows_of(tmp_path / "tables", "perplexity")
    assert [row["model"] for row in rows] == [NAME, "whole"]
    assert rows[0]["perplexity"] == rows[1]["perplexity"]
    record = json.loads((tmp_path / "named" / "compression.json").read_text())
    assert (record["from"], record["base"]) == (NAME, NAME)
    bases = [ModelCard.load(tmp_path / output / "README.md").data.base_model for output in ("named", "local")]
    assert bases == [NAME, None]


def test_a_run_goes_on_from_a_name_on_the_hub_and_keeps_licence_and_card(hub, whole, tmp_path, toy):
    put_into_cache(hub, whole)
    arguments = toy(train__steps=1, model__path=NAME, optimizer__lr=0)
    run_training([word for word in arguments if "data.tokenizer" not in word], tmp_path / "run")
    folder = last_checkpoint(tmp_path / "run") / "model"
    trained, original = (load_file(place / "model.safetensors") for place in (folder, whole))
    assert trained.keys() == original.keys() and all(torch.equal(trained[key], original[key]) for key in original)
    assert (folder / "LICENSE.txt").read_text() == LICENSE and (folder / "README.source.md").read_text() == CARD
    compress(tmp_path / "run", tmp_path / "made")
    assert (tmp_path / "made" / "LICENSE.txt").read_text() == LICENSE
    assert json.loads((tmp_path / "made" / "compression.json").read_text())["base"] == NAME


@pytest.mark.parametrize("cached", [(), ("config.json",)], ids=["nothing", "the configuration alone"])
def test_a_name_that_is_not_in_the_cache_is_refused_offline_with_the_command_that_fetches_it(
    hub, whole, tmp_path, toy, cached
):
    if cached:
        put_into_cache(hub, whole, *cached)
    cure = f"or fetch the model with: hf download {NAME}"
    for command in (("compress.py",), ("evaluate.py", "rpca")):
        assert cure in refused(*command, "--checkpoint", NAME, "--output", tmp_path / "made")
    with pytest.raises(UserError) as caught:
        run_training(toy(model__path=NAME), tmp_path / "run")
    assert str(caught.value).startswith(f"model.path {NAME} ") and str(caught.value).endswith(cure)
    assert not (tmp_path / "made").exists() and not (tmp_path / "run").exists()


@pytest.mark.parametrize("cached", [("config.json", "tokenizer.json"), ("config.json", "model.safetensors")])
def test_a_model_of_which_the_cache_holds_a_part_is_fetched_and_a_whole_one_is_not(hub, whole, monkeypatch, cached):
    """The hub's client is replaced by a function that records what is requested from the network."""
    asked, found = [], folders.snapshot_download

    def download(name: str, **options: object) -> str:
        if options["local_files_only"]:
            return found(name, **options)
        asked.append(options)
        shutil.rmtree(hub)
        return str(put_into_cache(hub, whole))

    monkeypatch.setattr(folders, "snapshot_download", download)
    put_into_cache(hub, whole, *cached)
    for _ in range(2):
        folder = folders.local_folder(NAME, "--checkpoint")
        assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in whole.iterdir())
    [options] = asked
    listed = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "tokenizer.model",
        "LICENSE",
        "special_tokens_map.json",
    ]
    listed += ["surrogate/index.json", "surrogate/00001.safetensors"]
    others = ["pytorch_model.bin", "onnx/config.json", "original/params.json", "consolidated.safetensors", "code.py"]
    folders_of_others = ["s", "su", "surrogat", "surrogates", "surrogate.old", "surrogate/old", "safety_checker"]
    folders_of_others += ["sentence_bert", "sub/surrogate", "Surrogate", ".surrogate", "x/y/z"]
    others += [f"{name}/{file}" for name in folders_of_others for file in ("config.json", "model.safetensors")]
    filters = {key: options[key] for key in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects([*listed, *others], **filters)) == listed


def test_weights_in_the_cache_are_enough_offline(hub, whole):
    snapshot = put_into_cache(hub, whole, "config.json", "model.safetensors")
    assert folders.local_folder(NAME, "--checkpoint") == snapshot


def test_a_path_that_does_not_exist_is_no_name_on_the_hub(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    monkeypatch.setattr(folders, "snapshot_download", lambda *_, **__: pytest.fail("the hub was asked"))
    for path in ("runs/salad", "./some/where/else", tmp_path / "gone", "runs"):
        assert "is no run, no checkpoint and no Hugging Face folder" in refused(
            "evaluate.py", "rpca", "--checkpoint", path
        )


# ---- without a tokenizer


def test_a_folder_without_a_tokenizer_is_compressed_and_its_structure_shown(plain, tmp_path):
    made = tmp_path / "made"
    said = compress(plain, made, godec=True, budget="0.6")
    assert "evaluate.py perplexity" not in said  # which would need a tokenizer
    assert "No tokenizer was written, since plain has none" in said
    AutoModelForCausalLM.from_pretrained(made)
    assert not list(made.glob("*token*"))
    assert len(evaluate("rpca", plain, tmp_path).strip().splitlines()) > 8


def test_a_model_that_others_quantized_is_refused_as_such(plain, tmp_path):
    shutil.copytree(plain, tmp_path / "fp8")
    place = tmp_path / "fp8" / "config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"quantization_config": {"quant_method": "fp8"}}))
    said = refused("compress.py", "--checkpoint", tmp_path / "fp8", "--output", tmp_path / "made", "--rpca")
    assert "fp8 is quantized already; give the dense model it was made of" in said


def test_text_is_read_with_a_tokenizer_that_is_named_where_the_folder_has_none(
    plain, whole, tmp_path, text_files, tiny_tokenizer_dir
):
    text = ("--data.source", "files", "--data.validation_files", text_files["validation"][0])
    text += ("--data.sequence_length", 32, "--dtype", "float32", "--output", tmp_path)
    said = refused("evaluate.py", "perplexity", "--checkpoint", plain, *text)
    assert (
        said.startswith(f"error: {plain} holds no tokenizer; put its files there, or name") and "data.tokenizer" in said
    )
    ok("evaluate.py", "perplexity", "--checkpoint", plain, *text, "--data.tokenizer", tiny_tokenizer_dir)
    ok("evaluate.py", "perplexity", "--checkpoint", whole, *text)
    found, expected = rows_of(tmp_path, "perplexity")
    assert found["perplexity"] == expected["perplexity"]
    assert "holds no tokenizer" in refused("evaluate.py", "lm-eval", "--checkpoint", plain, "--tasks", "piqa")


def without_an_end(folder: Path) -> None:
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "##c"]))
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    (folder / "vocab.txt").unlink()


@pytest.mark.parametrize(
    "save", [without_an_end, lambda folder: ByT5Tokenizer().save_pretrained(folder)], ids=["no end", "no fast version"]
)
def test_a_tokenizer_that_no_text_can_be_read_with_is_copied_all_the_same(plain, tmp_path, save):
    source, made = tmp_path / "source", tmp_path / "made"
    shutil.copytree(plain, source)
    save(source)
    said = compress(source, made, godec=True, roles="q")
    assert "evaluate.py perplexity" not in said
    first, copied = (AutoTokenizer.from_pretrained(folder) for folder in (source, made))
    assert type(first) is type(copied) and first("a bac").input_ids == copied("a bac").input_ids
    with pytest.raises(UserError, match=r"has no (end-of-sequence token|fast version)"):
        load_tokenizer(str(made))


def test_a_tokenizer_without_padding_is_copied_without_it(whole, tmp_path):
    """With the end as padding a Trainer would ignore every end in the text."""
    source, made = tmp_path / "source", tmp_path / "made"
    shutil.copytree(whole, source)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(source)
    compress(source, made, godec=True, roles="q")
    assert AutoTokenizer.from_pretrained(made).pad_token is None


# ---- licence and card


def test_licence_notice_and_card_of_the_source_go_with_the_model(whole, tmp_path):
    compress(whole, tmp_path / "elastic", godec=True, elastic=True)
    compress(tmp_path / "elastic", tmp_path / "small", budget="0.7")
    for made in (tmp_path / "elastic", tmp_path / "small"):
        assert (made / "LICENSE.txt").read_text() == LICENSE
        assert (made / "NOTICE").read_text() == "By us.\n"
        assert (made / "README.source.md").read_text() == CARD
        assert not (made / "notes.txt").exists()


def test_a_licence_that_is_a_link_out_of_the_folder_is_not_followed(whole, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(whole, copy)
    (tmp_path / "secret").write_text("secret")
    (copy / "LICENSE").symlink_to(tmp_path / "secret")
    (copy / "NOTICE").unlink()
    (copy / "NOTICE").symlink_to("LICENSE.txt")  # a link within the folder is followed
    compress(copy, tmp_path / "made", godec=True)
    assert (tmp_path / "made" / "NOTICE").read_text() == LICENSE
    assert not (tmp_path / "made" / "LICENSE").exists()
