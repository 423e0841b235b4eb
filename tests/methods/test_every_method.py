"""What every training method has to do: in the trainer, from a checkpoint, on several processes, with its folders."""

import json
import os
import signal
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

import compress
import evaluate
from salaad.common.errors import UserError
from salaad.config.methods import SETTINGS
from salaad.factored.fixed_size import slr_modules
from salaad.methods.low_rank_layers import factored_layers, projections
from salaad.methods.optimizer import step_unless
from salaad.methods.registry import method_of
from salaad.model.build import describe_model, outline
from salaad.model.loss import SummedLoss
from salaad.model.parameters import count_parameters
from scripts.host_reads import HostReads
from scripts.reliability.toy_run import toy_arguments
from tests.helpers.tiny_llama import IDS, config_of, llama
from tests.helpers.training import last_checkpoint, lines, moments, run_training, train_on_ranks

# The tests of the trainer itself cover full_rank and salaad.
METHODS = tuple(name for name in SETTINGS if name not in ("full_rank", "salaad"))
# Periodic work after steps 4 and 8 of 12.
OPTIONS = {
    "lora": {"rank": 4, "dropout": 0},
    "relora": {"rank": 4, "dropout": 0, "every": 4, "rewarmup": 2},
    "galore": {"rank": 4, "every": 4},
    "loro": {"rank": 4, "every": 4, "rewarmup": 2},
    "cola": {"rank": 4},
    "sltrain": {"rank": 4},
    "lost": {"rank": 4, "density": 0.1},
    "matformer": {"halvings": 2},
}
VARIANTS = {**OPTIONS, "lost, linear": {**OPTIONS["lost"], "activation": "linear"}}
VARIANTS["matformer, summed"] = {**OPTIONS["matformer"], "train": "summed"}
# Methods whose checkpoints hold L and S, and methods with an activation between the factors.
WITH_PARTS, ACTIVATED = ("loro", "sltrain", "lost, linear"), ("cola", "lost")
# Millions of parameters by the sizes and ranks of the papers: 2Vd + (2L + 1)d, and r(8d + 3(d + m)) per layer.
SIZES = ("60m", "130m", "350m", "1b")
DENSE, FACTORS = (58.07, 134.11, 367.97, 1339.08), (42.77, 94.00, 185.22, 609.31)
STORED = {
    "full_rank": DENSE,
    "lora": DENSE,
    "relora": DENSE,
    "galore": DENSE,
    "loro": FACTORS,
    "cola": FACTORS,
    "sltrain": (43.53, 96.55, 194.29, 645.55),
    "lost": (43.02, 94.78, 188.18, 621.14),
}
PRINTED = {"lost": (42.77, 94.00, 185.22, 609.31)}  # as the paper prints it, without LOST's columns
TRAINING = {**STORED, "lora": (68.07, 178.93, 487.61, 1817.22), "relora": (68.07, 178.93, 487.61, 1817.22)}


def words_of(variant: str) -> dict:
    """Return the options of a variant's toy run."""
    method = variant.partition(",")[0]
    # A large ε keeps rounding small: see test_two_processes_train_like_one of the trainer.
    return {
        "method": method,
        "optimizer__eps": 1e-3,
        **{f"{method}__{key}": value for key, value in VARIANTS[variant].items()},
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text_files, tiny_tokenizer_dir):
    """A function from a variant to the folder of its toy run in one process, which the first call trains."""
    folder, toy = tmp_path_factory.mktemp("finished"), partial(toy_arguments, text_files, tiny_tokenizer_dir)

    def trained(variant: str):
        if not (folder / variant).exists():
            run_training(toy(**words_of(variant)), folder / variant)
        return folder / variant

    return trained


# ---- counts


@pytest.mark.parametrize("method", list(STORED))
@pytest.mark.parametrize("size", SIZES)
def test_the_counts_are_those_of_the_literature(method, size):
    config = config_of(method, "--config", size)
    model = outline(describe_model(config.model, 256))
    kind = method_of(config)
    kind.rebuild(model, config)
    place = SIZES.index(size)
    assert count_parameters(model) / 1e6 == pytest.approx(TRAINING[method][place], abs=0.01)
    stored = kind.stored(model)
    assert stored["parameters"] / 1e6 == pytest.approx(STORED[method][place], abs=0.01)
    assert stored.get("parameters_printed", 0) / 1e6 == pytest.approx(PRINTED.get(method, (0,) * 4)[place], abs=0.01)


@pytest.mark.parametrize("method", METHODS)
def test_the_plan_counts_memory_by_kind(toy, tmp_path, capsys, method):
    run_training([*toy(**words_of(method)), "--dry-run"], tmp_path / "run")
    said = capsys.readouterr().out
    for kind in ("weights", "gradients", "optimizer state", "activations"):
        assert f"memory per rank: {kind}" in said
    assert not (tmp_path / "run").exists()


# ---- what is kept of model.path


@pytest.mark.parametrize("variant", [name for name in VARIANTS if not name.startswith(("galore", "matformer"))])
def test_a_method_says_whether_the_weights_of_the_projections_are_lost(variant):
    words = [f"--{key.replace('__', '.')}={value}" for key, value in words_of(variant).items()]
    config, model = config_of(variant.partition(",")[0], "--model.path=trained", *words), llama()
    kind, before = method_of(config), {name: linear.weight for name, linear in projections(model).items()}
    kind.rebuild(model, config)
    # Weights drawn anew have a cosine of about zero with those before, and rank 4 of 16 keeps most of random ones.
    alike = [
        torch.cosine_similarity(layer.dense_weight().flatten(), before[name].flatten(), dim=0).item()
        for name, layer in factored_layers(model).items()
    ]
    mean = sum(alike) / len(alike)
    assert mean > 0.4 or abs(mean) < 0.1
    said = "" if mean > 0.4 else f"{config.method} draws the 14 projections anew; of trained only embedding, head and"
    assert kind.remark(model, config).startswith(said) and bool(kind.remark(model, config)) == bool(said)
    assert not kind.remark(model, replace(config, model=replace(config.model, path=None)))


def test_the_loss_of_trained_projections_is_printed_before_training_and_not_at_a_resume(
    toy, tmp_path, capsys, finished
):
    trained = last_checkpoint(finished("matformer")) / "model"
    options = toy(**words_of("sltrain"), model__path=trained, train__steps=2, train__save_every=1)
    said = f"sltrain draws the 14 projections anew; of {trained} only embedding, head and norms are kept"
    run_training([*options, "--dry-run"], tmp_path / "run")
    assert f"| weights of model.path | {said} |" in " ".join(capsys.readouterr().out.split())
    run_training(options, tmp_path / "run")
    assert said in capsys.readouterr().out
    run_training([*options, f"--resume={tmp_path / 'run' / 'checkpoints' / 'step-0000001'}"], tmp_path / "rest")
    assert said not in capsys.readouterr().out


# ---- in the trainer


def state_of(folder) -> dict:
    """Return the trained weights, the optimizer's moments and the method's own tensors of the last checkpoint."""
    checkpoint = last_checkpoint(folder)
    found = {f"{index} {key}": value for index, entry in moments(checkpoint).items() for key, value in entry.items()}
    weights = checkpoint / "state" / "weights.safetensors"
    found |= load_file(weights if weights.exists() else checkpoint / "model" / "model.safetensors")
    own = checkpoint / "state" / "method.safetensors"
    return found | (load_file(own) if own.exists() else {})


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_two_interruptions_leave_no_trace(toy, tmp_path, monkeypatch, finished, variant):
    options, pending = toy(**words_of(variant)), {4, 9}  # 4 is right after a merge, an exact step, a new subspace
    kind = method_of(config_of(variant.partition(",")[0]))
    original = kind.after_step

    def after_step(self, optimizer, step, discarded):
        original(self, optimizer, step, discarded)
        if step in pending:
            pending.discard(step)
            os.kill(os.getpid(), signal.SIGTERM)

    whole, pieces = finished(variant), tmp_path / "pieces"
    monkeypatch.setattr(kind, "after_step", after_step)
    for _ in range(3):
        run_training(options, pieces)
    assert not pending
    assert lines(whole) == lines(pieces)
    assert lines(whole, "evaluations.jsonl") == lines(pieces, "evaluations.jsonl")
    first, second = state_of(whole), state_of(pieces)
    assert first.keys() == second.keys()
    assert all(torch.equal(torch.as_tensor(value), torch.as_tensor(second[name])) for name, value in first.items())


def test_two_processes_train_like_one_and_the_rest_goes_on_alone(toy, tmp_path, finished):
    """Two processes train every variant; then one process resumes each from the middle."""
    orders = [
        (toy(**words_of(variant), train__save_every=6, train__keep_last=0), tmp_path / f"{variant}-two")
        for variant in VARIANTS
    ]
    train_on_ranks(orders, 2, tmp_path)
    for variant in VARIANTS:
        one, two = lines(finished(variant)), lines(tmp_path / f"{variant}-two")
        for alone, shared in zip(one, two, strict=True):  # another order of sums, enlarged by Adam's first steps
            assert shared["loss"] == pytest.approx(alone["loss"], rel=5e-4), variant
        middle = tmp_path / f"{variant}-two" / "checkpoints" / "step-0000006"
        run_training([*toy(**words_of(variant)), f"--resume={middle}"], tmp_path / f"{variant}-rest")
        for alone, rest in zip(one[6:], lines(tmp_path / f"{variant}-rest")[-6:], strict=True):
            assert rest["loss"] == pytest.approx(alone["loss"], rel=5e-4), variant


@pytest.mark.parametrize("method", METHODS)
def test_all_that_a_projection_trains_learns_at_the_rate_of_projections(method):
    config = config_of(method, "--optimizer.projection_lr=0.25")
    kind = method_of(config)
    if kind.own_projection_rate:
        pytest.skip("has a rate of its own for them")
    model = llama()
    kind.rebuild(model, config)
    fast, slow = kind(model, config).build_optimizer()[0].param_groups
    assert slow["lr"] == pytest.approx(fast["lr"] / 4)
    names = {id(p): name for name, p in model.named_parameters()}
    found = {names[id(p)] for p in slow["params"]}
    assert found == {name for name, p in model.named_parameters() if "_proj" in name and p.requires_grad}


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_an_ordinary_step_waits_for_no_device(variant):
    model = llama()
    words = [f"--{key.replace('__', '.')}={value}" for key, value in words_of(variant).items()]
    config = config_of(variant.partition(",")[0], *words)
    method_of(config).rebuild(model, config)
    method = method_of(config)(model, config)
    optimizer, _ = method.build_optimizer()
    loss, found = SummedLoss(model), {}
    for step in (1, 2):  # step 1 makes the optimizer's state and a subspace
        with HostReads() as reads:
            loss(IDS, IDS).backward()
            method.after_backward()
            step_unless(torch.zeros(()), optimizer)
            optimizer.zero_grad()
            method.after_step(optimizer, step, torch.zeros(()))
        found[step] = reads.count
    assert found[2] == 0


@pytest.mark.parametrize("precision", ["tf32", "bf16-mixed", "bf16"])
@pytest.mark.parametrize("method", METHODS)
def test_it_trains_in_every_precision(toy, tmp_path, finished, method, precision):
    run_training(toy(**words_of(method), train__precision=precision), tmp_path / "run")
    exact, short = (lines(folder) for folder in (finished(method), tmp_path / "run"))
    # bfloat16 has three digits, and losses are near 6; widths of MatFormer differ by more than its rounding.
    assert short[-1]["loss"] == pytest.approx(exact[-1]["loss"], abs=0.15)


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_micro_batches_train_like_one_batch(toy, tmp_path, finished, variant):
    run_training(toy(**words_of(variant), train__micro_batch=1), tmp_path / "parts")
    for one, other in zip(lines(finished(variant)), lines(tmp_path / "parts"), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=5e-4)


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_recomputed_activations_change_nothing(toy, tmp_path, finished, variant):
    run_training(toy(**words_of(variant), train__gradient_checkpointing="true"), tmp_path / "recomputed")
    for one, other in zip(lines(finished(variant)), lines(tmp_path / "recomputed"), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=5e-4)


@pytest.mark.parametrize("method", METHODS)
def test_another_method_does_not_go_on_from_its_checkpoint(toy, tmp_path, finished, method):
    other = "cola" if method != "cola" else "loro"
    with pytest.raises(
        UserError, match=rf"was begun with method {method}, but {other} is asked for; keep it, or begin"
    ):
        run_training([*toy(**words_of(other)), f"--resume={last_checkpoint(finished(method))}"], tmp_path / "other")


# ---- the folder of a finished run


def rows_of(folder, name: str) -> dict:
    return {row["variant"]: row for row in json.loads((folder / f"{name}.json").read_text())["rows"]}


def run_evaluate(monkeypatch, *words) -> None:
    monkeypatch.setattr("sys.argv", ["evaluate.py", *map(str, words)])
    evaluate.main()


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_evaluate_measures_what_training_measured(tmp_path, monkeypatch, finished, variant):
    folder = finished(variant)
    more = ("--variants", "X,L+S") if variant in WITH_PARTS else ()
    run_evaluate(monkeypatch, "perplexity", "--checkpoint", folder, "--tokens", 2000, "--output", tmp_path, *more)
    found, trained = rows_of(tmp_path, "perplexity"), {r["variant"]: r for r in lines(folder, "evaluations.jsonl")}
    assert found["X"]["perplexity"] == pytest.approx(trained["X"]["perplexity"], rel=1e-4)
    assert found["X"]["tokens"] == trained["X"]["tokens"]
    if variant in WITH_PARTS:
        assert found["L+S"]["perplexity"] == pytest.approx(trained["X"]["perplexity"], rel=1e-4)
        assert found["L+S"]["parameters"] == trained["X"]["parameters"]
    assert found["X"]["parameters"] == trained["X"]["parameters"]
    if variant.startswith("matformer"):
        uniform = {row["parameters"]: row["perplexity"] for row in trained.values() if "+" not in row["variant"]}
        assert {row["parameters"]: row["perplexity"] for row in found.values()} == pytest.approx(uniform, rel=1e-4)


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_model_opens_in_plain_transformers_or_as_a_folder_of_ours(finished, variant):
    folder = last_checkpoint(finished(variant)) / "model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    entry = json.loads((folder / "config.json").read_text()).get("quantization_config")
    if variant in ACTIVATED:
        assert entry["activation"] == "silu" and len(slr_modules(model)) == 14
    else:
        assert entry is None and type(model.model.layers[0].mlp.up_proj) is nn.Linear


def run_compress(monkeypatch, *words) -> None:
    monkeypatch.setattr("sys.argv", ["compress.py", *map(str, words)])
    compress.main()


@pytest.mark.parametrize("variant", WITH_PARTS)
@pytest.mark.parametrize("how", [(), ("--budget", "35000"), ("--budget", "35000", "--kappa", "0.5"), ("--elastic",)])
def test_low_rank_plus_sparse_is_cut_like_salaads(tmp_path, monkeypatch, finished, variant, how):
    folder = finished(variant)
    run_compress(monkeypatch, "--checkpoint", folder, "--output", tmp_path / "small", *how, "--dtype", "float32")
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    record = json.loads((tmp_path / "small" / "compression.json").read_text())
    if "--budget" in how:
        assert 35000 - 100 < record["parameters"][1] <= 35000
        return
    merged = AutoModelForCausalLM.from_pretrained(last_checkpoint(folder) / "model")
    ids = torch.arange(24).view(2, 12)
    torch.testing.assert_close(small(ids).logits, merged(ids).logits, rtol=1e-3, atol=1e-4)
    trained = lines(folder, "evaluations.jsonl")[-1]["parameters"]
    assert record["parameters"][1] == trained and len(slr_modules(small)) == 14


@pytest.mark.parametrize("variant", ACTIVATED)
def test_factors_with_an_activation_stay_what_they_are(tmp_path, monkeypatch, finished, variant):
    folder = finished(variant)
    run_compress(monkeypatch, "--checkpoint", folder, "--output", tmp_path / "same", "--dtype", "float32")
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "same")
    ids = torch.arange(24).view(2, 12)
    own = AutoModelForCausalLM.from_pretrained(last_checkpoint(folder) / "model")
    assert torch.equal(small(ids).logits, own(ids).logits)
    card = (tmp_path / "same" / "README.md").read_text()
    assert "with layers y = U·silu(V·x) + S·x, as they were trained," in card and "L + S" not in card
    fitted = ("--budget", "35000", "--match", "4")
    for how in (("--format", "dense"), ("--budget", "35000"), ("--rpca",), fitted):
        with pytest.raises(UserError, match=r"silu between (their factors|the factors of its layers)"):
            run_compress(monkeypatch, "--checkpoint", folder, "--output", tmp_path / "other", *how)
    with pytest.raises(
        UserError, match=r"with a silu between the factors, so no weight is there to split; give another"
    ):
        run_evaluate(monkeypatch, "rpca", "--checkpoint", folder, "--output", tmp_path)
    small.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(small(ids).logits, again(ids).logits)
    run_compress(monkeypatch, "--checkpoint", folder, "--output", tmp_path / "bytes", "--dtype", "int8")
    rounded = AutoModelForCausalLM.from_pretrained(tmp_path / "bytes", dtype=torch.float32)
    torch.testing.assert_close(rounded(ids).logits, own(ids).logits, rtol=0, atol=0.05)  # the logits are around 1


@pytest.mark.parametrize("variant", ["matformer"])
def test_a_width_becomes_a_plain_folder(tmp_path, monkeypatch, finished, variant):
    folder = finished(variant)
    rows = {row["variant"]: row for row in lines(folder, "evaluations.jsonl")}
    budget = rows["X+X/2"]["parameters"]  # a mixed size, for which a folder holds the narrower width
    run_compress(
        monkeypatch, "--checkpoint", folder, "--output", tmp_path / "half", "--budget", budget, "--dtype", "float32"
    )
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert half.config.intermediate_size == 24 and count_parameters(half) == rows["X/2"]["parameters"]
    assert not hasattr(half.config, "quantization_config")
    half_folder = tmp_path / "half"
    run_evaluate(monkeypatch, "perplexity", "--checkpoint", half_folder, "--tokens", 2000, "--output", tmp_path)
    assert rows_of(tmp_path, "perplexity")["X"]["perplexity"] == pytest.approx(rows["X/2"]["perplexity"], rel=1e-4)
    with pytest.raises(UserError, match="holds narrower models and no L and S"):
        run_compress(
            monkeypatch, "--checkpoint", folder, "--output", tmp_path / "x", "--kappa", "0.5", "--budget", "0.9"
        )
    for words in (("--refine", "3"), ("--calibrate", "4")):
        with pytest.raises(UserError, match="nothing can be refined or calibrated; leave --refine and --calibrate out"):
            run_evaluate(monkeypatch, "perplexity", "--checkpoint", folder, "--variants", budget, *words)


@pytest.mark.parametrize("variant", ["sltrain"])
def test_the_sweep_takes_factors_that_were_trained(tmp_path, monkeypatch, finished, variant):
    words = ("--budgets", "36000,34500", "--kappas", "0,0.5,1", "--tokens", 500, "--output", tmp_path)
    run_evaluate(monkeypatch, "sweep", "--checkpoint", finished(variant), *words)
    rows = json.loads((tmp_path / "sweep.json").read_text())["rows"]
    assert {row["budget"] for row in rows if row["budget"]} == {36000, 34500}
