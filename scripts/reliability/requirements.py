"""What the drills and the fuzz need beyond the project's own requirements, asked for before anything starts."""

from importlib.util import find_spec

from salaad.common.errors import UserError


def require_hypothesis(what: str) -> None:
    """Raise a UserError, which names `what` needs it, unless hypothesis is installed."""
    if find_spec("hypothesis") is None:
        raise UserError(f"{what} needs hypothesis, which is not installed; pip install -r tests/requirements.txt")
