"""Which share of a model's parameters its blocks cover, and which parameters are left out for which reason."""

from collections import Counter
from typing import NamedTuple

from torch import nn

from salaad.common.formats import millions
from salaad.model.roles import role_of
from salaad.model.weights import Weights

_SHOWN = 2  # names that are listed for one reason


class LeftOut(NamedTuple):
    """Parameters that are in no block, for one reason.

    Args:
        reason: the reason in words.
        parameters: the number of these parameters.
        names: names of their tensors.
    """

    reason: str
    parameters: int
    names: list[str]


def left_out(model: nn.Module, blocks: Weights) -> list[LeftOut]:
    """Return the parameters that are in no block, grouped by reason, the largest group first.

    Args:
        model: the model, of which only names and shapes are read.
        blocks: the blocks that `find_blocks` returned.
    """
    inside: Counter[int] = Counter()
    for name, parameter in blocks.parameters.items():
        inside[id(parameter)] += blocks[name].numel()
    found: dict[str, LeftOut] = {}
    for name, parameter in model.named_parameters():
        outside = parameter.numel() - inside[id(parameter)]
        if not outside:
            continue
        reason = _reason(name, parameter)
        known = found.setdefault(reason, LeftOut(reason, 0, []))
        found[reason] = LeftOut(reason, known.parameters + outside, [*known.names, name])
    return sorted(found.values(), key=lambda one: -one.parameters)


def coverage_rows(model: nn.Module, blocks: Weights) -> list[tuple[str, str]]:
    """Return rows (what, how much) of a table: the share of the blocks, then every group that is left out and why."""
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
    if parameter.ndim == 3 and not role_of(name):
        return "3-D, without a role"
    if parameter.ndim > 3:
        return f"{parameter.ndim}-D"
    if parameter.ndim < 2:
        return "biases and norms"
    role = role_of(module) or role_of(name)
    if role in ("embedding", "lm_head"):
        return f"{role}, not asked for"
    if role:
        return "2-D, with a role that was not asked for"
    if key != "weight":
        return "2-D, but no module's `weight`; keep it in an nn.Linear"
    return "2-D, without a role; name it by re:PATTERN"
