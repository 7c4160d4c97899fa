"""Dtypes by their name in a Plan, the choice of the forward dtype for a device, and what a device cannot compute in."""

import torch

from weft.device.device import EMULATION_SIZE, Device, matmul_rate
from weft.errors import PlanError
from weft.plan import Precision

DTYPES: dict[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def check_formats(precision: Precision, device: Device) -> None:
    """Refuse dtypes that a device does not compute in, natively or by emulation.

    Args:
        precision: resolved.
        device: that the ranks compute on.

    Raises:
        PlanError: with the dtype, the part of a step that has it, and one that the device computes in.
    """
    if device.emulates:
        return
    known = [name for name in ("bf16", "fp16", "fp64") if device.supports(name)]
    for part in ("forward", "backward", "update", "reduce"):
        name = getattr(precision, part)
        if name not in (*known, "fp32", "forward"):
            raise PlanError(
                f"{device.type} {device.name} does not compute in {name}",
                where=f"plan.precision.{part}",
                rule=f"this device computes in fp32, {', '.join(known)}",
                fix=f'set plan.precision.{part} to "{"fp16" if part in ("forward", "backward") else "fp32"}"'
                + (' and plan.precision.loss_scale to "dynamic"' if part in ("forward", "backward") else ""),
            )


def explain_precision(written: Precision, device: Device) -> str:
    """One line on the forward dtype of a run: which, why, and what it costs where the device has no instructions for it.

    Args:
        written: as the user wrote it; its forward may be "auto".
        device: that the ranks compute on.
    """
    chosen = written.resolve(device.supports("bf16")).param_dtype
    if (chosen == "bf16" or chosen == "fp16") and device.emulates and not device.supports(chosen):
        slow, fast = (matmul_rate(DTYPES[name], EMULATION_SIZE, 1) for name in (chosen, "fp32"))
        needed = ", which another setting of the plan needs," if written.param_dtype == "auto" else ""
        return (
            f"forward in {chosen}{needed} without native instructions: its matmuls run at {slow / 1e9:.2g} GFLOP/s a thread, "
            f"those of fp32 at {fast / 1e9:.2g}"
        )
    if written.param_dtype != "auto":
        return f"forward in {chosen}, as the plan says"
    if chosen == "bf16":
        return "forward in bf16, which this device computes natively"
    return "forward in fp32: this device has no native bf16"
