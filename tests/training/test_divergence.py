"""NaN and infinity in loss, gradient, weight and surrogate: discarded, named, counted, never saved."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

import train
from salaad.common.errors import UserError
from salaad.config.methods import SalaadConfig
from salaad.methods.optimizer import step_unless
from salaad.methods.salaad import surrogate
from salaad.methods.salaad.method import SalaadMethod
from salaad.methods.salaad.storage import read_surrogates
from salaad.methods.salaad.surrogate import Surrogate
from salaad.methods.salaad.update import KEPT, SOLVERS, UpdateRecord
from salaad.spectral import ladder as spectral
from salaad.training import gradients
from tests.helpers.training import last_checkpoint, lines, run_training, weights

BLOCK = "model.layers.1.mlp.up_proj"


def spoil(monkeypatch, bad: dict[int, str]) -> None:
    """At the steps (from 1) of `bad` make the loss NaN, its value infinite, or a gradient of one block infinite."""
    clip, loss = gradients.Gradients.clip, train.SummedLoss.forward
    calls = {"backward": 0}
    backward = train.Trainer.backward

    def counted(self, batch, targets):
        calls["backward"] = self.step + 1
        return backward(self, batch, targets)

    def forward(self, *args):
        value = loss(self, *args)
        where = bad.get(calls["backward"])
        if where == "nan loss" and self.training:
            return value * float("nan")
        # Only the value is infinite: the gradient stays what it was.
        return value + float("inf") if where == "inf loss" and self.training else value

    def spoiled(self, step):
        if bad.get(step) == "gradient":
            self._named[f"{BLOCK}.weight"].grad[3, 5] = float("inf")
        clip(self, step)

    monkeypatch.setattr(train.Trainer, "backward", counted)
    monkeypatch.setattr(train.SummedLoss, "forward", forward)
    monkeypatch.setattr(gradients.Gradients, "clip", spoiled)


def spy_on_weights(monkeypatch) -> list[dict]:
    """Return a list that gets the weights and moments before and after every step of the optimizer."""
    seen = []
    original = train.step_unless

    def watched(broken, optimizer):
        def copy() -> list:
            state = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
            values = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
            return values + [v.clone() for one in state for v in one.values() if torch.is_tensor(v)]

        before = copy()
        original(broken, optimizer)
        seen.append({"before": before, "after": copy()})

    monkeypatch.setattr(train, "step_unless", watched)
    return seen


@pytest.mark.parametrize("what", ["nan loss", "inf loss", "gradient"])
@pytest.mark.parametrize("optimizer", ["AdamW", "RMSprop"])  # fused, and not
def test_a_bad_step_is_not_taken_and_the_run_goes_on(toy, tmp_path, monkeypatch, capsys, what, optimizer):
    seen = spy_on_weights(monkeypatch)
    spoil(monkeypatch, {3: what, 4: what, 9: what})
    arguments = toy(train__on_nonfinite="skip", train__save_every=4, optimizer__name=optimizer, train__log_every=2)
    run_training(arguments, tmp_path / "run")
    for step, pair in enumerate(seen, 1):
        same = all(torch.equal(a, b) for a, b in zip(pair["before"], pair["after"], strict=False))
        assert same == (step in (3, 4, 9)), step
    rows = lines(tmp_path / "run")
    assert [row["discarded"] for row in rows] == [0, 2, 2, 2, 3, 3]
    # Both steps of the second line were bad; the fifth line is the mean of one.
    assert rows[1]["loss"] is None and rows[1]["grad_norm"] is None
    assert all(row["loss"] > 0 for row in rows[:1] + rows[2:])
    said = capsys.readouterr().out
    where = f"the gradient of {BLOCK}.weight" if what == "gradient" else "the loss"
    assert f"step 3: {where} was not finite, so no step was taken" in said
    assert "batches skipped so far: 3 of 10" in said
    assert all(bool(tensor.isfinite().all()) for tensor in weights(tmp_path / "run").values())
    parts = read_surrogates(last_checkpoint(tmp_path / "run") / "surrogate")
    assert all(bool(tensor.isfinite().all()) for block in parts.values() for tensor in block.values())


def test_the_loss_of_a_line_is_the_mean_over_the_steps_taken(toy, tmp_path, monkeypatch):
    run_training(toy(train__steps=2), tmp_path / "plain")
    spoil(monkeypatch, {3: "nan loss"})
    run_training(toy(train__steps=3, train__on_nonfinite="skip", train__log_every=3), tmp_path / "run")
    [row] = lines(tmp_path / "run")
    plain = lines(tmp_path / "plain")
    # The schedule is longer, so the second step differs slightly from the plain run's.
    assert row["loss"] == pytest.approx((plain[0]["loss"] + plain[1]["loss"]) / 2, rel=1e-2)
    assert row["tokens"] > plain[1]["tokens"]


def test_a_first_batch_that_is_skipped_brings_no_warning_of_a_forgotten_step(toy, tmp_path, monkeypatch, recwarn):
    """Adamax has no fused form, so that its step is left out."""
    spoil(monkeypatch, {1: "gradient"})
    run_training(toy(train__steps=3, train__on_nonfinite="skip", optimizer__name="Adamax"), tmp_path / "run")
    assert lines(tmp_path / "run")[-1]["discarded"] == 1
    assert not [warning for warning in recwarn if "lr_scheduler" in str(warning.message)]


def test_a_skipped_batch_survives_a_resume(toy, tmp_path, monkeypatch):
    spoil(monkeypatch, {2: "gradient", 6: "nan loss"})
    options = {"train__on_nonfinite": "skip", "train__save_every": 4}
    run_training(toy(**options), tmp_path / "whole")
    saved = tmp_path / "whole" / "checkpoints" / "step-0000008"
    assert json.loads((saved / "state" / "trainer.json").read_text())["discarded"] == 2
    (tmp_path / "whole" / "checkpoints" / "latest").write_text("step-0000008\n")
    (tmp_path / "whole" / "summary.json").unlink()
    whole, before = lines(tmp_path / "whole"), weights(tmp_path / "whole")
    run_training(toy(**options), tmp_path / "whole")
    assert lines(tmp_path / "whole") == whole
    assert any(not torch.equal(before[name], tensor) for name, tensor in weights(tmp_path / "whole").items())


@pytest.mark.parametrize(
    ("options", "step", "cure"),
    [
        ({}, 5, "--train.on_nonfinite skip"),
        ({"train__on_nonfinite": "skip", "train__max_skipped": 1}, 6, "--train.max_skipped above 1"),
    ],
)
def test_a_run_stops_at_the_first_or_after_so_many_and_names_the_place(toy, tmp_path, monkeypatch, options, step, cure):
    spoil(monkeypatch, {5: "gradient", 6: "gradient"})
    with pytest.raises(UserError, match=rf"not finite at step {step}, first in the gradient of {BLOCK}.weight") as told:
        run_training(toy(train__save_every=2, **options), tmp_path / "run")
    assert f"--resume auto and {cure}, or with --resume" in str(told.value) and "\n" not in str(told.value)
    diagnosis = json.loads((tmp_path / "run" / "diagnosis.json").read_text())
    assert diagnosis["last_good_checkpoint"].endswith(last_checkpoint(tmp_path / "run").name)
    assert all(bool(tensor.isfinite().all()) for tensor in weights(tmp_path / "run").values())
    # The same run, told to skip, goes on and ends.
    run_training(toy(train__save_every=2, train__on_nonfinite="skip"), tmp_path / "run")
    assert lines(tmp_path / "run")[-1]["step"] == 12


@pytest.mark.parametrize("part", ["R", "T"])
@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_poisoned_surrogate_is_named_and_never_saved(toy, tmp_path, monkeypatch, part, policy):
    original = SalaadMethod.after_step

    def after_step(self, *given):
        original(self, *given)
        if self.salaad.steps == 7:
            getattr(self.salaad.surrogates[BLOCK], part)[1, 2] = float("nan")

    monkeypatch.setattr(SalaadMethod, "after_step", after_step)
    with pytest.raises(UserError, match=rf"first in .*{BLOCK}"):
        run_training(toy(train__save_every=2, train__log_every=100, train__on_nonfinite=policy), tmp_path / "run")
    assert last_checkpoint(tmp_path / "run").name == "step-0000006"
    parts = read_surrogates(last_checkpoint(tmp_path / "run") / "surrogate")
    assert all(bool(tensor.isfinite().all()) for block in parts.values() for tensor in block.values())


@pytest.mark.parametrize(
    ("weight", "settings"),
    [
        ("model.norm.weight", {}),
        ("model.layers.0.self_attn.q_proj.weight", {"method": "lora", "lora__rank": 4}),  # frozen
    ],
)
def test_a_model_to_begin_with_that_is_not_finite_is_refused_by_name(toy, tmp_path, weight, settings):
    run_training(toy(train__steps=1), tmp_path / "first")
    model = last_checkpoint(tmp_path / "first") / "model"
    tensors = load_file(model / "model.safetensors")
    tensors[weight].view(-1)[3] = float("nan")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=rf"{re.escape(weight)} is not finite in the model to begin with"):
        run_training(toy(model__path=model, **settings), tmp_path / "second")


def test_step_unless_leaves_weight_and_state_to_the_bit():
    for name in ("AdamW", "Adam", "SGD", "Adagrad", "RMSprop"):
        p = torch.nn.Parameter(torch.randn(5, 3))
        fused = {"fused": True} if name != "RMSprop" else {}
        optimizer = getattr(torch.optim, name)([p], lr=0.1, weight_decay=0.1, **fused)
        p.grad = torch.randn_like(p)
        step_unless(torch.zeros(()), optimizer)
        kept = p.detach().clone()
        p.grad = torch.full_like(p, float("nan"))
        step_unless(torch.ones(()), optimizer)
        assert torch.equal(p, kept), name
        p.grad = torch.ones_like(p)
        step_unless(torch.zeros(()), optimizer)
        assert not torch.equal(p, kept) and bool(p.isfinite().all()), name


# The solvers, each of which takes over where the one before fails.


def failing(*names: str):
    """Return a patch by which torch.linalg functions do not converge (`:float32`: in float32), or give NaN (`:nan`)."""

    def patch(monkeypatch) -> None:
        for name in names:
            function, _, how = name.partition(":")
            original = getattr(torch.linalg, function)

            def fails(A, *args, function=function, how=how, original=original, **kwargs):
                if how == "nan":
                    result = original(A, *args, **kwargs)
                    return tuple(torch.full_like(part, float("nan")) for part in result)
                if how == "float32" and A.dtype == torch.float64:
                    return original(A, *args, **kwargs)
                raise torch.linalg.LinAlgError(f"{function} did not converge")

            monkeypatch.setattr(torch.linalg, function, fails)

    return patch


SOLVERS_IN_ORDER = [
    ((), "gram"),
    (("eigh",), "exact"),
    (("eigh:nan",), "exact"),
    (("eigh", "svd:float32"), "regularised"),
]


def matrix(n: int = 24, m: int = 40) -> torch.Tensor:
    return torch.randn(n, m, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("broken", "solver"), SOLVERS_IN_ORDER)
@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_where_a_rung_fails_the_next_one_gives_the_same(monkeypatch, broken, solver, shape):
    Z, tau = matrix(*shape), 6.0
    U, sigma, Vh = torch.linalg.svd(Z.double(), full_matrices=False)
    L = (U * (sigma - tau).clamp_min(0)) @ Vh
    failing(*broken)(monkeypatch)
    found = spectral.threshold(Z, tau)
    assert found.solver == solver
    error = float(torch.linalg.vector_norm(found.L - L) / torch.linalg.vector_norm(Z))
    assert error <= found.bound
    assert found.L.dtype == found.sigma.dtype == torch.float32
    torch.testing.assert_close(found.sigma.double(), (sigma - tau).clamp_min(0), rtol=0, atol=found.bound * 60)


def test_a_failing_subspace_takes_the_next_solver(monkeypatch):
    n = 400
    torch.manual_seed(0)
    Z = torch.randn(n, 20) @ torch.randn(20, 500) + 0.01 * torch.randn(n, 500)
    first = spectral.threshold(Z, 10.0)
    assert spectral.threshold(Z, 10.0, first.basis).solver == "subspace"
    failing("qr")(monkeypatch)
    again = spectral.threshold(Z, 10.0, first.basis)
    assert again.solver == "gram"
    torch.testing.assert_close(again.L, first.L)


def test_without_any_rung_the_block_stays_and_says_so(monkeypatch):
    X, config = matrix(), SalaadConfig(every=1)
    block = Surrogate(X, rho=0.1, config=config)
    for _ in range(3):
        block.update(X)
    state = {key: value.clone() for key, value in block.state_dict().items()}
    rank = block.rank
    failing("eigh", "svd")(monkeypatch)
    record = UpdateRecord(*(row := block.update(1.1 * X).tolist())[:-1], SOLVERS[int(row[-1])])
    assert record.method == KEPT
    assert block.rank == rank
    for key, value in block.state_dict().items():
        assert torch.equal(value, state[key]), key
    # δ is that of the old L and S.
    distance = torch.linalg.vector_norm(1.1 * X.double() - block.low_rank().double() - block.sparse().double())
    assert record.delta == pytest.approx(float(distance), rel=1e-4)
    monkeypatch.undo()
    assert SOLVERS[int(block.update(X)[-1])] == "gram"


def test_a_result_that_is_not_finite_never_becomes_the_surrogate(monkeypatch):
    X = matrix()
    block = Surrogate(X, rho=0.1, config=SalaadConfig(every=1))
    block.update(X)
    state = {key: value.clone() for key, value in block.state_dict().items()}
    original = surrogate.threshold

    def poisoned(*args):
        found = original(*args)
        return spectral.SvtResult(found.L * float("inf"), found.sigma, found.basis, found.solver, found.bound)

    monkeypatch.setattr(surrogate, "threshold", poisoned)
    assert SOLVERS[int(block.update(X)[-1])] == KEPT
    assert all(torch.equal(value, state[key]) for key, value in block.state_dict().items())


@pytest.mark.parametrize("broken", [("eigh",), ("eigh:nan",), ("eigh", "svd:float32")])
def test_starting_and_deploying_survive_an_eigh_that_fails(monkeypatch, broken):
    """The last solver adds noise N, which turns the leading subspace by ‖N‖_F over the gap below the kept rank.

    So the truncated weight moves by at most √2·‖N‖_F·σ₁/gap (Wedin). Of a random matrix the gap can be so small that no
    solver's answer is better than another's; here the singular values that are left out are halved.
    """
    U, sigma, Vh = torch.linalg.svd(matrix().double(), full_matrices=False)
    rank = max(1, round(SalaadConfig().rank_ratio * len(sigma)))
    sigma[rank:] /= 2
    X = ((U * sigma) @ Vh).float()
    plain = Surrogate(X, rho=0.1, config=SalaadConfig(every=1)).deployed()
    failing(*broken)(monkeypatch)
    deployed = Surrogate(X, rho=0.1, config=SalaadConfig(every=1)).deployed()
    noise = spectral._NOISE * torch.linalg.vector_norm(sigma)
    # Noise is added at the start and on deployment, hence the 2; the rounding of float32 is a tenth of the noise.
    allowed = 2 * 2**0.5 * noise * sigma[0] / (sigma[rank - 1] - sigma[rank])
    assert float(torch.linalg.vector_norm(deployed - plain)) < float(allowed)


def test_a_run_in_which_nothing_converges_trains_on_and_says_so(toy, tmp_path, monkeypatch, capsys):
    original = surrogate.threshold

    def sometimes(Z, *args):
        if Z.shape == (48, 32):  # gate and up; down is transposed
            raise torch.linalg.LinAlgError
        return original(Z, *args)

    monkeypatch.setattr(surrogate, "threshold", sometimes)
    run_training(toy(train__steps=6), tmp_path / "run")
    methods = {row["block"]: row["method"] for row in lines(tmp_path / "run", "blocks.jsonl")}
    assert {name.rpartition(".")[2] for name, method in methods.items() if method == KEPT} == {"gate_proj", "up_proj"}
    assert f"step 3: no singular values of {BLOCK} could be found" in capsys.readouterr().out
