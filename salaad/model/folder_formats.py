"""The two formats of compressed folders, told apart by the entry `quantization_config` of their config.json."""

from collections.abc import Mapping
from typing import Any

# transformers prints an unknown `quant_method` verbatim, so that of our folders tells the user what to do.
_CURE = "(write `import salaad` before from_pretrained; this folder's README.md says where the package is)"
FIXED_SIZE, ANY_SIZE = f"salaad {_CURE}", f"salaad-elastic {_CURE}"


def format_name(method: str) -> str:
    """Return a `quant_method` without the hint to the user, as earlier versions wrote it."""
    return method.partition(" ")[0]


def is_fixed_size(entry: Any) -> bool:
    """Whether an entry `quantization_config` is that of a folder of one size."""
    return _has_format(entry, FIXED_SIZE)


def is_any_size(entry: Any) -> bool:
    """Whether an entry `quantization_config` is that of an elastic folder."""
    return _has_format(entry, ANY_SIZE)


def _has_format(entry: Any, method: str) -> bool:
    return isinstance(entry, Mapping) and format_name(str(entry.get("quant_method"))) == format_name(method)
