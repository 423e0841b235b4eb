"""Every way to break a training run: each drill starts the trainer, breaks it from outside, and compares the result.

A drill is a method of `Drills` that yields rows of the table. The comparison is that of `training_process.differences`:
weights, L and S, optimizer, position in the data, and every line of the records, to the bit.
"""

import json
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import psutil

from salaad.common.errors import run_command
from salaad.common.files import read_json
from scripts.reliability import faulty_hub
from scripts.reliability.fault_table import Row
from scripts.reliability.toy_run import ROOT, toy_arguments, write_text, write_tokenizer
from scripts.reliability.training_process import (
    PATIENCE,
    Training,
    deviation,
    differences,
    last_step,
    records,
    saved_step,
    spoil,
)

GRACE = 30  # seconds that a cluster leaves between SIGTERM and SIGKILL
POISON = 97  # steps from one spoiled gradient to the next
DRIFT = 1e-4  # the largest relative difference in the loss after a change of the number of processes


class Drills:
    """All drills, one method for each way to break a run.

    Args:
        work: folder for the runs.
        quick: a few tries instead of many.
        seed: determines the moments at which something happens.
    """

    def __init__(self, work: Path, quick: bool, seed: int) -> None:
        self.work, self.quick, self.pick = work, quick, random.Random(seed)
        (work / "tokenizer").mkdir(parents=True)
        self.text, self.tokenizer = write_text(work), write_tokenizer(work / "tokenizer")

    def options(self, steps: int, **more: object) -> list[str]:
        """Options of a toy run with data workers, a staggered schedule, evaluations and frequent checkpoints."""
        usual = {
            "train__steps": steps,
            "train__save_every": 5,
            "train__eval_every": 100,
            "data__workers": 1,
            "salaad__schedule": "staggered",
        }
        return toy_arguments(self.text, self.tokenizer, **usual | more)

    def whole(self, name: str, arguments: list[str], processes: int = 1) -> Path:
        """Return the folder of a run that is not broken, to compare others with; trained unless it is there."""
        if not (self.work / name).exists():
            Training(arguments, self.work / name, processes).finish()
        return self.work / name

    def kill(self) -> Iterator[Row]:
        """Send SIGKILL at random moments: while the trainer starts, between two steps, in the middle of a save."""
        for processes in (1, 2):
            tries = (3 if processes == 1 else 2) if self.quick else 25
            arguments = self.options(steps=150 if self.quick else 2500)
            whole = self.whole(f"whole-{processes}", arguments, processes)
            row, run = Row(f"SIGKILL, {_counted(processes)}"), self.work / f"k{processes}"
            saves = 0
            for number in range(tries):
                training = Training(arguments, run, processes)
                moment = self._moment(number)
                if moment == "start":
                    time.sleep(self.pick.uniform(0, 4 if self.quick else 8))
                else:
                    seconds = training.recovered()
                    row.recovery += [seconds] if number else []
                    time.sleep(self.pick.uniform(0, 0.3))
                if moment == "save":
                    training.until(training.saving, pause=0.0005)
                    time.sleep(self.pick.uniform(0, 0.02))
                training.kill()
                row.tries += 1
                saves += training.saving()
            self._go_on(row, Training(arguments, run, processes), whole)
            row.note = f"{saves} of them during a save"
            yield row

    def _go_on(self, row: Row, training: Training, whole: Path) -> None:
        """Resume a broken run to its end, and add the recovery time and the differences from `whole` to the row."""
        row.recovery.append(training.recovered())
        training.finish()
        row.lost += differences(whole, training.output)

    def _moment(self, number: int) -> str:
        """Return when kill `number` comes: at each moment in turn if there are few kills, else mostly in mid-run."""
        if self.quick:
            return ("save", "step", "start")[number % 3]
        return self.pick.choice(["save", "step"] * 4 + ["start"])

    def preempt(self) -> Iterator[Row]:
        """Send SIGTERM: the trainer has to save and end within the grace time, and say how to resume."""
        for processes in (1, 2):
            arguments = self.options(steps=150 if self.quick else 2500)
            whole = self.whole(f"whole-{processes}", arguments, processes)
            row, run = Row(f"SIGTERM, {_counted(processes)}"), self.work / f"t{processes}"
            longest = 0.0
            for number in range(1 if self.quick else 5):
                training = Training(arguments, run, processes)
                row.recovery += [training.recovered()] if number else []
                training.until(lambda run=run: last_step(run) > saved_step(run))
                time.sleep(self.pick.uniform(0, 0.3))
                trainers, asked = training.trainers(), time.monotonic()
                training.process.send_signal(signal.SIGTERM)
                _, left = psutil.wait_procs(trainers, timeout=GRACE)
                longest = max(longest, time.monotonic() - asked)
                training.wait(PATIENCE)
                row.tries += 1
                if left or "--resume auto" not in training.said():
                    row.lost.append("the checkpoint within the grace time")
            self._go_on(row, Training(arguments, run, processes), whole)
            row.note = f"saved and gone {longest:.1f} s after the signal at the latest"
            yield row

    def world(self) -> Iterator[Row]:
        """Resume checkpoints of 1, 2 and 3 processes with 1, 2 and 3 processes."""
        row = Row("another number of processes")
        # Few steps: differences in rounding grow exponentially.
        arguments = self.options(steps=20, train__batch=6, train__save_every=10, train__keep_last=0)
        sizes = (1, 2, 3)
        for size in sizes:
            self.whole(f"world-{size}", arguments, size)
        alone = {size: records(self.work / f"world-{size}", "metrics.jsonl") for size in sizes}
        truth, changed = alone[1], 0.0
        rounding = max(deviation(lines, truth) for lines in alone.values())
        pairs = [pair for pair in product(sizes, sizes) if not self.quick or pair not in ((1, 1), (2, 2))]
        for written, opened in pairs:
            run = self.work / f"world-{written}-{opened}"
            shutil.copytree(self.work / f"world-{written}", run)
            (run / "summary.json").unlink()
            (run / "checkpoints" / "latest").write_text("step-0000010\n")
            training = Training(arguments, run, opened)
            training.finish()
            row.tries += 1
            lines = records(run, "metrics.jsonl")
            if [(r["step"], r["tokens"]) for r in lines] != [(r["step"], r["tokens"]) for r in truth]:
                row.lost.append(f"text from {written} to {opened}")
            if written == opened:
                row.lost += differences(self.work / f"world-{written}", run)
            changed = max(changed, deviation(lines, truth))
        if changed > 3 * rounding or changed > DRIFT:
            row.lost.append("the course of the loss")
        row.note = (
            f"from and to {', '.join(map(str, sizes))}: text exactly, loss within {changed:.0e} (without a change runs "
            f"of different sizes differ by {rounding:.0e})"
        )
        yield row

    def disk(self) -> Iterator[Row]:
        """Simulate a full disk for a while: a limit set from outside makes the kernel refuse files beyond some size."""
        arguments = self.options(steps=400 if self.quick else 1500)
        whole, run = self.whole("whole-disk", arguments), self.work / "disk"
        row, training = Row("disk full for a while"), Training(arguments, run)
        training.recovered()
        for number in range(2 if self.quick else 10):
            training.until(lambda: last_step(run) > saved_step(run) > 0)
            [trainer] = training.trainers()
            resource.prlimit(trainer.pid, resource.RLIMIT_FSIZE, ((0, 100_000)[number % 2], resource.RLIM_INFINITY))
            before = training.said().count("cannot be written")
            training.until(lambda before=before: training.said().count("cannot be written") > before + 1)
            resource.prlimit(trainer.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            freed, saved = time.monotonic(), saved_step(run)
            training.until(lambda saved=saved: saved_step(run) > saved or (run / "summary.json").exists())
            row.recovery.append(time.monotonic() - freed)
            row.tries += 1
        training.finish()
        late = training.said().count("the checkpoint cannot be written")
        row.lost, row.note = differences(whole, run), f"{late} checkpoints were put off, and all lines came later"
        yield row

    def files(self) -> Iterator[Row]:
        """Truncate a file of the newest checkpoint, flip one bit of it, or delete it."""
        arguments = self.options(steps=40, train__save_every=10, train__keep_last=0)
        whole, row = self.whole("whole-files", arguments), Row("checkpoint file truncated, flipped or missing")
        newest = whole / "checkpoints" / "step-0000040"
        names = sorted(str(path.relative_to(newest)) for path in newest.rglob("*") if path.is_file())
        ways = [(name, way) for name in names for way in ("truncated", "flipped", "missing")]
        for name, way in self.pick.sample(ways, 2) if self.quick else ways:
            run = self.work / "files"
            shutil.rmtree(run, ignore_errors=True)
            shutil.copytree(whole, run)
            (run / "summary.json").unlink()
            spoil(run / "checkpoints" / newest.name / name, way)
            training = Training(arguments, run)
            training.finish()
            row.recovery.append(time.monotonic() - training.begun)
            row.tries += 1
            if "step-0000030, the newest that is whole" not in training.said():
                row.lost.append(f"the warning of {name} {way}")
            row.lost += differences(whole, run)
        row.note = "goes on from the newest whole one and says so; seconds until the ten steps were done again"
        yield row

    def shards(self) -> Iterator[Row]:
        """Take a shard of the text away in mid-run and bring it back, after a moment or after the run has stopped."""
        arguments = self.options(steps=300, data__workers=0, data__shuffle_window=5, data__retries=3)
        whole, run = self.whole("whole-shards", arguments), self.work / "shards"
        row, training = Row("shard of the text gone in mid-run"), Training(arguments, run)
        shard = Path(self.text["train"][0])
        away = shard.with_suffix(".away")
        for seconds in (1, 1) if self.quick else (1, 2, 1, 2, 60):
            training.until(lambda: last_step(run) > saved_step(run))
            shard.rename(away)
            tried, gone = training.said().count("trying again"), time.monotonic()
            training.until(lambda t=training, tried=tried: t.said().count("trying again") > tried)
            while time.monotonic() - gone < seconds and training.alive:
                time.sleep(0.05)
            away.rename(shard)
            if not training.alive:
                row.lost += [] if "stopped after step" in training.said() else ["the checkpoint at the stop"]
                training = Training(arguments, run)
                row.recovery.append(training.recovered())
            row.tries += 1
            known = last_step(run)
            training.until(lambda known=known: last_step(run) > known or (run / "summary.json").exists())
        training.finish()
        row.lost += differences(whole, run)
        row.note = "tried again with back-off, or saved and stopped with a sentence"
        yield row

    def hub(self) -> Iterator[Row]:
        """Read from a hub that answers 503 or 429, resets the connection, stalls, or sends half a shard."""
        command = [sys.executable, "scripts/reliability/faulty_hub.py", self.tokenizer]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
        row = Row("hub refuses, resets, stalls, cuts off", note="every document once")
        found = json.loads(done.stdout)["found"] if not done.returncode else {}
        for fault in faulty_hub.FAULTS:
            row.tries += faulty_hub.TIMES * (fault != "none")
            if found.get(fault) != [[index, text] for index, text in enumerate(faulty_hub.texts_of(fault))]:
                row.lost.append(f"documents at {fault}")
        yield row

    def numbers(self) -> Iterator[Row]:
        """Put NaN into a gradient every POISON steps."""
        steps = 300 if self.quick else 2000
        arguments = self.options(steps, train__on_nonfinite="skip", train__max_skipped=steps)
        run = self.work / "numbers"
        code = "from scripts.reliability.drills import train_poisoned; train_poisoned()"
        command = [sys.executable, "-c", code, *arguments, f"--output={run}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE * 5)
        row = Row("NaN in a gradient", tries=steps // POISON)
        lines = records(run, "metrics.jsonl")
        if done.returncode or lines[-1]["discarded"] != row.tries or len(lines) != steps:
            row.lost.append("the run")
        elif not all(row["loss"] is None or row["loss"] < 10 for row in lines):
            row.lost.append("the course of the loss")
        row.note = "the step is discarded on the device, its batch counted"
        yield row

    def hostile(self) -> Iterator[Row]:
        """Run scripts/reliability/fuzz.py, which opens configurations and folders that it has tampered with."""
        verdict = self.work / "fuzz.json"
        cases = "300" if self.quick else "10000"
        command = [sys.executable, "scripts/reliability/fuzz.py", "--cases", cases, "--output", verdict]
        subprocess.run(command, cwd=ROOT, capture_output=True, timeout=3600)
        found = read_json(verdict)
        row = Row("hostile configurations and model folders", tries=found["cases"])
        row.lost += [f"{found['failures']} cases"] if found["failures"] else []
        peak = found["peak_memory_bytes"] / 2**30
        row.note = f"{found['refused']:,} refused in a sentence, {found['opened']:,} opened, {peak:.1f} GiB at the most"
        yield row

    def second(self) -> Iterator[Row]:
        """Start a second trainer in a folder that a trainer is writing to."""
        row, run, arguments = Row("second run into one folder"), self.work / "second", self.options(steps=100_000)
        training = Training(arguments, run)
        training.recovered()
        for _ in range(1 if self.quick else 3):
            other = Training(arguments, run)
            other.wait(PATIENCE)
            row.tries += 1
            if "is being written by process" not in other.said() or not training.alive:
                row.lost.append("the first run")
        training.kill()
        row.note = "is refused"
        yield row

    def endurance(self) -> Iterator[Row]:
        """Many steps: memory and open files stay where they are after the warm-up."""
        steps = 1000 if self.quick else 20_000
        arguments = self.options(steps, train__save_every=500, train__eval_every=1000, train__log_every=10)
        training = Training(arguments, self.work / "endurance")
        training.recovered()
        seen: list[tuple[int, int, int]] = []
        while training.alive:
            try:
                tree = training.tree()
                memory, handles = sum(p.memory_info().rss for p in tree), sum(p.num_fds() for p in tree)
            except psutil.Error:
                break
            seen.append((last_step(training.output), memory, handles))
            time.sleep(0.5)
        training.finish()
        row = Row(f"{steps:,} steps at a stretch", tries=1)
        early = [(m, h) for step, m, h in seen if 0.1 * steps <= step <= 0.3 * steps]
        late = [(m, h) for step, m, h in seen if 0.8 * steps <= step < steps - 10]
        growth = statistics.median(m for m, _ in late) / statistics.median(m for m, _ in early) - 1
        more = statistics.median(h for _, h in late) - statistics.median(h for _, h in early)
        if growth > 0.02:
            row.lost.append(f"memory (grows by {growth:.1%})")
        if more > 0:
            row.lost.append(f"{more:.0f} file handles")
        if [line["step"] for line in records(training.output, "metrics.jsonl")] != list(range(10, steps + 1, 10)):
            row.lost.append("lines of metrics.jsonl")
        row.note = f"memory {growth:+.1%} after the warm-up, file handles {more:+.0f}, every line there"
        yield row


def _counted(processes: int) -> str:
    return f"{processes} process{'es' if processes > 1 else ''}"


def train_poisoned() -> None:
    """Run train.py with NaN in a gradient every POISON steps."""
    import train
    from salaad.config.command_line import read_command_line
    from salaad.training.gradients import Gradients

    original = Gradients.clip

    def clip(self: Gradients, step: int) -> None:
        if step % POISON == 0:
            next(iter(self._named.values())).grad[0, 0] = float("nan")
        original(self, step)

    Gradients.clip = clip
    run_command(lambda: train.main(*read_command_line()))


DRILLS = ("kill", "preempt", "world", "disk", "files", "shards", "hub", "numbers", "hostile", "second", "endurance")
