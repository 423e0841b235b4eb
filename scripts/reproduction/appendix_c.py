"""Appendix C: memory and operations of the ADMM, up to 70B, by the counts that the library itself uses."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from salaad.common.formats import markdown_table
from salaad.config.command_line import read_command_line
from salaad.config.run import RunConfig
from salaad.methods.salaad.method import SalaadMethod
from salaad.methods.salaad.ownership import update_operations
from salaad.model.build import training_flops
from salaad.model.parameters import count_parameters
from salaad.model.roles import find_blocks
from scripts.outlines import outline_of
from scripts.reproduction.grid import PAPERS, Scale
from scripts.reproduction.items import Measured

GPUS = 8
SEVENTY = {"hidden_size": 8192, "intermediate_size": 22016, "num_hidden_layers": 80, "num_attention_heads": 64}
PAPER_K = 40  # of the paper's example
# Shape of a block of the 70B model → gigabytes of L, S and Y, operations of a singular value decomposition, and these
# operations per training step.
PRINTED = {(8192, 8192): (0.4, 6.6e12, 1.6e11), (22016, 8192): (1.0, 1.0e13, 2.6e11)}
PRINTED_PASS = (1e13, 1e14)  # operations of a forward and backward pass of a 70B model


def svd_flops(n: int, m: int) -> float:
    """Operations of a full singular value decomposition of n×m; this count gives what the paper prints."""
    short, long = sorted((n, m))
    return 4 * long * short**2 + 8 * short**3


def memory_and_operations(scale: Scale) -> Measured:
    """Count bytes and operations of every size of the paper, and of its 70B example's blocks beside the printed ones.

    The result is the same at every scale.
    """
    configs = {name: read_command_line(["--config", name])[0] for name in PAPERS}
    large = configs["1b"]
    every = replace(large.salaad, every=PAPER_K)
    configs["70b"] = replace(large, model=replace(large.model, **SEVENTY), sections={"salaad": every})
    rows = [{"size": name, **costs(config)} for name, config in configs.items()]
    blocks = [
        {
            "shape": list(shape),
            "bytes": bytes_per_parameter(configs["70b"]) * prod(shape),
            "printed_bytes": printed[0] * 1e9,
            "svd_flops": svd_flops(*shape),
            "printed_svd_flops": printed[1],
            "printed_step_flops": printed[2],
            "gram_flops": sum(update_operations(*shape)),
        }
        for shape, printed in PRINTED.items()
    ]
    tables = _tables(rows, blocks)
    a_token = rows[-1]["step_flops"] / (large.train.batch * large.data.sequence_length)
    few, many = (operations / a_token for operations in PRINTED_PASS)
    notes = [
        "memory: R and T in float32 and singular vectors of up to half the short side; the paper counts L, S and Y, "
        "and its gigabytes are those of two bytes a number, though it trains in float32",
        f"operations: 6 per parameter and token and the attention, at {large.train.batch} × "
        f"{large.data.sequence_length} tokens a step, all GPUs together; the paper puts a forward and backward pass "
        f"of a 70B model at {PRINTED_PASS[0]:.0e} to {PRINTED_PASS[1]:.0e}, by our count that of {few:.0f} to "
        f"{many:.0f} tokens",
    ]
    return Measured([*rows, *({"block": True, **row} for row in blocks)], tables, notes=notes)


def _tables(rows: Sequence[Mapping[str, Any]], blocks: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return caption → Markdown table: one of the sizes, one of the blocks."""
    header = ("size", "parameters", "blocks", *(f"ADMM, GB a GPU, {one}" for one in (f"{GPUS} GPUs", "a GPU a block")))
    header += ("weights, gradients, Adam, GB", "operations of a step", "ADMM by full SVD", "ADMM by Gram matrix")
    lines = [
        (
            row["size"],
            f"{row['parameters'] / 1e6:,.0f} M",
            row["blocks"],
            *(f"{row[key] / 1e9:.2f}" for key in ("bytes_few", "bytes_many", "replicated_bytes")),
            f"{row['step_flops']:.1e}",
            *(f"{row[key] / row['step_flops']:.2%}" for key in ("svd_flops", "gram_flops")),
        )
        for row in rows
    ]
    own = [
        (
            "×".join(map(str, row["shape"])),
            f"{row['bytes'] / 1e9:.2f} ({row['printed_bytes'] / 1e9:g})",
            f"{row['svd_flops']:.1e} ({row['printed_svd_flops']:.1e})",
            f"{row['svd_flops'] / PAPER_K:.1e} ({row['printed_step_flops']:.1e})",
            f"{row['gram_flops']:.1e}",
        )
        for row in blocks
    ]
    columns = (
        "block",
        "GB (printed)",
        "full SVD (printed)",
        f"of it per step at K = {PAPER_K} (printed)",
        "update by Gram matrix",
    )
    return {
        f"per training step, K as configured, of 70b the paper's {PAPER_K}": markdown_table(header, lines),
        "one block of the 70B model": markdown_table(columns, own),
    }


def bytes_per_parameter(config: RunConfig) -> float:
    """Return the ADMM's bytes per parameter of a block, as the plan of a run counts them."""
    model = outline_of(config)
    blocks = find_blocks(model, config.salaad)
    return SalaadMethod.memory(model, config, 1)["ADMM"] / sum(X.numel() for X in blocks.values())


def costs(config: RunConfig) -> dict[str, Any]:
    """Return the bytes and the operations of a training step, and those of the ADMM."""
    model = outline_of(config)
    shapes = [tuple(X.shape) for X in find_blocks(model, config.salaad).values()]
    few, many = (SalaadMethod.memory(model, config, ranks) for ranks in (GPUS, len(shapes)))
    tokens, every = config.train.batch * config.data.sequence_length, config.salaad.every
    return {
        "parameters": count_parameters(model),
        "blocks": len(shapes),
        "bytes_few": few["ADMM"],
        "bytes_many": many["ADMM"],
        "replicated_bytes": sum(value for kind, value in few.items() if kind != "ADMM"),
        "step_flops": training_flops(model, config.data.sequence_length) * tokens,
        "svd_flops": sum(svd_flops(*shape) for shape in shapes) / every,
        "gram_flops": sum(sum(update_operations(*shape)) for shape in shapes) / every,
    }
