"""U·V + S (n×m) as a layer holds it in memory: five tensors, with S in compressed sparse rows.

The columns of S's entries have 16 bits where the kernels for a GPU read them, else 32 or 64. Columns of 16 bits are
stored as bytes (uint8, 2·nnz), since NCCL sends no integers of 16 bits.
"""

import torch
from torch import Tensor

from salaad.common import native

# U (n×r), V (r×m), and of S the starts of its rows (n+1), the columns (nnz) and the values (nnz).
SlrTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def contiguous(x: Tensor) -> Tensor:
    """Return x as it is to be read by its address: row by row, and without the lazy sign of a negative view."""
    return x.resolve_neg().contiguous()


def positions(starts: Tensor, columns: Tensor, m: int) -> Tensor:
    """Row-major positions (nnz, int64) of S's entries."""
    entries = torch.arange(len(columns), device=columns.device, dtype=starts.dtype)
    return torch.searchsorted(starts[1:], entries, right=True) * m + columns


def column_dtype(device: torch.device, m: int) -> torch.dtype:
    """The dtype of the columns of S (n×m) on a device: 16 bits where our kernels read them, else torch's 32."""
    return torch.int16 if m <= 2**15 and native.uses_triton(device) else torch.int32


def columns_in(stored: Tensor) -> Tensor:
    """The columns (nnz) as integers, in the memory of the stored tensor."""
    return stored.view(torch.int16) if stored.dtype == torch.uint8 else stored


def stored_columns(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """The stored columns converted to `dtype`, int16 as bytes; int64 columns, which S then needs, stay as they are."""
    if stored.dtype == torch.int64:
        return stored
    columns = columns_in(stored).to(dtype)
    return columns.view(torch.uint8) if dtype == torch.int16 else columns
