"""Which solver is the cheapest for a stack of matrices on a device, by counted operations over the device's rates.

The rates of the CPU were measured (`scripts/bench_admm.py`, one thread of an AMD EPYC). Those of the GPUs are none of
ours: peaks are from the data sheets, and the parts of them that are reached are assumptions, the same for all. An
eigensolver goes column by column and waits for a few kernels at each, in a stack too; then the host waits for it, for
whether it has converged, and has to start some calls before the device is busy again. An update beside the forward pass
is given no discount: products fill the device alone, and while the host waits it cannot begin that pass.

A CPU is not one of the stacked: on it the host sees every value at once, so the solvers of `ladder`, which decide by
what they find, are the cheapest there, and a stack was no faster than one matrix after the other.
"""

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from salaad.spectral import products, stacks
from salaad.spectral.gpu_names import known_as

Solver = Literal["ladder", "gram", "products"]
COLUMN_KERNELS = 4  # that an eigensolver starts for each column, one after the other
REFILL = 20  # calls of the host after a wait until the device does not wait for it any more; charged to every matrix


@dataclass(frozen=True)
class Rates:
    """What a device does in a second, in float32.

    Args:
        peak: dense operations.
        products: part of the peak that products reach.
        eigenvectors: part of the peak that an eigensolver reaches.
        launch: seconds of a call however small.
        waits: whether the host has to wait before it sees a value.
    """

    peak: float
    products: float = 0.4
    eigenvectors: float = 0.03
    launch: float = 5e-6
    waits: bool = True


RATES = {
    "cpu": Rates(25e9, products=0.9, eigenvectors=0.7, waits=False),
    "h100": Rates(67e12),
    "h200": Rates(67e12),
    "a100": Rates(19.5e12),
    "4090": Rates(82.6e12),
}


@cache
def rates_of(device: torch.device) -> Rates:
    """The rates of a device by its name; those of an A100 for a GPU that is not in the table, with a warning."""
    return RATES["cpu" if device.type == "cpu" else known_as(device)]


def seconds(solver: Solver, n: int, m: int, rates: Rates) -> float:
    """Predicted seconds for one matrix (n×m, n ≤ m) of a stack."""
    if solver == "products":
        work, calls = products.operations(n, m)
        return work / (rates.peak * rates.products) + calls * rates.launch
    work, eigenvectors = stacks.operations(n, m)
    time = (work / rates.products + eigenvectors / rates.eigenvectors) / rates.peak
    return time + ((n * COLUMN_KERNELS + REFILL) * rates.launch if rates.waits else 0.0)


def cheapest(n: int, m: int, rates: Rates) -> Solver:
    """The solver of the fewest predicted seconds."""
    if not rates.waits:
        return "ladder"
    return "products" if seconds("products", n, m, rates) < seconds("gram", n, m, rates) else "gram"
