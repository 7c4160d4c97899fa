"""Ahead-of-time compilation of all Triton kernels, without a GPU: registers, shared memory and spills on each target.

    weft doctor --kernels    # a table; exit code 1 if a kernel spills or does not compile

A compilation runs in a separate process, because a kernel that spills may keep the assembler busy for minutes. Results are
kept in a folder for temporary files, by a hash of the source and of everything else that decides them.
"""

import hashlib
import inspect
import json
import multiprocessing
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain, product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from weft.compute import (
    adamw,
    cross_entropy_kernels,
    dropout,
    experts,
    fp8_cast,
    fp8_experts,
    gated_activation,
    jit,
    rms_norm,
)

TARGETS = (80, 90, 100)
"""Compute capabilities: A100, H100 and H200, B200."""
TIME_LIMIT_SECONDS = 120.0
DIVISIBLE = re.compile(r"width|.*_stride|height|num_elements|size")
"""Integers that are multiples of 16 in real models; pointers are aligned to 16 bytes too."""


@dataclass(frozen=True)
class Kernel:
    """Kernel with the arguments of one launch."""

    name: str
    function: Any
    signature: dict[str, str]
    """Type of each argument that is no constant."""
    constants: dict[str, Any]
    """Values of constexpr arguments, and of arguments that Triton treats as constants because they are 1."""
    warps: int
    lowest_target: int = 0
    """Lowest compute capability that the kernel runs on."""
    highest_target: int = 100
    """Highest compute capability that is launched like this."""


@dataclass(frozen=True)
class Usage:
    """Resources of a compiled kernel."""

    kernel: str
    target: int
    registers: int = 0
    """Registers per thread."""
    shared_bytes: int = 0
    spilled_bytes: int = 0
    """Stack and local memory per thread."""
    wide_loads: int = 0
    """Loads of 16 bytes per thread."""
    seconds: float = 0
    error: str = ""


def kernels() -> list[Kernel]:
    """All kernels, as the launch functions start them for common sizes of models."""
    made = (
        _norm_kernels(),
        _gated_kernels(),
        _dropout_kernels(),
        _expert_kernels(),
        _loss_kernels(),
        _update_kernels(),
        _fp8_kernels(),
    )
    return list(chain.from_iterable(made))


def _norm_kernels() -> Iterable[Kernel]:
    numbers = {"rows": "i32", "width": "i32"}
    for width, dtype, *targets in [
        (128, "bf16", 0, 100),
        (4096, "bf16", 0, 100),
        (8192, "bf16", 0, 100),
        (16384, "bf16", 0, 90),
        (16384, "bf16", 100, 100),
        (4096, "fp32", 0, 100),
        (8192, "fp32", 0, 100),
    ]:
        block, rows, warps = rms_norm.sizes(width, targets[1])
        shape = {"HAS_WEIGHT": True, "OFFSET": 0.0, "ROWS": rows, "BLOCK": block}
        forward = _pointers("x weight y", dtype) | numbers | {"x_stride": "i32", "eps": "fp32"}
        backward = _pointers("dy x weight dx", dtype) | {"sums": "*fp32"} | numbers
        backward |= {"dy_stride": "i32", "x_stride": "i32", "eps": "fp32"}
        yield Kernel(
            f"rms_norm {dtype} {width}", rms_norm.forward_kernel, forward, shape | {"CAST_FIRST": True}, warps, *targets
        )
        constants = shape | {"WEIGHT_GRADIENT": True}
        yield Kernel(
            f"rms_norm_backward {dtype} {width}", rms_norm.backward_kernel, backward, constants, warps, *targets
        )


def _gated_kernels() -> Iterable[Kernel]:
    for activation in gated_activation.ACTIVATIONS:
        constants = {"ACTIVATION": activation, "SIZE": gated_activation.BLOCK}
        for name, function in (("", gated_activation.forward_kernel), ("_backward", gated_activation.backward_kernel)):
            tensors = "dy gate up d_gate d_up" if name else "gate up out"
            signature = _pointers(tensors, "bf16") | {"width": "i32", "blocks": "i32"}
            signature |= {f"{tensor}_stride": "i32" for tensor in tensors.split()}
            yield Kernel(f"gated_activation{name} bf16 {activation}", function, signature, constants, 4)


def _dropout_kernels() -> Iterable[Kernel]:
    numbers = "seed first_feature height length width blocks row_stride token_stride"
    for dtype in ("bf16", "fp32"):
        signature = _pointers("x out", dtype) | _pointers("rows tokens", "i64") | dict.fromkeys(numbers.split(), "i32")
        limit, factor = dropout.keep_rule(0.1, torch.float32)
        constants = {"LIMIT": limit, "FACTOR": factor, "COLUMNS": dropout.COLUMNS}
        constants |= {"ROWS": dropout.TILE // dropout.COLUMNS}
        yield Kernel(f"dropout {dtype}", dropout.dropout_kernel, signature, constants, 4)


def _expert_kernels() -> Iterable[Kernel]:
    for choices, width in ((2, 4096), (8, 2048)):
        tensors = _pointers("rows weights", "bf16") | {"position": "*i64", "end": "*i32"}
        constants = {"CHOICES": choices, "BLOCK": experts.BLOCK}
        forward = tensors | {"out": "*bf16", "width": "i32"}
        yield Kernel(
            f"unpermute bf16 {choices} x {width}",
            experts.unpermute_kernel,
            forward,
            constants | {"HAS_WEIGHTS": True},
            4,
        )
        backward = tensors | _pointers("gradient of_rows of_weights", "bf16") | {"width": "i32"}
        constants |= {"BLOCKS": -(-width // experts.BLOCK)}
        name = f"unpermute_backward bf16 {choices} x {width}"
        yield Kernel(name, experts.unpermute_backward_kernel, backward, constants, 4)


def _loss_kernels() -> Iterable[Kernel]:
    numbers = {"width": "i32", "stride": "i32", "start": "i32", "scale": "fp32", "softcap": "fp32"}
    for softcap in (False, True):
        constants = {"SOFTCAP": softcap, "BLOCK": cross_entropy_kernels.BLOCK}
        tensors = {"logits": "*bf16", "targets": "*i64"}
        statistics = tensors | {"found": "*fp32", "tokens": "i32"} | numbers
        gradient = tensors | {"lse": "*fp32", "ignored": "i32"} | numbers
        name, warps = " softcap" if softcap else "", cross_entropy_kernels.WARPS
        yield Kernel(
            f"softmax_statistics bf16{name}", cross_entropy_kernels.statistics_kernel, statistics, constants, warps
        )
        yield Kernel(f"softmax_gradient bf16{name}", cross_entropy_kernels.gradient_kernel, gradient, constants, warps)


def _update_kernels() -> Iterable[Kernel]:
    signature = {"table": "*i64", "coefficients": "*fp32", "entries": "*fp32"}
    for weight, moments in product(("fp32", "split", "split_even"), ("fp32", "bf16", "int8")):
        for aligned in (True, False) if (weight, moments) == ("fp32", "fp32") else (True,):
            constants: dict[str, Any] = {"WEIGHT": weight, "GRADIENT": "fp32", "MOMENTS": moments, "ALIGNED": aligned}
            constants |= {
                "ROWS": adamw.rows_of(moments),
                "WIDTH": adamw.WIDTH,
                "COLUMNS": adamw.COLUMNS,
                "SCALARS": adamw.SCALARS,
            }
            name = f"adamw {weight}, moments {moments}{'' if aligned else ', not aligned'}"
            yield Kernel(name, adamw.update_kernel, signature, constants, adamw.WARPS)


def _fp8_kernels() -> Iterable[Kernel]:
    x, shape = _pointers("x", "bf16"), {"height": "i32", "width": "i32"}
    largest = x | {"bits": "*i32", "num_elements": "i32"}
    yield Kernel("fp8_largest bf16", fp8_cast.largest_kernel, largest, {"BLOCK": fp8_cast.LARGEST_BLOCK}, 8)
    layouts = {"ROWS": True, "COLUMNS": True, "TILE": fp8_cast.CAST_TILE}
    for kind, top in (("fp8e4nv", 448.0), ("fp8e5", 57344.0)):
        tensors = x | _pointers("values transposed", kind) | _pointers("largest scales", "fp32") | shape
        constants = layouts | {"TOP": top, "POWER": True}
        yield Kernel(f"fp8_cast {kind}", fp8_cast.cast_kernel, tensors, constants, fp8_cast.CAST_WARPS, 89)
    values = x | _pointers("values transposed", "fp8e4nv") | _pointers("scales transposed_scales", "fp32") | shape
    for square in (False, True):
        name, constants = f"fp8_cast_blocks{' square' * square}", layouts | {"TOP": 448.0, "SQUARE": square}
        yield Kernel(name, fp8_cast.cast_blocks_kernel, values, constants, fp8_cast.BLOCKS_WARPS, 89)
    for width in (768, 2048, 16384):
        block, rows, warps = fp8_experts.row_sizes(width)
        constants, tensors = {"TOP": 448.0, "ROWS": rows, "BLOCK": block}, x | {"values": "*fp8e4nv", "scales": "*fp32"}
        yield Kernel(f"fp8_cast_rows {width}", fp8_experts.cast_rows_kernel, tensors | shape, constants, warps, 89)
    tensors = x | _pointers("starts ends targets", "i32") | {"values": "*fp8e4nv", "scales": "*fp32"}
    tensors |= {"size": "i32", "width": "i32"}
    constants = {"TOP": 448.0, "ALIGNMENT": fp8_experts.ALIGNMENT}
    constants |= {"ROWS": fp8_experts.TRANSPOSE_ROWS, "COLUMNS": fp8_experts.TRANSPOSE_COLUMNS}
    warps = fp8_experts.TRANSPOSE_WARPS
    yield Kernel("fp8_transpose", fp8_experts.transpose_kernel, tensors, constants, warps, 89)


def _pointers(names: str, dtype: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), f"*{dtype}")


def compile_all(kernels: Iterable[Kernel], targets: Iterable[int] = TARGETS) -> list[Usage]:
    """Compile kernels for targets, each in a separate process with a time limit, and only for targets that they run on.

    Results are read from the cache.
    """
    targets = tuple(targets)
    return [
        _cached(kernel, target)
        for kernel in kernels
        for target in targets
        if kernel.lowest_target <= target <= kernel.highest_target
    ]


def _cached(kernel: Kernel, target: int) -> Usage:
    source = Path(inspect.getfile(kernel.function.fn)).read_text(encoding="utf-8") + Path(__file__).read_text()
    settings = [kernel.signature, kernel.constants, kernel.warps, target, jit.triton.__version__, source]
    key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:32]
    path = Path(tempfile.gettempdir()) / f"weft-aot-{os.getuid()}" / f"{key}.json"
    if path.exists():
        return Usage(**json.loads(path.read_text()) | {"kernel": kernel.name})
    usage = limit_time(lambda: compile_kernel(kernel, target), TIME_LIMIT_SECONDS) or Usage(
        kernel.name, target, seconds=TIME_LIMIT_SECONDS, error=f"not compiled after {TIME_LIMIT_SECONDS:g} s"
    )
    if not usage.error:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.write_text(json.dumps(asdict(usage)))
    return usage


def limit_time(work: Callable[[], Usage], seconds: float) -> Usage | None:
    """Result of a function that runs in a forked process; None if it takes too long, after ending all its processes."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(work, send))
    process.start()
    send.close()
    try:
        return receive.recv() if receive.poll(seconds) else None
    finally:
        if process.is_alive() and process.pid and not receive.closed:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.join()


def _run(work: Callable[[], Usage], send: Connection) -> None:
    os.setsid()  # the assembler is a child of this process: both end with its group
    send.send(work())


def compile_kernel(kernel: Kernel, target: int) -> Usage:
    """Compile a kernel in this process."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    order = list(kernel.function.arg_names)
    types = {name: kernel.signature.get(name, "constexpr") for name in order}
    numbers = {name for name in order if types[name] in ("i32", "i64") and DIVISIBLE.fullmatch(name)}
    aligned = [i for i, name in enumerate(order) if types[name][0] == "*" or name in numbers]
    source = ASTSource(
        fn=kernel.function,
        signature=types,
        constexprs={(order.index(name),): value for name, value in kernel.constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    started = time.perf_counter()
    try:
        made = jit.triton.compile(source, target=GPUTarget("cuda", target, 32), options={"num_warps": kernel.warps})
    except Exception as error:  # the compiler raises many classes
        return Usage(kernel.name, target, error=f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:200]}")
    seconds = round(time.perf_counter() - started, 2)
    used = read_resources(made.asm["cubin"])
    wide = len(re.findall(r"ld\.global\S*\.v4\.b32", made.asm["ptx"]))
    spilled = used["STACK"] + used["LOCAL"]
    return Usage(kernel.name, target, used["REG"], made.metadata.shared, spilled, wide, seconds)


def read_resources(cubin: bytes) -> dict[str, int]:
    """Numbers of registers (REG), and bytes of stack and local memory (STACK, LOCAL), of a compiled kernel."""
    program = Path(jit.triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([program, "-res-usage", file.name], capture_output=True, text=True, check=True)
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text.stdout + text.stderr)}


def describe(usage: Usage) -> str:
    """Registers per thread, shared memory per program and spilled bytes per thread, or why a kernel was not compiled."""
    return usage.error or f"{usage.registers} reg, {usage.shared_bytes} B shared, {usage.spilled_bytes} B spilled"
