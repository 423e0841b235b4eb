"""Checks of how often the host waits for a GPU: never in a step, once in an ADMM round and in each eigensolver."""

import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import torch
from accelerate.state import AcceleratorState, GradientState

import train
from salaad.config.command_line import read_command_line
from salaad.config.methods import SalaadConfig
from salaad.methods.salaad import round as admm_round
from salaad.methods.salaad.surrogate import Surrogate
from salaad.training.agreement import Agreement
from scripts.on_device.check import Check, matrix, not_made
from scripts.reliability.toy_run import toy_arguments, write_text, write_tokenizer

SAID = "called a synchronizing CUDA operation"  # in torch's warnings of waits, which `set_sync_debug_mode` turns on
NAMES = ("a training step", "a training step with a round of the ADMM", "a round of the ADMM")
STEPS, EVERY = 12, 3  # steps of the training and of a period; the first round, which compiles kernels, is not counted
# Wide enough for `products` to be the cheapest solver by the rates of a GPU.
WIDE = {"hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 4}
BEFORE = 2  # rounds after which the host knows how many singular values lie above the threshold
Found = tuple[Counter[str], int]  # waits of the host by file and line, and the number of stacks by eigenvectors


def waits(device: torch.device, tiny: bool) -> Iterator[Check]:
    """Yield checks of the host's waits in training steps and in a round of the ADMM, against the number allowed."""
    if device.type == "cpu":
        for name in NAMES:
            yield not_made(f"waits in {name}", "nothing waits for a CPU")
        return
    steps = list(enumerate(steps_of_a_training(tiny), 1))[EVERY:]
    yield most(NAMES[0], [found for step, found in steps if step % EVERY], 0)
    yield most(NAMES[1], [found for step, found in steps if step % EVERY == 0], 1)
    with watching() as found:
        work = round_(device, tiny)
        found.next()
        work()
    yield most(NAMES[2], found.parts()[1:], 1)


def most(name: str, found: list[Found], allowed: int) -> Check:
    """Return the check of the part with the most waits, less one for each stack solved by eigenvectors."""
    places, stacks = max(found, key=lambda part: part[0].total() - part[1])
    count = places.total() - stacks
    told = ", ".join(f"{place}: {waits}" for place, waits in places.items())
    return Check(f"waits in {name}", max(count, 0), allowed, told if count > allowed else "")


class Watch:
    """The waits that torch warned of, and the stacks solved by eigenvectors, in each part of some work."""

    def __init__(self, said: list[warnings.WarningMessage]) -> None:
        self._said, self.stacks = said, 0
        self._ends: list[tuple[int, int]] = []

    def next(self) -> None:
        """Begin another part."""
        self._ends.append((len(self._said), self.stacks))

    def parts(self) -> list[Found]:
        """Return the waits and stacks of each part, the first one first."""
        ends = [(0, 0), *self._ends, (len(self._said), self.stacks)]
        return [(places_of(self._said[a:b]), after - before) for (a, before), (b, after) in pairwise(ends)]


def places_of(said: list[warnings.WarningMessage]) -> Counter[str]:
    """Return how often the host waited, by file and line."""
    return Counter(f"{note.filename}:{note.lineno}" for note in said if SAID in str(note.message))


@contextmanager
def watching() -> Iterator[Watch]:
    """Context manager that notes every wait of the host, and every stack solved by eigenvectors."""
    mode, by_eigenvectors = torch.cuda.get_sync_debug_mode(), admm_round.gram_stack
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        watch = Watch(said)

        def counted(*given: object) -> object:
            watch.stacks += 1
            return by_eigenvectors(*given)

        torch.cuda.set_sync_debug_mode("warn")
        try:
            with patch.object(admm_round, "gram_stack", counted):
                yield watch
        finally:
            torch.cuda.set_sync_debug_mode(mode)


def steps_of_a_training(tiny: bool) -> list[Found]:
    """Return the waits of each step of a training but the last, which writes the records."""
    look = Agreement.read
    with tempfile.TemporaryDirectory() as work, watching() as watch:

        def begin(agreement: Agreement) -> None:
            watch.next()
            look(agreement)

        with patch.object(Agreement, "read", begin):
            train_a_toy(Path(work), tiny)
    return watch.parts()[1:-1]


def train_a_toy(folder: Path, tiny: bool) -> None:
    """Train a toy model with train.py, in this process and on the device that it finds."""
    sizes = {} if tiny else {f"model__{key}": value for key, value in WIDE.items()}
    steps = {"train__steps": STEPS, "train__log_every": STEPS, "salaad__every": EVERY}
    texts, tokenizer = write_text(folder), write_tokenizer(folder / "tokenizer")
    words = toy_arguments(texts, tokenizer, **steps, **sizes)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    with redirect_stdout(StringIO()):
        train.main(*read_command_line([*words, f"--output={folder / 'run'}"]))


def round_(device: torch.device, tiny: bool) -> Callable[[], object]:
    """Return a function that runs a round of two blocks by the cheapest solver; the rounds before are done here."""
    config = SalaadConfig(delta_alpha=0.0, delta_beta=0.0)
    blocks = []
    for n, m in ((24, 40), (40, 40)) if tiny else ((512, 1376), (512, 512)):
        X = matrix(n, m).float().to(device)
        block = Surrogate(X, 1e-6, config)
        block.load_state_dict(block.state_dict() | {"thresholds": X.new_tensor([0.3, 0.01, 0.01])})
        blocks.append((block, X))
    for _ in range(BEFORE):
        admm_round.update_round(blocks)
    return lambda: admm_round.update_round(blocks)
