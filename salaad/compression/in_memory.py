"""Compression of a model inside a training loop, without a folder in between: the method `Salaad.compress`."""

import copy
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from salaad.common import distributed
from salaad.common.budgets import parse_budget
from salaad.common.errors import UserError
from salaad.compression.cut import Whole, cut, parameters_of
from salaad.compression.sensitivity import weights_from
from salaad.compression.split import (
    Parts,
    PostHoc,
    beside_trained,
    can_weigh_head,
    free_heads,
    post_hoc_parts,
    split_names,
)
from salaad.compression.variants import Variant
from salaad.config.commands import ALTERNATIONS
from salaad.factored.slr import Slr
from salaad.methods.float32 import true_float32
from salaad.methods.salaad import ownership
from salaad.methods.salaad.plugin import Salaad
from salaad.model.parameters import count_parameters
from salaad.model.weights import weights_of


def compress(
    salaad: Salaad,
    budget: str | float | None = None,
    *,
    kappa: float | None = None,
    refine: int | None = None,
    lm_head: bool | None = None,
) -> nn.Module:
    """Return a copy of the model with L + S cut to a budget, as U·V + S where that takes less memory; collective.

    The cut is that of compress.py, in whose folders a block is U·V + S where that is smaller in a file. The model and
    its training are left as they are.

    Args:
        salaad: the `Salaad` of the model.
        budget: parameters of the whole model, such as 194_000_000 or "194M", or a fraction of the dense one, such as
            0.5; all of L + S unless given.
        kappa: cut by HPA (section 4.3) with this κ; by energy unless given.
        refine: alternating projections that follow; 20 by energy, none by HPA, unless given.
        lm_head: split the LM head too, by robust PCA, and the embedding, as far as they are no blocks; small sizes gain
            most by it. Unless given, they are split where a cut by energy has to remove something and the optimizer's
            second moments tell their worth.

    Returns:
        The small model, for inference, on the device and in the dtype of the model; the same on every rank.

    Raises:
        UserError: the budget is below what is never compressed, κ is outside [0, 1], `refine` is negative, either is
            given without a budget, or the head that is to be split is missing or tied to the embedding.
    """
    # It takes seconds to import, and training has no need of it.
    from salaad.factored.fixed_size import factor, mark_factored

    salaad.require_same_ranks()
    _check(salaad.model, budget, kappa, refine, lm_head)
    dense = count_parameters(salaad.model)
    variant = Variant("L+S", capped=kappa is None)
    if budget is not None:
        alternations = (ALTERNATIONS if kappa is None else 0) if refine is None else refine
        variant = Variant(str(budget), parse_budget(str(budget), dense), kappa, alternations)
    device = next(salaad.model.parameters()).device
    with torch.no_grad(), true_float32(device):
        moments = {} if kappa is not None else salaad.second_moments()
        if lm_head is None:
            something_goes = variant.budget is not None and variant.budget < dense - _spared(salaad)
            lm_head = something_goes and can_weigh_head(salaad.model, salaad.weights, moments)
        split = beside_trained(salaad.model, salaad.weights)
        names = split_names(salaad.model, split, salaad.weights, type(salaad.model).__name__) if lm_head else []
        beside = weights_of(salaad.model, names)
        parts = _parts(salaad, split, beside)
        fixed = dense - sum(math.prod(slr.shape) for slr in parts.values())
        weights = weights_from(moments, parts)
        target = {name: X.detach().float().cpu() for name, X in beside.items()}
        whole = Whole(
            parts, fixed, lambda name: target[name] if name in target else parts[name].dense(), weights, device
        )
        small = cut(whole, variant)
        model = factor(copy.deepcopy(salaad.model), small).eval().requires_grad_(False)
        mark_factored(model, fixed + parameters_of(small, variant))
        return model


def _spared(salaad: Salaad) -> int:
    """Return how many parameters of X the trained L + S of all ranks spare, in the blocks where they are fewer."""
    mine = sum(max(0, surrogate.T.numel() - surrogate.parameters) for surrogate in salaad.surrogates.values())
    return sum(distributed.gather(mine))


def _check(
    model: nn.Module, budget: str | float | None, kappa: float | None, refine: int | None, lm_head: bool | None
) -> None:
    """Refuse arguments of `compress` that are out of range or contradict each other or the model."""
    if kappa is not None and not 0 <= kappa <= 1:
        raise UserError(f"kappa is {kappa}, outside [0, 1]; give the low-rank side's part of what is removed")
    if kappa is not None and budget is None:
        raise UserError(f"kappa is {kappa}, but nothing is cut; give a budget too")
    if refine is not None and refine < 0:
        raise UserError(f"refine is {refine}, but the least is 0; give 0 or more")
    if refine and budget is None:
        raise UserError(f"refine is {refine}, but nothing is cut; give a budget too")
    if lm_head and not free_heads(model):
        raise UserError(
            f"lm_head is True, but {type(model).__name__} has no LM head, or one that is tied to another weight and "
            "stays dense; leave it out"
        )


def _parts(salaad: Salaad, split: PostHoc, beside: Mapping[str, Tensor]) -> Parts:
    """Gather L + S of all blocks on every rank's CPU: the trained ones in a checkpoint's order, then `beside`.

    Args:
        salaad: the `Salaad` whose surrogates are the trained L + S.
        split: how the weights in `beside` are split after the fact, by rank 0 for all.
        beside: name → weight to split.
    """
    device = next(salaad.model.parameters()).device
    mine = {name: Slr.from_parts(s.low_rank().cpu(), s.sparse().cpu(), s.rank) for name, s in salaad.surrogates.items()}
    if distributed.rank() == 0:
        X = {name: X.detach().float() for name, X in beside.items()}
        mine |= dict(post_hoc_parts(split, X, device))
    every: Parts = {}
    # Block by block: together they may not fit into the host's memory as often as there are ranks.
    for owner, sizes in enumerate(distributed.gather({name: (slr.rank, slr.nnz) for name, slr in mine.items()})):
        for name, size in sizes.items():
            shape = tuple((beside if name in beside else salaad.weights)[name].shape)
            slr = mine[name] if owner == distributed.rank() else Slr.empty(shape, *size)
            every[name] = _sent(slr, owner, device)
    order = ownership.dearest_first(ownership.costs_of(salaad.weights))
    return {name: every[name] for name in (*order, *beside)}


def _sent(slr: Slr, owner: int, device: torch.device) -> Slr:
    """Return the owner's block on the CPU of every rank; `device` is one whose tensors ranks can exchange."""
    if distributed.world_size() == 1:
        return slr
    tensors = {key: tensor.to(device) for key, tensor in slr.tensors().items()}
    for tensor in tensors.values():
        if tensor.numel():
            distributed.broadcast(tensor, owner)
    return Slr.from_tensors(tensors).to("cpu")


# `salaad.methods` imports nothing of `salaad.compression`, so the class gets its method here.
Salaad.compress = compress
