"""A check: the error of a device's result against a reference, and the largest error that is allowed."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

PASSES, LEFT_OUT, FAILED = "passes", "left out", "FAILED"


class Check(NamedTuple):
    """One thing that was compared.

    Args:
        name: what was compared.
        error: relative to the reference, or a count; NaN where there is none.
        limit: the largest error that passes.
        problem: why the check does not pass, whatever the error.
        left_out: why the check was not made, which is no failure.
    """

    name: str
    error: float
    limit: float
    problem: str = ""
    left_out: str = ""

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "Check":
        """Return the check that `row` was made from; other keys of the row are ignored."""
        fields = {name: row[name] for name in cls._fields}
        return cls(**{**fields, "error": math.nan if row["error"] is None else row["error"]})

    @property
    def row(self) -> dict[str, Any]:
        """The check as a row of JSON, where None stands for an error that is not finite."""
        return {**self._asdict(), "error": self.error if math.isfinite(self.error) else None}

    @property
    def outcome(self) -> str:
        """`PASSES`, `LEFT_OUT` or `FAILED`; an error that is no number is a failure."""
        if self.left_out:
            return LEFT_OUT
        return PASSES if not self.problem and self.error <= self.limit else FAILED

    @property
    def found(self) -> str:
        """The error as text, or the reason why the check was left out or fails."""
        return self.left_out or self.problem or (f"{self.error:.1e}" if math.isfinite(self.error) else "not finite")


def not_made(name: str, why: str) -> Check:
    """A check that was left out."""
    return Check(name, math.nan, 0.0, left_out=why)


def matrix(n: int, m: int) -> Tensor:
    """Return a fixed random n×m matrix in float64 on the CPU; its singular values fall geometrically from 1 to 0.02.

    They fall less than in most weights, but as far as all solvers can follow at every threshold above the smallest.
    """
    generator = torch.Generator().manual_seed(n * m)
    U, V = (torch.linalg.qr(torch.randn(k, min(n, m), generator=generator).double())[0] for k in (n, m))
    return (U * torch.logspace(0, math.log10(0.02), min(n, m), dtype=torch.float64)) @ V.mT


def relative(found: Tensor, wanted: Tensor, scale: Tensor) -> float:
    """‖found − wanted‖_F over ‖scale‖_F, in float64."""
    difference = found.detach().cpu().double() - wanted.detach().cpu().double()
    return float(torch.linalg.vector_norm(difference) / torch.linalg.vector_norm(scale.double()))
