"""Sizes as one types them: parameter counts, budgets as a count or as a fraction of the dense model."""

from salaad.common.errors import UserError

_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9}


def parse_count(text: str) -> int:
    """A count such as `10M`, `1.2M` or `194000000`.

    Raises:
        UserError: it is none, or not above 0.
    """
    number, unit = (text[:-1], _UNITS[text[-1].upper()]) if text[-1:].upper() in _UNITS else (text, 1)
    count = round(finite_number(number, f"count {text!r}", "a number such as 10M or 194000000", unit))
    if count < 1:
        raise UserError(f"count {text!r} is less than 1; give a number such as 10M or 194000000")
    return count


def parse_budget(text: str, dense: int) -> int:
    """A budget in parameters: a count, or a fraction up to 1 of the `dense` model's."""
    if text[-1:].upper() in _UNITS:
        return parse_count(text)
    value = finite_number(text, f"budget {text!r}", "a number of parameters such as 194M, or a fraction such as 0.5")
    budget = round(value * dense) if value <= 1 else round(value)
    if budget < 1:
        raise UserError(f"budget {text!r} is less than 1 parameter; give a number of parameters such as 194M")
    return budget


def finite_number(text: str, what: str, wanted: str, unit: int = 1) -> float:
    """`text` times `unit`; a UserError says that `what` is no finite number and that `wanted` is to be given."""
    try:
        value = float(text) * unit
    except ValueError:
        raise UserError(f"{what} is no number; give {wanted}") from None
    if value - value != 0:
        raise UserError(f"{what} is not finite; give {wanted}")
    return value


def format_count(count: int, up: bool = True) -> str:
    """A parameter count as one types it: in millions or thousands, to three decimals, rounded up or down."""
    for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= unit:
            thousandths = -(-count * 1000 // unit) if up else count * 1000 // unit
            return f"{thousandths / 1000:.3f}".rstrip("0").rstrip(".") + letter
    return str(count)
