"""Markdown tables."""

from collections.abc import Sequence


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table with aligned columns; every column but the first is set to the right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    rule = ["-" * width if i == 0 else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    lines = [cells[0], rule, *cells[1:]]
    pad = [str.ljust] + [str.rjust] * (len(header) - 1)
    return "\n".join("| " + " | ".join(pad[i](cell, widths[i]) for i, cell in enumerate(line)) + " |" for line in lines)


def millions(count: float) -> str:
    """A parameter count in millions, as the paper prints it."""
    return f"{count / 1e6:.2f} M"


def mebibytes(size: float) -> str:
    """A number of bytes in MiB, for memory."""
    return f"{size / 2**20:,.1f} MiB"


def megabytes(count: float) -> str:
    """A number of bytes in millions."""
    return f"{count / 1e6:.2f} MB"
