"""ZeRO-1: the same bits as plain training for every optimizer and method, and checkpoints that resume either way."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from salaad.common import distributed
from salaad.common.errors import UserError
from salaad.config.command_line import read_command_line
from salaad.methods.optimizer import build_optimizer, step_unless
from salaad.methods.registry import method_of
from salaad.methods.salaad.storage import read_surrogates
from salaad.model.build import describe_model, outline
from salaad.training.optimizer_files import load_optimizer, save_optimizer, writers_of
from salaad.training.plan import memory_by_kind
from salaad.training.saving import plan_saving
from salaad.training.sharding import largest_share, owners_of, parameters_of, shard
from tests.helpers.ranks import run_ranks
from tests.helpers.training import assert_same_records, last_checkpoint, moments, run_training, train_on_ranks

# The settings of the toy runs, such as a penalty in the gradient, a decoupled pull, and gradients that a hook sets.
TOYS = {
    "coupled": {"salaad__embedding": "true"},
    "decoupled": {"salaad__pull": "decoupled", "salaad__pull_rate": 0.5},
    "galore": {"method": "galore", "galore__rank": 4, "galore__every": 4},
    "relora": {"method": "relora", "relora__rank": 4, "relora__dropout": 0, "relora__every": 4, "relora__rewarmup": 2},
    "bf16": {"train__precision": "bf16"},
}
SECOND = "state/second_moments.safetensors"
NAMES = ("AdamW", "Adam", "Adafactor", "Adagrad", "NAdam", "RMSprop", "SGD")


def parts_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return weights, the method's tensors and the whole state of the optimizer, whichever files they are in."""
    found = {}
    for place in ("model/model.safetensors", "state/weights.safetensors", "state/method.safetensors", SECOND):
        if (checkpoint / place).exists():
            found |= {f"{place} {name}": value for name, value in load_file(checkpoint / place).items()}
    if (checkpoint / "surrogate" / "index.json").exists():
        for block, state in read_surrogates(checkpoint / "surrogate").items():
            found |= {f"{block} {key}": value for key, value in state.items()}
    for index, entry in moments(checkpoint).items():
        found |= {f"{index} {key}": torch.as_tensor(value) for key, value in entry.items()}
    return found


def assert_same(first: Path, second: Path) -> None:
    one, two = parts_of(first), parts_of(second)
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text_files, tiny_tokenizer_dir) -> Path:
    """The runs of every toy on two processes, plain and sharded; and resumes either way from the other's middle."""
    from scripts.reliability.toy_run import toy_arguments

    folder, orders = tmp_path_factory.mktemp("sharded"), []
    for name, options in TOYS.items():
        for how in ("none", "optimizer"):
            more = options | {"train__shard": how, "train__save_every": 6, "train__keep_last": 0}
            orders.append((toy_arguments(text_files, tiny_tokenizer_dir, **more), folder / f"{name}-{how}"))
    for before, after in (("none", "optimizer"), ("optimizer", "none")):
        more = TOYS["decoupled"] | {"train__shard": after}
        resumed = f"--resume={folder}/decoupled-{before}/checkpoints/step-0000006"
        arguments = [*toy_arguments(text_files, tiny_tokenizer_dir, **more), resumed]
        orders.append((arguments, folder / f"from-{before}"))
    train_on_ranks(orders, 2, folder)
    return folder


@pytest.mark.parametrize("name", list(TOYS))
def test_two_processes_train_to_the_same_bits_with_half_the_state_each(trained, name):
    plain, sharded = trained / f"{name}-none", trained / f"{name}-optimizer"
    assert_same_records(plain, sharded)
    for step in (6, 12):
        assert_same(*(run / "checkpoints" / f"step-{step:07d}" for run in (plain, sharded)))
    state = last_checkpoint(sharded) / "state"
    sizes = [(state / f"optimizer-{rank:05d}-of-00002.pt").stat().st_size for rank in (0, 1)]
    assert max(sizes) < 0.65 * sum(sizes)


@pytest.mark.parametrize("shard", ["none", "optimizer"])
def test_each_process_writes_what_the_plan_says(trained, toy, shard):
    config, _ = read_command_line(toy(**TOYS["coupled"], train__shard=shard))
    model = outline(describe_model(config.model, 32))
    planned = plan_saving(config, model, 2).most - method_of(config).memory(model, config, 2)["ADMM"]
    loads = []
    for rank in (0, 1):
        path = last_checkpoint(trained / f"coupled-{shard}") / "state" / f"optimizer-{rank:05d}-of-00002.pt"
        state = torch.load(path, weights_only=True)["state"]
        loads.append(sum(value.nbytes for entry in state.values() for value in entry.values() if value.dim()))
    loads[0] += sum(4 * p.numel() for p in model.parameters())
    assert max(loads) == pytest.approx(planned, rel=0.02)


@pytest.mark.parametrize("before", ["none", "optimizer"])
def test_either_way_goes_on_from_a_checkpoint_of_the_other(trained, before):
    assert_same(last_checkpoint(trained / f"from-{before}"), last_checkpoint(trained / "decoupled-none"))


def test_one_process_goes_on_from_the_parts_of_two(trained, toy, tmp_path):
    for how in ("none", "optimizer"):
        middle = trained / f"coupled-{how}" / "checkpoints" / "step-0000006"
        run_training([*toy(**TOYS["coupled"], train__shard=how), f"--resume={middle}"], tmp_path / how)
    assert (last_checkpoint(tmp_path / "none") / "state" / "optimizer.pt").is_file()
    assert_same(last_checkpoint(tmp_path / "none"), last_checkpoint(tmp_path / "optimizer"))


# ---- every optimizer, without a model


def weights(name: str) -> list[nn.Parameter]:
    """Return weights of several sizes; for Adam, in bfloat16 with float32 gradients and moments, as in pure bf16."""
    generator = torch.Generator().manual_seed(0)
    found = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((8, 4), (3,), (5, 6), (2, 2))]
    if name in ("Adam", "AdamW"):
        found = [nn.Parameter(p.detach().bfloat16()) for p in found]
        for p in found:
            p.grad_dtype = torch.float32
    return found


def steps(name: str, numbers: range, sharded: bool, folder: Path) -> list[list[float]]:
    """Take the steps `numbers` of an optimizer, with the same gradients on every rank; return the weights.

    Steps from 0 on are saved into the folder at their end; later ones resume from it.
    """
    config, _ = read_command_line(["--config=nano", f"--optimizer.name={name}", "--optimizer.projection_lr=0.5"])
    parameters = weights(name)
    optimizer, _ = build_optimizer(parameters, config.optimizer, 9, parameters[2:])
    if sharded:
        shard(optimizer)
    if numbers.start:
        for p, saved in zip(parameters, torch.load(folder / "weights.pt"), strict=True):
            p.data.copy_(saved)
        load_optimizer(optimizer, folder, sharded)
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator)
        step_unless(torch.tensor(float(number == 2)), optimizer)
        owners = owners_of(parameters_of(optimizer), distributed.world_size())
        for p, owner in zip(parameters_of(optimizer), owners, strict=True):
            assert not sharded or owner == distributed.rank() or not optimizer.state.get(p)
    if not numbers.start:
        save_optimizer(optimizer, folder, sharded, beside=100)
        if distributed.rank() == 0:
            torch.save([p.detach() for p in parameters], folder / "weights.pt")
    return [p.flatten().tolist() for p in parameters]


def all_steps(numbers: range, sharded: bool, folder: Path) -> dict[str, list[list[float]]]:
    return {name: steps(name, numbers, sharded, folder / name) for name in NAMES}


WAYS = [((3, True), (2, False)), ((2, False), (3, True)), ((2, True), (3, True)), ((3, True), (1, False))]


def test_any_optimizer_goes_on_at_any_number_of_ranks_to_the_same_bits(tmp_path):
    def folder(name: str) -> Path:
        for optimizer in NAMES:
            (tmp_path / name / optimizer).mkdir(parents=True)
        return tmp_path / name

    whole = all_steps(range(7), False, folder("whole"))
    begun = {}
    for begin, (ranks, sharded) in WAYS:
        if begin not in begun:
            begun[begin] = folder(f"{begin}")
            run_ranks(all_steps, begin[0], tmp_path, range(4), begin[1], begun[begin])
        for found in run_ranks(all_steps, ranks, tmp_path, range(4, 7), sharded, begun[begin]):
            assert found == whole


def test_a_part_that_is_missing_is_said(tmp_path):
    parameters = weights("SGD")
    optimizer = torch.optim.SGD(parameters)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer-00001-of-00002.pt")
    with pytest.raises(UserError, match="does not hold the 00002 parts of one optimizer's state; give a whole check"):
        load_optimizer(optimizer, tmp_path, sharded=False)


def test_the_first_rank_writes_less_of_the_state_by_what_it_writes_beside():
    sizes = dict(enumerate([4] * 30))
    writers = list(writers_of(sizes, 4, beside=24).values())
    assert [writers.count(rank) for rank in range(4)] == [3, 9, 9, 9]  # 36 bytes each
    writers = list(writers_of(sizes, 4, beside=1000).values())
    assert [writers.count(rank) for rank in range(4)] == [0, 10, 10, 10]
    assert set(writers_of(sizes, 1, beside=9).values()) == {0}


# ---- before training


def test_the_plan_tells_the_memory_of_the_fullest_rank():
    plain, _ = read_command_line(["--config", "1b"])
    sharded, _ = read_command_line(["--config", "1b", "--train.shard=optimizer"])
    model = outline(describe_model(plain.model, 256))
    one, other = (memory_by_kind(config, model, 8) for config in (plain, sharded))
    assert one.pop("optimizer state") == 8 * 1_339_082_752
    # An embedding of 65.5 M weights and matrices of 11.2 M and 4.2 M are shared evenly to within the smallest matrix.
    assert 8 * 1_339_082_752 / 8 <= other.pop("optimizer state") <= 8 * (1_339_082_752 / 8 + 4_194_304)
    assert one == other
    assert largest_share(list(model.parameters()), 128) * 1_339_082_752 == 32000 * 2048  # no weight is divided


def test_a_method_that_reads_all_moments_is_refused(toy, tmp_path):
    with pytest.raises(UserError, match=r"train.shard is optimizer, but method loro reads moments that another"):
        run_training(toy(method="loro", loro__rank=4, train__shard="optimizer"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
