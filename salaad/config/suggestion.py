"""Settings of SALAAD for a run of a given length.

They are `nano`'s at its 2,000 steps, and `micro`'s at 5,000 but for a K twice as long. In longer runs the pull over the
whole run, c·steps, stays constant until c is the paper's: the pull of a step is weaker and ties X less to L + S, and
the thresholds go further. In shorter runs c stays nano's, as a larger c costs X more than it helps L + S (tried at 250
to 1,000 steps), and the thresholds have to go a little further, as the weights have followed less.

These settings make L + S small by itself. Where the model is to be cut anyway, a weaker pull in the second quarter of
the run costs X far less, and its cuts are about as good (results/elastic/tried.md): a quarter of c, with Δα and Δβ four
times as large, so that α and β move as fast.
"""

from operator import index
from typing import Any

from salaad.common.errors import UserError
from salaad.common.validation import check

_NANO = 2000  # steps of the run at which the settings were found
_PULL = 600  # c·steps of runs with `_NANO` steps or more
_LEAST = 0.01  # the least c: about that of the paper's ρ, at tens of thousands of large batches
_UPDATES = 400  # ADMM updates of a block, as long as K is at most _LONGEST
_LONGEST = 10
_WAY = 16.0  # updates·Δα at `_NANO` steps
_ALPHA_OVER_BETA = 50
_WEAKER = 4  # divisor of c, and factor of Δα and Δβ, for a model that is to be cut
_PARTS_WITHOUT_PULL = {"onset": 0.25, "release": 0.5}


def settings_for(steps: int, *, elastic: bool = False) -> dict[str, Any]:
    """K, c, Δα, Δβ (and `onset`, `release`) for a run of so many optimizer steps, by their names in `SalaadConfig`.

    Args:
        steps: optimizer steps of the run.
        elastic: whether the model is to be cut, so that the pull is to cost X little; else L + S is small by itself.

    Raises:
        UserError: `steps` is no whole number, or below 1.
    """
    try:
        steps = int(steps) if isinstance(steps, float) and steps.is_integer() else index(steps)
    except TypeError:
        raise UserError(f"steps is {steps!r}, but a run has a whole number of them; give one such as 1000") from None
    check(steps >= 1, f"steps is {steps}, but a run has at least 1; give 1 or more")
    every = min(_LONGEST, max(1, steps // _UPDATES))
    further = max(steps / _NANO, (_NANO / steps) ** (1 / 6))
    weaker = _WEAKER if elastic else 1
    alpha = weaker * _WAY * further * every / steps
    return {
        "every": every,
        "rho_constant": float(f"{max(_LEAST, _PULL / max(steps, _NANO)) / weaker:.3g}"),
        "delta_alpha": float(f"{alpha:.3g}"),
        "delta_beta": float(f"{alpha / _ALPHA_OVER_BETA:.3g}"),
        **(_PARTS_WITHOUT_PULL if elastic else {}),
    }
