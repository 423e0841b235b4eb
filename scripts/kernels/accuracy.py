"""How far every kernel, run by Triton's interpreter on the CPU, is from float64, over shapes that do not divide.

To be imported with `TRITON_INTERPRET=1`. The interpreter rounds bfloat16 towards zero, a GPU to nearest, so errors in
bfloat16 are up to twice those of a GPU.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from salaad.factored import gpu_products
from salaad.factored.layers import SlrLinear
from salaad.factored.slr import Slr
from salaad.methods.salaad import gpu_kernels as admm
from salaad.methods.salaad import passes
from salaad.model import gpu_kernels as loss

DTYPES = (torch.float32, torch.bfloat16)
# n, m, rank, entries of S, rows of x. Nothing divides; the third has more columns, entries and rows than a program
# reads at once, the fourth more terms.
PRODUCTS = {
    "one row": (13, 45, 6, 150, 1),
    "three rows": (13, 45, 6, 150, 3),
    "long rows": (5, 300, 5, 1200, 11),
    "high rank": (3, 20, 131, 30, 5),
    "empty S": (7, 20, 3, 0, 2),
    "rank 0": (7, 20, 0, 30, 2),
    "nothing": (5, 6, 0, 0, 2),
}


def errors() -> Iterator[dict[str, Any]]:
    """The largest error of every kernel and case, relative to the largest number of the exact result."""
    torch.manual_seed(0)
    for dtype in DTYPES:
        for case, sizes in PRODUCTS.items():
            yield from (_row(kernel, dtype, case, error) for kernel, error in product_errors(*sizes, dtype).items())
        for kernel, error in {**admm_errors(dtype), "cross_entropy_kernel": loss_error(dtype)}.items():
            yield _row(kernel, dtype, "", error)


def product_errors(n: int, m: int, rank: int, nnz: int, rows: int, dtype: torch.dtype) -> dict[str, float]:
    """Of y = U(Vx) + Sx + b, of U·V + S, and of rows of it."""
    slr = random_slr(n, m, rank, nnz, dtype)
    exact = slr.to("cpu", torch.float64).dense()
    with torch.no_grad():
        products, x, b = products_of(slr), torch.randn(rows, m).to(dtype), torch.randn(n).to(dtype)
        ids = torch.randint(n, (2, 3))
        [y] = gpu_products.linear_of_several([products], x, [b])
        return {
            "multiply_by_U_and_S": distance(y, x.double() @ exact.mT + b.double()),
            "add_rows_of_S": max(distance(products.dense(), exact), distance(products.rows(ids), exact[ids])),
        }


def admm_errors(dtype: torch.dtype) -> dict[str, float]:
    """Of T and the statistics of an update, and of the penalty, in float32 or with X and the gradient in `dtype`."""
    X, L, R = torch.randn(3, 37, 61).to(dtype), torch.randn(3, 37, 61), torch.randn(3, 37, 61)
    tau = passes.Thresholds(*torch.tensor([[1, 0.4, 0.1], [0.5, 0.2, 0], [0.3, 0.1, 0]]))
    exact_tau = passes.Thresholds(*(each.double() for each in tau))
    exact = passes.divide_in_torch(X.double(), L.double(), R.double(), exact_tau, thresholded=True)
    found = passes.Divided(*admm.divide(X, L, R, tau))
    gradient = torch.randn(37, 61).to(dtype)
    expected = gradient.double() + 0.01 * (X[0].double() - found.T[0].double())
    admm.add_penalty(gradient, X[0], found.T[0], 0.01, seed=3)
    error = max(distance(mine, theirs.double()) for mine, theirs in zip(found, exact, strict=True))
    return {"divide_kernel": error, "penalty_kernel": distance(gradient, expected)}


def loss_error(dtype: torch.dtype) -> float:
    """Of the losses and the gradient of logits, one token ignored, more logits than are read at once."""
    logits, targets = (5 * torch.randn(3, 4500)).to(dtype), torch.tensor([4, 4400, -100])
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, targets, reduction="none")
    expected.sum().backward()
    losses = loss.cross_entropy_(logits, targets, -100, with_gradient=True)
    return max(distance(losses, expected.detach()), distance(logits, exact.grad))


def random_slr(n: int, m: int, rank: int, nnz: int, dtype: torch.dtype) -> Slr:
    """Random parts of an n×m matrix."""
    U, V, values = torch.randn(n, rank) / 4, torch.randn(rank, m) / 4, torch.randn(nnz)
    return Slr((n, m), U.to(dtype), V.to(dtype), torch.randperm(n * m)[:nnz].int(), values.to(dtype))


def products_of(slr: Slr) -> gpu_products.Products:
    """The products of the kernels with a matrix, its columns in 16 bits."""
    layer = SlrLinear.from_slr(slr)
    assert layer.columns.dtype == torch.int16
    return gpu_products.products(slr.shape, *layer._tensors)


def distance(found: Tensor, exact: Tensor) -> float:
    """Largest difference, relative to the largest number."""
    return ((found.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-30)).item()


def _row(kernel: str, dtype: torch.dtype, case: str, error: float) -> dict[str, Any]:
    return {"kernel": kernel, "dtype": str(dtype).removeprefix("torch."), "case": case, "error": error}
