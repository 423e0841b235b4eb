"""Checks of the values of configuration sections and command options."""

import math
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from salaad.common.errors import UserError

PLAIN_TYPES = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}
T = TypeVar("T")
_MOST = 2**53  # beyond it a float does not hold every whole number


def check(condition: bool, sentence: str) -> None:
    """Raise a UserError with `sentence` unless the condition holds."""
    if not condition:
        raise UserError(sentence)


def at_least(section: object, low: float, *names: str) -> None:
    """Raise a UserError if one of the named numbers is infinite, NaN or below `low`."""
    for name in names:
        value, key = getattr(section, name), _key(section, name)
        check(value != math.inf, f"{key} is {value}, but has to be finite; give a number of {low} or more")
        if isinstance(value, int) and abs(value) > _MOST:  # Python may refuse to print its digits
            raise UserError(f"{key} is beyond {_MOST:,}, either way; give {low} or more")
        check(value >= low, f"{key} is {value}, but the least is {low}; give {low} or more")


def one_or_more(section: object, *names: str) -> None:
    """Turn the named fields, which YAML gives as a text such as `a,b` or as a list, into tuples."""
    for name in names:
        value = getattr(section, name)
        object.__setattr__(section, name, split_list(value) if isinstance(value, str) else tuple(value))


def split_list(text: str) -> tuple[str, ...]:
    """Return the items of a list with commas; one that begins with `re:`, a regular expression, is the last."""
    plain, *pattern = re.split(r"(?:^|,)\s*(?=re:)", text, maxsplit=1)
    return (*filter(None, map(str.strip, plain.split(","))), *pattern)


def section(kind: type[T], values: Any, place: Path) -> T:
    """Build the dataclass `kind` from the `values` in a file; lists pass for tuples, which JSON does not have.

    Raises:
        UserError: a key is unknown, or a value is of a wrong type or out of range.
    """
    types = _types(kind)
    check(isinstance(values, dict), f"{place} holds no {kind.__name__}; give a whole checkpoint")
    for name, value in values.items():
        known = name in types and _is_of(value, types[name])
        check(known, f"{place} has {name!r} as {_shown(value)} in its {kind.__name__}; give a whole checkpoint")
    return kind(**values)


def require_types(kind: type, values: Any, place: str = "") -> None:
    """Check that the values for a dataclass, and for the dataclasses in it, have the declared types.

    Args:
        kind: the dataclass.
        values: name → value.
        place: key of the dataclass in the configuration.

    Raises:
        UserError: a value is of another type.
    """
    for name, wanted in _types(kind).items():
        if name not in values:  # `sections`, the settings of methods, which are checked one by one
            continue
        key, value = f"{place}.{name}".lstrip("."), values[name]
        if is_dataclass(wanted):
            check(hasattr(value, "keys"), f"{key} is {_shown(value)}, but a section of its own; give its keys below it")
            require_types(wanted, value, key)
        else:
            sentence = f"{key} is {_shown(value)}, but has to be {plain_type(wanted)}; see --help for what it takes"
            check(_is_of(value, wanted), sentence)


def plain_type(kind: Any) -> str:
    """Describe a declared type in words: a union by its types other than None, a tuple as a list."""
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    if get_origin(kind) is UnionType:
        return " or ".join(plain_type(one) for one in get_args(kind) if one is not type(None))
    if get_origin(kind) is tuple:
        return f"a list, each {plain_type(get_args(kind)[0])}"
    return PLAIN_TYPES.get(kind.__name__, kind.__name__)


def _types(kind: type) -> dict[str, Any]:
    """The types that a dataclass declares for its fields."""
    hints = get_type_hints(kind)
    return {f.name: hints[f.name] for f in fields(kind)}


def _shown(value: Any) -> str:
    """Return a value as text, even a whole number of thousands of digits, which Python refuses to print."""
    try:
        return repr(value)
    except (ValueError, RecursionError):
        return "a number of thousands of digits"


def _is_of(value: Any, kind: Any) -> bool:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return value in inner
    if origin is UnionType:
        return any(_is_of(value, one) for one in inner)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            return False
        kinds = inner[:1] * len(value) if inner[1:] == (...,) else inner
        return len(kinds) == len(value) and all(map(_is_of, value, kinds))
    return type(value) in ((int, float) if kind is float else (kind,))


def _key(section: object, name: str) -> str:
    """The name of an option as users type it: `full_rank.x` for the x of FullRankConfig, `--batch` for a command's."""
    kind = type(section).__name__
    words = re.findall("[A-Z][a-z]*", kind.removesuffix("Config"))
    return f"{'_'.join(words).lower()}.{name}" if kind.endswith("Config") else f"--{name.replace('_', '-')}"
