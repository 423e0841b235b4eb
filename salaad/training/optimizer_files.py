"""The optimizer's state in a checkpoint: a file per rank, which any number of ranks can open.

    state/optimizer.pt                      of one rank; in earlier versions, of any number of ranks
    state/optimizer-00001-of-00008.pt       the second rank's part of eight

If all ranks hold the whole state, each writes a part of it, which divides the time of a save by their number. Each file
has the form of `Optimizer.state_dict`, and is read with `weights_only`.
"""

import heapq
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from salaad.common import distributed
from salaad.common.errors import UserError, in_a_sentence
from salaad.common.hashed_files import HashedFile
from salaad.methods.optimizer import load_optimizer_state
from salaad.training.sharding import owners_of, parameters_of

_WHOLE, _PART = "optimizer.pt", "optimizer-{:05d}-of-{:05d}.pt"


def save_optimizer(optimizer: Optimizer, folder: Path, sharded: bool, beside: int) -> dict[str, str]:
    """Write this rank's part of the optimizer's state into an existing folder.

    Args:
        optimizer: the optimizer, with the state of all parameters, or only of those that this rank owns.
        folder: `state/` of a checkpoint.
        sharded: whether it holds only the state of the parameters that this rank owns (`sharding.shard`).
        beside: bytes that the first rank writes besides, so that it gets a smaller part of a state that all ranks hold.

    Returns:
        Name of the file in the folder → its SHA-256.
    """
    ranks, whole = distributed.world_size(), optimizer.state_dict()
    name = _PART.format(distributed.rank(), ranks) if ranks > 1 else _WHOLE
    if not sharded:
        sizes = {i: sum(v.nbytes for v in entry.values() if torch.is_tensor(v)) for i, entry in whole["state"].items()}
        writers = writers_of(sizes, ranks, beside)
        whole["state"] = {i: entry for i, entry in whole["state"].items() if writers[i] == distributed.rank()}
    with HashedFile(folder / name) as file:
        torch.save(whole, file)
    return {name: file.digest}


def writers_of(sizes: Mapping[int, int], ranks: int, beside: int) -> dict[int, int]:
    """Return index of a parameter → rank that writes its state, evened out by bytes; rank 0 also writes `beside`."""
    loads = [(0, rank) for rank in range(1, ranks)]
    heapq.heappush(loads, (beside, 0))
    writers = {}
    for i in sorted(sizes, key=lambda i: (-sizes[i], i)):
        load, writers[i] = loads[0]
        heapq.heapreplace(loads, (load + sizes[i], writers[i]))
    return writers


def load_optimizer(optimizer: Optimizer, folder: Path, sharded: bool) -> None:
    """Load the state that any number of ranks wrote with `save_optimizer`; if `sharded`, only what this rank owns.

    Raises:
        UserError: a file is missing, broken, of another run, or of a version that grouped the parameters otherwise.
    """
    parameters = parameters_of(optimizer)
    owners = owners_of(parameters, distributed.world_size()) if sharded else [distributed.rank()] * len(parameters)
    state: dict[int, dict[str, Any]] = {}
    for path in _files(folder):
        with in_a_sentence(path):
            # Memory-mapped, so that the state that others own is not read, and the ranks of a machine share one copy.
            part = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            for i, entry in part["state"].items():
                if owners[i] == distributed.rank():
                    state[i] = {key: _own(value, parameters[i]) for key, value in entry.items()}
    with in_a_sentence(path):
        groups = part["param_groups"]
        saved, wanted = ([len(group["params"]) for group in parts] for parts in (groups, optimizer.param_groups))
        if saved != wanted and sum(saved) == sum(wanted):
            before, now = (" and ".join(map(str, counts)) for counts in (saved, wanted))
            raise UserError(
                f"{path} has groups of {before} parameters, but this run has groups of {now}, as versions differ in "
                "what learns at the rate of projections; go on with the version that began the run, or begin a new one"
            )
        load_optimizer_state(optimizer, {"state": dict(sorted(state.items())), "param_groups": groups})


def _own(value: Any, parameter: nn.Parameter) -> Any:
    """Return `value` in memory of its own, not the file's; for a parameter on a device, loading will copy it."""
    return value.clone() if torch.is_tensor(value) and parameter.device.type == "cpu" else value


def _files(folder: Path) -> list[Path]:
    """Return the files of the state, written by any number of ranks; a UserError if parts are missing."""
    found = sorted(folder.glob("optimizer-*.pt"))
    if (folder / _WHOLE).is_file() or not found:
        return [folder / _WHOLE]
    ranks = found[0].stem.rpartition("-")[2]
    wanted = [folder / _PART.format(rank, int(ranks)) for rank in range(int(ranks) if ranks.isdigit() else 0)]
    if found != wanted:
        raise UserError(f"{folder} does not hold the {ranks} parts of one optimizer's state; give a whole checkpoint")
    return found
