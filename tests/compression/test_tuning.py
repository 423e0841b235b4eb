"""Matching and distillation: gradients against autograd on dense weights, and folders made with the user's command.

How near a folder comes to the dense model is measured with transformers alone, on text that nothing was fitted on.
"""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    logging,
)

import salaad  # noqa: F401  so that from_pretrained opens factored folders
from salaad.common.errors import Stopped, UserError
from salaad.common.signals import StopRequest
from salaad.compression.tuning.distillation import Distillation, sizes_in_turn
from salaad.compression.tuning.fitting import Fitting
from salaad.compression.tuning.matching import layer_names
from salaad.compression.tuning.saved import SavedTuning
from salaad.compression.tuning.tuned_model import TunedModel
from salaad.model.loss import IGNORED, SummedDivergence, SummedLoss, summed_divergence
from salaad.runs.model_on_disk import ModelOnDisk
from tests.helpers.deploying import compress, refused, text_options
from tests.helpers.models import save_gpt2
from tests.helpers.training import last_checkpoint
from tests.helpers.tuned_models import SIZES, WTE, NeverAsked, Q, drawn, ids, tuned_model

logging.set_verbosity_error()
logging.disable_progress_bar()
pytestmark = pytest.mark.usefixtures("own_caches")


@pytest.fixture
def tuned() -> TunedModel:
    return tuned_model()


# ---- what is trained


def test_a_size_is_that_of_the_cut_parts(tuned):
    parts = tuned.parts()
    weights = tuned.weights({Q: (2, 7), WTE: (4, 0)})
    torch.testing.assert_close(weights[f"{Q}.weight"], parts[Q].cut(2, 7).dense())
    torch.testing.assert_close(weights[f"{WTE}.weight"], parts[WTE].cut(4, 0).dense())
    torch.testing.assert_close(tuned.weights()[f"{Q}.weight"], parts[Q].dense())
    inside = tuned.weights(prefix="model.layers.1")
    assert set(inside) == {"self_attn.q_proj.weight"}
    outside = tuned.weights(prefix="model", without="model.layers")
    assert set(outside) == {name for name in tuned.weights(prefix="model") if not name.startswith("layers.")} != set()


def test_the_teacher_is_as_it_was_and_the_student_has_the_weights_of_now(tuned):
    before = tuned.model(ids()).logits
    wrapper = SummedDivergence(tuned.model, 0.0, "give another")
    hidden, head = tuned.call(Hidden(tuned.model, 0.0, "give another"), ids())
    torch.testing.assert_close(tuned.model(ids()).logits, before)
    by_hand = LlamaForCausalLM(tuned.model.config).eval()
    by_hand.load_state_dict(tuned.model.state_dict() | tuned.weights())
    torch.testing.assert_close((hidden @ head.mT).view(3, 9, 40), by_hand(ids()).logits, rtol=1e-4, atol=1e-4)
    assert wrapper.model is tuned.model


class Hidden(SummedDivergence):
    """A wrapper that returns the hidden states and the head that the loss is computed from."""

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.hidden_and_head(input_ids)


def test_gradients_are_those_of_dense_weights_by_the_chain_rule(tuned):
    wrapper, labels = SummedDivergence(tuned.model, 0.0, "give another"), ids().clone()
    labels[0, 5:] = IGNORED
    with torch.no_grad():
        teacher = wrapper.hidden_and_head(ids())
    tuned.call(wrapper, ids(), labels, teacher).backward()

    student = LlamaForCausalLM(tuned.model.config).double().eval()
    student.load_state_dict(tuned.model.state_dict() | tuned.weights())
    target = F.log_softmax(tuned.model.double()(ids()).logits, -1)
    found = F.log_softmax(student(ids()).logits, -1)
    real = labels != IGNORED
    (target.exp() * (target - found))[real].sum().backward()
    for name, block in zip((Q, WTE), tuned.blocks.values(), strict=True):
        G = student.get_submodule(name).weight.grad
        close = {"rtol": 1e-3, "atol": 1e-4 * float(G.abs().max())}
        torch.testing.assert_close(block.U.grad.double(), G @ block.V.double().mT, **close)
        torch.testing.assert_close(block.V.grad.double(), block.U.double().mT @ G, **close)
        torch.testing.assert_close(block.values.grad.double(), G.flatten()[block.positions], **close)
    head, norm = (tuned.others[name].grad.double() for name in ("lm_head/weight", "model/norm/weight"))
    torch.testing.assert_close(head, student.lm_head.weight.grad, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(norm, student.model.norm.weight.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("tokens", "share"), [(1, 0.0), (130, 0.3), (700, 0.0), (700, 0.3), (700, 1.0)])
def test_the_divergence_in_chunks_is_that_of_all_logits_at_once(tokens, share):
    torch.manual_seed(0)
    hidden, head = torch.randn(tokens, 8).requires_grad_(), torch.randn(5000, 8).requires_grad_()
    teacher, its_head = torch.randn(tokens, 8), torch.randn(5000, 8)
    targets = torch.randint(0, 5000, (tokens,))
    targets[::7] = IGNORED
    loss = summed_divergence(hidden, head, teacher, its_head, targets, share)
    h, w = (part.detach().double().requires_grad_() for part in (hidden, head))
    q, p = F.softmax(teacher.double() @ its_head.double().mT, -1), F.log_softmax(h @ w.mT, -1)
    said = targets != IGNORED
    q[said] = (1 - share) * q[said] + share * F.one_hot(targets[said], 5000)
    expected = (torch.xlogy(q, q) - q * p).sum()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    for found, wanted in zip(
        torch.autograd.grad(loss, (hidden, head)), torch.autograd.grad(expected, (h, w)), strict=True
    ):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-3, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = summed_divergence(hidden, head, teacher, its_head, targets, share)
    assert rounded.dtype == torch.float32
    assert float(rounded.detach()) == pytest.approx(float(expected.detach()), rel=0.05)  # 8 bits of the logits
    same = summed_divergence(teacher, its_head, teacher, its_head, targets, 0.0)
    assert abs(float(same)) < 1e-4 * tokens


def test_the_text_says_the_next_token_and_nothing_at_the_end_of_a_row(tuned):
    labels = ids().clone()
    labels[0, 5:] = IGNORED
    divergence, loss = SummedDivergence(tuned.model, 1.0, "give another"), SummedLoss(tuned.model)
    with torch.no_grad():
        hidden, head = divergence.hidden_and_head(ids())
        # Without a next token only the teacher's prediction counts, which here equals the student's.
        found = float(divergence(ids(), labels, (hidden, head)))
        assert found == pytest.approx(float(loss(ids(), labels)), rel=1e-5)


def test_an_expert_is_a_slice_of_its_parameter():
    torch.manual_seed(0)
    config = MixtralConfig(vocab_size=40, num_local_experts=3, num_key_value_heads=2, **SIZES)
    model = MixtralForCausalLM(config).eval()
    name = "model.layers.0.mlp.experts.down_proj"
    parts = {f"{name}.{i}": drawn(16, 24, 3, 5) for i in (0, 2)}
    W = TunedModel(model, parts, {}).weights()[name]
    assert W.shape == (3, 16, 24)
    torch.testing.assert_close(W[0], parts[f"{name}.0"].dense(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(W[1], model.get_parameter(name)[1])
    torch.testing.assert_close(W[2], parts[f"{name}.2"].dense(), rtol=1e-5, atol=1e-5)


def test_layers_are_found_in_every_family_and_missed_in_a_sentence(tuned):
    assert layer_names(tuned.model) == ["model.layers.0", "model.layers.1"]
    tuned.model.config.num_hidden_layers = 7
    with pytest.raises(UserError, match=r"has 0 lists of 7 layers.*leave --match out"):
        layer_names(tuned.model)


def test_every_step_trains_the_smallest_size_and_one_of_all():
    at = sizes_in_turn(100, 1600, lambda size: size)  # four octaves
    steps = [at(step) for step in range(160)]
    assert {smallest for _, smallest in steps} == {100}
    octaves = [math.log2(one / 100) for one, _ in steps]
    for first in range(0, 160, 20):  # whatever stretch of steps is taken, an even share falls on each octave
        counts = [sum(i <= place < i + 1 for place in octaves[first : first + 20]) for i in range(4)]
        assert min(counts) >= 4 and max(counts) <= 6


def test_a_step_goes_down_the_gradient_of_the_sum(tuned):
    """Against torch's own Adam, at the first step of a schedule that warms up over one."""
    parameters = list(tuned.trained())
    wanted = [p.detach().clone().requires_grad_() for p in parameters]
    fitting = Fitting(parameters, 10, 0.1)
    goals = [torch.randn_like(p) for p in wanted]
    losses = (lambda ps: sum((p - g).square().sum() for p, g in zip(ps, goals, strict=True)), lambda ps: ps[0].sum())
    found = fitting.step(loss(parameters) for loss in losses)
    total = sum(loss(wanted) for loss in losses)
    assert found == pytest.approx(float(total.detach()))
    total.backward()
    rates = [0.1 * float(p.detach().square().mean().sqrt()) for p in wanted]
    torch.optim.Adam([{"params": [p], "lr": lr} for p, lr in zip(wanted, rates, strict=True)], betas=(0.9, 0.99)).step()
    torch.testing.assert_close(parameters, wanted, rtol=1e-5, atol=1e-6)
    assert fitting.done == 1 and all(p.grad is None for p in parameters)


def done(saved: SavedTuning) -> int:
    """Return the number of steps in a saved state of distillation."""
    return torch.load(saved.path, weights_only=True)["fitting"]["done"]


class StopsAfterTwo:
    """A stream that raises `Stopped` in place of its third batch, as if a stop were requested while text is read."""

    repeats, given = False, 0

    def __next__(self) -> dict[str, Tensor]:
        self.given += 1
        if self.given > 2:
            raise Stopped
        return {"input_ids": ids(), "labels": ids()}

    def state_dict(self) -> dict:
        return {"rows": self.given}

    def close(self) -> None:
        pass


def test_a_stop_while_text_is_waited_for_saves_what_was_done(tuned, tmp_path):
    saved = SavedTuning(tmp_path / "state.pt")
    with pytest.raises(UserError, match="interrupted after 2 of 9 steps; the same command goes on"):
        Distillation(tuned, lambda state: StopsAfterTwo(), 9, saved, NeverAsked(), 0.0, lambda step: [None]).run()
    assert done(saved) == 2


class RepeatsAfterTwo(StopsAfterTwo):
    """A stream whose third batch begins the text anew."""

    def __next__(self) -> dict[str, Tensor]:
        self.given += 1
        self.repeats = self.given > 2
        return {"input_ids": ids(), "labels": ids()}


def test_text_that_turns_out_to_repeat_ends_distillation_and_what_was_done_is_saved(tuned, tmp_path):
    saved = SavedTuning(tmp_path / "state.pt")
    with pytest.raises(
        UserError, match="repeats after 2 of the 9 batches of --distill; give fewer tokens, or more text"
    ):
        Distillation(tuned, lambda state: RepeatsAfterTwo(), 9, saved, NeverAsked(), 0.0, lambda step: [None]).run()
    assert done(saved) == 2


# ---- the command


@torch.no_grad()
def divergence(small: Path, dense: Path, files: list[str], **options) -> float:
    """Mean KL(dense ‖ small) per token of the first validation documents, by transformers."""
    models = [AutoModelForCausalLM.from_pretrained(folder, **more) for folder, more in ((dense, {}), (small, options))]
    tokenizer, total, count = AutoTokenizer.from_pretrained(small), 0.0, 0
    for line in Path(files[0]).read_text().splitlines()[:20]:
        row = torch.tensor([tokenizer(json.loads(line)["text"])["input_ids"][:32]])
        q, p = (F.log_softmax(model(row).logits.double(), -1) for model in models)
        total, count = total + float((q.exp() * (q - p)).sum()), count + row.numel()
    return total / count


@pytest.fixture
def dense(runs) -> Path:
    return last_checkpoint(runs / "salaad") / "model"


WORDS = {"budget": "0.4", "dtype": "float32"}


def test_matching_and_distillation_come_nearer_to_the_dense_model(runs, dense, text_files, tmp_path):
    ways = {"cut": {}, "matched": {"match": 32}, "distilled": {"distill": "8K"}, "both": {"match": 32, "distill": "8K"}}
    found, numbers = {}, set()
    for name, options in ways.items():
        compress(runs / "salaad", tmp_path / name, **WORDS, **options)
        found[name] = divergence(tmp_path / name, dense, text_files["validation"])
        record = json.loads((tmp_path / name / "compression.json").read_text())
        assert (record["match"], record["distill"]) == (options.get("match", 0), options.get("distill"))
        numbers.add(tuple(record["numbers_stored"]))
    assert found["matched"] < 0.9 * found["cut"] and found["distilled"] < 0.9 * found["cut"]
    assert found["both"] < found["distilled"]
    assert len(numbers) == 1  # fitting adds no number to those stored
    assert "matched to the dense one on 32 sequences" in (tmp_path / "both" / "README.md").read_text()


def test_all_sizes_of_an_elastic_folder_come_nearer(runs, dense, text_files, tmp_path):
    folders = {"cut": {}, "tuned": {"match": 32, "distill": "9K"}}
    for name, options in folders.items():
        compress(runs / "salaad", tmp_path / name, "--elastic", **WORDS, **options)
    record = json.loads((tmp_path / "cut" / "compression.json").read_text())
    smallest = record["budget"]
    for size in (smallest, round(1.3 * smallest)):
        before, after = (divergence(tmp_path / f, dense, text_files["validation"], budget=size) for f in folders)
        assert after < 0.95 * before
    # The units are the same but their values differ, so the two folders have different digests.
    digests = {ModelOnDisk.open(tmp_path / name).digest[:16] for name in folders}
    assert len(digests) == 2
    largest = divergence(tmp_path / "tuned", dense, text_files["validation"])
    assert largest < divergence(tmp_path / "tuned", dense, text_files["validation"], budget=smallest)


def test_a_folder_that_was_fitted_holds_no_size_above_that_of_the_dense_model(runs, tmp_path):
    held, unit = {}, 0
    for name, options in {"as it is": {}, "matched": {"match": 8}}.items():
        compress(runs / "salaad", tmp_path / name, "--elastic", **WORDS, **options)
        entry = json.loads((tmp_path / name / "config.json").read_text())["quantization_config"]
        held[name] = entry["fixed"] + sum(rank * (n + m) + nnz for n, m, rank, nnz in entry["blocks"].values())
        unit = max(n + m for n, m, *_ in entry["blocks"].values())
    dense = entry["dense"]
    assert held["as it is"] > dense >= held["matched"] > dense - unit
    with pytest.raises(UserError, match="that the folder holds"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "matched", budget=dense + unit)
    AutoModelForCausalLM.from_pretrained(tmp_path / "matched", budget="1.0")  # as near to X as whole units come
    told = {name: (tmp_path / name / "README.md").read_text() for name in held}
    assert "all units are kept" in told["as it is"] and "as many units as X has parameters for" in told["matched"]


def test_a_folder_that_is_matched_with_all_of_its_units_holds_them_as_matched(runs, dense, text_files, tmp_path):
    for name, options in {"as it is": {}, "matched": {"match": 8}}.items():
        words = WORDS | {"budget": "9M"}  # above L + S
        compress(runs / "salaad", tmp_path / name, "--elastic", **words, **options)
    U = {name: load_file(tmp_path / name / "model.safetensors")[f"elastic.{Q}.U"] for name in ("as it is", "matched")}
    assert not torch.equal(U["as it is"][: len(U["matched"])], U["matched"])


def test_a_range_of_its_own_is_nearer_than_one_for_all_sizes(runs, dense, text_files, tmp_path):
    folders = {"one": "0.4", "two": "0.4, 0.7"}
    for name, budget in folders.items():
        compress(runs / "salaad", tmp_path / name, "--elastic", budget=budget, dtype="float32", distill="9K")
    record = json.loads((tmp_path / "two" / "compression.json").read_text())
    small, large = record["ranges_from"][::-1]
    one, two = (divergence(tmp_path / name, dense, text_files["validation"], budget=large) for name in folders)
    assert two < one
    # Sizes below the second range are about as near as those of a folder with one range.
    for size in (small, (small + large) // 2):
        one, two = (divergence(tmp_path / name, dense, text_files["validation"], budget=size) for name in folders)
        assert two < 1.1 * one
    assert "in each of 2 ranges of sizes" in (tmp_path / "two" / "README.md").read_text()


def interrupted(monkeypatch, after: int) -> None:
    """Make `StopRequest.asked` true once it has been read `after` times."""
    looked = [0]

    def asked(self) -> bool:
        looked[0] += 1
        return looked[0] > after

    monkeypatch.setattr(StopRequest, "asked", property(asked, lambda self, value: None), raising=False)


@pytest.mark.parametrize(
    ("elastic", "words", "after", "said"),
    [
        ((), {"match": 16}, 13, "interrupted while model.layers.0 was matched"),
        ((), {"distill": "4K"}, 20, "interrupted after"),
        (("--elastic",), {"match": 16}, 13, "interrupted while model.layers.0 was matched"),
        (("--elastic",), {"match": 16, "distill": "4K"}, 60, "interrupted after"),
    ],
)
def test_the_same_command_goes_on_after_an_interruption(runs, tmp_path, monkeypatch, elastic, words, after, said):
    arguments = ["--checkpoint", runs / "salaad", *elastic]
    arguments += [f"--{key}={value}" for key, value in (WORDS | words).items()]
    with monkeypatch.context() as patch:
        interrupted(patch, after)
        error = refused("compress.py", *arguments, f"--output={tmp_path / 'a'}")
    assert said in error and "goes on" in error
    assert not (tmp_path / "a").exists()
    kept = list((runs / "salaad" / "cache").glob("*/unfinished/*"))
    compress(runs / "salaad", tmp_path / "another", budget="0.6", match=8)
    tokenizer = shutil.copytree(last_checkpoint(runs / "salaad") / "model", tmp_path / "the same tokenizer")
    compress(runs / "salaad", tmp_path / "other rows", *elastic, **WORDS, **words, **{"data.packing": "true"})
    assert all(path.exists() for path in kept)  # other commands leave the state of the interrupted one
    compress(runs / "salaad", tmp_path / "a", *elastic, **WORDS, **words, **{"data.tokenizer": tokenizer})
    assert not any(path.exists() for path in kept)
    compress(runs / "salaad", tmp_path / "b", *elastic, **WORDS, **words)
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)


def families(folder: Path) -> dict[str, Path]:
    """Save random models of several architectures in `folder`; return name → folder."""
    torch.manual_seed(0)
    wide = SIZES | {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 512}
    made = {
        "llama": LlamaForCausalLM(LlamaConfig(**wide)),
        "qwen2": Qwen2ForCausalLM(Qwen2Config(**wide, num_key_value_heads=1)),
        "mistral": MistralForCausalLM(MistralConfig(**wide, num_key_value_heads=1, sliding_window=16)),
    }
    for name, model in made.items():
        sharpen(model).save_pretrained(folder / name)
    sharpen(AutoModelForCausalLM.from_pretrained(save_gpt2(folder / "plain"))).save_pretrained(folder / "gpt2")
    return {name: folder / name for name in (*made, "gpt2")}


def sharpen(model: PreTrainedModel) -> PreTrainedModel:
    """Enlarge the weight matrices of a model, so that its predictions are not nearly uniform, and return the model."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    return model


@pytest.fixture
def text(tiny_tokenizer_dir, text_files) -> dict[str, object]:
    """Options that name a text and a tokenizer, for models that were saved without a run."""
    return text_options(text_files, tiny_tokenizer_dir)


def test_any_dense_model_is_matched_and_distilled(tmp_path, tiny_tokenizer_dir, text_files, text):
    """Split by GoDec; the next test splits all of them by robust PCA."""
    for name, folder in families(tmp_path).items():
        AutoTokenizer.from_pretrained(tiny_tokenizer_dir).save_pretrained(folder)
        found = []
        for options in ({}, {"match": 32, "distill": "4K"}):
            made = tmp_path / f"{name}-{len(found)}"
            compress(folder, made, "--godec", budget="0.8", dtype="float32", **options, **text)
            found.append(divergence(made, folder, text_files["validation"]))
        assert found[1] < 0.95 * found[0], name


def test_all_sizes_of_any_dense_model_are_matched_and_distilled(tmp_path, tiny_tokenizer_dir, text_files, text):
    """The folders have two ranges, and the head is split where it is not tied; each step fits the smallest size."""
    for name, folder in families(tmp_path).items():
        AutoTokenizer.from_pretrained(tiny_tokenizer_dir).save_pretrained(folder)
        shares = (0.9, 0.8) if name == "gpt2" else (0.7, 0.5)
        words, found = ["--rpca", "--elastic", *["--lm_head"] * (name != "gpt2")], []
        for options in ({}, {"match": 32, "distill": "4K"}):
            made = tmp_path / f"{name}-{len(found)}"
            compress(folder, made, *words, budget=",".join(map(str, shares)), dtype="float32", **options, **text)
            found.append(divergence(made, folder, text_files["validation"], budget=shares[-1]))
        assert found[1] < 0.95 * found[0], (name, found)


def test_what_cannot_be_fitted_is_refused_and_nothing_is_left(runs, tmp_path, text_files):
    run, out = runs / "salaad", tmp_path / "out"
    few = ["--data.source=files", f"--data.validation_files={text_files['validation'][0]}"]
    gone = [*few, "--data.files=nowhere.jsonl"]
    few.append(f"--data.files={text_files['train'][2]}")
    compress(run, tmp_path / "small", budget="0.5")
    compress(run, tmp_path / "every", "--elastic")
    cases = [
        (run, ["--match=8"], "--match and --distill fit what is cut; give a --budget too"),
        (run, ["--distill=1K"], "give a --budget too"),
        (run, ["--budget=0.5", "--match=-1"], "match is -1"),
        (run, ["--budget=0.5", "--text_share=0.3"], "nothing is distilled; give --distill TOKENS too"),
        (run, ["--budget=0.5", "--distill=1K", "--text_share=1.5"], "--text-share is 1.5, outside [0, 1]"),
        (run, ["--budget=0.7,0.5", "--distill=1K"], "--budget 0.7,0.5 names several sizes, and a folder holds one"),
        (run, ["--elastic", "--budget=,", "--distill=1K"], "','"),
        (run, ["--elastic", "--budget=0.7,100", "--distill=1K"], "is below the floor"),
        (run, ["--elastic", "--budget=1M,0.8", "--distill=1K"], "a range of sizes from 1M would be above the"),
        (run, ["--budget=0.5", "--distill=none"], "--distill 'none' is no number"),
        (run, ["--budget=0.5", "--match=100000"], "100000 are asked for; give --match "),
        (run, ["--budget=0.5", "--distill=1000M", *few], "tokens before it repeats, 31250000 are asked for"),
        (run, ["--budget=0.5", "--distill=1K", *gone], "nowhere.jsonl"),
        (tmp_path / "small", ["--budget=0.4", "--distill=1K"], "holds no dense original"),
        (tmp_path / "every", ["--budget=0.4", "--match=8"], "without --match"),
        (tmp_path / "every", ["--budget=0.4", "--distill=1K"], "without --distill"),
    ]
    for folder, words, said in cases:
        assert said in refused("compress.py", f"--checkpoint={folder}", *words, f"--output={out}"), words
        assert not out.exists()
