"""Markdown tables."""

from collections.abc import Sequence

from tabulate import tabulate


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table with aligned columns: the first to the left, all others to the right."""
    alignment = ("left", *["right"] * (len(header) - 1)) if rows else None
    return tabulate(rows, header, tablefmt="pipe", colalign=alignment, disable_numparse=True)


def millions(count: float) -> str:
    """A parameter count in millions, as the paper prints it."""
    return f"{count / 1e6:.2f} M"


def mebibytes(size: float) -> str:
    """A number of bytes in MiB, for memory."""
    return f"{size / 2**20:,.1f} MiB"


def megabytes(count: float) -> str:
    """A number of bytes in millions."""
    return f"{count / 1e6:.2f} MB"
