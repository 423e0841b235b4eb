"""Matching: one Transformer layer after the other is fitted to the dense layer's output, on a few sequences of text.

With the dense layer f, the cut layer f̂, and hidden states x from the dense layers before and x̂ from the cut ones:

    minimise  Σ ‖f̂(x̂) − f(x)‖² / Σ ‖f(x)‖²   over U, V, the entries of S, norms and biases of this layer,

summed over the tokens that are not padding. Because f̂ gets x̂, a layer also corrects errors of those before it (the
transformer matching of 3BASiL). Only the one layer in training needs memory for gradients and moments. An embedding
among the blocks is matched first.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from salaad.common.errors import UserError
from salaad.common.signals import StopRequest
from salaad.compression.tuning.fitting import Fitting
from salaad.compression.tuning.saved import SavedTuning
from salaad.compression.tuning.tuned_model import TunedModel
from salaad.model.loss import IGNORED

PASSES = 4  # over the sequences, for every layer
RATE = 0.03  # as in `Fitting`


class Call(NamedTuple):
    """The arguments that a module is called with: hidden states (or token ids), and all others."""

    hidden: Tensor
    positional: tuple = ()
    named: Mapping[str, Any] = MappingProxyType({})


def match(tuned: TunedModel, texts: Sequence[Mapping[str, Tensor]], saved: SavedTuning, request: StopRequest) -> None:
    """Fit all layers of `tuned`, with all its units, going on after the last layer that was saved.

    Args:
        tuned: the cut model, which holds the dense one.
        texts: batches of sequences, `input_ids` and `labels` (rows × length).
        saved: where the state is saved after every layer.
        request: a request to stop.

    Raises:
        UserError: a stop was requested; the layers that were fitted are saved.
    """
    model, base = tuned.model, tuned.model.base_model_prefix
    batches, real = [text["input_ids"] for text in texts], [text["labels"] != IGNORED for text in texts]
    state = saved.load() or {"fitted": []}
    if state["fitted"]:
        tuned.load_state_dict(state["tuned"])

    def fit(name: str, calls: Sequence[Call], goals: Sequence[Tensor]) -> None:
        if name not in state["fitted"] and any(part.numel() for part in tuned.trained(name)):
            fit_module(tuned, name, calls, goals, real, request)
            state["fitted"].append(name)
            saved.save({**state, "tuned": tuned.state_dict()})

    embedding = next(name for name, module in model.named_modules() if module is model.get_input_embeddings())
    with torch.no_grad():
        goals = [model.get_input_embeddings()(ids) for ids in batches]
    fit(embedding, [Call(ids) for ids in batches], goals)

    names = layer_names(model)
    layers = [model.get_submodule(name) for name in names]
    with torch.no_grad():
        # The arguments of a layer other than hidden states depend on the shape of the rows alone.
        others = {
            ids.shape: calls_of(layers, lambda ids=ids: model.base_model(ids, use_cache=False)) for ids in batches
        }
        dense = [calls_of(layers[:1], lambda ids=ids: model.base_model(ids, use_cache=False))[0] for ids in batches]
        cut = [
            calls_of(layers[:1], lambda ids=ids: tuned.call_inside(base, ids, use_cache=False))[0] for ids in batches
        ]
    for i, (name, layer) in enumerate(zip(names, layers, strict=True)):
        with torch.no_grad():
            goals = [hidden_of(layer(call.hidden, *call.positional, **call.named)) for call in dense]
        fit(name, cut, goals)
        if i + 1 < len(names):
            following = [others[ids.shape][i + 1] for ids in batches]
            with torch.no_grad():
                found = [
                    hidden_of(tuned.call_inside(name, call.hidden, *call.positional, **call.named)) for call in cut
                ]
            dense = [call._replace(hidden=goal) for call, goal in zip(following, goals, strict=True)]
            cut = [call._replace(hidden=hidden) for call, hidden in zip(following, found, strict=True)]


def fit_module(
    tuned: TunedModel,
    name: str,
    calls: Sequence[Call],
    goals: Sequence[Tensor],
    real: Sequence[Tensor],
    request: StopRequest,
) -> None:
    """Fit the module named `name` so that `calls` give `goals`, at the tokens that are `real` (bool)."""
    goals = [goal[places] for goal, places in zip(goals, real, strict=True)]
    scale = torch.stack([goal.float().square().mean() for goal in goals]).mean()
    fitting = Fitting(tuned.trained(name), PASSES * len(calls), RATE)
    bar = tqdm(range(fitting.steps), desc=f"matching {name}", unit="step", leave=False, disable=None)
    for step in bar:
        i = step % len(calls)
        found = hidden_of(tuned.call_inside(name, calls[i].hidden, *calls[i].positional, **calls[i].named))
        loss = fitting.step([(found[real[i]] - goals[i]).float().square().mean() / scale])
        bar.set_postfix_str(f"error {loss**0.5:.3f}", refresh=False)
        if request.asked:
            raise UserError(f"interrupted while {name} was matched; the same command goes on with it")


def calls_of(layers: Sequence[nn.Module], run: Callable[[], Any]) -> list[Call]:
    """Return the arguments that each of `layers` is called with in `run`."""
    calls: list[Call] = []

    def note(module: nn.Module, inputs: tuple, named: dict[str, Any]) -> None:
        calls.append(Call(inputs[0], inputs[1:], named))

    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return calls


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
