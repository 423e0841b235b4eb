"""Folders and files that somebody made to do harm: nothing in them runs, leads elsewhere, or takes memory and time."""

import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GPTJConfig,
    GPTJForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    logging,
)

import salaad  # noqa: F401  so that from_pretrained opens factored folders
from salaad.common.errors import UserError
from salaad.common.files import inside, verify, write_checksums
from salaad.config.command_line import read_command_line
from salaad.data.tokenizer import load_tokenizer
from salaad.methods.salaad.storage import read_surrogates
from salaad.model.build import load_model
from salaad.runs.run import open_run
from scripts.reliability import config_damage, fuzz, sample_folders
from scripts.reliability.toy_run import ROOT
from tests.helpers.deploying import refused
from tests.helpers.training import last_checkpoint, run_training

logging.set_verbosity_error()
logging.disable_progress_bar()
pytestmark = pytest.mark.usefixtures("own_caches")


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Kind → a small folder, one of every kind that the programs open."""
    root = tmp_path_factory.mktemp("folders")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SALAAD_CACHE", str(root / "caches"))
        return sample_folders.make_folders(root)


@pytest.fixture
def copy(folders, tmp_path):
    """A function that returns a copy of the folder of a kind, to tamper with."""
    return lambda kind: Path(shutil.copytree(folders[kind], tmp_path / kind))


def edit(path: Path, change) -> None:
    """Let `change` work on the JSON at `path`; write the checksums anew where there are any."""
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))
    rewrite(path)


def rewrite(path: Path) -> None:
    for folder in path.parents:
        if (folder / "checksums.json").is_file():
            write_checksums(folder)


def sentence_of(action, *arguments) -> str:
    with pytest.raises(UserError) as caught:
        action(*arguments)
    sentence = str(caught.value)
    assert "\n" not in sentence and "; " in sentence
    return sentence


def opened(folder: Path) -> None:
    load_model(folder, torch.float32)


def subprocess_refused(*command: object) -> str:
    """Run a program that has to exit with 2, and return the one line that it prints on standard error."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, text=True, timeout=120, env=environment
    )
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


# ---- pickles and code


class Planted:
    """An object whose unpickling creates the file `mark`."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def plant_everywhere(folder: Path, mark: Path) -> None:
    """Write pickles, code and templates under every name by which some library might look for them."""
    for name in ("pytorch_model.bin", "optimizer.pt", "vocab.pkl", "tokenizer.pkl", "random-00000.pt", ".metadata"):
        (folder / name).write_bytes(pickle.dumps(Planted(mark)))
    code = f"import pathlib; pathlib.Path({str(mark)!r}).touch()\n"
    (folder / "custom_generate").mkdir()
    for name in ("modeling_evil.py", "configuration_evil.py", "tokenization_evil.py", "custom_generate/generate.py"):
        (folder / name).write_text(f"{code}class Evil:\n    pass\n\ndef generate(*a, **k):\n    pass\n")
    (folder / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    classes = {
        "AutoConfig": "configuration_evil.Evil",
        "AutoModelForCausalLM": "modeling_evil.Evil",
        "AutoTokenizer": ["tokenization_evil.Evil", "tokenization_evil.Evil"],
    }
    for name in ("config.json", "tokenizer_config.json"):
        edit(folder / name, lambda tree: tree.update(auto_map=classes))


def test_a_planted_pickle_does_what_it_is_planted_for(tmp_path):
    pickle.loads(pickle.dumps(Planted(tmp_path / "mark")))
    assert (tmp_path / "mark").exists()


@pytest.mark.parametrize("kind", ["dense", "factored", "shards", "tied", "elastic", "elastic-tied"])
def test_nothing_planted_beside_a_model_runs_and_the_model_opens(copy, tmp_path, kind):
    folder, mark = copy(kind), tmp_path / "mark"
    plant_everywhere(folder, mark)
    fuzz.open_folder(folder, run=False)
    load_model(folder, torch.float32)
    AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = load_tokenizer(str(folder))
    with pytest.raises(Exception, match=r"unsafe|undefined"):  # the sandbox of transformers
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert not mark.exists()


@pytest.mark.parametrize("kind", ["dense", "factored", "elastic"])
@pytest.mark.parametrize("kept", ["pickle alone", "unknown architecture"])
def test_a_folder_that_only_code_or_a_pickle_could_open_is_refused(copy, tmp_path, kind, kept):
    folder, mark = copy(kind), tmp_path / "mark"
    plant_everywhere(folder, mark)
    if kept == "pickle alone":
        (folder / "model.safetensors").unlink()
        assert "weights in other formats can run code" in sentence_of(opened, folder)
    else:
        edit(folder / "config.json", lambda config: config.update(model_type="evil"))
        assert "cannot be opened" in sentence_of(opened, folder)
    with pytest.raises(Exception):  # noqa: B017  what transformers itself says to it is its own affair
        AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    assert not mark.exists()


def test_planted_pickles_do_not_run_in_any_program(runs, tmp_path, toy):
    run, mark = tmp_path / "run", tmp_path / "mark"
    shutil.copytree(runs / "salaad", run, ignore=shutil.ignore_patterns("summary.json", "cache"))
    checkpoint = last_checkpoint(run)
    plant_everywhere(checkpoint / "model", mark)
    for path in (checkpoint / "state").glob("*.pt"):
        path.write_bytes(pickle.dumps(Planted(mark)))
    rewrite(checkpoint / "model" / "config.json")
    arguments = [*toy(salaad__embedding="true", train__steps=14), f"--resume={checkpoint}"]
    assert "optimizer.pt does not fit this run or is broken" in sentence_of(run_training, arguments, tmp_path / "new")
    (checkpoint / "model" / "model.safetensors").unlink()
    rewrite(checkpoint / "model" / "config.json")
    common = ("--checkpoint", run, "--output", tmp_path / "made")
    assert "can run code when they are read" in refused("compress.py", *common)
    assert "can run code when they are read" in refused("evaluate.py", "perplexity", *common)
    assert not mark.exists()


# ---- names that lead elsewhere


LEADING = ["../x", "a/../../x", "/etc/passwd", "..", ".", "", "a/..", "./x", "a//x", "x/"]
LEADING += ["C:\\x", "C:x", "..\\x", "a\\x"]
UNPRINTABLE = ["a\nb", "\0", "\ud800"]


@pytest.mark.parametrize("name", [*LEADING, *UNPRINTABLE, None, 3, ["x"], {}])
def test_a_name_that_is_not_plain_is_refused(tmp_path, name):
    assert "; give a whole copy" in sentence_of(inside, tmp_path, name)


def test_a_link_may_not_lead_out_of_its_folder(tmp_path):
    home = tmp_path / "home"
    (home / "sub").mkdir(parents=True)
    (tmp_path / "secret").write_text("x")
    (home / "sub" / "own").write_text("x")
    for name, target in {"out": tmp_path / "secret", "up": "../secret", "folder": tmp_path, "circle": "circle"}.items():
        (home / name).symlink_to(target)
    for name in ("out", "up", "folder/secret", "circle"):
        assert "; put the file itself" in (said := sentence_of(inside, home, name)) or "leads nowhere" in said
    (home / "beside").symlink_to("sub/own")
    assert inside(home, "beside").read_text() == inside(home, "sub/own").read_text() == "x"
    (tmp_path / "linked").symlink_to(home)
    assert inside(tmp_path / "linked", "sub/own").read_text() == "x"


@pytest.mark.parametrize("kind", ["dense", "factored", "shards", "elastic"])
def test_a_snapshot_in_the_hubs_cache_opens(folders, tmp_path, kind):
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0123", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True), blobs.mkdir()
    for path in folders[kind].iterdir():
        shutil.copy(path, blobs / f"{len(list(blobs.iterdir())):040x}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / max(blobs.iterdir()).name)
    fuzz.open_folder(snapshot, run=False)
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    first, second = (AutoModelForCausalLM.from_pretrained(folder)(ids).logits for folder in (folders[kind], snapshot))
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/tmp/elsewhere.safetensors", "link.safetensors"])
def test_no_list_of_files_leads_out_of_its_folder(copy, tmp_path, name):
    shards, run = copy("shards"), copy("run")
    elsewhere = tmp_path / "elsewhere.safetensors"
    shutil.copy(next(shards.glob("*.safetensors")), elsewhere)
    place = {"/tmp/elsewhere.safetensors": str(elsewhere)}.get(name, name)
    (shards / "link.safetensors").symlink_to(elsewhere)

    def point(index: dict) -> None:
        index["weight_map"][next(iter(index["weight_map"]))] = place

    edit(shards / "model.safetensors.index.json", point)
    (shards / "checksums.json").unlink()
    wrong = "is no plain name|is a link that leads out"
    for opener in (opened, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(UserError, match=wrong):
            opener(shards)
    surrogate = last_checkpoint(run) / "surrogate"
    (surrogate / "link.safetensors").symlink_to(elsewhere)
    index = json.loads((surrogate / "index.json").read_text())
    for entry in index["blocks"].values():
        entry["file"] = place
    (surrogate / "index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=wrong):
        read_surrogates(surrogate)
    (run / "link.safetensors").symlink_to(elsewhere)
    (run / "checksums.json").write_text(json.dumps({place: "0" * 64}))
    with pytest.raises(UserError, match=wrong):
        verify(run)


def test_a_sentence_stays_one_line_of_bounded_length_whatever_it_quotes():
    said = str(UserError(f"a{'b' * 10**6}\n\x1b[2J\ud800; mend it"))
    assert said.isprintable() and len(said) < 1100
    assert said.startswith("abbb") and said.endswith("; mend it")
    assert str(UserError("κ is 2; give 1")) == "κ is 2; give 1"


# ---- sizes that cannot be


def test_small_models_of_other_families_are_no_hostile_ones(tmp_path):
    """The models have settings of large ones, tensors of three dimensions, or tables that no file holds."""
    common = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 40}
    for model in (
        Qwen2ForCausalLM(Qwen2Config(**common, intermediate_size=24, num_key_value_heads=1)),
        GPTNeoXForCausalLM(GPTNeoXConfig(**common, intermediate_size=24)),
        GPTJForCausalLM(GPTJConfig(vocab_size=40, n_embd=16, n_layer=1, n_head=2, rotary_dim=4)),
        MixtralForCausalLM(MixtralConfig(**common, intermediate_size=24, num_key_value_heads=1, num_local_experts=4)),
        OPTForCausalLM(OPTConfig(**common, ffn_dim=24, word_embed_proj_dim=16)),
    ):
        folder = tmp_path / model.config.model_type
        model.save_pretrained(folder)
        ids = torch.tensor([[1, 2, 3]])
        with torch.no_grad():
            assert torch.equal(load_model(folder, torch.float32)(ids).logits, model.eval()(ids).logits)


def peak() -> int:
    return fuzz.peak_memory()


SIZES = {
    "hidden_size": 10**9, "num_hidden_layers": 10**7, "vocab_size": 10**12, "intermediate_size": 10**15,
    "num_labels": 10**9, "head_dim": 10**9, "num_attention_heads": 10**6,
}  # fmt: skip
LARGE = [{key: size} for key, size in SIZES.items()]
WRONG = [{"hidden_size": size} for size in (-16, "16", 16.5, 10**400, None)]
WRONG += [{"num_key_value_heads": 0}, {"num_hidden_layers": [1] * 1000}, {"vocab_size": True}]
WRONG += [{"model_type": "deepseek_v3"}]  # whose default sizes are those of 671B parameters


@pytest.mark.parametrize("kind", ["dense", "factored", "elastic", "run"])
@pytest.mark.parametrize("sizes", [*LARGE, *WRONG], ids=str)
def test_absurd_sizes_are_refused_before_they_cost_anything(copy, kind, sizes):
    folder = copy(kind)
    model = last_checkpoint(folder) / "model" if kind == "run" else folder
    edit(model / "config.json", lambda config: config.update(sizes))
    begun, before = time.monotonic(), peak()
    sentence_of(lambda: fuzz.open_folder(folder, kind == "run"))
    assert time.monotonic() - begun < 10
    assert peak() - before < 2**28


def test_plain_from_pretrained_does_not_count_up_to_absurd_numbers_of_layers(copy):
    for kind in ("factored", "elastic"):
        folder = copy(kind)
        edit(folder / "config.json", lambda config: config.update(num_hidden_layers=10**6))
        begun = time.monotonic()
        assert "num_hidden_layers 1,000,000" in sentence_of(AutoModelForCausalLM.from_pretrained, folder)
        assert time.monotonic() - begun < 10


Q = "model.layers.0.self_attn.q_proj"
FACTORED = [[10**9, 12], [3, 10**18], [17, 12], [3, 257], [-1, 12], [True, 12], [3.0, 12], ["3", 12], [3], 3, None]


@pytest.mark.parametrize("sizes", [*FACTORED, [10**400, 12], [3, 14], [2, 13]], ids=str)
def test_absurd_ranks_and_counts_of_a_factored_folder_are_refused(copy, sizes):
    folder = copy("factored")
    edit(folder / "config.json", lambda config: config["quantization_config"]["blocks"].update({Q: sizes}))
    before = peak()
    for opener in (opened, AutoModelForCausalLM.from_pretrained):
        sentence_of(opener, folder)
    assert peak() - before < 2**28


ELASTIC = [[16, 16, *sizes] for sizes in FACTORED if isinstance(sizes, list)]


@pytest.mark.parametrize("sizes", [*ELASTIC, [16, 15, 3, 12], [10**9, 16, 3, 12], [0, 0, 0, 0]], ids=str)
def test_absurd_units_of_an_elastic_folder_are_refused(copy, sizes):
    folder = copy("elastic")
    edit(folder / "config.json", lambda config: config["quantization_config"]["blocks"].update({Q: sizes}))
    before = peak()
    for opener in (opened, AutoModelForCausalLM.from_pretrained):
        sentence_of(opener, folder)
    assert peak() - before < 2**28


@pytest.mark.parametrize("name", ["nowhere", "model.layers.0", "model.norm", "model.layers.0.mlp.act_fn", "", "a..b"])
def test_a_block_that_is_no_matrix_of_the_model_is_refused(copy, name):
    for kind, sizes in (("factored", [1, 0]), ("elastic", [16, 16, 1, 0])):
        folder = copy(kind)

        def rename(config: dict, sizes: list = sizes) -> None:
            entry = config["quantization_config"]
            entry["blocks"][name] = sizes
            entry.get("order", []).append(name)

        edit(folder / "config.json", rename)
        for opener in (opened, AutoModelForCausalLM.from_pretrained):
            assert sentence_of(opener, folder)


@pytest.mark.parametrize("key", ["U", "V", "S_values", "S_packed"])
def test_a_tensor_of_a_wrong_shape_or_type_is_refused(copy, key):
    for change in (lambda t: t[:-1], lambda t: t[None], lambda t: t.new_zeros(10**15, 0), lambda t: t.to(torch.int64)):
        folder = copy("factored")
        tensors = load_file(folder / "model.safetensors")
        tensors[f"{Q}.{key}"] = change(tensors[f"{Q}.{key}"]).contiguous()
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        for opener in (opened, AutoModelForCausalLM.from_pretrained):
            assert f"{Q}.{key} is " in sentence_of(opener, folder)
        shutil.rmtree(folder)


@pytest.mark.parametrize("harm", ["outside", "twice", "negative line", "short line", "long line"])
def test_an_elastic_folder_gathers_nothing_from_outside_or_twice(copy, harm):
    folder = copy("elastic")
    tensors = load_file(folder / "model.safetensors")
    places, line = tensors[f"elastic.{Q}.S_places"], tensors["elastic.line"]
    if harm == "outside":
        places = tensors["elastic.model.layers.0.mlp.up_proj.S_places"]  # places of two bytes, in a block of 24×16
        places[0] = 255
    elif harm == "twice":
        places[1] = places[0]
    elif harm == "negative line":
        line[0, 0, 0] -= 1000
        line[1, 0, 0] += 1000
    elif harm == "short line":
        line[0] = 0
    else:
        line[0, 0, 1] += 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for opener in (opened, AutoModelForCausalLM.from_pretrained):
        said = sentence_of(opener, folder)
        assert "names places twice or outside" in said or "elastic.line does not count" in said


def test_numbers_that_are_not_finite_are_numbers_in_a_stored_model_and_none_in_l_plus_s(copy):
    folder, run = copy("factored"), copy("run")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.U"].fill_(torch.nan)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert load_model(folder, torch.float32)(torch.tensor([[1]])).logits.isnan().all()
    [shard] = (last_checkpoint(run) / "surrogate").glob("*.safetensors")
    tensors = load_file(shard)
    tensors[f"{Q}/target"].fill_(torch.nan)
    save_file(tensors, shard)
    rewrite(shard)
    assert "is not finite" in sentence_of(fuzz.open_folder, run, True)


def test_a_header_that_promises_more_than_the_file_is_refused(copy):
    for length in (0, 10**9, 2**63, 2**64 - 1):
        folder = copy("dense")
        content = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", length) + content[8:])
        assert "is no whole safetensors file" in sentence_of(opened, folder)
        shutil.rmtree(folder)


# ---- configurations


def config_refused(path: Path, content: bytes | str) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    begun = time.monotonic()
    said = sentence_of(fuzz.open_config, path)
    assert time.monotonic() - begun < 20
    return said


@pytest.mark.parametrize(
    "tag", ["!!python/object/apply:os.system", "!!python/object/apply:subprocess.run", "!!python/name:os.x"]
)
def test_yaml_makes_no_objects(tmp_path, tag, folders):
    mark = tmp_path / "mark"
    config_refused(tmp_path / "hostile.yaml", f'seed: {tag} ["touch {mark}"]\n')
    config_refused(tmp_path / "hostile.yaml", f'{tag} ["touch {mark}"]\n')
    run = tmp_path / "run"
    shutil.copytree(folders["run"], run)
    (run / "config.yaml").write_text(f'seed: {tag} ["touch {mark}"]\n')
    config, options = read_command_line(["--config", "nano", "--output", str(run)])
    assert "readable config.yaml" in sentence_of(open_run, config, options)
    assert not mark.exists()


@pytest.mark.parametrize("odd", ["bomb", "deep-flow", "large", "nul", "binary", "list", "0x" + "f" * 5000, "1: 2"])
def test_the_config_of_a_run_is_read_as_carefully(folders, tmp_path, odd):
    run = Path(shutil.copytree(folders["run"], tmp_path / "run"))
    known = odd in ("bomb", "deep-flow", "large", "nul", "binary", "list")
    (run / "config.yaml").write_bytes(config_damage.config_bytes(["odd" if known else "text", odd], {}))
    config, options = read_command_line(["--config", "nano", "--output", str(run)])
    assert "readable config.yaml" in sentence_of(open_run, config, options)


@pytest.mark.parametrize("odd", ["bomb", "deep", "deep-flow", "large", "nul", "binary", "utf-16", "list", "scalar"])
def test_a_file_that_is_no_plain_yaml_is_refused_at_once(tmp_path, odd):
    before = peak()
    content = config_damage.config_bytes(["odd", odd], {})
    if odd == "utf-16":  # a byte order mark is not in the way of text
        content = content[:-1]
    config_refused(tmp_path / "hostile.yaml", content)
    assert peak() - before < 2**28


KEYS = [".".join(path) for path in config_damage.known_keys()]


@pytest.mark.parametrize("key", KEYS)
def test_a_value_that_no_key_takes_is_refused_of_every_key(tmp_path, key):
    parts = key.split(".")
    scalars = () if config_damage.kind_of(tuple(parts)) in (str, tuple) else ("0x" + "f" * 5000, "2024-01-01 10:00:00")
    for value in ("{a: [1]}", "[[1], {}]", "!!set {a}", *scalars):
        lines = "".join(
            "  " * k + f"{part}:" + ("\n" if k < len(parts) - 1 else f" {value}\n") for k, part in enumerate(parts)
        )
        assert config_refused(tmp_path / "hostile.yaml", lines)
        assert config_refused(tmp_path / "hostile.yaml", lines + lines)


NUMBERS = [
    path for path in config_damage.known_keys() if len(path) == 2 and config_damage.kind_of(path) in (int, float)
]


@pytest.mark.parametrize("path", NUMBERS, ids=".".join)
def test_no_number_may_be_infinite_nan_or_endless(tmp_path, path):
    for value in (".nan", ".inf", "-.inf", str(10**400), str(-(10**400)), "1e400", "null", "true"):
        assert config_refused(tmp_path / "hostile.yaml", f"{path[0]}:\n  {path[1]}: {value}\n")


def test_a_named_file_in_place_of_a_section_is_not_read(tmp_path):
    (tmp_path / "other.yaml").write_text("lr: 0.1\n")
    said = config_refused(tmp_path / "hostile.yaml", f"optimizer: {tmp_path / 'other.yaml'}\n")
    assert "optimizer without keys of its own" in said


# ---- the programs, and many cases at once


def test_train_says_one_line_and_leaves_with_2(copy, tmp_path):
    dense, made = copy("dense"), ("--output", tmp_path / "made")
    edit(dense / "config.json", lambda config: config.update(num_hidden_layers=10**7))
    train = ("train.py", "--config", "nano", *made, "--model.path", dense)
    assert "num_hidden_layers 10,000,000" in subprocess_refused(*train)
    (tmp_path / "bomb.yaml").write_bytes(config_damage.config_bytes(["odd", "bomb"], {}))
    assert "has an alias" in sentence_of(read_command_line, ["--config", str(tmp_path / "bomb.yaml")])
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("kind", ["run", "elastic"])
def test_compress_and_evaluate_say_one_line_and_leave_with_2(copy, tmp_path, kind):
    """Each program runs once in a process of its own, where a library too might write to standard error."""
    folder, made = copy(kind), ("--output", tmp_path / "made")
    if kind == "run":
        index = last_checkpoint(folder) / "surrogate" / "index.json"
        edit(index, lambda index: index.update(blocks={"x": {"file": "../x"}}))
        assert "no sound entry for x" in subprocess_refused("compress.py", "--checkpoint", folder, *made)
    else:
        edit(folder / "config.json", lambda config: config.update(hidden_size=10**9))
        refused("compress.py", "--checkpoint", folder, "--budget", "0.5", *made)
        subprocess_refused("evaluate.py", "perplexity", "--checkpoint", folder, *made)
    assert not list((tmp_path / "made").glob("*"))


def test_three_hundred_drawn_cases_end_opened_or_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("SALAAD_CACHE", str(tmp_path))
    made = fuzz.fuzz(tmp_path, 300)
    assert not made.failures
    assert made.refused + made.opened == 300 and made.refused and made.opened


@pytest.mark.parametrize("sentence", ["it does not fit in memory; give less", "", "one\ntwo", "no such file; give one"])
def test_a_refusal_is_counted_once(tmp_path, monkeypatch, sentence):
    monkeypatch.setenv("SALAAD_CACHE", str(tmp_path))
    monkeypatch.setattr(fuzz, "make_folders", lambda root: {})
    error = UserError("")
    error.args = (sentence,)  # which the class itself would make one line of

    def refuse(path):
        raise error

    monkeypatch.setattr(fuzz, "open_config", refuse)
    made = fuzz.Fuzz(tmp_path)
    made.config(["text", ""])
    report = made.report()
    assert report["cases"] == 1 == report["refused"] + report["failures"]
    assert report["refused"] == sentence.startswith("no such")


def test_the_command_line_of_the_fuzz_is_read(tmp_path):
    path = tmp_path / "plain.yaml"
    path.write_text("seed: 3\n")
    assert read_command_line(["--config", str(path)])[0].seed == 3
