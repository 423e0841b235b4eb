"""Which weights compress.py splits after the fact: what its options name, and the head where nothing is said of it."""

from dataclasses import replace

from salaad.common.budgets import parse_budget
from salaad.common.errors import UserError
from salaad.compression.opening import open_deployment
from salaad.compression.split import PostHoc, has_free_head
from salaad.config.commands import CompressOptions
from salaad.config.methods import SalaadConfig
from salaad.runs.model_on_disk import ModelOnDisk


def split_of(source: ModelOnDisk, options: CompressOptions) -> PostHoc | None:
    """How the model is to be split after the fact: the blocks named, or those of the run, or all projections.

    Without --rpca and --godec only embedding and head can be, beside what was trained.

    Raises:
        UserError: the head is asked for and cannot be split.
    """
    if options.lm_head and not has_free_head(source.folder.outline):
        raise UserError(
            f"{source.name} has no LM head, or one that is tied to another weight and stays dense; leave --lm-head out"
        )
    head = splits_head(source, options) if options.lm_head is None else options.lm_head
    if not (options.rpca or options.godec):
        asked = {"embedding": options.embedding, "lm_head": head}
        outer = tuple(name for name, wanted in asked.items() if wanted)
        return PostHoc(replace(source.blocks, roles=outer), beside=True) if outer else None
    blocks = source.blocks
    if options.roles or options.embedding:
        blocks = SalaadConfig(roles=options.roles, embedding=options.embedding)
    if head:
        blocks = replace(blocks, lm_head=True)
    method = "rpca" if options.rpca else "godec"
    given = {"rank_ratio": options.rank_ratio, "density": options.density}
    return PostHoc(blocks, method, **{name: value for name, value in given.items() if value is not None})


def splits_head(source: ModelOnDisk, options: CompressOptions) -> bool:
    """Whether the head is split where nothing is said about it.

    Its worth beside the other blocks has to be known, or energy takes too much of it; then every size measured so far
    is better for it (results/elastic). GoDec, whose L + S is less than X, was not measured.
    """
    weighed = options.calibrate > 0 or source.second_moments is not None
    if not (options.by_energy and weighed and has_free_head(source.folder.outline)):
        return False
    if options.rpca:
        return not options.roles and (options.elastic or options.budget is not None)
    if options.godec or source.surrogate is None:
        return False
    if options.elastic or options.budget is None:
        return options.elastic
    deployment = open_deployment(source)
    return parse_budget(options.budget, deployment.dense) < deployment.whole.parameters  # else nothing has to go
