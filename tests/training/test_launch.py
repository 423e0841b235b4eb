"""The launch configurations as accelerate itself reads them, processes meant for GPUs, and the gradients' buckets."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from huggingface_hub.constants import DEFAULT_REQUEST_TIMEOUT
from huggingface_hub.utils import http_backoff
from torch._dynamo.testing import CompileCounter
from torch.multiprocessing import ProcessRaisedException
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import train
from salaad.common import distributed
from salaad.common.errors import UserError
from salaad.config.command_line import read_command_line
from salaad.config.run import DataConfig
from salaad.data.retries import UnreadableFile, longest_wait, read_with_retries
from salaad.model.build import describe_model, outline
from salaad.training.launch import compiled_bucket, leave_together, patience, require_devices, start_accelerator
from tests.helpers.launches import resolved, torch_launch
from tests.helpers.ranks import run_ranks
from tests.helpers.training import assert_same_records, run_training, train_on_ranks

EXAMPLES = sorted(Path("configs/accelerate").glob("*.yaml"))
NUMBERS = {"two": 2, "four": 4, "eight": 8}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_what_its_first_line_says(path):
    found = resolved(["--config_file", str(path), "train.py"])
    said = [NUMBERS[word] for word in re.findall(r"two|four|eight", path.read_text().splitlines()[0].lower())]
    machines, each = said if len(said) == 2 else (1, said[0])
    assert (found.num_machines, found.num_processes) == (machines, machines * each)
    assert found.use_cpu == ("on the CPU" in path.read_text())
    assert found.mixed_precision == "no"  # train.precision sets it instead


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_no_key_of_an_example_is_overruled(path):
    found = resolved(["--config_file", str(path), "train.py"])
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        value = value.partition("#")[0].strip().strip('"')
        if line.startswith("#") or key in ("compute_environment", "distributed_type"):  # only read by accelerate config
            continue
        assert str(getattr(found, key)).lower() == value.lower(), key


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_no_example_is_elastic_nor_says_so(path):
    launch = torch_launch(["--config_file", str(path), "train.py"])
    assert (launch.rdzv_backend, launch.max_restarts) == ("static", 0)
    assert launch.min_nodes == launch.max_nodes
    assert ("Not elastic" in path.read_text()) == (launch.max_nodes > 1)


def comment_of(path: Path) -> str:
    return " ".join(line.lstrip("# ") for line in path.read_text().splitlines() if line.startswith("#"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_command_in_an_example_starts_what_it_says(path):
    command = re.search(r"accelerate launch (.* train\.py --config \w+\.yaml)", comment_of(path))[1]
    words = command.replace("--machine_rank N", "--machine_rank 2").replace("HOST", "first-host").split()
    launch, found = torch_launch(words), resolved(words)
    assert launch.nproc_per_node * launch.max_nodes == found.num_processes
    assert found.training_script == "train.py" and Path("configs", found.training_script_args[-1]).is_file()
    if launch.max_nodes > 1:
        assert (launch.rdzv_endpoint, launch.rdzv_configs["rank"]) == ("first-host:29500", 2)


def test_the_example_of_several_machines_says_how_long_they_wait_for_one_that_is_gone(monkeypatch):
    said = comment_of(Path("configs/accelerate/nodes4.yaml"))
    minutes, hours = int(re.search(r"(\d+) minutes", said)[1]), int(re.search(r"(\d+) hours", said)[1])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (minutes, hours) == (round(patience(DataConfig()).total_seconds() / 60), distributed.PATIENCE // 3600)


@pytest.mark.parametrize(
    ("environment", "refused"),
    [
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, "8 processes were launched, 8 of them on this machine"),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "1"}, "4 processes were launched, 1 of them on this machine"),
        ({"WORLD_SIZE": "8", "CUDA_VISIBLE_DEVICES": "0,1"}, "8 processes"),
        ({"WORLD_SIZE": "8", "ACCELERATE_USE_CPU": "False"}, "8 processes"),
        ({"WORLD_SIZE": "8", "CUDA_VISIBLE_DEVICES": ""}, "8 processes"),
        ({"WORLD_SIZE": "8", "CUDA_VISIBLE_DEVICES": "-1,-1"}, None),
        ({"WORLD_SIZE": "8", "ACCELERATE_USE_CPU": "True"}, None),
        ({"WORLD_SIZE": "8", "ACCELERATE_USE_CPU": "true"}, None),
        ({"WORLD_SIZE": "8", "ACCELERATE_USE_CPU": "1"}, None),
        ({"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, None),
        ({}, None),
    ],
)
def test_processes_for_gpus_are_refused_where_there_are_none(monkeypatch, environment, refused):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "ACCELERATE_USE_CPU"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if refused:
        with pytest.raises(UserError, match=rf"{refused}.*, where torch .* finds no GPU; mend the driver"):
            require_devices()
    else:
        require_devices()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    require_devices()


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("WORLD_SIZE", "", "a number"),
        ("LOCAL_WORLD_SIZE", "two", "a number"),
        ("LOCAL_RANK", "", "a number"),
        ("ACCELERATE_USE_CPU", "maybe", "true or false"),
        ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "5m", "a number"),
    ],
)
def test_an_environment_variable_that_cannot_be_read_is_a_sentence(monkeypatch, toy, tmp_path, name, value, kind):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "some")
    monkeypatch.setenv(name, value)
    said = f"{name} is '{value}' in the environment, but has to be {kind}; correct or unset it"
    with pytest.raises(UserError, match=re.escape(said)):
        run_training(toy(train__steps=1), tmp_path / "run")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_the_eight_gpu_example_ends_in_a_sentence_without_a_gpu(tmp_path):
    command = [str(Path(sys.executable).parent / "accelerate"), "launch", "--config_file=configs/accelerate/gpu8.yaml"]
    command += ["--num_processes=2", "--main_process_port=0", "train.py", "--config=nano"]
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(
        [*command, f"--output={tmp_path / 'run'}"], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode != 0
    last = done.stderr.rstrip().splitlines()[-1]
    assert last.startswith("error: 2 processes were launched, 2 of them on this machine")
    assert not (tmp_path / "run").exists()


def test_a_batch_that_cannot_be_shared_by_the_processes_is_refused(toy, tmp_path):
    said = "train.batch 3 cannot be shared by 2 processes; give a multiple of 2"
    with pytest.raises(ProcessRaisedException, match=said):
        train_on_ranks([(toy(train__batch=3), tmp_path / "run")], 2, tmp_path)
    assert not (tmp_path / "run").exists()


def test_a_plan_and_a_finished_run_end_on_all_ranks_at_once_too(toy, tmp_path, monkeypatch, capsys):
    ended = []

    def leave(accelerator):
        ended.append(capsys.readouterr().out)
        leave_together(accelerator)

    monkeypatch.setattr(train, "leave_together", leave)
    for words in (["--dry-run"], [], []):
        run_training([*toy(train__steps=1), *words], tmp_path / "run")
    plan, trained, again = ended
    assert "validation" in plan and "perplexity of X" in trained and "is finished" in again


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("ACCELERATE_DYNAMO_BACKEND", "AOT_EAGER"),
        ("ACCELERATE_MIXED_PRECISION", "bf16"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4"),
    ],
)
def test_settings_of_the_launcher_do_not_overrule_those_of_the_run(toy, tmp_path, monkeypatch, setting, value):
    """Accelerate's own default configuration, which a user may have made for other programs, holds such settings."""
    run_training(toy(train__steps=2), tmp_path / "usual")
    monkeypatch.setenv(setting, value)
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr("salaad.training.launch.follow_launcher", lambda: None)
    run_training(toy(train__steps=2), tmp_path / "told")
    assert not torch._dynamo.utils.counters["stats"]
    assert_same_records(tmp_path / "usual", tmp_path / "told")


# ---- how long ranks wait for each other


def seconds_until_given_up(retries: int, monkeypatch) -> float:
    """Return the seconds that a read from the hub takes when every request of the hub's client times out."""
    passed = [0.0]
    no_answer = inspect.signature(http_backoff).parameters["retry_on_exceptions"].default[0]

    def sleep(seconds: float) -> None:
        passed[0] += seconds

    def request(**_):
        passed[0] += DEFAULT_REQUEST_TIMEOUT
        raise no_answer("no answer")

    def records_from(index: int):
        http_backoff("GET", "https://huggingface.co/nothing")
        yield index, "", None

    client = SimpleNamespace(request=request)
    monkeypatch.setattr("huggingface_hub.utils._http.get_session", lambda: client)
    monkeypatch.setattr("time.sleep", sleep)
    with pytest.raises(UnreadableFile):
        list(read_with_retries("hf://x", records_from, start=0, stride=1, retries=retries, remote=True))
    return passed[0]


@pytest.mark.parametrize("retries", [0, 6, 20])
def test_the_longest_wait_for_text_is_known(retries, monkeypatch):
    assert longest_wait(retries) == seconds_until_given_up(retries, monkeypatch)


def process_group_of(words: list[str], monkeypatch) -> dict:
    """Return what accelerate hands to torch's init_process_group when one of two processes begins a run."""
    given = {}

    class Enough(Exception):
        pass

    def init_process_group(**keywords):
        given.update(keywords)
        raise Enough

    environment = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "RANK": 0, "LOCAL_RANK": 0, "OMP_NUM_THREADS": 1}
    environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": 0, "ACCELERATE_USE_CPU": True}
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("salaad.training.launch.follow_launcher", lambda: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", init_process_group)
    AcceleratorState._reset_state(reset_partial_state=True)
    config, _ = read_command_line(["--config", "nano", *words])
    try:
        with pytest.raises(Enough):
            start_accelerator(config)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    return given


@pytest.mark.parametrize(
    ("words", "seconds"),
    [
        ([], 1800),  # torch's default on the CPU
        (["--data.retries=20"], 2 * (21 * 83 + 31 + 15 * 30)),
        (["--data.max_lost_files=2"], 3 * 2 * (7 * 83 + 61)),
        (["--data.retries=1000000000"], 6 * 3600),
    ],
)
def test_accelerate_is_given_the_time_that_text_may_take(words, seconds, monkeypatch):
    assert process_group_of(words, monkeypatch)["timeout"].total_seconds() == seconds


def test_on_gpus_ranks_wait_longer_than_the_hub_retries(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    waited = patience(DataConfig()).total_seconds()
    assert waited > 1.9 * seconds_until_given_up(DataConfig().retries, monkeypatch) > 1.9 * 600
    assert patience(DataConfig(retries=0)).total_seconds() == 600  # torch's default on GPUs


# ---- buckets of gradients in a compiled backward pass


@pytest.mark.parametrize(("size", "megabytes"), [("60m", 25), ("350m", 48), ("1b", 191)])
def test_a_bucket_holds_a_layer(size, megabytes):
    config, _ = read_command_line(["--config", size])
    model = outline(describe_model(config.model, 256))
    assert compiled_bucket(model, []) == megabytes  # 12 MiB, 48.06 and 191.98 a layer; torch's own is 25
    apart = [p for p in model.parameters() if p.ndim > 1]  # excluded, as the blocks are in pure bf16
    assert compiled_bucket(model, apart) == 25


LAYERS = 3


def graphs(megabytes: int | None) -> int:
    """Return the number of graphs of a compiled model that is wrapped with buckets of this size (None: a layer's)."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2736, "num_attention_heads": 4, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=LAYERS, use_cache=False))
    counter = CompileCounter()
    model.model.compile(backend=counter)
    wrapped = DistributedDataParallel(
        model, bucket_cap_mb=megabytes or compiled_bucket(model, []), gradient_as_bucket_view=True
    )
    wrapped(input_ids=torch.zeros(1, 4, dtype=torch.int64)).logits.sum().backward()
    return counter.frame_count


def test_a_compiled_model_is_cut_once_a_layer_for_its_gradients(tmp_path):
    # The end of the last layer is a graph of its own: its gradients come first, and torch's first bucket is 1 MiB.
    assert run_ranks(graphs, 2, tmp_path, None) == [LAYERS + 1] * 2
    assert run_ranks(graphs, 2, tmp_path, 25)[0] > LAYERS + 2
