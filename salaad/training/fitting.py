"""Options for a run that needs more memory than a device has: the first that fit, in order of their cost in time."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from transformers import PretrainedConfig

from salaad.config.run import RunConfig
from salaad.methods.registry import method_of
from salaad.training.plan import memory_by_kind, rebuilt_outline, rows_at_once


def changes_that_fit(
    config: RunConfig, description: PretrainedConfig, memory: float, ranks: int
) -> tuple[str | None, RunConfig]:
    """Return options with which a run on `ranks` ranks needs less than `memory` bytes, and the configuration with them.

    The options are "" if the run fits as it is, and None if it fits with none of them.
    """
    model = rebuilt_outline(config, description)
    for words, changed in _ways(config, ranks):
        if sum(memory_by_kind(changed, model, ranks).values()) < memory:
            return words, changed
    return None, config


def _ways(config: RunConfig, ranks: int) -> Iterator[tuple[str, RunConfig]]:
    """Yield options and the configuration with them, the cheapest in time first.

    Smaller micro-batches cost kernel launches, a sharded optimizer an exchange of weights, recomputation a third more
    computation.
    """
    train, micro = config.train, rows_at_once(config, ranks)
    sizes = [train.micro_batch, *(micro >> i for i in range(1, micro.bit_length()))]
    shards = ["optimizer"] if ranks > 1 and not method_of(config).reads_moments else []
    for recomputed, shard, size in product(
        sorted({train.gradient_checkpointing, True}), dict.fromkeys([train.shard, *shards]), sizes
    ):
        changed = {"gradient_checkpointing": recomputed, "shard": shard, "micro_batch": size}
        new = {name: value for name, value in changed.items() if value != getattr(train, name)}
        words = " ".join(f"--train.{name} {str(value).lower()}" for name, value in reversed(new.items()))
        yield words, replace(config, train=replace(train, **new))
