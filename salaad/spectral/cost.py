"""Which solver is the cheapest for a stack of matrices on a device, by counted operations over the device's rates.

The rates of the CPU were measured (`scripts/bench_admm.py`, one thread of an AMD EPYC). The rates of the GPUs were not:
peaks are from the data sheets, and the fractions of the peaks that are attained are assumptions, equal for all GPUs. An
eigensolver goes column by column and runs a few kernels in sequence for each, in a stack too; then the host waits to
learn whether it has converged, and has to launch some calls before the device is busy again. An update that runs
concurrently with the forward pass is not counted as cheaper: products fill the device by themselves, and while the host
waits it cannot begin the forward pass.

On a CPU matrices are not stacked: the host reads every value without waiting, so the solvers of `ladder`, which branch
on computed values, are the cheapest there, and a stack was no faster than one matrix after the other.
"""

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from salaad.spectral import products, stacks
from salaad.spectral.gpu_names import known_as

Solver = Literal["ladder", "gram", "products"]
COLUMN_KERNELS = 4  # kernels that an eigensolver runs for each column, one after the other
REFILL = 20  # calls that the host launches after a wait until the device is busy again; charged to every matrix


@dataclass(frozen=True)
class Rates:
    """The speed of a device in float32.

    Args:
        peak: dense operations per second.
        products: fraction of the peak that matrix products attain.
        eigenvectors: fraction of the peak that an eigensolver attains.
        launch: seconds that even the smallest call takes.
        waits: whether the host has to wait for the device before it can read a value.
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
    """Return the solver with the fewest predicted seconds; `ladder` where the host does not have to wait."""
    if not rates.waits:
        return "ladder"
    return "products" if seconds("products", n, m, rates) < seconds("gram", n, m, rates) else "gram"
