"""Settings of SALAAD for a run of a given length.

Two invariants of the settings that were searched at `nano` (2,000 steps) and hold at `micro` (5,000) and below: the
pull over a whole run, c·steps, and the way of the thresholds. In a short run the weights do not follow, and the way is
the same at any number of updates; in a long one the pull per step is weaker, so is what it leaves between L and X, and
the thresholds go further.
"""

from typing import Any

from salaad.common.validation import check

_PULL = 600  # c·steps
_UPDATES = 400  # ADMM updates of a block, as long as K is at most _LONGEST
_LONGEST = 10
_WAY = 16.0  # updates·Δα in a run of up to _SHORT steps
_SHORT = 2000
_ALPHA_OVER_BETA = 50


def settings_for(steps: int) -> dict[str, Any]:
    """K, c, Δα and Δβ for a run of so many optimizer steps, by their names in `SalaadConfig`.

    Raises:
        UserError: there are none.
    """
    check(steps >= 1, f"steps is {steps}, but a run has at least 1; give 1 or more")
    every = min(_LONGEST, max(1, steps // _UPDATES))
    alpha = _WAY * every / min(steps, _SHORT)
    return {
        "every": every,
        "rho_constant": float(f"{_PULL / steps:.3g}"),
        "delta_alpha": float(f"{alpha:.3g}"),
        "delta_beta": float(f"{alpha / _ALPHA_OVER_BETA:.3g}"),
    }
