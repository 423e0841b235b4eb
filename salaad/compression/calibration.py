"""Worth measured where it acts: how much the loss feels each output of a block, from a few sequences of text.

The weight of row i of a block, whose output is y = X·x, is

    w_i² = ½ + ½ · E[g_i²] / mean_j E[g_j²],   g = ∂ℓ/∂y,

the output half of the empirical Fisher information (K-FAC), half way to uniform. Cutting and refinement then work on
diag(w)·X, so that an error counts by what it does to the loss. Weights average to one in every block: how much blocks
weigh among each other is left to their energy. An embedding, which multiplies nothing, and the head keep equal weights.

Of all that was tried (results/nano/calibration) this does no harm anywhere, and helps where much is cut.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers.pytorch_utils import Conv1D

from salaad.config.run import DataConfig
from salaad.data.text import Text, open_text, sample_rows, to_batch
from salaad.model.loss import SummedLoss
from salaad.model.weights import weights_of

_ROWS_AT_ONCE = 8
SHRINKAGE = 0.5  # of the weights towards uniform ones


@dataclass(frozen=True)
class CalibrationText:
    """Sequences of training text.

    Args:
        data: where the text is, and how it is cut; with the model's own tokenizer.
        vocab_size: of the model.
        sequences: how many.
    """

    data: DataConfig
    vocab_size: int
    sequences: int

    @cached_property
    def _text(self) -> Text:
        return open_text(self.data, vocab_size=self.vocab_size)

    def check(self) -> None:
        """Raise a UserError if the text cannot be read or is shorter."""
        self._rows  # noqa: B018  read here, before anything is computed

    @cached_property
    def _rows(self) -> list[np.ndarray]:
        return sample_rows(self._text, self.data, self.sequences)

    @cached_property
    def digest(self) -> str:
        """Changes with what is read."""
        return sha256(b"".join(row.tobytes() + b"|" for row in self._rows)).hexdigest()[:16]

    @property
    def described(self) -> str:
        """How much of which text."""
        return f"{self.sequences} sequences of {self.data.name_of('training')}"

    def batches(self) -> Iterator[dict[str, Tensor]]:
        """The sequences in small batches."""
        rows = self._rows
        starts = range(0, len(rows), _ROWS_AT_ONCE)
        for start in tqdm(starts, desc="calibrating", unit="batch", leave=False, disable=None):
            few = rows[start : start + _ROWS_AT_ONCE]
            yield to_batch(few, self.data.sequence_length, self._text.pad_id, self.vocab_size)


def output_weights(
    loss: SummedLoss, blocks: Sequence[str], batches: Iterable[dict[str, Tensor]], device: torch.device
) -> dict[str, Tensor]:
    """Name → w of every block in the body that multiplies (n×1; 1×n for a weight kept transposed), float32 on the CPU.

    Args:
        loss: of the model whose blocks they are, in float32, its parameters frozen.
        blocks: module names.
        batches: `input_ids` and `labels` of the text.
        device: where the model is.
    """
    model, second_moments = loss.model, {}

    def watch(name: str, module: nn.Module) -> torch.utils.hooks.RemovableHandle:
        def add(gradient: Tensor) -> None:
            squared = gradient.double().flatten(0, -2).square().sum(0)
            second_moments[name] = second_moments.get(name, 0) + squared

        return module.register_forward_hook(lambda module, inputs, output: output.register_hook(add) and None)

    places = weights_of(model, blocks).places
    # An expert in a 3-D parameter has no output that could be watched; like an embedding it is weighed as it is.
    modules = {name: place.module for name, place in places.items() if place.index is None}
    modules = {name: module for name, module in modules.items() if not isinstance(module, nn.Embedding)}
    # Gradients are wanted of what flows through the model, not of its weights.
    begin = model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: output.requires_grad_())
    hooks = [begin, *(watch(name, module) for name, module in modules.items())]
    try:
        with torch.enable_grad():
            for batch in batches:
                loss(batch["input_ids"].to(device), batch["labels"].to(device)).backward()
    finally:
        for hook in hooks:
            hook.remove()
    weights = {}
    for name, total in second_moments.items():
        mean = total.mean()
        share = total / mean if mean > 0 else torch.ones_like(total)
        w = (SHRINKAGE + (1 - SHRINKAGE) * share).sqrt().float().cpu()
        weights[name] = w[None] if isinstance(modules[name], Conv1D) else w[:, None]
    return weights
