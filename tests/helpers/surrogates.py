"""L and S of the blocks of a checkpoint, read from its files without the package."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.helpers.training import last_checkpoint


def dense_parts(run_folder: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor, int]]:
    """Return block → (L, S, effective rank), computed from the checkpoint's files by the definitions of the paper."""
    surrogate = last_checkpoint(run_folder) / "surrogate"
    index = json.loads((surrogate / "index.json").read_text())["blocks"]
    parts = {}
    for name, entry in index.items():
        state = load_file(surrogate / entry["file"])
        R, tau = state[f"{name}/residual"].double(), state[f"{name}/thresholds"][2].double()
        S = torch.sign(R) * (R.abs() - tau).clamp_min(0)
        T = state[f"{name}/target"].double()
        L = T - R + 2 * R.clamp(-tau, tau)
        sigma = torch.linalg.svdvals(L)
        rank = int((sigma.cumsum(0) < 0.999 * sigma.sum()).sum()) + 1
        parts[name] = (L, S, rank)
    return parts


def best_rank(L: torch.Tensor, rank: int) -> torch.Tensor:
    U, sigma, Vh = torch.linalg.svd(L, full_matrices=False)
    return (U[:, :rank] * sigma[:rank]) @ Vh[:rank]


def l_plus_s(run_folder: Path) -> dict[str, torch.Tensor]:
    """Return block → L, truncated to its effective rank, plus S."""
    return {name: best_rank(L, rank) + S for name, (L, S, rank) in dense_parts(run_folder).items()}
