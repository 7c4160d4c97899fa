"""Dtype names of a plan, choice of the forward dtype, and check of the dtypes that a device supports."""

import torch
from torch import nn

from weft.device.cpu import EMULATION_SIZE, matmul_rate
from weft.device.device import Device
from weft.errors import PlanError
from weft.plan import Comm, Precision

DTYPES: dict[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def dtype_of_forward(precision: Precision, model: nn.Module) -> str:
    """Dtype of forward for a model of a loop or of a script, where its plan leaves it open: that of its weights.

    Args:
        precision: precision settings with param_dtype = "auto".
        model: model with its weights, or on the meta device.

    Returns:
        Name of a dtype: "bf16" if another setting needs it, "fp32" for weights of several dtypes.
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    own = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return "bf16" if precision.needs_bf16 else names.get(own.pop(), "fp32") if len(own) == 1 else "fp32"


def check_dtypes(precision: Precision, device: Device) -> None:
    """Refuse dtypes that a device supports neither natively nor by emulation, and FP8 that the plan does not let it emulate.

    Args:
        precision: resolved precision settings.
        device: device of the ranks.

    Raises:
        PlanError: names the key, its dtype, and a supported dtype.
    """
    if precision.matmul != "forward" and not precision.emulate_fp8 and not device.supports("float8"):
        raise missing_fp8(precision.matmul, f"{device.type} {device.name}")
    if device.emulates:
        return
    known = [name for name in ("bf16", "fp16", "fp64") if device.supports(name)]
    for key in ("param_dtype", "backward", "update", "reduce_dtype"):
        name = getattr(precision, key)
        if name not in (*known, "fp32", "forward"):
            raise PlanError(
                f"{device.type} {device.name} does not compute in {name}",
                where=f"plan.precision.{key}",
                rule=f"this device computes in fp32, {', '.join(known)}",
                fix=f'set plan.precision.{key} to "{"fp16" if key in ("param_dtype", "backward") else "fp32"}"'
                + (' and plan.precision.loss_scale to "dynamic"' if key in ("param_dtype", "backward") else ""),
            )


def check_row_format(comm: Comm, device: Device) -> None:
    """Refuse FP8 rows of experts on a device that cannot convert them.

    Raises:
        PlanError: names the device.
    """
    if comm.expert_compression == "fp8" and not device.has_float8_dtype:
        raise PlanError(
            f"expert_compression = 'fp8' on {device.type} {device.name}",
            where="plan.comm.expert_compression",
            rule="torch does not convert to FP8 on this device",
            fix='set plan.comm.expert_compression = "int8", which sends as many bytes',
        )


def missing_fp8(matmul: str, device: str) -> PlanError:
    """Error for FP8 matmuls on a device without them.

    Args:
        matmul: value of `plan.precision.matmul`.
        device: name of the device.
    """
    return PlanError(
        f"matmul = {matmul!r} on {device}",
        where="plan.precision.matmul",
        rule="this device has no FP8 matmuls",
        fix='set plan.precision.emulate_fp8 = true to compute the same numbers in float32, or matmul = "forward"',
    )


def explain_precision(written: Precision, device: Device) -> str:
    """Describe the forward dtype of a run in one line: the choice, its reason, and its cost without native instructions.

    Args:
        written: precision settings as the user wrote them; `param_dtype` may be "auto".
        device: device of the ranks.
    """
    chosen = written.resolve(device.supports("bf16")).param_dtype
    if (chosen == "bf16" or chosen == "fp16") and device.emulates and not device.supports(chosen):
        slow, fast = (matmul_rate(DTYPES[name], EMULATION_SIZE, 1) for name in (chosen, "fp32"))
        needed = ", which another setting of the plan needs," if written.param_dtype == "auto" else ""
        return (
            f"forward in {chosen}{needed} without native instructions: its matmuls run at {slow / 1e9:.2g} GFLOP/s per thread, "
            f"fp32 matmuls at {fast / 1e9:.2g}"
        )
    if written.param_dtype != "auto":
        return f"forward in {chosen}, as the plan says"
    if chosen == "bf16":
        return "forward in bf16, which this device computes natively"
    return "forward in fp32: this device has no native bf16"
