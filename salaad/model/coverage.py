"""What part of a model its blocks are, and what is left out for which reason."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, nn

from salaad.common.formats import millions
from salaad.model.roles import role_of

_SHOWN = 2  # names of a kind


class LeftOut(NamedTuple):
    """Parameters that are in no block for one reason.

    Args:
        reason: in words.
        parameters: how many.
        names: of the tensors.
    """

    reason: str
    parameters: int
    names: list[str]


def left_out(model: nn.Module, blocks: Mapping[str, Tensor]) -> list[LeftOut]:
    """What of a model is in none of the blocks, the most first.

    Args:
        model: of which names and shapes are read.
        blocks: name → weight, of `find_blocks`.
    """
    inside = {id(X) for X in blocks.values()}
    found: dict[str, LeftOut] = {}
    for name, parameter in model.named_parameters():
        if id(parameter) in inside:
            continue
        reason = _reason(name, parameter)
        known = found.setdefault(reason, LeftOut(reason, 0, []))
        found[reason] = LeftOut(reason, known.parameters + parameter.numel(), [*known.names, name])
    return sorted(found.values(), key=lambda one: -one.parameters)


def said(model: nn.Module, blocks: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """(What, how much) for a table: the share of the blocks, then what is left out and why."""
    total = sum(parameter.numel() for parameter in model.parameters())
    inside = sum(X.numel() for X in blocks.values())
    rows = [("blocks", f"{len(blocks)}, {millions(inside)} of {millions(total)} parameters ({inside / total:.0%})")]
    for one in left_out(model, blocks):
        names = ", ".join(one.names[:_SHOWN]) + (", …" if len(one.names) > _SHOWN else "")
        rows.append((f"left out: {one.reason}", f"{millions(one.parameters)} ({names})"))
    return rows


def _reason(name: str, parameter: nn.Parameter) -> str:
    module, _, key = name.rpartition(".")
    if key == "in_proj_weight":
        return "fused weight of nn.MultiheadAttention, which is no module's own"
    if "parametrizations" in name or key in ("weight_g", "weight_v"):
        return "a part from which a weight is computed, as in weight normalization"
    if parameter.ndim > 2:
        return f"{parameter.ndim}-D, such as the experts of a layer in one tensor"
    if parameter.ndim < 2:
        return "biases and norms"
    role = role_of(module)
    if role in ("embedding", "lm_head"):
        return f"{role}, not asked for"
    return "2-D, with a role that was not asked for" if role else "2-D, without a role; name it by re:PATTERN"
