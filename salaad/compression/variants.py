"""The models that one checkpoint holds: X as trained, L + S, and L + S cut to a budget in one of several ways."""

from dataclasses import dataclass, replace

from salaad.common.budgets import finite_number, parse_budget
from salaad.common.errors import UserError

_MOST_KAPPAS = 1000
# To be raised when a cut, a refinement or a split computes something else, so that what caches hold is computed anew.
ALGORITHMS = 2


@dataclass(frozen=True)
class Variant:
    """One of the models that a checkpoint holds: X, L + S, or L + S cut to a budget.

    Args:
        name: the variant as the user wrote it.
        budget: parameters of the whole model, or None for X and L+S.
        kappa: κ of HPA, the part of the removed parameters that L gives; without it a budget is cut by energy.
        refine: alternating projections of the refinement after the cut; 0 for none.
        calibrated: weigh units and errors by the gradients on calibration text, not by those of the training.
        stored: take a size that the folder already holds: the first units of an elastic folder, or a width of a
            MatFormer.
        head: LM head and embedding are cut too, where training left them whole.
        capped: count no block of L+S as more than dense, as cuts by energy do.
    """

    name: str
    budget: int | None = None
    kappa: float | None = None
    refine: int = 0
    calibrated: bool = False
    stored: bool = False
    head: bool = False
    capped: bool = False

    def fitted(self, refine: int, calibrated: bool) -> "Variant":
        """Return the variant with this refinement and calibration; X and L+S, which are not cut, stay as they are."""
        return self if self.budget is None else replace(self, refine=refine, calibrated=calibrated)


def parse_variants(text: str, dense: int) -> list[Variant]:
    """Return the variants that a list such as `X,L+S,194M@0.6` names.

    Args:
        text: names separated by commas.
        dense: parameters of the dense model, of which a budget may be a fraction.

    Raises:
        UserError: a name is no variant, or its budget or κ is invalid.
    """
    variants = []
    for name in (part.strip() for part in text.split(",")):
        budget, at, how = name.partition("@")
        if name in ("X", "L+S"):
            variants.append(Variant(name))
        elif at:
            way = how.removesuffix("+head")
            kappa = None if way == "energy" else parse_kappa(way)
            variants.append(Variant(name, parse_budget(budget, dense), kappa, head=way != how))
        elif name[:1].isdigit():
            variants.append(Variant(name, parse_budget(name, dense), stored=True))
        else:
            raise UserError(
                f"variant {name!r} is unknown; give X, L+S, BUDGET@KAPPA such as 194M@0.6, 194M@energy, either with "
                "+head, or 194M of an elastic folder"
            )
    return variants


def parse_kappa(text: str) -> float:
    """Return the κ in [0, 1] that `text` stands for; a UserError if it is none."""
    kappa = finite_number(text, f"kappa {text!r}", "a number from 0 to 1")
    if not 0 <= kappa <= 1:
        raise UserError(f"kappa {text} is outside [0, 1]; give the low-rank side's part of what is removed")
    return kappa


def parse_kappas(text: str) -> list[float]:
    """Return the κ of a list `0.2,0.5` or of a range `0:1:0.1` (first, last, step), without duplicates."""
    if ":" not in text:
        return list(dict.fromkeys(parse_kappa(part) for part in text.split(",")))
    parts = text.split(":")
    if len(parts) != 3:
        raise UserError(
            f"kappas {text!r} are no range; give FIRST:LAST:STEP such as 0:1:0.1, or a list such as 0.2,0.5"
        )
    first, last = parse_kappa(parts[0]), parse_kappa(parts[1])
    step = finite_number(parts[2], f"step {parts[2]!r}", "a number above 0")
    if step <= 0 or last < first:
        raise UserError(f"kappas {text!r} hold nothing; give FIRST:LAST:STEP that rises, such as 0:1:0.1")
    if (last - first) / step > _MOST_KAPPAS:
        raise UserError(f"kappas {text!r} are more than {_MOST_KAPPAS}; give a larger step, such as 0.1")
    return [min(round(first + i * step, 10), last) for i in range(int((last - first) / step + 1e-9) + 1)]


def parse_budgets(text: str, dense: int) -> list[int]:
    """Return the budgets of a comma-separated list in parameters, the largest first, without duplicates."""
    return sorted({parse_budget(part.strip(), dense) for part in text.split(",")}, reverse=True)
