"""Registers, shared memory and spills of every kernel, compiled ahead of time for GPUs that are not there."""

import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from salaad.factored import gpu_kernels as products
from salaad.methods.salaad import gpu_kernels as admm
from salaad.model import gpu_kernels as loss

ARCHITECTURES = (80, 90, 100)  # A100; H100 and H200; B200
_TYPES = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16"}


@dataclass(frozen=True)
class Case:
    """A kernel as it is launched.

    Args:
        kernel: the kernel to compile.
        dtype: of the weights, the gradient or the logits.
        types: argument → its type, if that is no 32-bit integer; for a tuple the types of its elements.
        constants: the constexpr arguments.
        warps: warps of a program.
        what: what distinguishes the case from others of its kernel.
        aligned: whether V lies at a multiple of 16 bytes, as all other tensors do.
    """

    kernel: Any
    dtype: str
    types: Mapping[str, str | tuple]
    constants: Mapping[str, Any]
    warps: int
    what: str = ""
    aligned: bool = True

    @property
    def name(self) -> str:
        """The names of kernel and dtype, and `what`."""
        return " ".join(filter(None, (self.kernel.__name__, self.dtype, self.what)))


def cases() -> Iterator[Case]:
    """Yield every kernel in every dtype that it takes; the ADMM takes only dtypes of training."""
    for dtype, pointer in _TYPES.items():
        yield from product_cases(dtype, pointer)
        if dtype != "float16":
            yield from admm_cases(dtype, pointer)
        logits = {"logits": pointer, "targets": "*i64", "losses": "*fp32"}
        for gradient in (True, False):
            how = {"WITH_GRADIENT": gradient, "BLOCK": 4096}
            yield Case(loss.cross_entropy_kernel, dtype, logits, how, 8, "with gradient" if gradient else "")


def product_cases(dtype: str, pointer: str) -> Iterator[Case]:
    """Yield the products for every number of rows of x per program, for groups of layers, and for other layouts."""
    for B in (1, 2, 4, 8):
        yield from launches(dtype, pointer, B, what=f"B={B}")
    for layers in (2, 3):
        yield from launches(dtype, pointer, 1, layers, what=f"B=1, {layers} layers")
    yield next(launches(dtype, pointer, 1, what="B=1, not aligned", aligned=False))
    yield from list(launches(dtype, pointer, 8, columns="*i32", what="B=8, 32 bits"))[1:]
    for columns, bits in (("*i16", ""), ("*i32", ", 32 bits")):
        S = {"y": pointer, "ids": "*i64", "starts": "*i32", "columns": columns, "values": pointer}
        yield Case(products.add_rows_of_S, dtype, S, {"CHOSEN": True, "K": 128}, 1, f"chosen{bits}")
        yield Case(products.add_rows_of_S, dtype, S, {"CHOSEN": False, "ids": None, "K": 128}, 1, f"all{bits}")


def launches(
    dtype: str, pointer: str, B: int, layers: int = 1, columns: str = "*i16", aligned: bool = True, *, what: str
) -> Iterator[Case]:
    """The two launches by which layers with a bias are multiplied: by V, and by U and S."""
    layer = {"V": pointer, "U": pointer, "STARTS": "*i32", "COLUMNS": columns, "VALUES": pointer, "BIAS": pointer}
    fields = tuple({**layer, "Y": pointer, "RANK": "i32", "N": "i32"}.values())
    given = {"layers": (fields,) * layers, "x": pointer, "hidden": "*fp32"}
    rows = {"rows": 1} if B == 1 else {}  # Triton compiles an argument that is 1 as a constant
    of_V, of_U = ({"LAYERS": layers, "B": B, "K": max(least, 4 * least // B)} for least in (256, 128))
    yield Case(products.multiply_by_V, dtype, given, {**rows, **of_V}, 4, what, aligned)
    yield Case(products.multiply_by_U_and_S, dtype, given, {**rows, **of_U}, 1, what, aligned)


def admm_cases(dtype: str, pointer: str) -> Iterator[Case]:
    """Yield the kernels of an update's elementwise part and of the penalty."""
    block = dict.fromkeys(("L", "old_R", "R", "T", "thresholds", "partial"), "*fp32")
    yield Case(admm.divide_kernel, dtype, {"X": pointer, **block}, {"BLOCK": 2048}, 8)
    gradient = {"gradient": pointer, "X": pointer, "T": "*fp32", "factor": "fp32", "seed": "i64"}
    yield Case(admm.penalty_kernel, dtype, gradient, {"ROUNDED": dtype == "bfloat16", "BLOCK": 2048}, 8)


def resources(case: Case, architecture: int) -> dict[str, Any]:
    """What a case takes on an architecture: registers of a thread, bytes of shared memory and of spills."""
    compiled = compile_for(case, architecture)
    used = _assembled(compiled.asm["ptx"], architecture)
    return {
        "kernel": case.kernel.__name__,
        "dtype": case.dtype,
        "case": case.what,
        "architecture": f"sm_{architecture}",
        "warps": case.warps,
        "registers": int(re.search(r"Used (\d+) registers", used)[1]),
        "shared": compiled.metadata.shared,
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", used))),
    }


def compile_for(case: Case, architecture: int) -> Any:
    """Compile a case to a cubin; tensors and rows of m numbers lie at multiples of 16 bytes, V only if `aligned`."""
    names = case.kernel.arg_names
    given = {name: case.types.get(name, "i32") for name in names}
    types = {name: "constexpr" if name in case.constants else given[name] for name in names}
    constants = {(names.index(name),): value for name, value in case.constants.items()}
    aligned = {path: [["tt.divisibility", 16]] for path in _aligned(types, case)}
    source = ASTSource(case.kernel, types, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": case.warps})


def _aligned(types: Mapping[str, str | tuple], case: Case) -> Iterator[tuple[int, ...]]:
    """Yield the positions of arguments that are multiples of 16: addresses, the width m of x, and a layer's sizes."""
    for at, (name, kind) in enumerate(types.items()):
        if isinstance(kind, tuple):
            for layer, fields in enumerate(kind):
                shifted = () if case.aligned else (products.V.value,)
                yield from ((at, layer, field) for field in range(len(fields)) if field not in shifted)
        elif name == "m" or "*" in kind:
            yield (at,)


def _assembled(ptx: str, architecture: int) -> str:
    """Return the report of Triton's assembler (ptxas) on a kernel."""
    tools = triton.knobs.nvidia
    assembler = tools.ptxas_blackwell if architecture >= 100 else tools.ptxas
    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)[1]
    with TemporaryDirectory() as folder:
        file = Path(folder, "kernel.ptx")
        file.write_text(ptx)
        output = ["-o", str(file.with_suffix(".cubin"))]
        command = [assembler.path, "--verbose", f"--gpu-name={target}", str(file), *output]
        return subprocess.run(command, check=True, capture_output=True, text=True).stderr
