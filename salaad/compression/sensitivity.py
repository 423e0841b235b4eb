"""How sensitive the loss is to an error in each entry of a block, so that a cut damages what matters least.

An error E in a block X (n×m) counts as Σ w_ij² E_ij², with w_ij² from mean squared gradients v_ij of training or text:

    w_ij² = (1/x̄) · (v̄·x̄)^b · (r_i·c_j)^½,     x̄ = mean X²,  v̄ = mean v,  r_i, c_j = means of v/v̄ by row and by column

The first factor makes errors relative to the size of the block, whose scale often means nothing, as that of an
embedding before a normalization layer. With exponents 1 the rest would be the diagonal of the empirical Fisher
information in its best separable form; errors of a cut are too large for such a second-order model, so smaller
exponents are used: b = ⅓. The head keeps b = 1, since no layer follows that could lessen its errors: they are errors of
the logits. Because w is separable, cutting and refining X in this norm is cutting and refining
diag(w_rows)·X·diag(w_columns) in the Frobenius norm.
"""

from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from salaad.factored.slr import Slr
from salaad.model.roles import role_of
from salaad.model.second_moments import Moments

BETWEEN, OF_HEAD, WITHIN = 1 / 3, 1.0, 1 / 2  # exponents: of a block's sensitivity, of the head's, of rows and columns
_FLOOR = 0.05  # least value of r and c: a row without recent gradients, as of a rare token, still has some worth


class ErrorWeights(NamedTuple):
    """The weights w of the errors in a block: w_ij = rows_i · columns_j.

    Args:
        rows: n×1.
        columns: 1×m.
    """

    rows: Tensor
    columns: Tensor

    def of(self, X: Tensor) -> Tensor:
        """diag(rows)·X·diag(columns) of a matrix X (n×m)."""
        return X * self.rows.to(X) * self.columns.to(X)

    def of_units(self, slr: Slr) -> Slr:
        """The units of diag(rows)·X·diag(columns) from those of X, not sorted again."""
        return slr.scaled(self.rows).scaled(self.columns)

    def undone(self, slr: Slr) -> Slr:
        """The units of X from those of diag(rows)·X·diag(columns)."""
        return slr.scaled(1 / self.rows).scaled(1 / self.columns)


def weights_from(moments: Moments, parts: Mapping[str, Slr]) -> dict[str, ErrorWeights]:
    """Return block → w; empty if no gradient is known.

    Args:
        moments: block → means of v by row (n) and by column (m). A block that is missing, or whose gradient is zero,
            counts as the median of the others.
        parts: block → X as U·V + S.
    """
    sizes = {name: float(slr.dense().double().square().mean()) for name, slr in parts.items()}
    felt = {name: float(moments[name][0].double().mean()) * size for name, size in sizes.items() if name in moments}
    felt = {name: value for name, value in felt.items() if value > 0}
    if not felt:
        return {}
    usual = median(felt.values())
    found = {}
    for name, slr in parts.items():
        between = OF_HEAD if role_of(name) == "lm_head" else BETWEEN
        block = (felt.get(name, usual) / usual) ** between / (sizes[name] or 1.0)
        sides = moments[name] if name in felt else map(torch.ones, slr.shape)
        r, c = ((_FLOOR + (1 - _FLOOR) * side / side.mean()) ** (WITHIN / 2) for side in sides)
        found[name] = ErrorWeights(block**0.5 * r[:, None], c[None])
    return found
