"""A folder opened as a user opens it, and what the model makes of one text."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

IDS = torch.randint(3, 512, (2, 17), generator=torch.Generator().manual_seed(5))


def open_folder(folder: Path, **options) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **options)


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return model(input_ids=IDS).logits
