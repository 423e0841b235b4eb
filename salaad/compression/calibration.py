"""Mean squared gradients of the blocks on a few sequences of text, in place of those of the training.

With the output y = W·x of a block and g = ∂ℓ/∂y, the gradient of an entry for one token is g_i·x_j. Taking both factors
for independent, E[g_i²·x_j²] = E[g_i²]·E[x_j²] (K-FAC), so the activations and their gradients are enough: no gradient
of a weight is ever held. For an embedding, the gradient of a row is that of the outputs at the places of its token. For
the head, g is the predicted probabilities minus the one-hot next token. A tied weight gets the sum of both.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from tqdm import tqdm
from transformers.pytorch_utils import Conv1D

from salaad.common.errors import UserError
from salaad.common.files import save_if_possible
from salaad.common.hashed_files import write_tensors
from salaad.config.run import DataConfig
from salaad.data.text import Text, open_text, sample_rows, to_batch
from salaad.model.loss import IGNORED, SummedLoss, next_tokens, summed_cross_entropy
from salaad.model.second_moments import Moments, read_second_moments, tensors_of
from salaad.model.weights import weights_of

_ROWS_AT_ONCE = 8
_TOKENS_AT_ONCE = 256  # tokens whose logits are held together


@dataclass(frozen=True)
class CalibrationText:
    """Sequences of training text.

    Args:
        data: where the text is, and how it is cut; with the model's own tokenizer.
        vocab_size: vocabulary size of the model.
        sequences: number of sequences.
        option: the option that asked for the sequences, for errors and progress bars.
    """

    data: DataConfig
    vocab_size: int
    sequences: int
    option: str = "--calibrate"

    @cached_property
    def _text(self) -> Text:
        return open_text(self.data, vocab_size=self.vocab_size, validation=False)

    def check(self) -> None:
        """Raise a UserError if the text cannot be read or has too few sequences."""
        self._rows  # noqa: B018  read here, before anything is computed

    @cached_property
    def _rows(self) -> list[np.ndarray]:
        return sample_rows(self._text, self.data, self.sequences, option=self.option)

    @cached_property
    def digest(self) -> str:
        """A hash of the token ids of the sequences."""
        return sha256(b"".join(row.tobytes() + b"|" for row in self._rows)).hexdigest()[:16]

    @property
    def described(self) -> str:
        """The number of sequences and the name of their text, in words."""
        return f"{self.sequences} sequences of {self.data.name_of('training')}"

    def batches(self) -> Iterator[dict[str, Tensor]]:
        """Yield the sequences as batches of up to `_ROWS_AT_ONCE` rows, with `input_ids` and `labels`."""
        rows = self._rows
        starts = range(0, len(rows), _ROWS_AT_ONCE)
        for start in tqdm(starts, desc=f"reading text for {self.option}", unit="batch", leave=False, disable=None):
            few = rows[start : start + _ROWS_AT_ONCE]
            yield to_batch(few, self.data.sequence_length, self._text.pad_id, self.vocab_size)


def kept_moments(path: Path, shapes: Mapping[str, tuple[int, int]], make: Callable[[], Moments]) -> Moments:
    """Return the moments that the file at `path` holds; if it has none, those that `make` gives, which are saved there.

    No two computations on a GPU need be equal to the last bit, and a command that goes on after an interruption has to
    cut the same model as before.

    Args:
        path: a safetensors file; it is ignored if it is broken or does not fit.
        shapes: name → (n, m) of every block.
        make: function that returns the moments.
    """
    with suppress(UserError):
        return read_second_moments(path, shapes)
    moments = make()
    save_if_possible(path, partial(write_tensors, tensors_of(moments)))
    return moments


def second_moments_of_text(
    loss: SummedLoss, blocks: Sequence[str], batches: Iterable[dict[str, Tensor]], device: torch.device
) -> Moments:
    """Return block → means by row and by column of its squared gradient per token, float32 on the CPU.

    Blocks that do not see every token exactly once, such as routed experts, are left out.

    Args:
        loss: the loss of the model that holds the blocks, in float32 and with frozen parameters.
        blocks: module names.
        batches: `input_ids` and `labels` of the text.
        device: where the model is.
    """
    model, head_module = loss.model, loss.model.get_output_embeddings()
    places = weights_of(model, blocks).places
    modules = {name: place.module for name, place in places.items() if place.index is None}
    with_head = [name for name, module in modules.items() if module.weight is head_module.weight]
    embedding = model.get_input_embeddings()
    if embedding.weight is head_module.weight:  # by whichever name it is a block
        modules |= dict.fromkeys(with_head, embedding)
    watched = _Watched({name: module for name, module in modules.items() if module is not head_module})
    of_head, tokens = [torch.zeros(side, dtype=torch.float64, device=device) for side in head_module.weight.shape], 0
    # Gradients are needed of the activations, not of the weights.
    begin = embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_())
    hooks = [begin, *watched.hooks()]
    try:
        with torch.enable_grad():
            for batch in batches:
                watched.real = real = (batch["labels"] != IGNORED).flatten().to(device)
                hidden, head = loss.hidden_and_head(batch["input_ids"].to(device))
                targets = next_tokens(batch["labels"].to(device))
                summed_cross_entropy(hidden, head, targets).backward()
                if with_head:
                    found = _sums_of_head(hidden.detach(), head, targets, real)
                    of_head = [before + now for before, now in zip(of_head, found, strict=True)]
                tokens += int(real.sum())
    finally:
        for hook in hooks:
            hook.remove()
    moments = {name: _means(modules[name], *pair, tokens) for name, pair in watched.sums().items()}
    if with_head:
        as_head = _means(head_module, *of_head, tokens)
        for name in with_head:  # plus its moments as embedding, if tied
            before = moments.get(name, (0, 0))
            moments[name] = tuple(one + other for one, other in zip(before, as_head, strict=True))
    return moments


class _Watched:
    """Hooks on modules that sum squared gradients of outputs, and squared inputs, over the tokens of text.

    Args:
        modules: name → module.

    Attributes:
        real: mask (flat) of the tokens of the current batch that are not padding.
    """

    real: Tensor

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._sums: dict[str, list[Tensor]] = {}
        self._partial: set[str] = set()  # names of modules that did not see every token once

    def hooks(self) -> list[RemovableHandle]:
        """Register the hooks, which sum until they are removed, and return their handles."""
        return [module.register_forward_hook(partial(self._note, name)) for name, module in self._modules.items()]

    def sums(self) -> dict[str, list[Tensor]]:
        """Return name → sums of g² and of x²; for an embedding, sums of its squared gradient's row and column means."""
        return {name: pair for name, pair in self._sums.items() if name not in self._partial}

    def _note(self, name: str, module: nn.Module, inputs: tuple, output: Tensor) -> None:
        if isinstance(output, Tensor) and output.requires_grad:  # a router of experts gives its choice as well
            output.register_hook(partial(self._add, name, inputs[0].detach()))

    def _add(self, name: str, inputs: Tensor, gradient: Tensor) -> None:
        module, g = self._modules[name], gradient.flatten(0, -2)  # some families flatten tokens before a layer
        if len(g) != len(self.real):
            self._partial.add(name)
            return
        g = g.double()[self.real].square()
        if isinstance(module, nn.Embedding):
            g *= float(getattr(module, "embed_scale", 1)) ** 2  # factor on the outputs in some families
            rows = g.new_zeros(len(module.weight)).index_add_(0, inputs.flatten()[self.real], g.mean(1))
            pair = rows, g.sum(0) / len(module.weight)
        else:
            pair = g.sum(0), inputs.flatten(0, -2).double()[self.real].square().sum(0)
        self._sums[name] = [before + now for before, now in zip(self._sums.get(name, (0, 0)), pair, strict=True)]


@torch.no_grad()
def _sums_of_head(hidden: Tensor, head: Tensor, targets: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums over the tokens of g² and of x² of the head, whose logits are computed a few tokens at a time."""
    inputs = hidden[real].double().square().sum(0)
    hidden, targets = hidden[targets != IGNORED], targets[targets != IGNORED]
    outputs = hidden.new_zeros(len(head), dtype=torch.float64)
    for x, target in zip(hidden.split(_TOKENS_AT_ONCE), targets.split(_TOKENS_AT_ONCE), strict=True):
        g = (x @ head.mT).softmax(-1)
        g.scatter_add_(1, target[:, None], g.new_full((len(g), 1), -1.0))
        outputs += g.square().sum(0)
    return outputs, inputs


def _means(module: nn.Module, outputs: Tensor, inputs: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Return row and column means of the squared gradient per token from the sums over `tokens` tokens."""
    outputs, inputs = (sums.cpu() / max(1, tokens) for sums in (outputs, inputs))
    if not isinstance(module, nn.Embedding):
        outputs, inputs = outputs * inputs.mean(), inputs * outputs.mean()
    pair = (inputs, outputs) if isinstance(module, Conv1D) else (outputs, inputs)
    return pair[0].float(), pair[1].float()
