"""Roles: which weights of a model become blocks, chosen by their function instead of by layer.

A role is one of the names below, known for the usual decoder families, or `re:PATTERN`, a regular expression that is
searched in the module names of any other model.
"""

import functools
import re

from torch import nn

from salaad.common.errors import UserError
from salaad.config.methods import SalaadConfig
from salaad.model.weights import Place, Weights, matrices

# role → ends of module names, of LLaMA, Mistral, Qwen, Gemma and their like; Phi-3, which computes q, k and v with one
# weight; DeepSeek, which factors them; GPT-2; OPT; GPT-NeoX; Falcon. A fused weight is one block under all its roles.
_ENDS = {
    "q": ("q_proj", "q_a_proj", "q_b_proj", "qkv_proj", "attn.c_attn", "query_key_value"),
    "k": ("k_proj", "kv_a_proj_with_mqa", "kv_b_proj", "qkv_proj", "attn.c_attn", "query_key_value"),
    "v": ("v_proj", "kv_a_proj_with_mqa", "kv_b_proj", "qkv_proj", "attn.c_attn", "query_key_value"),
    "o": ("o_proj", "self_attn.out_proj", "attn.c_proj", "attention.dense", "self_attention.dense"),
    "gate": ("gate_proj", "gate_up_proj"),
    "up": ("up_proj", "gate_up_proj", "mlp.c_fc", "fc1", "dense_h_to_4h"),
    "down": ("down_proj", "mlp.c_proj", "fc2", "dense_4h_to_h"),
    "embedding": ("embed_tokens", "wte", "embed_in", "word_embeddings"),
    "lm_head": ("lm_head", "embed_out"),
}
_OUTER = ("embedding", "lm_head")  # blocks only if asked for
ROLES = tuple(_ENDS)


def find_blocks(model: nn.Module, config: SalaadConfig) -> Weights:
    """Return name → matrix of every block that `config` selects, in the model's own order.

    A block has the name of its module or, if it is one expert's part of a 3-D parameter, the name of the parameter with
    the expert's number. A tied weight appears once, under the name asked for, and only if a role names that.

    Raises:
        UserError: a role is unknown or matches no 2-D weight of this model.
    """
    weights = matrices(model)
    if not config.roles and hasattr(model, "peft_config"):
        raise UserError(
            "the model is wrapped by PEFT, which trains adapters instead of its weights; give the model itself, as "
            "merge_and_unload() returns it"
        )
    roles = list(config.roles) or _own_roles(weights)
    if not roles:  # refused also if embedding or head are asked for, which would be split alone, unnoticed
        inner = [name for name, place in weights.items() if not isinstance(place.module, nn.Embedding)]
        raise UserError(
            "no roles are given and this model is of no known family; name its projections by the role re:PATTERN (in "
            "compress.py --roles 're:PATTERN'), a pattern over module names such as "
            f"{', '.join(inner[:3] or list(weights)[:3]) or '(it has no 2-D weight)'}"
        )
    roles += [role for role in _OUTER if getattr(config, role) and role not in roles]
    chosen: set[str] = set()
    for role in roles:
        found = _select(weights, role)
        if not found:
            raise UserError(
                f"the role {role!r} matches no 2-D weight of this model; choose from "
                f"{', '.join(name for name in ROLES if _matches(weights, name)) or 're:PATTERN'}"
            )
        chosen.update(found)
    blocks: dict[tuple[int, int | None], str] = {}
    for name, place in weights.items():
        if name in chosen:
            blocks.setdefault((id(place.parameter), place.index), name)
    return Weights({name: weights[name] for name in blocks.values()})


def role_of(name: str) -> str | None:
    """Return the role of the block `name`; for a fused weight the first of its roles; None if it has none."""
    return next(iter(_roles_of(name)), None)


def _own_roles(weights: dict[str, Place]) -> list[str]:
    """Return the roles found in a model except embedding and LM head; none if its q or o is not recognised."""
    if not (_matches(weights, "q") and _matches(weights, "o")):
        return []
    return [role for role in ROLES if role not in _OUTER and _matches(weights, role)]


def _select(weights: dict[str, Place], role: str) -> list[str]:
    if role.startswith("re:"):
        try:
            pattern = re.compile(role.removeprefix("re:"))
        except re.error as error:
            raise UserError(f"the role {role!r} is no regular expression ({error}); mend it") from None
        return [name for name in weights if pattern.search(name)]
    if role not in ROLES:
        raise UserError(f"there is no role {role!r}; give any of {', '.join(ROLES)} or re:PATTERN")
    return _matches(weights, role)


def _matches(weights: dict[str, Place], role: str) -> list[str]:
    return [name for name in weights if role in _roles_of(name)]


@functools.cache
def _roles_of(name: str) -> tuple[str, ...]:
    name = re.sub(r"\.\d+$", "", name)  # without the number of an expert
    return tuple(role for role, ends in _ENDS.items() if any(f".{name}".endswith(f".{end}") for end in ends))
