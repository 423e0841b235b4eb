"""The data sheets of known GPUs: one table for predictions and for the choice of kernels and solvers."""

from dataclasses import dataclass

import torch

from salaad.spectral.cost import RATES, Rates
from salaad.spectral.gpu_names import known_as, known_name


@dataclass(frozen=True)
class Gpu:
    """The figures of a GPU's data sheet.

    Args:
        peaks: precision of training → dense operations a second.
        bandwidth: memory bandwidth in bytes a second.
        memory: bytes of memory.
        link: bytes a second in one direction to the other GPUs of its machine.
        network: bytes a second between machines, this GPU's share.
        rates: speeds of the ADMM's products and solvers, in float32.
    """

    peaks: dict[str, float]
    bandwidth: float
    memory: float
    link: float
    network: float
    rates: Rates

    def peak(self, dtype: torch.dtype) -> float:
        """Operations a second of matrix products in `dtype`; products in float32 run outside of tensor cores."""
        return self.peaks["fp32" if dtype == torch.float32 else "bf16"]


def _gpu(name: str, tf32: float, bf16: float, **others: float) -> Gpu:
    rates = RATES[name]
    return Gpu({"fp32": rates.peak, "tf32": tf32, "bf16-mixed": bf16, "bf16": bf16}, rates=rates, **others)


GPUS = {
    "h100": _gpu("h100", 495e12, 989e12, bandwidth=3.35e12, memory=80e9, link=450e9, network=50e9),
    "h200": _gpu("h200", 495e12, 989e12, bandwidth=4.8e12, memory=141e9, link=450e9, network=50e9),
    "a100": _gpu("a100", 156e12, 312e12, bandwidth=2.04e12, memory=80e9, link=300e9, network=25e9),
    "4090": _gpu("4090", 82.6e12, 165e12, bandwidth=1.01e12, memory=24e9, link=32e9, network=12.5e9),
}


def gpu_of(device: torch.device) -> Gpu:
    """Return the data sheet of a device: that of an A100 for an unknown GPU (with a warning) and for a CPU."""
    return GPUS[known_as(device)]


def gpu_called(name: str) -> Gpu:
    """Return the data sheet of a GPU by its device name: that of an A100 for an unknown one, with a warning."""
    return GPUS[known_name(name)]
