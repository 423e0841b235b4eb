"""One ADMM update of all blocks that are due, of which the host reads the results once.

Where the host must wait for a value, blocks of one shape (n×m, or m×n as its transpose) are stacked and updated
together by a solver whose results it does not look at: `gram` or `products`, whichever is predicted to be the cheaper.
Each leaves behind whether its result holds, with the four numbers by which the host plans the next update, and one read
brings those of all blocks. By products, the cheaper on every GPU in the table for matrices of about a hundred rows and
columns or more, that is the only wait of a round. An eigensolver waits inside, for whether it has converged: once a
stack by `gram`, which is taken while there is no threshold, as in the first round, and for smaller matrices.

A block whose result does not hold is still as it was, and is updated alone, as every block is on a CPU, by the solvers
that decide by what they find. That makes the host wait many times. So `gram` takes the update that follows one in which
products have failed, and every one after it until τ_L is large enough beside the singular values.

A result does not depend on which blocks stand in one stack, apart from rounding: a block's solver is chosen from its
own last rank.

A round has a beginning and an end, between which the device computes and the host goes on. With `beside` that is a
stream of its own, so that the device works on the next step's forward pass too. Neither the weights nor the states of
the blocks may be touched in between: then the results are those of a round at once, to the bit.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from functools import cache

import torch
from torch import Tensor

from salaad.methods.salaad.surrogate import Surrogate
from salaad.methods.salaad.update import State, advance, statistics
from salaad.spectral.cost import Rates, Solver, cheapest, rates_of
from salaad.spectral.products import MOST_ENERGY, MOST_SPREAD, product_stack
from salaad.spectral.results import StackResult
from salaad.spectral.stacks import gram_stack

MOST_ENTRIES = 2**26  # of the weights in a stack, whose update takes nine to sixteen times their memory for a moment
PARTS = [field.name for field in fields(State)]
Block = tuple[Surrogate, Tensor]


@dataclass(frozen=True)
class Kind:
    """What the blocks of a stack have in common: solver, shape, ρ and whether τ_L > 0."""

    solver: Solver
    n: int
    m: int
    rho: float
    thresholded: bool


@dataclass(frozen=True)
class Attempt:
    """What became of a stack of b blocks.

    Args:
        solver: which was tried.
        rows: b×8, as `Surrogate.update` returns them.
        sigma: b×n singular values of L, if the solver found them.
        verdict: b×5: whether the result holds, effective rank, singular values above τ_L, whether the next τ_L > 0, and
            whether it is too small for products.
    """

    solver: Solver
    rows: Tensor
    sigma: Tensor | None
    verdict: Tensor


def bytes_for_a_moment(n: int, m: int, count: int) -> int:
    """Bytes that a device needs while it updates stacks of `count` blocks (n×m, n ≤ m), at most.

    The new states among them. Counted: of a wide matrix most are there at once while S and T are computed, of a square
    one while its rank is found.
    """
    stacked = min(count, max(1, MOST_ENTRIES // (n * m)))
    return 4 * stacked * max(9 * n * m, 5 * n * m + 11 * n * n)


def update_round(blocks: Sequence[Block]) -> list[Tensor]:
    """Update blocks towards their weights; returns of each what `Surrogate.update` returns, in the same order."""
    return Round(blocks).end()


class Round:
    """An update of blocks towards their weights, of which the device has begun what needs no look at a value.

    Args:
        blocks: of one device, at least one.
        beside: compute it beside what the device is given until `end`.
    """

    def __init__(self, blocks: Sequence[Block], beside: bool = False) -> None:
        self._blocks = blocks
        self._device = blocks[0][1].device
        self._stream = _stream_of(self._device) if beside and self._device.type == "cuda" else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))  # which may still move the weights
            for surrogate, _ in blocks:
                for tensor in vars(surrogate.state).values():
                    tensor.record_stream(self._stream)  # read there after the block has let go of it
        with self._beside():
            self._attempts = [
                (members, _attempt(kind, [blocks[i] for i in members])) for kind, members in _stacks(blocks)
            ]

    def end(self) -> list[Tensor]:
        """Wait for the results; returns of each block what `Surrogate.update` returns, in the same order."""
        with self._beside():  # where the host waits for this stream alone
            rows = self._held()
            tried = {i: found.solver for members, found in self._attempts for i in members}
            for i, (surrogate, X) in enumerate(self._blocks):
                if rows[i] is None:
                    rows[i] = surrogate.update(X)
                    surrogate.unfit = tried.get(i) == "products"
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return rows

    def _held(self) -> list[Tensor | None]:
        """The rows of the blocks whose result holds; None of the others."""
        rows: list[Tensor | None] = [None] * len(self._blocks)
        if not self._attempts:
            return rows
        # All that the host reads.
        verdicts = iter(torch.cat([tried.verdict for _, tried in self._attempts]).tolist())
        for members, tried in self._attempts:
            for place, i in enumerate(members):
                holds, rank, width, thresholded, unfit = next(verdicts)
                if holds:
                    surrogate = self._blocks[i][0]
                    sigma = None if tried.sigma is None else tried.sigma[place].clone()
                    surrogate.know(int(rank), int(width), bool(thresholded), sigma)
                    surrogate.unfit = bool(unfit)
                    rows[i] = tried.rows[place]
        return rows

    def _beside(self) -> AbstractContextManager:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """The stream of all rounds on a device: its allocator keeps the memory of every stream apart, and never shares it.

    torch hands out 32 streams in turn. With a new one for each round, the temporaries of an update, many times a stack,
    would in time be kept 32 times.
    """
    return torch.cuda.Stream(device)


def _stacks(blocks: Sequence[Block]) -> Iterator[tuple[Kind, list[int]]]:
    """The blocks that are updated together, by their places."""
    kinds: dict[Kind, list[int]] = {}
    rates = rates_of(blocks[0][1].device)
    for i, (surrogate, _) in enumerate(blocks):
        kind = _kind(surrogate, rates)
        if kind.solver != "ladder":
            kinds.setdefault(kind, []).append(i)
    for kind, members in kinds.items():
        most = max(1, MOST_ENTRIES // (kind.n * kind.m))
        for first in range(0, len(members), most):
            yield kind, members[first : first + most]


def _kind(surrogate: Surrogate, rates: Rates) -> Kind:
    n, m = sorted(surrogate.T.shape)
    method = surrogate.config.method
    solver: Solver = "gram" if rates.waits else "ladder"
    if surrogate.thresholded and not surrogate.unfit and surrogate.config.gamma <= MOST_ENERGY:
        if method == "products":
            solver = "products"
        elif method == "auto":
            solver = cheapest(n, m, rates)
    if method in ("exact", "subspace"):
        solver = "ladder"
    return Kind(solver, n, m, surrogate.rho, surrogate.thresholded)


@torch.no_grad()
def _attempt(kind: Kind, blocks: Sequence[Block]) -> Attempt:
    """Update a stack; a block whose result does not hold stays as it was."""
    config = blocks[0][0].config
    before = _stacked([surrogate.state for surrogate, _ in blocks])
    X = torch.stack([_lying(weight.detach()) for _, weight in blocks]).float()
    tau = before.tau_L if kind.thresholded else None
    holds = torch.ones_like(before.tau_L, dtype=torch.bool)

    def solve(Z: Tensor) -> StackResult:
        if kind.solver == "products":
            found = product_stack(Z, before.tau_L, config.gamma, config.energy)
        else:
            found = gram_stack(Z, tau, config.gamma, config.energy)
        holds.logical_and_(found.holds)
        return found

    try:
        after, found, figures = advance(before, X, solve, kind.thresholded, config)
    except torch.linalg.LinAlgError:
        nothing = X.new_zeros(len(blocks), 8)
        return Attempt(kind.solver, nothing, None, nothing[:, :5])
    assert isinstance(found, StackResult)
    holds &= figures.total.isfinite()
    for place, (surrogate, _) in enumerate(blocks):
        surrogate.take(_chosen(place, holds, before, after, surrogate.T.shape))
    rows = statistics(after, figures, kind.rho, found.bound, found.solver)
    unfit = torch.zeros_like(holds)  # after products that held; if they do so no more, they will say so
    if found.sigma is not None:
        unfit = found.sigma[:, 0] + before.tau_L > MOST_SPREAD * after.tau_L
    verdict = torch.stack([holds, figures.rank, found.kept, after.tau_L > 0, unfit], 1)
    return Attempt(kind.solver, rows, found.sigma, verdict)


def _lying(M: Tensor) -> Tensor:
    """M (n×m) with the short side first."""
    return M.mT if M.shape[0] > M.shape[1] else M


def _stacked(states: Sequence[State]) -> State:
    def all_of(name: str) -> Tensor:
        values = [getattr(state, name) for state in states]
        return torch.stack([_lying(value) if value.ndim else value for value in values])

    return State(*map(all_of, PARTS))


def _chosen(place: int, holds: Tensor, before: State, after: State, shape: torch.Size) -> State:
    """The state of one block of a stack in memory of its own: after the update where it holds, else before."""

    def choose(name: str) -> Tensor:
        value = torch.where(holds[place], getattr(after, name)[place], getattr(before, name)[place])
        return value if value.shape == shape or not value.ndim else value.mT.contiguous()

    return State(*map(choose, PARTS))
