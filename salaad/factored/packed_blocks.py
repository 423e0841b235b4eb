"""The blocks in a state dict to be saved: in the form of a file, in int8 where they are so up to rounding."""

import warnings
from collections.abc import Mapping

from torch import Tensor

from salaad.common.errors import UserError
from salaad.factored import int8
from salaad.factored.slr_weight import PARTS, SlrWeight


def pack_blocks(state: dict[str, Tensor], layers: Mapping[str, SlrWeight], in_int8: bool, rounding: bool) -> bool:
    """Replace, in place, the tensors of layers in a state dict by those of a file; return whether they are in int8.

    Args:
        state: the state dict of the model, or one with the same names.
        layers: name → layer of every block held as U·V + S.
        in_int8: store U, V and the values as int8, unless that would undo what was trained.
        rounding: round numbers that are no int8 yet.
    """
    parts = {name: _parts_in(state, name) for name in layers}
    packed = {name: layer.packed(in_int8, parts[name]) for name, layer in layers.items()}
    if in_int8 and not rounding and not all(int8.holds(packed[name], parts[name]) for name in layers):
        warnings.warn(
            "U, V or S have changed since they were read from int8, and int8 would round the change away; they are "
            "saved as floats, of which compress.py --dtype int8 makes int8 again",
            stacklevel=2,
        )
        in_int8 = False
        packed = {name: layer.packed(parts=parts[name]) for name, layer in layers.items()}
    for name, tensors in packed.items():
        for key in (*PARTS, "S_starts", "S_columns"):
            state.pop(f"{name}.{key}", None)
        state |= {f"{name}.{key}": tensor for key, tensor in tensors.items()}
    return in_int8


def _parts_in(state: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Return U, V and S_values of a block from a state dict; a UserError if it lacks one."""
    for key in PARTS:
        if f"{name}.{key}" not in state:
            raise UserError(
                f"the given state dict has no {name}.{key}, in which the model holds this weight; give one with the "
                "names of model.state_dict(), or call model.dequantize() first"
            )
    return {key: state[f"{name}.{key}"].detach() for key in PARTS}
