"""Functions that open a folder as a user does, compute logits of fixed tokens, and save a small GPT-2."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

IDS = torch.randint(3, 512, (2, 17), generator=torch.Generator().manual_seed(5))


def open_folder(folder: Path, **options) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **options)


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return model(input_ids=IDS).logits


def save_gpt2(folder: Path) -> Path:
    """Save a GPT-2 as transformers does, config and weights alone, with the end token of the tests' tokenizer."""
    torch.manual_seed(3)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 512, "n_positions": 32}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=1)).save_pretrained(folder)
    return folder
