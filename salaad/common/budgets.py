"""Parameter counts and budgets as users type them, and what the blocks of a model keep under a budget."""

from salaad.common.errors import UserError
from salaad.hpa import Blocks, Kept, allocate, parameters

_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9}


def parse_count(text: str, what: str = "count") -> int:
    """The number that a text such as `10M`, `1.2M` or `194000000` stands for.

    Raises:
        UserError: the text is no number, or below 1; the error names `what` it belongs to, such as an option.
    """
    number, unit = (text[:-1], _UNITS[text[-1].upper()]) if text[-1:].upper() in _UNITS else (text, 1)
    count = round(finite_number(number, f"{what} {text!r}", "a number such as 10M or 194000000", unit))
    if count < 1:
        raise UserError(f"{what} {text!r} is less than 1; give a number such as 10M or 194000000")
    return count


def parse_budget(text: str, dense: int) -> int:
    """Return a budget in parameters, given as a count or as a fraction up to 1 of `dense`.

    Raises:
        UserError: the text is no number, or below 1 parameter, or above 1 and not whole.
    """
    if text[-1:].upper() in _UNITS:
        return parse_count(text, "budget")
    value = finite_number(text, f"budget {text!r}", "a number of parameters such as 194M, or a fraction such as 0.5")
    if value > 1 and value != round(value):
        raise UserError(
            f"budget {text!r} is neither a fraction up to 1 nor a whole number of parameters; give such as 0.5 or 194M"
        )
    budget = round(value * dense) if value <= 1 else round(value)
    if budget < 1:
        raise UserError(f"budget {text!r} is less than 1 parameter; give a number of parameters such as 194M")
    return budget


def finite_number(text: str, what: str, wanted: str, unit: int = 1) -> float:
    """Return `text` as a number times `unit`; raise a UserError of `what` and `wanted` if it is not finite."""
    try:
        value = float(text) * unit
    except ValueError:
        raise UserError(f"{what} is no number; give {wanted}") from None
    if value - value != 0:
        raise UserError(f"{what} is not finite; give {wanted}")
    return value


def format_count(count: int, up: bool = True) -> str:
    """A parameter count as a user would type it: with a unit, to three decimals, rounded up or down."""
    for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= unit:
            thousandths = -(-count * 1000 // unit) if up else count * 1000 // unit
            return f"{thousandths / 1000:.3f}".rstrip("0").rstrip(".") + letter
    return str(count)


def fit(blocks: Blocks, *, fixed: int, budget: int, kappa: float) -> Kept:
    """Return the ranks and entries that the blocks keep by HPA so that the model has at most `budget` parameters.

    Args:
        blocks: name → (n, m, rank, nnz) of L + S as trained.
        fixed: parameters that are never compressed, such as norms and the head.
        budget: parameters of the whole model; at or above L + S as trained, L + S is kept as it is.
        kappa: κ in [0, 1].

    Returns:
        Name → (rank kept, entries kept).

    Raises:
        UserError: the budget is below `fixed`.
        ValueError: κ is out of range.
    """
    return allocate(blocks, remove=to_remove(blocks, fixed=fixed, budget=budget), kappa=kappa)


def to_remove(blocks: Blocks, *, fixed: int, budget: int) -> int:
    """C of eq. 8: parameters that the blocks have to lose so that the whole model has at most `budget`.

    `fixed` parameters are never compressed.

    Raises:
        UserError: the budget is below `fixed`.
    """
    require_floor(fixed, budget)
    return max(0, fixed + parameters(blocks) - budget)


def require_floor(fixed: int, budget: int, or_else: str = "") -> None:
    """Raise a UserError if a budget is below the parameters that are never compressed; `or_else` adds another cure."""
    if budget < fixed:
        raise UserError(
            f"budget {format_count(budget, up=False)} is below the floor of {format_count(fixed)} (the parts that are "
            f"never compressed); give {format_count(fixed)} or more{or_else}"
        )
