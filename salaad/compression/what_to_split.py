"""Which weights compress.py splits after the fact: those that options name; the defaults for head and embedding."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from salaad.common.budgets import parse_budget
from salaad.common.errors import UserError
from salaad.compression.split import PostHoc, beside_trained, can_weigh_head, free_heads
from salaad.config.commands import CompressOptions
from salaad.config.methods import SalaadConfig
from salaad.methods.salaad.storage import read_index
from salaad.model.parameters import count_parameters
from salaad.model.roles import role_of
from salaad.model.second_moments import names_of_moments
from salaad.model.weights import matrices
from salaad.runs.model_on_disk import ModelOnDisk


def split_of(source: ModelOnDisk, options: CompressOptions) -> PostHoc | None:
    """Return how to split the model after the fact: the blocks named, or those of the run, or all projections.

    Without --rpca and --godec only embedding and head can be split, beside the trained L + S; None if neither is.

    Raises:
        UserError: the head is asked for and cannot be split, or a trained block or all that is split is left out.
    """
    if options.lm_head and not free_heads(source.folder.outline):
        raise UserError(
            f"{source.name} has no LM head, or one that is tied to another weight and stays dense; leave --lm-head out"
        )
    head = splits_head(source, options) if options.lm_head is None else options.lm_head
    post_hoc, embedding = options.rpca or options.godec, options.embedding
    if embedding is None and head and not options.roles:
        trained = () if post_hoc else _trained(source)
        embedding = beside_trained(source.folder.outline, trained).blocks.embedding or None
    if not post_hoc:
        _require_not_trained(source, options)
        outer = tuple(role for role, wanted in (("embedding", embedding), ("lm_head", head)) if wanted)
        blocks = replace(source.blocks, roles=outer, embedding=False, lm_head=False)
        return PostHoc(blocks, beside=True) if outer else None
    blocks = source.blocks
    if options.roles:
        blocks = replace(blocks, roles=options.roles, embedding=False, lm_head=False)
    blocks = _with_outer(blocks, "embedding", embedding)
    blocks = _with_outer(blocks, "lm_head", head or options.lm_head)
    method = "rpca" if options.rpca else "godec"
    given = {"rank_ratio": options.rank_ratio, "density": options.density}
    return PostHoc(blocks, method, **{name: value for name, value in given.items() if value is not None})


def _with_outer(blocks: SalaadConfig, role: str, wanted: bool | None) -> SalaadConfig:
    """Return `blocks` with embedding or head added or left out, as `wanted` says; unchanged if that is None."""
    if wanted is None:
        return blocks
    roles = blocks.roles if wanted else tuple(one for one in blocks.roles if one != role)
    if blocks.roles and not roles:  # without roles all projections would be split
        raise UserError(
            f"only the {role} would be split, and {_option(role)} false leaves it out; leave one of them out"
        )
    return replace(blocks, roles=roles, **{role: wanted})


def _require_not_trained(source: ModelOnDisk, options: CompressOptions) -> None:
    trained = {role_of(name) for name in _trained(source)}
    for role in ("embedding", "lm_head"):
        if getattr(options, role) is False and role in trained:
            raise UserError(
                f"L and S of the {role} of {source.name} were trained, so {_option(role)} false cannot leave it out; "
                "leave that out, or add --rpca, which splits the weights anew"
            )


def _option(role: str) -> str:
    return f"--{role.replace('_', '-')}"


def splits_head(source: ModelOnDisk, options: CompressOptions) -> bool:
    """Return whether to split the head by default: if a cut by energy removes something and can weigh the head.

    Every size measured so far is better for it, except half of nano if fitted on text (results/elastic). GoDec, whose
    L + S only approximates X, was not measured, nor were methods that train their factors.
    """
    if not options.by_energy or options.godec or options.roles or not (options.rpca or source.surrogate):
        return False
    model, index = source.folder.outline, {} if options.rpca else _trained(source)
    moments = source.second_moments
    known = matrices(model) if options.calibrate else names_of_moments(moments) if moments else ()
    left = {name for name in matrices(model) if options.embedding is False and role_of(name) == "embedding"}
    if not can_weigh_head(model, left.union(index), known):
        return False
    dense = count_parameters(model)
    spared = sum(max(0, math.prod(e["shape"]) - e["rank"] * sum(e["shape"]) - e["nnz"]) for e in index.values())
    cut = options.budget is not None and not options.elastic and parse_budget(options.budget, dense) < dense - spared
    return options.elastic or cut


def _trained(source: ModelOnDisk) -> Mapping[str, Any]:
    """Return trained block → its entry in the surrogate's index; empty for a method without surrogates."""
    return read_index(source.surrogate) if source.surrogate else {}
