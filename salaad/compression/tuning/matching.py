"""Matching: one Transformer layer after the other is fitted to the dense layer's output, on a few sequences of text.

With the dense layer f, the cut layer f̂, and hidden states x from the dense layers before and x̂ from the cut ones:

    minimise  Σ ‖f̂(x̂) − f(x)‖² / Σ ‖f(x)‖²   over U, V, the entries of S, norms and biases of this layer,

summed over the tokens that are not padding. Because f̂ gets x̂, a layer also corrects errors of those before it (the
transformer matching of 3BASiL). Only the one layer in training needs memory for gradients and moments. An embedding
among the blocks is matched first.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from salaad.common.errors import UserError
from salaad.common.save_pace import SavePace
from salaad.common.signals import StopRequest
from salaad.compression.tuning.fitting import Fitting
from salaad.compression.tuning.saved import SavedTuning
from salaad.compression.tuning.tuned_model import TunedModel
from salaad.model.loss import IGNORED

PASSES = 4  # over the sequences, for every layer
RATE = 0.03  # as in `Fitting`
_SECONDS = 60  # between two saves of the state


class Arguments(NamedTuple):
    """What a layer is called with besides hidden states; it depends on the shape of the rows alone."""

    positional: tuple = ()
    named: Mapping[str, Any] = MappingProxyType({})


class Matching:
    """The matching of a cut model, layer by layer; it goes on after the last layer that was saved.

    Args:
        tuned: the cut model, which holds the dense one; all its units are fitted.
        texts: batches of sequences, `input_ids` and `labels` (rows × length).
        saved: where the state between two layers is saved.
        request: a request to stop.
    """

    def __init__(
        self, tuned: TunedModel, texts: Sequence[Mapping[str, Tensor]], saved: SavedTuning, request: StopRequest
    ) -> None:
        self._tuned, self._saved, self._request = tuned, saved, request
        self._ids = [text["input_ids"] for text in texts]
        self._real = [text["labels"] != IGNORED for text in texts]
        self._fitted = saved.resumed(tuned, self._begin)
        self._pace, self._on_disk = SavePace(_SECONDS), len(self._fitted)

    def _begin(self, state: dict[str, Any] | None) -> list[str]:
        """Take over a saved state; return the names of the modules that are fitted."""
        if state is None:
            return []
        self._tuned.load_state_dict(state["tuned"])
        return [str(name) for name in state["fitted"]]

    def run(self) -> None:
        """Fit all layers that are left, holding the hidden states before one layer only.

        Raises:
            UserError: a stop was requested; the layers that were fitted are saved.
        """
        self._fit_embedding()
        tuned, model = self._tuned, self._tuned.model
        names = layer_names(model)
        layers = [model.get_submodule(name) for name in names]
        one_of_each_shape = {ids.shape: ids for ids in self._ids}
        of_shape = {shape: arguments_of(model, layers, ids) for shape, ids in one_of_each_shape.items()}
        # No layer is run, so none needs its weights.
        by_cut = partial(tuned.call_inside, model.base_model_prefix, without=names[0].rpartition(".")[0])
        dense = [hidden_before(layers[0], model.base_model, ids) for ids in self._ids]
        cut = [hidden_before(layers[0], by_cut, ids) for ids in self._ids]
        for i, (name, layer) in enumerate(zip(names, layers, strict=True)):
            arguments = [of_shape[ids.shape][i] for ids in self._ids]
            pass_through(layer, dense, arguments)
            self._fit(name, cut, arguments, dense)
            if name != names[-1]:
                pass_through(partial(tuned.call_inside, name), cut, arguments)
        self._save()
        if self._request.asked:  # after the last step
            raise UserError("interrupted after all layers were matched; the same command goes on from there")

    def _fit_embedding(self) -> None:
        model = self._tuned.model
        module = model.get_input_embeddings()
        with torch.no_grad():
            goals = [module(ids) for ids in self._ids]
        [name] = [name for name, one in model.named_modules() if one is module]
        self._fit(name, self._ids, [Arguments()] * len(goals), goals)

    def _fit(
        self, name: str, inputs: Sequence[Tensor], arguments: Sequence[Arguments], goals: Sequence[Tensor]
    ) -> None:
        """Fit the module named `name`, so that `inputs` give `goals` at the tokens that are real.

        Nothing is done if that was done before, or nothing in the module is trained.
        """
        if name in self._fitted or not any(part.numel() for part in self._tuned.trained(name)):
            return
        squares = [goal[real].float().square().mean() for goal, real in zip(goals, self._real, strict=True)]
        scale = torch.stack(squares).mean()
        trained = list(self._tuned.trained(name))
        before = [part.detach().clone() for part in trained]
        fitting = Fitting(trained, PASSES * len(inputs), RATE)
        bar = tqdm(range(fitting.steps), desc=f"matching {name}", unit="step", leave=False, disable=None)
        for step in bar:
            i = step % len(inputs)
            found = hidden_of(self._tuned.call_inside(name, inputs[i], *arguments[i].positional, **arguments[i].named))
            real = self._real[i]
            loss = fitting.step([(found[real] - goals[i][real]).float().square().mean() / scale])
            bar.set_postfix_str(f"error {loss**0.5:.3f}", refresh=False)
            if self._request.asked:
                with torch.no_grad():  # what is saved goes on from the begin of a layer
                    for part, value in zip(trained, before, strict=True):
                        part.copy_(value)
                self._save()
                raise UserError(f"interrupted while {name} was matched; the same command goes on with it")
        self._fitted.append(name)
        if self._pace.is_due():  # the state is that of the whole model, which may take longer than a layer
            with self._pace.save():
                self._save()

    def _save(self) -> None:
        """Save the state after the last fitted layer, if that was not done before."""
        if len(self._fitted) > self._on_disk:
            self._saved.save({"fitted": self._fitted, "tuned": self._tuned.state_dict()})
            self._on_disk = len(self._fitted)


@torch.no_grad()
def pass_through(layer: Callable[..., Any], hidden: list[Tensor], arguments: Sequence[Arguments]) -> None:
    """Replace the hidden states before a layer by those behind it, in the same list, one batch after the other."""
    for i, given in enumerate(arguments):
        hidden[i] = hidden_of(layer(hidden[i], *given.positional, **given.named))


@torch.no_grad()
def arguments_of(model: PreTrainedModel, layers: Sequence[nn.Module], ids: Tensor) -> list[Arguments]:
    """Return what each of `layers` is called with, besides hidden states, for token ids (rows × length)."""
    found: list[Arguments] = []

    def note(module: nn.Module, inputs: tuple, named: dict[str, Any]) -> None:
        found.append(Arguments(inputs[1:], named))

    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    try:
        model.base_model(ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found


class _Reached(Exception):
    """Raised with the hidden states before a layer."""


@torch.no_grad()
def hidden_before(layer: nn.Module, body: Callable[..., Any], ids: Tensor) -> Tensor:
    """Return the hidden states (rows × length × width) that `body` calls `layer` with; nothing behind it is run."""

    def stop(module: nn.Module, inputs: tuple) -> None:
        raise _Reached(inputs[0])

    hook = layer.register_forward_pre_hook(stop)
    try:
        body(ids, use_cache=False)
    except _Reached as reached:
        return reached.args[0]
    finally:
        hook.remove()
    raise RuntimeError(f"{type(layer).__name__} was not called")


def layer_names(model: PreTrainedModel) -> list[str]:
    """Return the names of the Transformer layers in the order in which hidden states pass them.

    Raises:
        UserError: the model has no such list of layers.
    """
    depth = getattr(model.config, "num_hidden_layers", None)
    modules = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    found = [name for name, module in modules if len(module) == depth]
    outermost = [name for name in found if not any(name.startswith(f"{other}.") for other in found)]
    if len(outermost) != 1:
        raise UserError(
            f"{type(model).__name__} has {len(outermost)} lists of {depth} layers, and --match needs the one that the "
            "hidden states pass; leave --match out"
        )
    return [f"{outermost[0]}.{i}" for i in range(depth)]


def hidden_of(output: Any) -> Tensor:
    """Return the hidden states in the output of a layer, which is a tuple in some architectures."""
    return output[0] if isinstance(output, tuple) else output
