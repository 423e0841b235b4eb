"""Damaged configurations and folders: each has to open, or to be refused in one sentence.

    python scripts/reliability/fuzz.py --cases 10000
    python scripts/reliability/fuzz.py --replay '["dense", [["json", "config.json", 3, "drop", 0]], "left"]'

Half of the cases are YAML files, as `train.py --config` reads and checks them before it reads a batch. The other half
are folders: dense, factored, elastic, in several files, with tied weights, and training runs, in which JSON, headers,
tensors, bytes and the kinds of files were tampered with. Mostly the checksums are written anew, so that they do
not reveal the damage. If a folder opens, a few tokens go through the model. A case fails if it raises anything but a
`UserError` of one line, takes longer than --seconds, or asks for memory out of proportion. All cases run in one
process. The last line printed is the verdict.
"""

import argparse
import contextlib
import io
import json
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from salaad.common.errors import UserError, run_command
from scripts.reliability.requirements import require_hypothesis

if __name__ == "__main__":
    run_command(lambda: require_hypothesis("fuzz.py"))  # before the imports below, some of which import it

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from transformers import logging

from salaad.common.files import CHECKSUMS, write_checksums, write_json
from salaad.compression.from_elastic import ElasticDeployment
from salaad.compression.opening import open_deployment
from salaad.compression.variants import parse_variants
from salaad.config.command_line import read_command_line
from salaad.data.tokenizer import load_tokenizer
from salaad.model.build import describe_model, load_model
from salaad.runs.model_on_disk import ModelOnDisk
from salaad.training.plan import check_run, plan_table
from scripts.reliability.config_damage import ODD_FILES, config_bytes, config_cases
from scripts.reliability.folder_damage import FOLDERS, SUMS, folder_cases, tamper
from scripts.reliability.sample_folders import make_folders

ROOM = 3 * 2**30  # bytes that the process may grow by, over what it takes before the first case
LONGEST = 86_400  # seconds that --seconds may allow
GROWTH = 2**29  # bytes that one case may take beyond the peak of those before; a few megabytes of tokens take half


class TooSlow(BaseException):
    """Raised when a case takes too long; a BaseException, so that no `except Exception` catches it."""


# ---- what is done with a case


def open_config(path: Path) -> None:
    """Do what train.py does with a configuration before it reads a batch."""
    config, _ = read_command_line(["--config", str(path), "--output", str(path.parent / "run")])
    description = describe_model(config.model, config.data.sequence_length)
    plan_table(config, description, 1)
    check_run(config, description)


def open_folder(folder: Path, run: bool) -> None:
    """Do what evaluate.py and compress.py do with a folder: find out what it is, cut it, open it and use it."""
    source = ModelOnDisk.open(folder)
    deployment = open_deployment(source)
    elastic = isinstance(deployment, ElasticDeployment)
    names = "X,L+S,0.8@0.5,0.8@energy" if run else "X"
    if elastic:
        names = f"L+S,{(deployment.fixed + 3 * deployment.largest) // 4}"
    wanted = parse_variants(names, deployment.dense)
    deployment.check(wanted)
    load_tokenizer(str(source.folder.path))
    ids = torch.tensor([[1, 2, 3]])
    with deployment.opened(wanted[-1], torch.float32) as opened, torch.no_grad():
        opened.model(input_ids=ids)
    if not run and not elastic:
        load_model(folder, torch.bfloat16)


class Fuzz:
    """Runs cases in a folder of its own and counts how they end.

    Args:
        root: an empty folder.
        seconds: the most that a case may take.
    """

    def __init__(self, root: Path, seconds: float = 30) -> None:
        self.root, self.seconds = root, seconds
        self.refused, self.opened, self.failures, self.slowest = 0, 0, [], 0.0
        os.environ["SALAAD_CACHE"] = str(root / "caches")
        self.folders = make_folders(root / "folders")
        self.begun = time.monotonic()
        self.before = peak_memory()

    def config(self, case: list) -> None:
        """Run the case of a configuration."""
        path = self.root / "case.yaml"
        path.write_bytes(config_bytes(case, self.folders))
        self._end(case, lambda: open_config(path))

    def folder(self, case: list) -> None:
        """Run the case of a folder."""
        kind, steps, checksums = case
        copy = self.root / "case" / kind
        shutil.rmtree(copy.parent, ignore_errors=True)
        shutil.copytree(self.folders[kind], copy)
        model = copy / "checkpoints" / "step-0000001" if kind == "run" else copy
        tamper(model, steps)
        if checksums == "removed":
            (model / CHECKSUMS).unlink(missing_ok=True) if not (model / CHECKSUMS).is_dir() else None
        elif checksums == "rewritten" and not any(CHECKSUMS in map(str, step) for step in steps):
            with contextlib.suppress(OSError):
                _rewrite(model)
        self._end(case, lambda: open_folder(copy, kind == "run"))

    def _end(self, case: list, action: Callable[[], None]) -> None:
        """Do a case and count it once: as refused, as opened, or as the first failure that it shows."""
        begun, before = time.monotonic(), peak_memory()
        sentence = wrong = None
        try:
            with time_limit(self.seconds), contextlib.redirect_stdout(io.StringIO()):
                action()
        except UserError as error:
            sentence = str(error)
            if "\n" in sentence or not sentence.strip():
                wrong = "not one line", sentence
            elif "allocate" in sentence or "emory" in sentence:
                wrong = "memory was asked for", sentence
        except TooSlow:
            wrong = f"over {self.seconds} s", traceback.format_exc()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            wrong = type(error).__name__, traceback.format_exc()
        grown = peak_memory() - before
        if wrong is None and grown > GROWTH:
            wrong = "too much memory", f"{grown / 2**20:.0f} MiB more than any case before"
        self.slowest = max(self.slowest, time.monotonic() - begun)
        if wrong is not None:
            self._fail(case, *wrong)
        elif sentence is None:
            self.opened += 1
        else:
            self.refused += 1

    def _fail(self, case: list, what: str, text: str) -> None:
        self.failures.append((what, case))
        print(f"FAILED ({what}): --replay {json.dumps(case)!r}\n{text}", flush=True)

    def report(self) -> dict[str, Any]:
        """Return what --output writes: counts, times and memory."""
        return {
            "cases": self.refused + self.opened + len(self.failures),
            "refused": self.refused,
            "opened": self.opened,
            "failures": len(self.failures),
            "seconds": round(time.monotonic() - self.begun, 1),
            "slowest_case_seconds": round(self.slowest, 2),
            "memory_before_bytes": self.before,
            "peak_memory_bytes": peak_memory(),
        }


def _rewrite(folder: Path) -> None:
    """Write checksums that fit the files that are there now; a listed file that is missing stays listed."""
    listed = json.loads((folder / CHECKSUMS).read_text())
    (folder / CHECKSUMS).unlink()
    write_checksums(folder)
    now = json.loads((folder / CHECKSUMS).read_text())
    write_json({**{name: "0" for name in listed if not (folder / name).is_file()}, **now}, folder / CHECKSUMS)


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TooSlow in the main thread when the time is over."""

    def over(*_: object) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def peak_memory() -> int:
    """Return the peak resident memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextlib.contextmanager
def bounded_memory(room: int) -> Iterator[None]:
    """Context manager under which the process gets at most `room` bytes of addresses beyond those that it has."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def fuzz(root: Path, cases: int, start: int = 0, seconds: float = 30) -> Fuzz:
    """Run `cases` cases, half of each kind; the same `start` gives the same cases."""
    made = Fuzz(root, seconds)
    half = cases // 2
    for strategy, run, count in ((config_cases, made.config, cases - half), (folder_cases, made.folder, half)):
        if count:
            drawn = given(strategy)(_runner(run))
            kept = settings(
                max_examples=count,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            with bounded_memory(ROOM):
                seed(start)(kept(drawn))()
    return made


def _runner(run: Callable[[list], None]) -> Callable[[list], None]:
    def one(case: tuple) -> None:
        run(json.loads(json.dumps(case)))  # plain data, as --replay gets it

    return one


def read_case(text: str) -> list:
    """Return the case of a folder (three parts) or of a configuration (two) that was printed as `text`.

    Raises:
        UserError: `text` is no case.
    """
    try:
        case = json.loads(text)
    except (ValueError, RecursionError):
        case = None
    match case:
        case [str(kind), list(steps), str(sums)] if kind in FOLDERS and sums in SUMS:
            sound = all(isinstance(step, list) and step for step in steps)
        case ["keys", list(drawn)]:
            sound = all(_is_line(line) for line in drawn)
        case ["odd", str(name)]:
            sound = name in ODD_FILES
        case ["text" | "path", str()]:
            sound = True
        case _:
            sound = False
    if not sound:
        raise UserError(f"--replay {text} is no case; give one as the line FAILED prints it")
    return case


def _is_line(line: Any) -> bool:
    match line:
        case [[str(), *rest], str()]:
            return len(rest) < 2 and all(isinstance(part, str) for part in rest)
    return False


def main() -> None:
    """Run the command line.

    Raises:
        UserError: an option is wrong; no case has begun.
        SystemExit: at the end; its code is 1 if a case failed, else 0.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000, help="how many, half of each kind (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="determines the cases (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=30, help="the most that a case may take (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, help="a JSON file for the verdict")
    parser.add_argument("--replay", help="do a single case again, as printed where it failed")
    options = parser.parse_args()
    if options.cases < 1:
        raise UserError(f"--cases {options.cases}: must be at least 1")
    if not 0 < options.seconds <= LONGEST:
        raise UserError(f"--seconds {options.seconds:g}: must be above 0, and at most {LONGEST:,}")
    replayed = None if options.replay is None else read_case(options.replay)
    if options.output:
        require_output(options.output)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    with TemporaryDirectory() as root:
        if replayed is None:
            made = fuzz(Path(root), options.cases, options.seed, options.seconds)
        else:
            made = Fuzz(Path(root), options.seconds)
            (made.folder if len(replayed) == 3 else made.config)(replayed)
    report = made.report()
    if options.output:
        write_json(report | {"seed": options.seed}, options.output)
    print(
        f"{report['cases']} cases: {made.refused} refused in a sentence, {made.opened} opened, {len(made.failures)} "
        f"failures, {report['seconds']:.0f} s, {report['peak_memory_bytes'] / 2**30:.2f} GB at most"
    )
    raise SystemExit(1 if made.failures else 0)


def require_output(path: Path) -> None:
    """Raise a UserError unless the file `path` can be written; what is in it stays until the verdict."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise UserError(f"--output {path} cannot be written ({error.strerror}); give a file you can write") from None


if __name__ == "__main__":
    run_command(main)
