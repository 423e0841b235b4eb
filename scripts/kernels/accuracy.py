"""Errors of every kernel against float64 on shapes that no block size divides: on a GPU, or interpreted on the CPU.

Without a GPU `TRITON_INTERPRET=1` must be set before the import. The interpreter rounds bfloat16 towards zero, a GPU to
nearest, so errors in bfloat16 are up to twice those of a GPU.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from salaad.factored import gpu_products
from salaad.factored.layers import SlrLinear
from salaad.factored.slr import Slr
from salaad.methods.salaad import elementwise
from salaad.methods.salaad import gpu_kernels as admm
from salaad.model import gpu_kernels as loss

# The ADMM does not take float16, which is a dtype of deployed models, not of training.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TRAINED = (torch.float32, torch.bfloat16)


class Case(NamedTuple):
    """A weight U·V + S (n×m) and what it is multiplied by.

    Args:
        n: rows.
        m: columns.
        rank: r of U·V.
        nnz: entries of S.
        rows: rows of x.
        layers: number of layers that share a launch.
        wide: whether the column indices of S have 32 bits, as rows of more than 2¹⁵ entries need.
        shifted: whether V lies at an address that is no multiple of 16 bytes.
    """

    n: int
    m: int
    rank: int
    nnz: int
    rows: int
    layers: int = 1
    wide: bool = False
    shifted: bool = False


# No block size divides these. The third has more columns, entries and rows than a program reads at once, the fourth a
# higher rank.
PRODUCTS = {
    "one row": Case(13, 45, 6, 150, 1),
    "three rows": Case(13, 45, 6, 150, 3),
    "long rows": Case(5, 300, 5, 1200, 11),
    "high rank": Case(3, 20, 131, 30, 5),
    "empty S": Case(7, 20, 3, 0, 2),
    "rank 0": Case(7, 20, 0, 30, 2),
    "nothing": Case(5, 6, 0, 0, 2),
    "two layers": Case(13, 45, 6, 150, 3, layers=2),
    "32 bits": Case(13, 45, 6, 150, 3, wide=True),
    "shifted": Case(13, 45, 6, 150, 3, shifted=True),
}
# Projections of the 1B model at the paper's rank ratio and density: too much for the interpreter.
LARGE = {
    "gate of 1B": Case(5461, 2048, 307, 559_206, 1),
    "down of 1B": Case(2048, 5461, 307, 559_206, 8, layers=2),
}


def errors(device: str | torch.device = "cpu", large: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the largest error of every kernel and case, relative to the largest magnitude in the exact result.

    Args:
        device: a GPU, or the CPU with an interpreting Triton.
        large: whether to measure shapes of a real model too.

    Raises:
        RuntimeError: the kernels are not used on this device.
    """
    torch.manual_seed(0)
    for dtype in DTYPES:
        for name, case in {**PRODUCTS, **(LARGE if large else {})}.items():
            found = product_errors(case, dtype, device)
            yield from (_row(kernel, dtype, name, error) for kernel, error in found.items())
        for kernel, error in (admm_errors(dtype, device) if dtype in TRAINED else {}).items():
            yield _row(kernel, dtype, "", error)
        yield _row("cross_entropy_kernel", dtype, "", loss_error(3, 4500, dtype, device))
        if large:
            yield _row("cross_entropy_kernel", dtype, "1B", loss_error(512, 32000, dtype, device))


@torch.no_grad()
def product_errors(case: Case, dtype: torch.dtype, device: str | torch.device) -> dict[str, float]:
    """Return kernel → error of y = U(Vx) + Sx + b, and of U·V + S as a whole and by rows."""
    n, m, rank, nnz, rows, *_ = case
    weights = [random_slr(n + 2 * i, m, rank + i * (rank > 0), nnz, dtype) for i in range(case.layers)]
    exact = [slr.to("cpu", torch.float64).dense() for slr in weights]
    layers, stored = zip(*(products_of(slr, device, case.wide, case.shifted) for slr in weights), strict=True)
    x, ids = torch.randn(rows, m).to(dtype), torch.randint(n, (2, 3))
    biases = [torch.randn(layer.n).to(dtype) for layer in layers]
    found = gpu_products.linear_of_several(layers, stored, x.to(device), [b.to(device) for b in biases])
    expected = [x.double() @ W.mT + b.double() for W, b in zip(exact, biases, strict=True)]
    return {
        "multiply_by_U_and_S": max(map(distance, found, expected)),
        "add_rows_of_S": max(
            distance(layers[0].dense(stored[0]), exact[0]),
            distance(layers[0].rows(ids.to(device), stored[0]), exact[0][ids]),
        ),
    }


def admm_errors(dtype: torch.dtype, device: str | torch.device) -> dict[str, float]:
    """Return kernel → error of an update's T and statistics, and of the penalty; X and the gradient are in `dtype`."""
    X, L, R = torch.randn(3, 37, 61).to(dtype), torch.randn(3, 37, 61), torch.randn(3, 37, 61)
    tau = elementwise.Thresholds(*torch.tensor([[1, 0.4, 0.1], [0.5, 0.2, 0], [0.3, 0.1, 0]]))
    exact_tau = elementwise.Thresholds(*(each.double() for each in tau))
    exact = elementwise.sparse_and_dual_in_torch(X.double(), L.double(), R.double(), exact_tau, thresholded=True)
    there = elementwise.Thresholds(*(each.to(device) for each in tau))
    found = elementwise.SparseAndDual(*admm.sparse_and_dual(X.to(device), L.to(device), R.to(device), there))
    gradient, T = torch.randn(37, 61).to(dtype), found.T[0].cpu()
    expected = gradient.double() + 0.01 * (X[0].double() - T.double())
    gradient = gradient.to(device)
    admm.add_penalty(gradient, X[0].to(device), found.T[0], 0.01, seed=3)
    error = max(distance(mine, theirs.double()) for mine, theirs in zip(found, exact, strict=True))
    return {"divide_kernel": error, "penalty_kernel": distance(gradient, expected)}


def loss_error(tokens: int, vocabulary: int, dtype: torch.dtype, device: str | torch.device) -> float:
    """Return the error of losses and logits' gradient, with one token ignored and more logits than are read at once."""
    logits, targets = (5 * torch.randn(tokens, vocabulary)).to(dtype), torch.randint(vocabulary, (tokens,))
    targets[-1] = -100
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, targets, reduction="none")
    expected.sum().backward()
    logits = logits.to(device)
    losses = loss.cross_entropy_(logits, targets.to(device), -100, with_gradient=True)
    return max(distance(losses, expected.detach()), distance(logits, exact.grad))


def random_slr(n: int, m: int, rank: int, nnz: int, dtype: torch.dtype) -> Slr:
    """Return random U, V and S of an n×m matrix."""
    U, V, values = torch.randn(n, rank) / 4, torch.randn(rank, m) / 4, torch.randn(nnz)
    return Slr((n, m), U.to(dtype), V.to(dtype), torch.randperm(n * m)[:nnz].int(), values.to(dtype))


def products_of(
    slr: Slr, device: str | torch.device, wide: bool, shifted: bool
) -> tuple[gpu_products.Products, gpu_products.SlrTensors]:
    """Return the kernels' products with a matrix, and its tensors on the device, stored as `wide` and `shifted` say.

    Raises:
        RuntimeError: the kernels are not used on this device.
    """
    U, V, starts, columns, values = SlrLinear.from_slr(slr).to(device)._tensors
    if shifted:
        V = torch.cat([V.new_empty(1), V.flatten()])[1:].view(V.shape)
    stored = (U, V, starts, columns.int() if wide else columns, values)
    found = gpu_products.products(slr.shape, stored)
    if found is None or columns.dtype != torch.int16:
        raise RuntimeError(f"torch's operations take the place of the kernels on {device}")
    return found, stored


def distance(found: Tensor, exact: Tensor) -> float:
    """The largest difference, relative to the largest magnitude in `exact`."""
    return ((found.cpu().double() - exact).abs().max() / exact.abs().max().clamp(min=1e-30)).item()


def _row(kernel: str, dtype: torch.dtype, case: str, error: float) -> dict[str, Any]:
    return {"kernel": kernel, "dtype": str(dtype).removeprefix("torch."), "case": case, "error": error}
