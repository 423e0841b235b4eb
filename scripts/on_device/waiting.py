"""How often the host waits for a GPU: never in a training step, once in a round of the ADMM."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator

import torch

from salaad.config.command_line import read_command_line
from salaad.config.methods import SalaadConfig
from salaad.methods.salaad.round import update_round
from salaad.methods.salaad.surrogate import Surrogate
from scripts.bench_training import Contender
from scripts.on_device.check import Check, matrix, not_made
from scripts.on_device.trainings import batches_of, small_run

SAID = "called a synchronizing CUDA operation"  # torch's warning in the mode that watches for waits
ALLOWED = {"a training step": 0, "a round of the ADMM": 1}
BEFORE = 2  # rounds after which the host knows how many singular values lie above the threshold


def waits(device: torch.device, tiny: bool) -> Iterator[Check]:
    """Waits of the host in a step of SALAAD without an update, and in a round, each against what it may have."""
    if device.type == "cpu":
        for name in ALLOWED:
            yield not_made(f"waits in {name}", "nothing waits for a CPU")
        return
    for name, work in (("a training step", step(device, tiny)), ("a round of the ADMM", round_(device, tiny))):
        places = waits_in(work)
        told = ", ".join(f"{place}: {count}" for place, count in places.items())
        count = places.total()
        yield Check(f"waits in {name}", count, ALLOWED[name], told if count > ALLOWED[name] else "")


def waits_in(work: Callable[[], object]) -> Counter[str]:
    """How often the host waited, by file and line."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    return Counter(f"{note.filename}:{note.lineno}" for note in said if SAID in str(note.message))


def step(device: torch.device, tiny: bool) -> Callable[[], None]:
    """One training step; those before it, which compile kernels and make the optimizer's state, are done."""
    config = read_command_line([*small_run(tiny), "--method=salaad"])[0]
    contender = Contender(config, device)
    first, second, last = ({key: ids.to(device) for key, ids in batch.items()} for batch in batches_of(config, 3))
    contender.step(first)
    contender.step(second)
    return lambda: contender.step(last)


def round_(device: torch.device, tiny: bool) -> Callable[[], None]:
    """One round of two blocks by products; those before it are done."""
    config = SalaadConfig(delta_alpha=0.0, delta_beta=0.0, method="products")
    blocks = []
    for n, m in ((24, 40), (40, 40)) if tiny else ((512, 1376), (512, 512)):
        X = matrix(n, m).float().to(device)
        block = Surrogate(X, 1e-6, config)
        block.load_state_dict(block.state_dict() | {"thresholds": X.new_tensor([0.3, 0.01, 0.01])})
        blocks.append((block, X))
    for _ in range(BEFORE):
        update_round(blocks)
    return lambda: update_round(blocks)
