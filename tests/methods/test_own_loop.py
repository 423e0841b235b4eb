"""Salaad in a user's own training loop: it saves, resumes to the bit, and compresses to a small model."""

import copy
import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from salaad import Salaad, SalaadConfig
from salaad.common.errors import UserError
from salaad.factored.fixed_size import slr_modules
from tests.helpers import deploying
from tests.helpers.ranks import run_ranks

# Strong enough that L, S, dual and both thresholds are at work within a few steps.
CONFIG = SalaadConfig(
    rho=0.05, rank_ratio=0.2, density=0.2, delta_alpha=0.1, delta_beta=0.05, every=2, schedule="staggered"
)
IDS = torch.randint(3, 64, (20, 2, 12), generator=torch.Generator().manual_seed(7))


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
    )


class Loop:
    """A plain training loop, with an optimizer that has no state which a resume could lose."""

    def __init__(self, model: nn.Module, salaad: Salaad) -> None:
        self.model, self.salaad = model, salaad
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def run(self, first: int, last: int) -> None:
        for tokens in IDS[first:last]:
            mine = tokens[dist.get_rank() :: dist.get_world_size()] if dist.is_initialized() else tokens
            self.model(input_ids=mine, labels=mine).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.salaad.step()


def numbers(loop: Loop) -> dict[str, Tensor]:
    """Return every weight, and every tensor of L, S and dual of the blocks that this rank owns."""
    state = loop.salaad.state_dict()["surrogates"]
    blocks = {f"{name}/{key}": tensor for name, part in state.items() for key, tensor in part.items()}
    return {**loop.model.state_dict(), **blocks}


def assert_equal(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


@pytest.fixture(scope="module")
def whole() -> Loop:
    model = llama()
    loop = Loop(model, Salaad(model, CONFIG))
    loop.run(0, 11)
    return loop


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tiny_tokenizer_dir) -> Path:
    """The folder saved by a loop like that of `whole` after five steps."""
    model = llama()
    loop = Loop(model, Salaad(model, CONFIG))
    loop.run(0, 5)
    folder = tmp_path_factory.mktemp("loop") / "saved"
    loop.salaad.save(folder, AutoTokenizer.from_pretrained(tiny_tokenizer_dir))
    return folder


# ---- resuming


def test_a_loop_that_saves_and_loads_ends_to_the_bit_like_one_that_never_stopped(whole, saved, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(saved, local_files_only=True)
    loop = Loop(model, Salaad.load(model, saved))
    assert loop.salaad.config == CONFIG
    loop.run(5, 8)
    loop.salaad.save(str(tmp_path / "again"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "again", local_files_only=True)
    loop = Loop(model, Salaad.load(model, str(tmp_path / "again")))
    loop.run(8, 11)
    assert_equal(numbers(loop), numbers(whole))
    assert loop.salaad.counts() == whole.salaad.counts()
    lively = loop.salaad.surrogates.values()
    assert all(s.nnz and s.rank and s.alpha and s.beta and s.dual().any() for s in lively)


def test_state_dict_and_load_state_dict_go_on_to_the_bit(whole, tmp_path):
    model = llama()
    loop = Loop(model, Salaad(model, CONFIG))
    loop.run(0, 5)
    torch.save({"model": model.state_dict(), "salaad": loop.salaad.state_dict()}, tmp_path / "mine.pt")
    loop.run(5, 7)  # further steps do not change the saved state

    stored = torch.load(tmp_path / "mine.pt", weights_only=True)
    model = llama()
    model.load_state_dict(stored["model"])
    second = Loop(model, Salaad(model, CONFIG))
    second.salaad.load_state_dict(stored["salaad"])
    second.run(5, 11)
    assert_equal(numbers(second), numbers(whole))


def test_after_a_roll_back_the_records_are_those_of_the_steps_that_count():
    records = []
    for abandoned in (0, 3):
        model = llama()
        loop = Loop(model, Salaad(model, CONFIG))
        loop.run(0, 5)
        weights, state = copy.deepcopy(model.state_dict()), loop.salaad.state_dict()
        loop.salaad.drain_records()
        loop.run(5, 5 + abandoned)
        model.load_state_dict(weights)
        loop.salaad.load_state_dict(state)
        loop.run(5, 11)
        records.append(loop.salaad.drain_records())
    assert {step for step, *_ in records[0]} == set(range(6, 12))
    assert records[0] == records[1]


@pytest.mark.parametrize("key", ["steps", "updated_at", "surrogates"])
def test_a_state_without_one_of_its_parts_is_refused(whole, key):
    state = {name: value for name, value in whole.salaad.state_dict().items() if name != key}
    with pytest.raises(UserError, match=f"the state has no {key}, so L and S would begin anew"):
        Salaad(llama(), CONFIG).load_state_dict(state)


def test_a_state_of_fewer_blocks_or_of_another_model_is_refused_and_nothing_is_taken_over(whole):
    state = whole.salaad.state_dict()
    salaad = Salaad(llama(), CONFIG)
    before = {name: s.T.clone() for name, s in salaad.surrogates.items()}
    name = salaad.blocks[3]
    some = {**state, "surrogates": {key: value for key, value in state["surrogates"].items() if key != name}}
    with pytest.raises(UserError, match=f"the state lacks block {name}"):
        salaad.load_state_dict(some)
    other = {**state["surrogates"][name], "target": torch.zeros(3, 4)}
    with pytest.raises(UserError, match=rf"the state of block {name} has its target as \(3, 4\), where .* is wanted"):
        salaad.load_state_dict({**state, "surrogates": {**state["surrogates"], name: other}})
    del other["thresholds"]
    with pytest.raises(UserError, match=f"the state of block {name} lacks its thresholds"):
        salaad.load_state_dict({**state, "surrogates": {**state["surrogates"], name: other}})
    without_sigma = {key: state["surrogates"][name][key] for key in ("residual", "thresholds")}
    without_sigma["ranks"] = torch.tensor([3.0, 4.0])  # as from a solver that finds no singular values
    with pytest.raises(UserError, match=f"the state of block {name} lacks its target"):
        salaad.load_state_dict({**state, "surrogates": {**state["surrogates"], name: without_sigma}})
    assert all(torch.equal(s.T, before[name]) for name, s in salaad.surrogates.items())


@pytest.mark.parametrize(
    ("part", "wrong", "words"),
    [
        ("target", torch.zeros(32, 32, dtype=torch.float16), r"target in torch\.float16, where torch\.float32"),
        ("thresholds", torch.zeros(2), r"thresholds as \(2,\), where \(3,\)"),
        ("sigma", torch.zeros(33), r"sigma as \(33,\), where \(32,\)"),
        ("basis", torch.zeros(3, 3), r"basis as \(3, 3\), where \(32, 32\)"),
        ("ranks", torch.zeros(1), r"ranks as \(1,\), where \(2,\)"),
    ],
)
def test_each_part_of_a_state_must_be_of_the_model_and_in_float32(whole, part, wrong, words):
    state, name = whole.salaad.state_dict(), whole.salaad.blocks[0]
    other = {**state["surrogates"], name: state["surrogates"][name] | {part: wrong}}
    with (
        Salaad(llama(), CONFIG) as salaad,
        pytest.raises(UserError, match=f"the state of block {name} has its {words} is wanted; give a whole one"),
    ):
        salaad.load_state_dict({**state, "surrogates": other})


def test_loading_beside_other_weights_than_those_of_that_time_is_refused(saved):
    model = llama()
    with pytest.raises(UserError, match=r"is not that which .* was saved beside; open the model from there first"):
        Salaad.load(model, saved)
    Salaad(model, CONFIG)  # the refused Salaad no longer watches the weights


def test_a_model_in_data_parallel_is_saved_with_its_weights(saved, tmp_path):
    model = nn.DataParallel(llama())
    loop = Loop(model, Salaad(model, CONFIG))
    loop.run(0, 5)
    loop.salaad.save(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", local_files_only=True)
    alone = AutoModelForCausalLM.from_pretrained(saved, local_files_only=True)
    assert_equal(again.state_dict(), alone.state_dict())


def test_other_settings_may_be_given_to_go_on_with(saved):
    model = AutoModelForCausalLM.from_pretrained(saved, local_files_only=True)
    salaad = Salaad.load(model, saved, SalaadConfig(rho=0.2, every=3))
    assert (salaad.config.every, salaad.steps) == (3, 5)
    assert {s.rho for s in salaad.surrogates.values()} == {0.2}


def test_save_overwrites_nothing(saved):
    model = AutoModelForCausalLM.from_pretrained(saved, local_files_only=True)
    with pytest.raises(UserError, match="exists, and nothing is overwritten"):
        Salaad.load(model, saved).save(saved)


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda model: torch.compile(model, backend="eager")])
def test_second_moments_are_found_again_of_a_wrapped_model(wrap, tmp_path):
    model = llama()
    salaad = Salaad(model, CONFIG)
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=IDS[0], labels=IDS[0]).loss.backward()
    optimizer.step()
    salaad.step()
    salaad.save(tmp_path / "saved")
    salaad.close()
    again = Salaad.load(wrap(model), tmp_path / "saved")
    assert again.second_moments().keys() == salaad.second_moments().keys() != set()
    again.close()


def test_a_layer_that_was_compiled_in_place_is_saved_under_its_own_name(tmp_path):
    model = llama()
    for layer in model.model.layers:
        layer.compile(backend="eager")
    loop = Loop(model, Salaad(model, CONFIG))
    loop.run(0, 3)
    loop.salaad.save(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", local_files_only=True)
    second = Loop(again, Salaad.load(again, tmp_path / "saved"))
    assert_equal(numbers(second), numbers(loop))


def test_a_layer_in_what_torch_compile_returned_is_refused_before_the_training_and_before_saving(tmp_path):
    model = llama()
    salaad, layers = Salaad(model, CONFIG), model.model.layers
    layers[1] = torch.compile(layers[1], backend="eager")
    cure = r"model\.layers\.1 is what torch\.compile returned, .* compile it in place instead, by module\.compile\(\)"
    with salaad, pytest.raises(UserError, match=cure):
        salaad.save(tmp_path / "saved")
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match=cure):
        Salaad(model, CONFIG)


def test_a_setting_of_a_newer_version_is_named(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "newer")
    index = tmp_path / "newer" / "surrogate" / "index.json"
    about = json.loads(index.read_text())
    index.write_text(json.dumps(about | {"settings": about["settings"] | {"newer": 1}}))
    model = AutoModelForCausalLM.from_pretrained(saved, local_files_only=True)
    with pytest.raises(UserError, match=r"index\.json has 'newer' as 1 in its SalaadConfig"):
        Salaad.load(model, tmp_path / "newer")


def test_counts_without_a_block_are_refused_and_the_weights_are_let_go(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "other")
    index = tmp_path / "other" / "surrogate" / "index.json"
    about = json.loads(index.read_text())
    name = "model.layers.1.mlp.up_proj"
    del about["updated_at"][name]
    index.write_text(json.dumps(about))
    model = AutoModelForCausalLM.from_pretrained(saved, local_files_only=True)
    with pytest.raises(UserError, match=f"updated_at does not name block {name}") as kept:
        Salaad.load(model, tmp_path / "other")
    Salaad.load(model, saved).close()
    del kept


def test_a_folder_without_l_and_s_is_refused_in_a_sentence(tmp_path):
    llama().save_pretrained(tmp_path / "plain")
    with pytest.raises(UserError, match="cannot be read"):
        Salaad.load(llama(), tmp_path / "plain")


# ---- several ranks


def two_ranks(folder: str) -> dict[str, Tensor]:
    """Train five steps, save, load and train six more; return the compressed model's logits and the weights."""
    model = llama()
    together = dataclasses.replace(CONFIG, schedule="synchronous")  # "staggered" depends on the owners
    loop = Loop(DistributedDataParallel(model), Salaad(model, together))
    loop.run(0, 5)
    loop.salaad.save(folder)
    small = loop.salaad.compress(0.5, lm_head=True)
    loop.salaad.close()
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    loop = Loop(DistributedDataParallel(model), Salaad.load(model, folder))
    loop.run(5, 11)
    with torch.no_grad():
        return {"small": small(input_ids=IDS[0]).logits, **model.state_dict()}


def test_two_ranks_save_one_folder_that_one_rank_reads_and_train_as_one(tmp_path):
    model = llama()
    whole = Loop(model, Salaad(model, dataclasses.replace(CONFIG, schedule="synchronous")))
    whole.run(0, 11)
    first, second = run_ranks(two_ranks, 2, tmp_path, str(tmp_path / "both"))
    assert_equal(first, second)
    for name, value in whole.model.state_dict().items():
        # Gradients agree to float32 rounding at first; in training the difference grows a little.
        assert (first[name] - value).norm() <= 1e-3 * value.norm(), name
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "both", local_files_only=True)
    alone = Salaad.load(model, tmp_path / "both")
    assert sorted(alone.surrogates) == sorted(alone.blocks)
    with torch.autocast("cpu", torch.bfloat16):  # which changes nothing that is computed for the cut
        small = alone.compress(0.5, lm_head=True)
    with torch.no_grad():
        torch.testing.assert_close(first["small"], small(input_ids=IDS[0]).logits, rtol=1e-4, atol=1e-4)


def small_of_two_ranks(sharded: bool) -> dict[str, Tensor]:
    """Return the small model's logits after five steps of AdamW, by default and with and without a split head.

    If `sharded`, each rank keeps the moments of some weights alone.
    """
    model = llama()
    loop = Loop(DistributedDataParallel(model), Salaad(model, dataclasses.replace(CONFIG, schedule="synchronous")))
    if sharded:
        loop.optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    else:
        loop.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loop.run(0, 5)
    with torch.no_grad():
        return {
            str(head): loop.salaad.compress(0.5, lm_head=head)(input_ids=IDS[0]).logits for head in (None, True, False)
        }


@pytest.mark.parametrize("sharded", [False, True])
def test_on_two_ranks_too_the_head_is_split_unless_told_where_the_optimizer_tells_its_worth(tmp_path, sharded):
    first, second = run_ranks(small_of_two_ranks, 2, tmp_path, sharded)
    assert_equal(first, second)
    assert torch.equal(first["None"], first["True"])
    assert (first["None"] - first["False"]).norm() > 0.01 * first["False"].norm()


# ---- a small model


@pytest.mark.parametrize(("budget", "head"), [("0.5", False), (0.5, None), (None, None), (0.5, True)])
def test_compress_gives_the_model_that_compress_py_writes(saved, tmp_path, budget, head):
    model = AutoModelForCausalLM.from_pretrained(saved, local_files_only=True)
    salaad = Salaad.load(model, saved)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    small = salaad.compress(budget, lm_head=head)
    words = ([] if budget is None else ["--budget=0.5"]) + (
        {None: [], True: ["--lm_head"], False: ["--lm_head=false"]}[head]
    )
    deploying.compress(saved, tmp_path / "small", *words, dtype="float32")
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "small", local_files_only=True)
    assert slr_modules(small).keys() == slr_modules(written).keys() != set()
    with torch.no_grad():
        torch.testing.assert_close(
            small(input_ids=IDS[0]).logits, written(input_ids=IDS[0]).logits, rtol=1e-4, atol=1e-4
        )
    generated = small.generate(IDS[0, :1, :4], max_new_tokens=4, do_sample=False)
    assert generated.shape[1] > 4
    assert_equal(before, model.state_dict())
    Loop(model, salaad).run(5, 7)  # training goes on


def test_compress_by_hpa_is_the_cut_of_compress_py_with_the_same_kappa(saved, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(saved, local_files_only=True)
    small = Salaad.load(model, saved).compress(0.4, kappa=0.3)
    deploying.compress(saved, tmp_path / "small", budget=0.4, kappa=0.3, dtype="float32")
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "small", local_files_only=True)
    with torch.no_grad():
        torch.testing.assert_close(
            small(input_ids=IDS[0]).logits, written(input_ids=IDS[0]).logits, rtol=1e-4, atol=1e-4
        )


def test_any_module_can_be_compressed_a_tied_weight_stays_dense():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 32), nn.Linear(32, 24), nn.Linear(24, 32, bias=False))
    model[2].weight = model[0].weight
    salaad = Salaad(model, SalaadConfig(roles=("re:.",), rho=0.5, rank_ratio=0.2, density=0.1, every=1))
    small = salaad.compress()
    x = torch.randn(3, 24)
    with salaad.deployed():
        expected = model(x)
    torch.testing.assert_close(small(x), expected, rtol=1e-4, atol=1e-5)
    assert small[2].weight is small[0].weight


def test_a_default_device_that_is_not_the_models_changes_nothing():
    """The device meta stands in for a GPU, which cannot multiply the counts of the cut."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 32), nn.Linear(32, 24))
    salaad = Salaad(model, SalaadConfig(roles=("re:.",), rho=0.5, rank_ratio=0.5, density=0.1, every=1))
    x = torch.randn(3, 24)
    expected = salaad.compress(0.6)(x)
    with torch.device("meta"):
        small = salaad.compress(0.6)
    torch.testing.assert_close(small(x), expected)
    salaad.close()


class Thrice(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


class Times(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24, 24) / 5)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Spread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm((3, 24))  # with a matrix as its weight

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


@pytest.mark.parametrize("more", [lambda: Thrice(24, 24), Times, Spread])
def test_a_module_that_does_more_with_its_matrix_keeps_doing_it(more):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 24), more())
    salaad = Salaad(model, SalaadConfig(roles=("re:.",), rho=0.5, rank_ratio=0.2, density=0.1, every=1))
    small = salaad.compress()
    assert list(slr_modules(small)) == ["0"]
    x = torch.randn(3, 24)
    with salaad.deployed():
        expected = model(x)
    torch.testing.assert_close(small(x), expected, rtol=1e-4, atol=1e-5)
    salaad.close()


def test_a_module_that_holds_its_salaad_can_be_compressed():
    """As a LightningModule holds it."""
    model = nn.Sequential(nn.Linear(12, 20), nn.Linear(20, 16))
    model.salaad = Salaad(model, SalaadConfig(roles=("re:.",), rho=0.05))
    with model.salaad.deployed():
        expected = model(torch.ones(2, 12))
    small = model.salaad.compress()
    torch.testing.assert_close(small(torch.ones(2, 12)), expected, rtol=1e-4, atol=1e-5)
    model.salaad.close()


def test_weights_that_layers_share_undeclared_stay_dense_in_one_copy():
    model = llama()
    first, second = model.model.layers
    for layer in ("gate_proj", "up_proj", "down_proj"):
        getattr(second.mlp, layer).weight = getattr(first.mlp, layer).weight
    salaad = Salaad(model, CONFIG)
    loop = Loop(model, salaad)
    loop.run(0, 4)
    small = salaad.compress(lm_head=False)
    assert not any(".mlp." in name for name in slr_modules(small))
    ours, theirs = (layer.mlp.up_proj.weight for layer in small.model.layers)
    assert ours is theirs
    with salaad.deployed():
        expected = model(IDS[0]).logits
    torch.testing.assert_close(small(IDS[0]).logits, expected, rtol=1e-4, atol=1e-4)
    salaad.close()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"budget": 100}, "below the floor"),
        ({"budget": 0.5, "kappa": 1.5}, "outside [0, 1]"),
        ({"kappa": 0.5}, "nothing is cut; give a budget"),
        ({"refine": 3}, "refine is 3, but nothing is cut; give a budget too"),
        ({"budget": "half"}, "is no number"),
        ({"budget": 0.5, "refine": -1}, "refine is -1, but the least is 0; give 0 or more"),
    ],
)
def test_what_cannot_be_compressed_is_said_in_a_sentence(saved, arguments, words):
    model = AutoModelForCausalLM.from_pretrained(saved, local_files_only=True)
    with pytest.raises(UserError) as error:
        Salaad.load(model, saved).compress(**arguments)
    assert words in str(error.value)


# ---- our commands on a folder that `save` wrote


def test_the_commands_open_what_save_wrote(saved, tmp_path):
    assert "density of S" in deploying.evaluate("rpca", saved, tmp_path / "tables")
    assert "0.5@0.5" in deploying.compress(saved, tmp_path / "cut", budget=0.5, kappa=0.5)


def test_train_py_says_what_to_do_with_such_a_folder(saved):
    from salaad.runs.checkpoints import RunState

    with pytest.raises(UserError, match=r"holds no optimizer or data position; go on in that loop by Salaad\.load"):
        RunState.read(saved)


# ---- settings


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"every": "10"}, "salaad.every is '10', but has to be a whole number"),
        ({"every": 2.5}, "salaad.every is 2.5, but has to be a whole number"),
        ({"rank_ratio": "low"}, "salaad.rank_ratio is 'low', but has to be a number"),
        ({"embedding": 1}, "salaad.embedding is 1, but has to be true or false"),
        ({"roles": (1,)}, "salaad.roles is (1,), but has to be"),
    ],
)
def test_settings_of_a_wrong_type_are_refused_as_on_the_command_line(settings, words):
    with pytest.raises(UserError) as error:
        SalaadConfig(**settings)
    assert words in str(error.value)
