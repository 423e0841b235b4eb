"""Roles: which weights of a model become blocks, chosen by their function instead of by layer.

A role is one of the names below, known for LLaMA-like models and for GPT-2, or `re:PATTERN`, a regular expression that
is searched in the module names of any other model.
"""

import re

from torch import nn

from salaad.common.errors import UserError
from salaad.config.methods import SalaadConfig

# role → ends of module names. GPT-2 computes q, k and v with one weight and has no gate.
_LLAMA = {
    "q": ("q_proj",),
    "k": ("k_proj",),
    "v": ("v_proj",),
    "o": ("o_proj",),
    "gate": ("gate_proj",),
    "up": ("up_proj",),
    "down": ("down_proj",),
    "embedding": ("embed_tokens",),
    "lm_head": ("lm_head",),
}
_GPT2 = {
    "q": ("attn.c_attn",),
    "k": ("attn.c_attn",),
    "v": ("attn.c_attn",),
    "o": ("attn.c_proj",),
    "up": ("mlp.c_fc",),
    "down": ("mlp.c_proj",),
    "embedding": ("wte",),
    "lm_head": ("lm_head",),
}
_FAMILIES = (_LLAMA, _GPT2)
_OUTER = ("embedding", "lm_head")  # blocks only if asked for
ROLES = tuple(_LLAMA)


def find_blocks(model: nn.Module, config: SalaadConfig) -> dict[str, nn.Parameter]:
    """Module name → 2-D weight of every block that `config` selects, in the model's own order.

    A tied weight appears once, under the name asked for, and only if a role names it.

    Raises:
        UserError: a role is unknown or matches no 2-D weight of this model.
    """
    weights = {
        name: module.weight
        for name, module in model.named_modules()
        if isinstance(getattr(module, "weight", None), nn.Parameter) and module.weight.ndim == 2
    }
    family = next((family for family in _FAMILIES if _matches(weights, family["o"])), None)
    roles = list(config.roles) or [role for role in family or () if role not in _OUTER]
    roles += [role for role in _OUTER if getattr(config, role) and role not in roles]
    if not roles:
        raise UserError(
            "salaad.roles is empty and this model is of no known family; name its weights with "
            "salaad.roles=['re:PATTERN'], a pattern over module names such as "
            f"{', '.join(list(weights)[:3]) or '(it has no 2-D weight)'}"
        )
    chosen: set[str] = set()
    for role in roles:
        found = _select(weights, family, role)
        if not found:
            raise UserError(
                f"salaad.roles names {role!r}, which matches no 2-D weight of this model; choose from "
                f"{', '.join(r for r in family or () if _matches(weights, family[r])) or 're:PATTERN'}"
            )
        chosen.update(found)
    blocks: dict[str, nn.Parameter] = {}
    for name, weight in weights.items():
        if name in chosen and not any(weight is other for other in blocks.values()):
            blocks[name] = weight
    return blocks


def _select(weights: dict[str, nn.Parameter], family: dict | None, role: str) -> list[str]:
    if role.startswith("re:"):
        try:
            pattern = re.compile(role.removeprefix("re:"))
        except re.error as error:
            raise UserError(f"salaad.roles holds {role!r}, which is no regular expression ({error}); mend it") from None
        return [name for name in weights if pattern.search(name)]
    if role not in ROLES:
        raise UserError(f"salaad.roles names {role!r}; give any of {', '.join(ROLES)} or re:PATTERN")
    return _matches(weights, (family or {}).get(role, ()))


def _matches(weights: dict[str, nn.Parameter], ends: tuple[str, ...]) -> list[str]:
    return [name for name in weights if any(name == end or name.endswith("." + end) for end in ends)]
