"""The checks of scripts/gpu_checks.py: what they find, what they leave out, and that wrong results do not pass."""

import json
import math
import os
import sys
import warnings
from dataclasses import replace

import pytest
import torch

import train
from salaad.common import native
from salaad.common.errors import UserError
from salaad.config.command_line import read_command_line
from salaad.methods.salaad import method as salaad_method
from salaad.methods.salaad import round as admm_round
from salaad.methods.salaad.storage import load_surrogates
from salaad.spectral.cost import RATES
from scripts import gpu_checks
from scripts.host_reads import HostReads
from scripts.on_device import factored, kernels, mathematics, trainings, waiting
from scripts.on_device.check import FAILED, LEFT_OUT, PASSES, Check, not_made
from scripts.on_device.trainings import batches_of, small_run
from tests.helpers.training import train_as_told

CPU = torch.device("cpu")


def outcomes(checks) -> dict[str, str]:
    return {check.name: check.outcome for check in checks}


def test_what_passes_is_a_number_within_its_limit_without_a_problem():
    assert Check("", 1e-4, 1e-4).outcome == PASSES
    for wrong in (Check("", 2e-4, 1e-4), Check("", math.nan, 1), Check("", math.inf, 1), Check("", 0, 1, "gram")):
        assert wrong.outcome == FAILED
    absent = not_made("graphs", "it takes a GPU")
    assert (absent.outcome, absent.found) == (LEFT_OUT, "it takes a GPU")
    assert Check.from_row(absent.row)[2:] == absent[2:] and Check.from_row(absent.row).row["error"] is None


def test_a_wrong_number_does_not_pass_and_a_broken_check_hides_no_other(monkeypatch):
    def breaks(*_):
        raise RuntimeError("no kernel for this device")
        yield

    monkeypatch.setattr(gpu_checks, "KINDS", {"layers": breaks, "solvers": lambda *_: iter([Check("svt", 1.0, 1e-4)])})
    [broken], [wrong] = (gpu_checks.checks_of(kind, CPU, True) for kind in ("layers", "solvers"))
    assert broken.outcome == FAILED and math.isnan(broken.error) and "no kernel" in broken.problem
    assert wrong.outcome == FAILED


def test_a_kind_that_is_none_is_refused(monkeypatch):
    monkeypatch.setattr("sys.argv", ["gpu_checks.py", "--device=cpu", "--kinds=solvers,kernel"])
    with pytest.raises(UserError, match=r"--kinds has 'kernel', which is none; give some of kernels, solvers"):
        gpu_checks.main()


def test_a_rung_that_gives_way_to_another_does_not_pass(monkeypatch):
    assert set(outcomes(mathematics.solvers(CPU, True)).values()) == {PASSES}
    usual = mathematics.threshold
    monkeypatch.setattr(mathematics, "threshold", lambda Z, tau, basis, solver: usual(Z, tau, None, "gram"))
    found = list(mathematics.solvers(CPU, True))
    failed = {check.name.split(",")[0]: check.problem for check in found if check.outcome == FAILED}
    assert failed == dict.fromkeys(("SVT by exact", "SVT by subspace", "SVT by regularised"), "gram took over")


# ---- kernels


def test_a_gpu_on_which_torch_takes_the_place_of_the_kernels_does_not_pass(monkeypatch):
    monkeypatch.setattr(native, "why_not", lambda device: "Triton is not installed")
    [check] = kernels.kernels(torch.device("cuda"), True)
    assert (check.name, check.outcome, check.found) == (kernels.USED, FAILED, "Triton is not installed")
    monkeypatch.setenv("SALAAD_NATIVE", "0")
    [check] = kernels.kernels(torch.device("cuda"), True)
    assert (check.outcome, check.found) == (FAILED, "SALAAD_NATIVE is 0")


# ---- graphs


def stale(step):
    """Return what a CUDA graph that reads no new token would be: a function that repeats the first result."""
    first = None

    def replay():
        nonlocal first
        first = step() if first is None else first
        return first

    return replay


def test_decoding_token_by_token_is_the_whole_row_at_once_and_what_is_stale_is_seen():
    """The decoding step itself takes the place of its CUDA graph."""
    assert set(outcomes(factored.decoding(CPU, True, lambda step: step)).values()) == {PASSES}
    assert set(outcomes(factored.decoding(CPU, True, stale)).values()) == {FAILED}


def test_a_decoding_step_reads_nothing_that_would_break_a_capture():
    """On the CPU only the embedding reads a value; on a GPU it is computed without a read."""
    reads = []

    def watched(step):
        def counted():
            with HostReads() as seen:
                result = step()
            reads.append((seen.count, seen.uploads))
            return result

        return counted

    list(factored.decoding(CPU, True, watched))
    assert set(reads[1:]) <= {(0, 0), (1, 0)} and len(reads) == 8


# ---- waiting


@pytest.fixture
def watched(monkeypatch):
    """Replace torch's sync debug mode, which needs a GPU; return the list of the modes that are set."""
    modes = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    return modes


def wait_for_it():
    warnings.warn(waiting.SAID, stacklevel=1)


def test_waits_are_counted_by_line_and_by_part_and_other_warnings_are_not(watched):
    with waiting.watching() as watch:
        wait_for_it()
        watch.next()
        for _ in range(3):
            wait_for_it()
        warnings.warn("something else", stacklevel=1)
    assert watched == ["warn", 0]
    before, after = ([*places.items()] for places, _ in watch.parts())
    [(place, count)] = after
    assert count == 3 and place.startswith(__file__) and before == [(place, 1)]
    with pytest.raises(ZeroDivisionError), waiting.watching():
        1 / 0  # noqa: B018
    assert watched == ["warn", 0] * 2


def play_gpu(monkeypatch, rates) -> None:
    """Make a training and a round on the CPU wait as on a GPU: for every eigensolver and once for a round's results."""
    held, by_eigenvectors, begun = admm_round.Round._held, admm_round.gram_stack, waiting.round_
    monkeypatch.setattr(admm_round, "rates_of", lambda device: rates)
    monkeypatch.setattr(admm_round.Round, "_held", lambda self: wait_for_it() or held(self))
    monkeypatch.setattr(admm_round, "gram_stack", lambda *given: wait_for_it() or by_eigenvectors(*given))
    monkeypatch.setattr(waiting, "round_", lambda device, tiny: begun(CPU, tiny))


@pytest.mark.parametrize("rates", [RATES["h100"], replace(RATES["h100"], eigenvectors=1e-7)])
def test_a_training_that_waits_for_rounds_and_eigensolvers_alone_passes(watched, monkeypatch, rates):
    play_gpu(monkeypatch, rates)
    found = list(waiting.waits(torch.device("cuda"), True))
    assert outcomes(found) == {f"waits in {name}": PASSES for name in waiting.NAMES}
    assert [check.error for check in found] == [0, 1, 1]


def test_a_training_that_waits_in_a_step_does_not_pass(watched, monkeypatch):
    play_gpu(monkeypatch, RATES["h100"])
    usual = train.step_unless
    monkeypatch.setattr(train, "step_unless", lambda *given: wait_for_it() or usual(*given))
    step, with_round, _ = waiting.waits(torch.device("cuda"), True)
    assert (step.outcome, with_round.outcome) == (FAILED, FAILED) and __file__ in step.problem


# ---- steps


def test_batches_depend_on_nothing_that_is_drawn_between_and_no_method_drops_anything():
    for method in ("full_rank", "lora", "relora"):
        config = read_command_line([*small_run(True), *trainings.LEARNING, "--method", method])[0]
        assert getattr(config.settings, "dropout", 0) == 0
    torch.manual_seed(1)
    first = batches_of(config, 2)
    torch.manual_seed(2)
    assert all(torch.equal(a["labels"], b["labels"]) for a, b in zip(first, batches_of(config, 2), strict=True))
    assert not torch.equal(first[0]["labels"], first[1]["labels"])


def test_a_device_that_leaves_one_step_of_ten_out_does_not_pass(monkeypatch):
    usual = trainings.loss_after_steps

    def lazy(config, device):
        monkeypatch.setattr(trainings, "STEPS", 9 if device.type == "meta" else 10)
        return usual(config, CPU)

    monkeypatch.setattr(trainings, "loss_after_steps", lazy)
    assert set(outcomes(trainings.steps(CPU, True)).values()) == {PASSES}
    assert set(outcomes(trainings.steps(torch.device("meta"), True)).values()) == {FAILED}


# ---- whole trainings


def without_dual(surrogates, folder):
    load_surrogates(surrogates, folder)
    for block in surrogates.values():
        dual = block.state.dual
        assert dual.any()
        block.R, block.T = block.R - dual, block.T + dual


@pytest.mark.parametrize("lost", [None, lambda *_: None, without_dual], ids=["nothing", "L, S and dual", "dual"])
def test_a_resume_that_loses_the_state_of_the_admm_does_not_pass(lost, toy_alone, monkeypatch):
    toy, alone = toy_alone
    middle = toy.work / "alone" / "checkpoints" / f"step-{trainings.MIDDLE:07d}"
    monkeypatch.setattr(trainings, "perform", train_as_told)
    if lost:
        monkeypatch.setattr(salaad_method, "load_surrogates", lost)
    again = toy.trained(f"again-{lost and lost.__name__}", resume=middle)
    found = set(outcomes(trainings.repeated("resumed", again, alone)).values())
    assert FAILED in found if lost else found == {PASSES}


@pytest.fixture(scope="module")
def toy_alone(tmp_path_factory, text_files, tiny_tokenizer_dir):
    """A `Toy` whose trainings run in this process, and one training of it that was not interrupted."""
    toy = trainings.Toy(CPU, tmp_path_factory.mktemp("toy"), text_files, str(tiny_tokenizer_dir))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(trainings, "perform", train_as_told)
        return toy, toy.trained("alone", train__save_every=trainings.MIDDLE)


def test_a_training_that_never_ends_is_a_check_that_fails(monkeypatch):
    monkeypatch.setattr(trainings, "PATIENCE", 0.5)
    with pytest.raises(RuntimeError, match=r"a training did not end within 0\.5 seconds"):
        trainings.perform([sys.executable, "-c", "import time; time.sleep(600)"], dict(os.environ))


def test_the_processes_of_a_machine(monkeypatch):
    assert trainings.most_processes(CPU) == 2
    for count, expected in ((1, 1), (3, 2), (6, 4), (16, 8)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert trainings.most_processes(torch.device("cuda")) == expected


# ---- checks that are kept


def test_finished_kinds_are_kept_and_what_never_ended_comes_last(tmp_path, monkeypatch, capsys):
    path, made = tmp_path / "checks.json", []

    def kind(name, stops=False):
        def checks(*_):
            made.append(name)
            yield Check(f"first of {name}", 0.0, 1.0)
            if stops:
                raise KeyboardInterrupt
            yield Check(f"second of {name}", 0.0, 1.0)

        return checks

    def begin(**kinds):
        made.clear()
        monkeypatch.setattr(gpu_checks, "KINDS", kinds)
        monkeypatch.setattr("sys.argv", ["x", "--device=cpu", f"--output={path}", f"--kinds={','.join(kinds)}"])
        gpu_checks.main()

    with pytest.raises(KeyboardInterrupt):
        begin(a=kind("a"), b=kind("b", stops=True), c=kind("c"))
    found = json.loads(path.read_text())
    assert [row["name"] for row in found["checks"]] == ["first of a", "second of a", "first of b"]
    assert found["left"] == ["b", "c"]
    begin(a=kind("a"), b=kind("b"), c=kind("c"))
    found = json.loads(path.read_text())
    assert made == ["c", "b"] and found["left"] == []
    assert sorted(row["name"] for row in found["checks"]) == sorted(
        f"{n} of {k}" for k in "abc" for n in ("first", "second")
    )
    begin(a=kind("a"), b=kind("b"), c=kind("c"))
    assert made == []
    path.write_text(json.dumps(found | {"commit": "another"}))
    begin(a=kind("a"))
    assert made == ["a"]


def test_a_kind_that_is_not_asked_for_again_stays_unfinished_and_loses_its_part(tmp_path, monkeypatch):
    path = tmp_path / "checks.json"

    def stops(*_):
        yield Check("half", 0.0, 1.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_checks, "KINDS", {"a": stops, "b": lambda *_: iter([Check("whole", 0.0, 1.0)])})
    monkeypatch.setattr("sys.argv", ["x", "--device=cpu", f"--output={path}"])
    with pytest.raises(KeyboardInterrupt):
        gpu_checks.main()
    monkeypatch.setattr("sys.argv", ["x", "--device=cpu", f"--output={path}", "--kinds=b"])
    gpu_checks.main()
    found = json.loads(path.read_text())
    assert found["left"] == ["a"] and [row["name"] for row in found["checks"]] == ["whole"]


@pytest.mark.parametrize("content", ["[1]", '{"a": 1}', '{"checks": 5}', '{"checks": [1]}'])
def test_a_file_of_another_script_is_not_taken_for_checks(tmp_path, monkeypatch, content):
    path = tmp_path / "checks.json"
    path.write_text(content)
    monkeypatch.setattr(gpu_checks, "KINDS", {})
    monkeypatch.setattr("sys.argv", ["x", "--device=cpu", f"--output={path}"])
    with pytest.raises(UserError, match=r"checks\.json .*; give another --output"):
        gpu_checks.main()
    assert path.read_text() == content


def test_a_compiled_step_that_computes_something_else_does_not_pass(monkeypatch):
    frames = trainings.counters["frames"]
    for difference, compiled, expected in ((0.0, 1, PASSES), (0.1, 1, FAILED), (0.0, 0, FAILED)):

        def loss(config, device, difference=difference, compiled=compiled):
            frames["ok"] += compiled * config.train.compile
            return 4.0 + difference * config.train.compile

        monkeypatch.setattr(trainings, "loss_after_steps", loss)
        assert set(outcomes(trainings.compiled(CPU, True)).values()) == {expected}
