"""The module that holds a weight as U·V + S: its tensors in memory and in the form of a file, and what products read.

`layers` has the layers that compute with it.
"""

import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from salaad.common.errors import UserError
from salaad.factored import cpu_kernels, int8, operators, packing
from salaad.factored.autocast import without_autocast
from salaad.factored.cached_sparse import CachedSparse
from salaad.factored.computed_weight import REFUSED, ComputedWeight
from salaad.factored.slr import Slr
from salaad.factored.slr_tensors import SlrTensors, column_dtype, columns_in, positions, stored_columns

# torch warns at the first sparse tensor of a process; a user can do nothing about it.
warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")


PARTS = ("U", "V", "S_values")  # the parameters of a layer, besides its bias


class SlrWeight(nn.Module):
    """A weight U·V + S (n×m): parameters U (n×r), V (r×m) and S_values, with S in compressed sparse rows.

    In a file the positions of S's entries are one packed buffer, and U, V and the values may be int8 with scales;
    `unpack` replaces the positions by row starts and columns, and int8 by floats. Starts and columns are int32 if they
    fit (the smallest dtype that torch's sparse products take), else int64; columns for our GPU kernels are int16 if
    they fit.

    Args:
        n: rows.
        m: columns.
        rank: r of U·V.
        nnz: entries of S.
        in_int8: the layer is about to be read from a file whose numbers are int8.
    """

    activation: ClassVar[str | None] = None  # between U and V
    _is_hf_initialized = True  # transformers would fill the weight of a linear layer with random numbers

    def __init__(self, n: int, m: int, rank: int, nnz: int, in_int8: bool = False) -> None:
        nn.Module.__init__(self)
        self.shape, self.rank, self.nnz = (n, m), rank, nnz
        if in_int8:
            for name, tensor in int8.outlines(n, m, rank, nnz).items():
                self.register_buffer(name, tensor)
        else:
            self._set_numbers(torch.empty(n, rank), torch.empty(rank, m), torch.empty(nnz))
        packed = torch.empty(packing.encoded_size(nnz, n * m), dtype=torch.uint8)
        self.register_buffer("S_packed", packed)
        self._sparse = CachedSparse()
        self._cached_products: tuple[tuple, operators.Products | None] | None = None

    def fill(self, slr: Slr) -> None:
        """Copy the numbers of `slr`, in its dtype and on its device."""
        self.rank, self.nnz = slr.rank, slr.nnz
        positions, order = slr.positions.long().sort()
        parts = (slr.U, slr.V, slr.values[order])
        self._set_numbers(*(part.clone(memory_format=torch.contiguous_format) for part in parts))
        self._set_positions(positions)

    def unpack(self) -> None:
        """Replace packed positions, if any, by row starts and columns, and int8 numbers, if any, by floats.

        Raises:
            ValueError: the packed positions are broken.
        """
        if "U_int8" in self._buffers:
            stored = {name: self._buffers.pop(name) for name in int8.NAMES}
            self._set_numbers(*int8.decode_parts(stored).values())
        if "S_packed" in self._buffers:
            self._set_positions(self._decoded(self.S_packed))

    def packed(self, in_int8: bool = False, parts: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return the tensors to store in a file, in the form that `unpack` reads, without the bias.

        Args:
            in_int8: store U, V and the values as int8.
            parts: name → U, V and S_values; those of the layer unless given.
        """
        n, m = self.shape
        found = positions(self.S_starts, self.columns, m).cpu().numpy()
        stored = {"S_packed": torch.from_numpy(packing.encode(found, n * m))}
        parts = parts or {name: getattr(self, name).detach() for name in PARTS}
        if not in_int8:
            return {**stored, **parts}
        U, V, values = (parts[name] for name in PARTS)
        pairs = {"U": int8.encode(U.mT), "V": int8.encode(V), "S": int8.encode_entries(values)}
        for x, (numbers, scales) in pairs.items():
            stored |= {f"{x}_int8": numbers.contiguous(), f"{x}_scales": scales}
        return stored

    def _set_numbers(self, U: Tensor, V: Tensor, values: Tensor) -> None:
        self.U, self.V, self.S_values = map(nn.Parameter, (U, V, values))

    def _decoded(self, packed: Tensor) -> Tensor:
        """Row-major positions (nnz) of S's entries from their packed form, on the same device."""
        n, m = self.shape
        return torch.from_numpy(packing.decode(packed.cpu().numpy(), self.nnz, n * m)).to(packed.device)

    def _set_positions(self, positions: Tensor) -> None:
        starts, columns = self._starts_and_columns(positions)
        self._buffers.pop("S_packed", None)
        self._cached_products = None
        self.register_buffer("S_starts", starts)
        self.register_buffer("S_columns", columns)
        if not len(positions):  # saves a product the work of `_with_empty_S`
            self.S_values.requires_grad_(False)
        self._fit_columns()

    def _starts_and_columns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        n, m = self.shape
        index = torch.int32 if max(len(positions), m) < 2**31 else torch.int64
        starts = torch.searchsorted(positions, torch.arange(n + 1, device=positions.device) * m)
        return starts.to(index), (positions % m).to(index)

    @property
    def columns(self) -> Tensor:
        """The columns of S's entries (nnz), in 16 bits on a GPU."""
        return columns_in(self._buffers["S_columns"])

    def _fit_columns(self) -> None:
        """Store the columns in the dtype that is used on their device."""
        stored = self._buffers.get("S_columns")
        if stored is not None and not stored.is_meta:
            self._buffers["S_columns"] = stored_columns(stored, column_dtype(stored.device, self.shape[1]))

    def _apply(self, fn: Any, recurse: bool = True) -> "SlrWeight":
        self._sparse.drop()
        super()._apply(fn, recurse)
        self._fit_columns()
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        """Load as torch does, from a file's form too, and convert columns stored on another kind of device.

        A Trainer resumes by giving the tensors of its checkpoint's file to `load_state_dict`.

        Raises:
            UserError: the numbers of a matrix are int8, and their scales are in another file.
            ValueError: the packed positions are broken.
        """
        if "S_starts" in self._buffers:
            self._unpack_stored(state_dict, prefix)
        key, own = f"{prefix}S_columns", self._buffers.get("S_columns")
        if own is not None and key in state_dict:
            assigned, given = local_metadata.get("assign_to_params_buffers", False), state_dict[key]
            wanted = column_dtype(given.device, self.shape[1]) if assigned else columns_in(own).dtype
            state_dict[key] = stored_columns(given, wanted)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    def _unpack_stored(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Replace, in place, tensors of this layer in the form of a file by those that it has in memory."""
        numbers = {name: state_dict.pop(key) for name in int8.NAMES if (key := f"{prefix}{name}") in state_dict}
        for x in "UVS":
            if (f"{x}_int8" in numbers) != (f"{x}_scales" in numbers):
                raise UserError(
                    f"{prefix}{x}_int8 and its scales are in two files, which are loaded one after the other; save "
                    "the model in one file, by a larger max_shard_size"
                )
        state_dict.update({f"{prefix}{name}": tensor for name, tensor in int8.decode_parts(numbers).items()})
        if f"{prefix}S_packed" in state_dict:
            starts, columns = self._starts_and_columns(self._decoded(state_dict.pop(f"{prefix}S_packed")))
            state_dict.update({f"{prefix}S_starts": starts, f"{prefix}S_columns": columns})

    @property
    def _tensors(self) -> SlrTensors:
        """The tensors that products read, looked up in few steps, since every forward pass does so."""
        return self._read(self._held)

    def _read(self, held: Mapping[str, Tensor]) -> SlrTensors:
        """Return the tensors that products read, of `_held`."""
        return held["U"], held["V"], self._buffers["S_starts"], self.columns, held["S_values"]

    @property
    def _held(self) -> Mapping[str, Tensor]:
        """Name → U, V, S_values and perhaps bias, in one step where they are parameters.

        A replica of torch.nn.DataParallel has them as plain attributes, as has a pruned layer; those of a parametrized
        one are computed.
        """
        held = self._parameters
        if "U" in held and "V" in held and "S_values" in held:
            return held
        return {name: getattr(self, name) for name in (*PARTS, "bias") if hasattr(self, name)}

    def _S(self) -> Tensor:
        """S as a sparse tensor of torch (n×m), which shares the memory of S_values."""
        return self._sparse.get(self._held["S_values"], self._buffers["S_starts"], self.columns, self.shape[1])

    def _native(self, x: Tensor) -> tuple[operators.Products, SlrTensors] | None:
        """Return the compiled products and the tensors that they read; None where the products cannot be used.

        They can be used in float32 on a CPU, and on a GPU with Triton. Every forward pass calls this method, and takes
        microseconds in a small layer; so the products are cached.
        """
        on_cpu = x.is_cpu
        if on_cpu and x.dtype not in operators.ON_CPU:
            return None
        if cpu_kernels.is_intercepted() or type(x) not in cpu_kernels.PLAIN:
            return None
        held, buffers = self._held, self._buffers
        U, V, values = held["U"], held["V"], held["S_values"]
        starts, columns = buffers["S_starts"], buffers["S_columns"]
        addresses = starts.data_ptr(), columns.data_ptr(), values.data_ptr(), U.data_ptr(), V.data_ptr()
        # A U or V that is cut in place keeps its address; new tensors of another dtype may get the old addresses.
        key = *addresses, U.numel(), V.numel(), U.dtype, V.dtype, values.dtype
        cached = self._cached_products  # read once, since another thread may replace it
        if cached is None or cached[0] != key:
            # Of the very tensors at these addresses: those of a parametrized layer are new whenever they are asked for.
            cached = self._cached_products = key, operators.compiled_products(self.shape, self._read(held))
        products = cached[1]
        if products is None or not (on_cpu if products.on_cpu else products.takes(x)):
            return None
        return products, (U, V, starts, columns if products.on_cpu else columns_in(columns), values)

    def _is_recorded(self, x: Tensor) -> bool:
        """Whether autograd records operations on x or on a parameter of this layer."""
        if not torch.is_grad_enabled():
            return False
        tensors = (x, *(self._held.get(name) for name in ("U", "V", "S_values", "bias")))
        return any(tensor is not None and tensor.requires_grad for tensor in tensors)

    def _with_empty_S(self, y: Tensor) -> Tensor:
        """Return y of a layer without entries of S, with a gradient for S_values where a caller has asked for one.

        DistributedDataParallel waits for the gradient of each parameter that is to have one, even if it is empty.
        """
        values = self._held["S_values"]
        return y + values.sum() if values.requires_grad and torch.is_grad_enabled() else y

    def _replicate_for_data_parallel(self) -> "SlrWeight":
        """Return a replica for another device, with caches of its own."""
        replica = super()._replicate_for_data_parallel()
        vars(replica).update(_sparse=CachedSparse(), _cached_products=None)
        return replica

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy or pickle, without the caches, which hold addresses of this object's memory."""
        return self.__dict__ | {"_sparse": CachedSparse(), "_cached_products": None}

    @property
    def weight(self) -> Tensor:
        """U·V + S (n×m), dense and new at every call; what is written into it would be lost, and is refused."""
        self.unpack()  # transformers reads a weight of GPT-2 before it calls the hook that unpacks
        with without_autocast(self.U.device):
            return operators.dense(*self._tensors).as_subclass(ComputedWeight)

    @weight.setter
    def weight(self, value: Tensor) -> None:
        raise UserError(REFUSED)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Add a parameter to the layer; a UserError for its weight, or what pruning makes of it."""
        if name == "weight" or isinstance(param, ComputedWeight):
            raise UserError(REFUSED)
        super().register_parameter(name, param)

    def float_weight(self) -> Tensor:
        """U·V + S (n×m), summed in float32, or in float64 where that is the layer's dtype."""
        U, V, starts, columns, values = (part.detach() for part in self._tensors)
        dtype = torch.promote_types(U.dtype, torch.float32)
        with without_autocast(U.device):
            return operators.dense(U.to(dtype), V.to(dtype), starts, columns, values.to(dtype))

    def extra_repr(self) -> str:
        """The layer's sizes for `print`."""
        return f"{self.shape[0]}×{self.shape[1]}, rank={self.rank}, nnz={self.nnz}"
