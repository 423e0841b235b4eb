"""The models that one checkpoint holds: X as trained, L + S, and L + S cut to a budget in one of several ways."""

from dataclasses import dataclass, replace

from salaad.common.budgets import finite_number, parse_budget
from salaad.common.errors import UserError

_MOST_KAPPAS = 1000


@dataclass(frozen=True)
class Variant:
    """X, L+S, or what a budget keeps of L+S.

    Args:
        name: as the user wrote it.
        budget: parameters of the whole model, or None for X and L+S.
        kappa: κ, the part of what is removed that the low-rank side gives; a budget without it goes by energy.
        refine: alternations of the refinement that follows.
        calibrated: whether worth and error are weighed by what the loss feels of them.
        stored: the budget goes by the sizes that are there: an elastic folder's order of units, or the widths of a
            MatFormer.
        head: LM head and embedding are cut too, where training left them whole.
    """

    name: str
    budget: int | None = None
    kappa: float | None = None
    refine: int = 0
    calibrated: bool = False
    stored: bool = False
    head: bool = False

    def fitted(self, refine: int, calibrated: bool) -> "Variant":
        """The same size with these two; X and L+S, of which nothing is cut, as they are."""
        return self if self.budget is None else replace(self, refine=refine, calibrated=calibrated)


def parse_variants(text: str, dense: int) -> list[Variant]:
    """The variants of a list such as `X,L+S,194M@0.6`.

    Args:
        text: names separated by commas.
        dense: parameters of the dense model, of which a budget may be a fraction.

    Raises:
        UserError: a name is none of these.
    """
    variants = []
    for name in (part.strip() for part in text.split(",")):
        budget, at, kappa = name.partition("@")
        if name in ("X", "L+S"):
            variants.append(Variant(name))
        elif kappa in ("energy", "energy+head"):
            variants.append(Variant(name, parse_budget(budget, dense), head=kappa.endswith("+head")))
        elif at:
            variants.append(Variant(name, parse_budget(budget, dense), parse_kappa(kappa)))
        elif name[:1].isdigit():
            variants.append(Variant(name, parse_budget(name, dense), stored=True))
        else:
            raise UserError(
                f"variant {name!r} is unknown; give X, L+S, BUDGET@KAPPA such as 194M@0.6, 194M@energy, "
                "194M@energy+head, or 194M of an elastic folder"
            )
    return variants


def parse_kappa(text: str) -> float:
    """A κ in [0, 1]."""
    kappa = finite_number(text, f"kappa {text!r}", "a number from 0 to 1")
    if not 0 <= kappa <= 1:
        raise UserError(f"kappa {text} is outside [0, 1]; give the part of the budget that the low-rank side gives")
    return kappa


def parse_kappas(text: str) -> list[float]:
    """The κ of a list `0.2,0.5` or of a range `0:1:0.1` (first, last, step), none twice."""
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
    """The budgets of a list, the largest first, none twice."""
    return sorted({parse_budget(part.strip(), dense) for part in text.split(",")}, reverse=True)
