"""Run a function on several ranks, each a process of its own, and bring back what every rank returned."""

import pickle
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

from tests.helpers.forked import begin, server


def run_ranks(fn: Callable[..., Any], world_size: int, tmp_path: Path, *args: Any, timeout: float = 60) -> list[Any]:
    """Run `fn(*args)` on `world_size` ranks that form a gloo group, and return the results in rank order.

    `fn` must be a function of a module, and its arguments and results picklable. An error on any rank is raised here. A
    rank that waits for one that has failed does not wait for longer than `timeout` seconds.
    """
    folder = Path(mkdtemp(dir=tmp_path))
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # like the store of a launcher
    server(fn.__module__)  # before it starts
    mp.start_processes(
        _rank, (world_size, folder, store.port, fn, args, timeout), nprocs=world_size, start_method="forkserver"
    )
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(world_size)]


def _rank(
    rank: int, world_size: int, folder: Path, port: int, fn: Callable[..., Any], args: tuple, timeout: float
) -> None:
    begin()
    store, limit = dist.TCPStore("localhost", port), timedelta(seconds=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    dist.barrier()  # a rank that ended before another has connected would leave that one without a peer
    try:
        (folder / f"{rank}.pickle").write_bytes(pickle.dumps(fn(*args)))
    finally:
        dist.destroy_process_group()
