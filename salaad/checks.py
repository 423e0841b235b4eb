"""What every section of a configuration and every command's options check about themselves."""

import math

from salaad.errors import UserError


def check(condition: bool, sentence: str) -> None:
    """Raise a UserError with `sentence` unless the condition holds."""
    if not condition:
        raise UserError(sentence)


def at_least(section: object, low: float, *names: str) -> None:
    """Refuse any of the named numbers that is infinite or lies below `low` (NaN lies nowhere)."""
    for name in names:
        value, key = getattr(section, name), _key(section, name)
        check(value != math.inf, f"{key} is {value}, but has to be finite; give a number of {low} or more")
        check(value >= low, f"{key} is {value}, but the least is {low}; give {low} or more")


def one_or_more(section: object, *names: str) -> None:
    """Let a single text stand for a tuple of one, and a list, as YAML has it, for a tuple."""
    for name in names:
        value = getattr(section, name)
        object.__setattr__(section, name, (value,) if isinstance(value, str) else tuple(value))


def _key(section: object, name: str) -> str:
    """The name a user knows: `train.steps` of TrainConfig, `--batch` of a command's options."""
    kind = type(section).__name__
    return f"{kind.removesuffix('Config').lower()}.{name}" if kind.endswith("Config") else f"--{name}"
