"""A round: one ADMM update of all blocks that are due, of which the host reads the results once.

On a device for whose values the host must wait, blocks of one shape (n×m, or m×n as its transpose) are stacked and
updated together by a solver that needs no value on the host: `gram` or `products`, whichever is predicted to be the
cheaper. For each block the solver leaves on the device whether its result holds, and four numbers by which the host
plans the next update; one read brings those of all blocks. With `products`, the cheaper on every GPU in the table for
matrices of about a hundred rows and columns or more, this read is the only wait of a round. An eigensolver makes
the host wait for whether it has converged: `gram` once per stack. `gram` is used while there is no threshold, as in the
first round, and for smaller matrices.

A block whose result does not hold keeps its state, and is updated alone, as every block is on a CPU, by the solvers
that decide by the values they find. That makes the host wait many times. So after an update in which `products` has
failed, `gram` does the following updates of the block until τ_L is large enough compared with the singular values.

A result does not depend on which blocks are in one stack, apart from rounding: a block's solver is chosen from its own
shape and state.

A round has a beginning and an end, between which the device computes and the host goes on. With `overlap` the round has
a CUDA stream of its own, so that the device can compute the next step's forward pass at the same time. Neither the
weights nor the states of the blocks may be changed in between: then the results are bit for bit those of a round that
is ended at once.
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

MOST_ENTRIES = 2**26  # of the weights in a stack, whose update takes 9 to 16 times their memory temporarily
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
    """The outcome of the update of a stack of b blocks.

    Args:
        solver: the solver that was tried.
        rows: b×8, a row for each block, as `Surrogate.update` returns it.
        sigma: b×n singular values of L, if the solver found them.
        verdict: b×5: whether the result holds, effective rank, singular values above τ_L, whether the next τ_L > 0, and
            whether the next τ_L is too small for products.
    """

    solver: Solver
    rows: Tensor
    sigma: Tensor | None
    verdict: Tensor


def bytes_for_a_moment(n: int, m: int, count: int) -> int:
    """Return the most bytes that a device needs while it updates stacks of `count` blocks (n×m, n ≤ m).

    The new states are included. Counted from the tensors: a wide matrix needs most while S and T are computed, a square
    one while its rank is found.
    """
    stacked = min(count, max(1, MOST_ENTRIES // (n * m)))
    return 4 * stacked * max(9 * n * m, 5 * n * m + 11 * n * n)


def update_round(blocks: Sequence[Block]) -> list[Tensor]:
    """Update blocks towards their weights; return for each what `Surrogate.update` returns, in the same order."""
    return Round(blocks).end()


class Round:
    """An update of blocks towards their weights, of which the device begins what needs no value on the host.

    Args:
        blocks: at least one block, all on one device.
        overlap: whether a GPU computes the round at the same time as the work that it is given until `end`.
    """

    def __init__(self, blocks: Sequence[Block], overlap: bool = False) -> None:
        self._blocks = blocks
        self._device = blocks[0][1].device
        self._stream = _stream_of(self._device) if overlap and self._device.type == "cuda" else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))  # which may still change the weights
            for surrogate, _ in blocks:
                for tensor in vars(surrogate.state).values():
                    tensor.record_stream(self._stream)  # still read there after the block has dropped it
        with self._on_stream():
            self._attempts = [
                (members, _attempt(kind, [blocks[i] for i in members])) for kind, members in _stacks(blocks)
            ]

    def end(self) -> list[Tensor]:
        """Wait for the results; return for each block what `Surrogate.update` returns, in the same order."""
        with self._on_stream():  # so that the host waits for this stream alone
            rows = self._held()
            tried = {i: found.solver for members, found in self._attempts for i in members}
            for i, (surrogate, X) in enumerate(self._blocks):
                if rows[i] is None:
                    rows[i] = surrogate.update(X)
                    surrogate.avoid_products = tried.get(i) == "products"
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return rows

    def _held(self) -> list[Tensor | None]:
        """Read the verdicts; return the row of every block whose result holds, and None for the others."""
        rows: list[Tensor | None] = [None] * len(self._blocks)
        if not self._attempts:
            return rows
        # All values that the host reads, at once.
        verdicts = iter(torch.cat([tried.verdict for _, tried in self._attempts]).tolist())
        for members, tried in self._attempts:
            for place, i in enumerate(members):
                holds, rank, width, thresholded, unfit = next(verdicts)
                if holds:
                    surrogate = self._blocks[i][0]
                    sigma = None if tried.sigma is None else tried.sigma[place].clone()
                    surrogate.set_host_copies(int(rank), int(width), bool(thresholded), sigma)
                    surrogate.avoid_products = bool(unfit)
                    rows[i] = tried.rows[place]
        return rows

    def _on_stream(self) -> AbstractContextManager:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream of all rounds on a device.

    torch's allocator shares no memory between streams, and torch hands out 32 streams in turn. With a new stream for
    each round, the temporaries of an update, many times as large as a stack, would in time be kept 32 times.
    """
    return torch.cuda.Stream(device)


def _stacks(blocks: Sequence[Block]) -> Iterator[tuple[Kind, list[int]]]:
    """Yield the stacks: what the blocks of each share, and their indices in `blocks`."""
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
    if surrogate.thresholded and not surrogate.avoid_products and surrogate.config.gamma <= MOST_ENERGY:
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
    config, held = blocks[0][0].config, blocks[0][0].held
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
        after, found, figures = advance(before, X, solve, kind.thresholded, config, held)
    except torch.linalg.LinAlgError:
        nothing = X.new_zeros(len(blocks), 8)
        return Attempt(kind.solver, nothing, None, nothing[:, :5])
    assert isinstance(found, StackResult)
    holds &= figures.total.isfinite()
    for place, (surrogate, _) in enumerate(blocks):
        surrogate.set_state(_chosen(place, holds, before, after, surrogate.T.shape))
    rows = statistics(after, figures, kind.rho, found.bound, found.solver)
    unfit = torch.zeros_like(holds)  # products that held are tried again; `holds` tells if they fail then
    if found.sigma is not None:
        unfit = found.sigma[:, 0] + before.tau_L > MOST_SPREAD * after.tau_L
    verdict = torch.stack([holds, figures.rank, found.kept, after.tau_L > 0, unfit], 1)
    return Attempt(kind.solver, rows, found.sigma, verdict)


def _lying(M: Tensor) -> Tensor:
    """M (n×m) or its transpose, whichever has the short side first."""
    return M.mT if M.shape[0] > M.shape[1] else M


def _stacked(states: Sequence[State]) -> State:
    def all_of(name: str) -> Tensor:
        values = [getattr(state, name) for state in states]
        return torch.stack([_lying(value) if value.ndim else value for value in values])

    return State(*map(all_of, PARTS))


def _chosen(place: int, holds: Tensor, before: State, after: State, shape: torch.Size) -> State:
    """Return the state of one block of a stack, in memory of its own: after the update if it holds, else before."""

    def choose(name: str) -> Tensor:
        value = torch.where(holds[place], getattr(after, name)[place], getattr(before, name)[place])
        return value if value.shape == shape or not value.ndim else value.mT.contiguous()

    return State(*map(choose, PARTS))
