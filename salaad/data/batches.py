"""Text to batches: the same rows at any number of ranks and workers, and a position that can be saved.

Global row g = 0, 1, 2, … of a run comes from virtual stream g mod V (`rows`). A step takes the next B rows, and rank r
of W trains on those at places i of the batch with i ≡ r (mod W). A rank reads only the streams whose rows it needs.
"""

import itertools
import traceback
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, astuple, dataclass, replace
from math import gcd

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from salaad.common.errors import Stopped, UserError
from salaad.common.signals import StopRequest
from salaad.config.run import DataConfig
from salaad.data.rows import Cursor, Plan, RowStream
from salaad.data.text import Text, fingerprint, reading_plan, to_batch
from salaad.data.tokenizer import Encoder, beginning_id, tokenizer_digest
from salaad.data.workers import Workers
from salaad.model.loss import IGNORED

_COUNTS = ("bad", "empty", "long", "lost")  # of `Cursor`


class TrainingStream:
    """The endless batches of one rank; `state_dict` gives the position after the last batch returned.

    The next batch is always prepared ahead, so that `error` is known while the run can still be saved.

    Args:
        text: from `open_text`.
        config: how rows are made and by how many processes.
        batch: B, the number of rows in a global batch.
        rank: r, this data-parallel rank.
        world_size: W, the number of ranks.
        seed: seeds the order of the text.
        state: from `merge_states`, or the state of the only rank.
        stop: a request to stop ends a wait for the next batch; a batch prepared before is still returned.

    Raises:
        UserError: the state belongs to other files or another order, or lacks ranks.
    """

    def __init__(
        self,
        text: Text,
        config: DataConfig,
        *,
        batch: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        state: dict | None = None,
        stop: StopRequest | None = None,
    ) -> None:
        self._text, self._stop = text, stop
        self._order = {
            "files": fingerprint(text.train_files, text.sizes),
            "validation": fingerprint(text.validation_files, text.sizes),
            "tokenizer": tokenizer_digest(text.tokenizer),
            "bos": beginning_id(text.tokenizer),
            "seed": seed,
            "shuffle_window": config.shuffle_window,
        }
        self._rows = 0
        streams = gcd(config.streams, batch)
        cursors: dict[int, Cursor] = {}
        if state is not None:
            _require_same_order(state, self._order, config.source)
            self._order["bos"] = state.get("bos")  # a run of a version that began documents with none goes on so
            self._rows, streams = state["rows"], state["streams"]
            cursors = {int(number): Cursor(**cursor) for number, cursor in state["cursors"].items()}
            if len(cursors) < streams:
                raise UserError(
                    f"the data state holds {len(cursors)} of {streams} streams, so some ranks' files are missing; "
                    f"resume from a complete checkpoint"
                )
        plan = replace(reading_plan(text, config, text.train_files, streams, seed), bos=self._order["bos"])
        self._share = _Share(plan, Encoder(text.tokenizer), self._rows, batch, rank, world_size, cursors)
        self._cursors = dict(self._share.cursors)
        self._count = min(config.workers, len(self._cursors))
        self._workers: Workers | None = None
        self._next: tuple[list[_Item], dict[str, torch.Tensor]] | None = None
        self._error: str | None = None

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        """The next batch: `input_ids` and `labels`, int64 [rows of this rank, length].

        Raises:
            UserError: the text cannot be read any further.
            Stopped: a stop was requested before there was a batch.
        """
        self._prepare_next()
        if self._next is None:
            raise Stopped if self.error is None else self.error
        items, batch = self._next
        self._next = None
        for item in items:
            for number, cursor in zip(item.numbers, item.cursors, strict=True):
                self._cursors[number] = Cursor(*cursor)
        self._rows += self._share.batch
        self._prepare_next()
        return batch

    @property
    def error(self) -> UserError | None:
        """The error that `__next__` will raise in place of the next batch, if any; None after a request to stop."""
        return None if self._error is None or (self._stop and self._stop.asked) else UserError(self._error)

    def _prepare_next(self) -> None:
        """Prepare the next batch, or the sentence that says why there is none."""
        if self._next is not None or self._error is not None:
            return
        share, text = self._share, self._text
        try:
            if self._workers is None:
                self._workers = Workers(share, self._count)
            with self._stop.ends_waiting() if self._stop else nullcontext():
                items = [next(self._workers) for _ in range(max(1, self._count))]
            for item in items:
                if isinstance(item, UserError):
                    raise item
            rows: list[np.ndarray] = [None] * len(range(share.rank, share.batch, share.world_size))
            for item in items:
                if not len(item.places):  # more workers than rows, after a resume with a smaller batch
                    continue
                for place, row in zip(item.places, np.split(item.ids, item.ends[:-1]), strict=True):
                    rows[place // share.world_size] = row
            self._next = items, to_batch(rows, share.plan.length, text.pad_id, text.vocab_size)
        except UserError as error:
            self._error = str(error)  # the exception itself would keep the loader alive
        except Stopped:
            self._error = "a stop was requested during the wait for text"
        if self._error is not None:
            self.close()

    def close(self) -> None:
        """End the workers; a new stream can go on from the state."""
        self._next = None
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    @property
    def rows(self) -> int:
        """Rows of the global batches returned since the run began."""
        return self._rows

    @property
    def repeats(self) -> bool:
        """Whether a stream of this rank has begun another pass over its text."""
        return any(cursor.epoch for cursor in self._cursors.values())

    def state_dict(self) -> dict:
        """The position of the run and the cursors of the streams that this rank reads, for JSON."""
        return {
            "rows": self._rows,
            "streams": self._share.plan.streams,
            **self._order,
            "cursors": {str(number): asdict(cursor) for number, cursor in sorted(self._cursors.items())},
        }


def merge_states(states: Iterable[dict]) -> dict:
    """Merge the states of all ranks into one, from which any number of ranks can go on.

    Raises:
        ValueError: they are states of different runs or steps.
    """
    states = list(states)
    merged = {**states[0], "cursors": {}}
    for state in states:
        if any(state[name] != merged[name] for name in state if name != "cursors"):
            raise ValueError("data states of different runs or steps cannot be merged")
        merged["cursors"] |= state["cursors"]
    merged["cursors"] = dict(sorted(merged["cursors"].items(), key=lambda item: int(item[0])))
    return merged


def counts_in(state: dict | None) -> dict[str, int]:
    """Bad, empty and cut documents and lost parts of files up to a state; a stream that several ranks read counts once.

    `passes` are the completed passes over its text of the stream that is furthest.

    Args:
        state: from `merge_states` or of one rank; None is the beginning of a run.
    """
    cursors = state["cursors"].values() if state else ()
    counts = {name: sum(cursor[name] for cursor in cursors) for name in _COUNTS}
    return counts | {"passes": max((cursor["epoch"] for cursor in cursors), default=0)}


def count_targets(labels: torch.Tensor) -> int:
    """The number of tokens predicted in `labels` (rows × length): all but padding and each row's first."""
    return int((labels[:, 1:] != IGNORED).sum())


def _require_same_order(state: dict, order: dict, source: str) -> None:
    for key, what, option in (
        ("files", "other training files", "data.files"),
        ("validation", "other validation files", "data.validation_files"),
        ("tokenizer", "another tokenizer", "data.tokenizer"),
    ):
        if state.get(key, order[key]) != order[key]:  # an older version kept less of it
            if source == "python-docs" and key != "tokenizer":
                raise UserError(
                    "the checkpoint was made with other python-docs than the packages on this machine hold now; "
                    "install the versions of that time, as in the first line of the run's config.yaml, or start a new "
                    "run from the model with model.path"
                )
            by = "the ids, which older versions may give otherwise" if key == "tokenizer" else "name and size"
            raise UserError(
                f"the checkpoint was made with {what} than {option} names now (by {by}); give the same, or start a new "
                "run from the model with model.path"
            )
    for name, option in (("seed", "seed"), ("shuffle_window", "data.shuffle_window")):
        if state[name] != order[name]:
            raise UserError(
                f"the checkpoint's text was ordered with {option} {state[name]}, this run has {order[name]}; "
                f"give {option} {state[name]}"
            )


@dataclass
class _Item:
    """The contribution of one worker to one batch."""

    places: list[int]  # of its rows in the global batch
    ids: np.ndarray  # of its rows, concatenated
    ends: np.ndarray  # of each row in `ids`
    numbers: list[int]  # of its streams
    cursors: list[tuple[int, ...]]  # of its streams, after this batch


class _Share(IterableDataset):
    """The streams of a rank; each worker takes some of them and yields one `_Item` per step."""

    def __init__(
        self,
        plan: Plan,
        encoder: Encoder,
        rows: int,
        batch: int,
        rank: int,
        world_size: int,
        cursors: dict[int, Cursor],
    ) -> None:
        self.plan, self.encoder = plan, encoder
        self.rows, self.batch, self.rank, self.world_size = rows, batch, rank, world_size
        # The pattern of streams repeats after so many steps, when a multiple of V rows has been taken.
        steps = plan.streams // gcd(plan.streams, batch)
        places = rows + np.add.outer(np.arange(steps) * batch, np.arange(rank, batch, world_size))
        self.cursors = {int(v): cursors.get(int(v), Cursor()) for v in np.unique(places % plan.streams)}

    def __iter__(self) -> Iterator[_Item | UserError]:
        """Yield items endlessly; an error is yielded as an item, since torch would wrap a raised one in tracebacks."""
        worker = get_worker_info()
        numbers = list(self.cursors)[worker.id :: worker.num_workers] if worker else list(self.cursors)
        streams = {v: RowStream(self.plan, v, self.cursors[v], self.encoder) for v in numbers}
        rows = self.rows
        while True:
            try:
                yield self._item(streams, rows)
            except UserError as error:
                yield from itertools.repeat(UserError(str(error)))
            except Exception as error:
                traceback.print_exc()  # a fault of this program, to be reported
                sentence = f"the training text cannot be read ({type(error).__name__}: {error}); see the lines above"
                yield from itertools.repeat(UserError(" ".join(sentence.split())))
            rows += self.batch

    def _item(self, streams: dict[int, RowStream], rows_done: int) -> _Item:
        places, rows = [], []
        for number, stream in streams.items():
            for place in range((number - rows_done) % self.plan.streams, self.batch, self.plan.streams):
                row = stream.next_row()
                if place % self.world_size == self.rank:
                    places.append(place)
                    rows.append(row)
        ids = np.concatenate(rows) if rows else np.empty(0, np.int32)
        ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
        return _Item(places, ids, ends, list(streams), [astuple(stream.cursor) for stream in streams.values()])
