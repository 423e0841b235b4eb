"""The folder of a run: what it may be continued from, what it records about itself, how it ends."""

import shlex
import sys
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from salaad.common import distributed, locks
from salaad.common.errors import UserError
from salaad.common.files import CHECKSUMS, PARTIAL, at_home, unseen, verify
from salaad.common.provenance import provenance
from salaad.config.command_line import TrainOptions, read_plain_yaml, write_config
from salaad.config.methods import SETTINGS
from salaad.config.run import DataConfig, RunConfig, TrainConfig
from salaad.model.folders import has_tokenizer, local_folder
from salaad.runs.checkpoints import NAME, UNSEEN, Checkpoints, RunState, patience_for
from salaad.runs.records import RECORDS

_LOOKS = 20  # how often ranks look at a folder that another machine has written into
# Settings that may change when a run goes on. Most do not change what is computed. The data goes on at any size of the
# batch without losing or repeating text, and says itself whether files or tokenizer in another place are the same. What
# to do about numbers that are not finite and about broken text is for the user to decide anew.
_FREE = (
    "train.batch",
    "train.micro_batch",
    "train.compile",
    "train.gradient_checkpointing",
    "train.shard",
    "train.log_every",
    "train.eval_every",
    "train.eval_tokens",
    "train.save_every",
    "train.keep_last",
    "train.keep_every",
    "train.on_nonfinite",
    "train.max_skipped",
    "data.files",
    "data.validation_files",
    "data.tokenizer",
    "data.workers",
    "data.max_bad_documents",
    "data.retries",
    "data.max_lost_files",
    "wandb.mode",
    "wandb.project",
)


# Settings that may change when a new folder goes on from a checkpoint, such as after a run that diverged. Methods name
# further settings of their own.
_TUNABLE = (*(f"optimizer.{name}" for name in ("lr", "warmup", "final_lr", "clip")), "train.steps")


BEGUN_FROM, GONE_BACK = "begun from", "asked to go back to"
_LARGEST_RECORD = 2**22  # bytes of a run's own config.yaml, which lists every file of text and every start
# What a run that took no step leaves in its folder.
_OURS = {"checkpoints", "diagnosis.json", "wandb", "wandb_id", ".lock", *RECORDS}


def open_run(config: RunConfig, options: TrainOptions) -> tuple[Path, Path | None]:
    """Return the run's folder and the checkpoint to go on from, if any, the same on every rank; collective.

    Every file of the checkpoint is compared with its checksum first. If the newest checkpoint is not whole, the newest
    whole one is taken instead and a message says so. If the folder holds a run already, this process locks it.

    Raises:
        UserError: the folder belongs to a run of another configuration, another process writes into it, or --resume
            does not fit what is there.
    """
    return distributed.first_decides(lambda: _open_run(config, options))


def _open_run(config: RunConfig, options: TrainOptions) -> tuple[Path, Path | None]:
    folder = at_home(options.output)
    tunable = (*_TUNABLE, *(f"{config.method}.{name}" for name in config.settings.tunable))
    if _begun(folder):
        locks.claim(folder)
    asked = None if options.resume in ("auto", "none") else at_home(options.resume)
    if asked and not _repeats_last_resume(folder, asked):
        return folder, _checkpoint_named(folder, asked, config, tunable)
    if not _begun(folder):
        _require_ours(folder)
        return folder, None
    if options.resume == "none":
        raise UserError(f"--output {folder} already holds a run; give another folder, or --resume auto to go on")
    _compare(_begun_with(folder), config, folder, elsewhere=tunable)
    checkpoint, wrong = Checkpoints(folder / "checkpoints").newest_whole(RunState.read)
    for sentence in wrong:
        print(f"passed over: {sentence}", file=sys.stderr)
    if wrong:
        print(f"going on from {checkpoint}, the newest that is whole", file=sys.stderr)
    elif asked and _is_own(folder, asked):
        print(
            f"the last start went back to {_own_name(asked)} already, so this one goes on from {checkpoint.name}; "
            f"to go back once more, write {_own_name(asked)} into {folder / 'checkpoints' / 'latest'}"
        )
    return folder, checkpoint


def _is_own(folder: Path, checkpoint: Path) -> bool:
    """Whether a path leads to a checkpoint of the run in `folder`, and not to a copy of one under another name."""
    place = checkpoint.resolve()
    return place.parent == (folder / "checkpoints").resolve() and bool(NAME.fullmatch(place.name))


def _own_name(checkpoint: Path) -> str:
    """Return the name of a checkpoint of the run itself, whatever links lead there."""
    return checkpoint.resolve().name


def _repeats_last_resume(folder: Path, asked: Path) -> bool:
    """Whether the last start had the same --resume, so that the run goes on, as a job that is queued again has to.

    The checkpoint `asked` for may be deleted by now.
    """
    told = folder / "config.yaml"
    if not _begun(folder) or not told.is_file():
        return False
    lines = [line for line in told.read_text(errors="replace").splitlines() if line.startswith("#")]
    if not _is_own(folder, asked):
        said = f"# {BEGUN_FROM}: "
        return asked.resolve() in [Path(line.removeprefix(said)).resolve() for line in lines if line.startswith(said)]
    if lines[-1:] != [f"# {GONE_BACK}: {_own_name(asked)}"]:
        return False
    newest = Checkpoints(folder / "checkpoints").latest_step()  # of which `newest_whole` finds a whole one
    return newest is not None and newest > int(_own_name(asked).rpartition("-")[2])


def _checkpoint_named(folder: Path, checkpoint: Path, config: RunConfig, tunable: tuple[str, ...]) -> Path:
    """Return the checkpoint that --resume names, once it is found to be whole and to fit the run."""
    patience = patience_for([checkpoint])
    unseen(checkpoint, [CHECKSUMS], patience)
    if not (checkpoint / "state").is_dir():
        raise UserError(f"--resume {checkpoint} is no checkpoint; give a folder such as RUN/checkpoints/step-0001000")
    own = _is_own(folder, checkpoint)
    if own:
        checkpoint = folder / "checkpoints" / _own_name(checkpoint)
    elif _begun(folder):
        raise UserError(f"--output {folder} already holds a run; give a folder that is new")
    else:
        _require_ours(folder)
        locks.keep_from_deletion(checkpoint)  # by its own run, which may go on training
    verify(checkpoint, alone=True, patience=patience)
    state = RunState.read(checkpoint)
    if own:  # the run may have been begun from this checkpoint with other settings than it was saved with
        _compare(_begun_with(folder), config, folder, elsewhere=tunable, proposed=checkpoint)
    _compare(state.config, config, checkpoint, tunable)
    if not own and state.step >= config.train.steps:
        raise UserError(
            f"--resume {checkpoint} is after step {state.step}, and train.steps is {config.train.steps}, so "
            "nothing is left to train; give more --train.steps, or an earlier checkpoint"
        )
    return checkpoint


def _begun_with(folder: Path) -> dict[str, Any]:
    """Return the configuration of the run in `folder`, as its last start left it."""
    try:
        return read_plain_yaml(folder / "config.yaml", largest=_LARGEST_RECORD)
    except UserError as error:
        said = f"--output {folder} holds a run without a readable config.yaml ({error})"
        raise UserError(f"{said}; give another folder") from None


def _require_ours(folder: Path) -> None:
    """Raise a UserError if a folder in which no run took a step holds anything that no start of a run left there."""
    if folder.exists() and (not folder.is_dir() or any(not _is_ours(path) for path in folder.iterdir())):
        raise UserError(f"--output {folder} exists and is no run of this program; give a folder that is new")


def _is_ours(path: Path) -> bool:
    if path.name == "config.yaml":  # which may also be what a user gives as --config
        return path.is_file() and f"\n# {BEGUN_FROM}: " in path.read_text(errors="replace")
    return path.name in _OURS or path.name.endswith(PARTIAL)


def _begun(folder: Path) -> bool:
    """Whether a run took a step in `folder`; a run that ended before leaves nothing to go on from or to lose."""
    metrics = folder / "metrics.jsonl"
    return Checkpoints(folder / "checkpoints").begun() or (metrics.exists() and metrics.stat().st_size > 0)


def _compare(
    old: dict[str, Any],
    config: RunConfig,
    place: Path,
    tunable: tuple[str, ...] = (),
    elsewhere: tuple[str, ...] = (),
    proposed: Path | None = None,
) -> None:
    """Raise a UserError for a setting that differs from the one with which a run was begun.

    Args:
        old: the configuration that the run was begun with.
        config: the configuration that is asked for now.
        place: where `old` was found, a checkpoint or a run's folder.
        tunable: settings that may change.
        elsewhere: settings that may change only in a new folder, which the error message then proposes.
        proposed: the checkpoint that it proposes to go on from; the newest in `place` unless given.
    """
    # The settings of other methods change nothing that is computed.
    others = {name for name in SETTINGS if name != config.method}
    free = [f"{config.method}.{name}" for name in config.settings.free]
    trees = [{key: value for key, value in tree.items() if key not in others} for tree in (old, config.to_dict())]
    before_all, now_all = map(_flat, trees)
    # A version that did not know a setting yet trained as if the setting had its default.
    defaults = {config.method: asdict(type(config.settings)()), "optimizer": {"projection_lr": 1.0}}
    before_all = _flat(defaults) | before_all
    for key in sorted(before_all.keys() | now_all.keys(), key=lambda key: (key != "method", key)):
        before, now = before_all.get(key), now_all.get(key)
        if before != now and key not in (*_FREE, *free, *tunable):
            cure = "keep it, or begin a new run with another --output"
            if key in elsewhere and (start := proposed or Checkpoints(place / "checkpoints").latest()):
                cure = f"keep it, or go on from there with it in a new folder: --resume {start} --output NEW"
            raise UserError(f"{place} was begun with {key} {before}, but {now} is asked for; {cure}")


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def begin(
    folder: Path, config: RunConfig, corpus_hash: str | None, checkpoint: Path | None, resume: str = "auto"
) -> Path | None:
    """Create the folder and its config.yaml, in which every start of the run leaves its versions and commit.

    A checkpoint to go on from becomes the newest of the folder, so that a later --resume auto goes on from it, too. If
    `resume`, the option, names a checkpoint of this folder, config.yaml says so last (`_repeats_last_resume`).

    Returns:
        The checkpoint to go on from, in this folder; that of another run may be deleted from now on.

    Raises:
        UserError: another process writes into the folder.
    """
    checkpoints = Checkpoints(folder / "checkpoints")
    try:
        checkpoints.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {folder} cannot be made ({error.strerror}); give one you can write to") from None
    locks.claim(folder)
    if checkpoint is None and checkpoints.begun():
        raise UserError(f"--output {folder} was begun by another process meanwhile; start again to go on from there")
    for name in ("summary.json", "diagnosis.json"):  # of a run that had finished or diverged, and now goes on
        (folder / name).unlink(missing_ok=True)
    own = checkpoint is not None and _is_own(folder, checkpoint)
    if own:  # first, as config.yaml says that everything newer was saved after this start
        checkpoints.point_to(checkpoint)
    weights = str(checkpoint.absolute() if checkpoint else config.model.path or "random weights")
    start = provenance() | {"corpus": corpus_hash or "not hashed", BEGUN_FROM: weights}
    if resume not in ("auto", "none") and _is_own(folder, at_home(resume)):
        start[GONE_BACK] = _own_name(at_home(resume))
    path = folder / "config.yaml"
    earlier = (
        [line for line in path.read_text().splitlines() if line.startswith("#")] if checkpoint and path.exists() else []
    )
    write_config(config, [*earlier, *(f"# {key}: {value}" for key, value in start.items())], path)
    if checkpoint and not own:
        adopted = checkpoints.adopt(checkpoint)
        locks.allow_deletion(checkpoint)
        return adopted
    return checkpoint


def resume_command() -> str:
    """Return this run's command without the launcher, with the option to go on from the newest checkpoint."""
    return shlex.join(["train.py", *sys.argv[1:], "--resume", "auto"])


def not_saved(folder: Path, train: TrainConfig, step: int, why: str, last: bool) -> str:
    """Return the message about a checkpoint that could not be written after `step`.

    Raises:
        UserError: `last` is set: it was the last attempt, and the run ends.
    """
    newest = Checkpoints(folder / "checkpoints").latest()
    good = newest.name if newest else "the beginning"
    if last:
        raise UserError(
            f"the checkpoint of step {step} cannot be written ({why}), and the run ends here; make room in {folder} "
            f"and start the same command again, which goes on from {good}"
        )
    following = min(train.steps, (step // train.save_every + 1) * train.save_every)
    return (
        f"step {step}: the checkpoint cannot be written ({why}); training goes on, {good} stays untouched, the next "
        f"attempt is after step {following}"
    )


def with_own_tokenizer(config: RunConfig, folder: Path | None = None) -> DataConfig:
    """Return the data settings, where a run from `model.path` without data.tokenizer gets the model's tokenizer.

    `folder` is where the model lies, if that has been found out already.

    Raises:
        UserError: the model's folder has no tokenizer.
    """
    if config.model.path is None or config.data.tokenizer is not None:
        return config.data
    folder = folder or local_folder(config.model.path, "model.path")
    if not has_tokenizer(folder):
        raise UserError(f"model.path {config.model.path} holds no tokenizer; name the model's own with data.tokenizer")
    return replace(config.data, tokenizer=str(folder))


def require_shared_storage(folder: Path) -> None:
    """Compare what every rank sees in the run's folder, for a minute if need be; collective.

    Raises:
        UserError: some machine does not see what the first one wrote.
    """
    for _ in range(_LOOKS):
        views = distributed.gather(_view(folder))
        if all(view == views[0] for view in views):
            return
        time.sleep(UNSEEN / _LOOKS)
    raise UserError(f"--output {folder} is not the same folder on every machine; give one on storage they share")


def _view(folder: Path) -> tuple[bool, str]:
    """Return whether a run is there, and the text of `latest`; listing a folder refreshes a network file system."""
    with suppress(OSError):
        list((folder / "checkpoints").iterdir())
    latest = folder / "checkpoints" / "latest"
    return (folder / "config.yaml").exists(), latest.read_text() if latest.exists() else ""
