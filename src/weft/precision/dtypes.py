"""Names of number formats in a Plan -> torch dtypes, and whether a device computes in them."""

import torch

from weft.cluster.device import Device
from weft.errors import PlanError
from weft.plan import Precision

DTYPES: dict[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def check_formats(precision: Precision, device: Device) -> None:
    """Refuse formats that a device does not compute in.

    Raises:
        PlanError: with the format, the part of a step that has it, and one that the device knows.
    """
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
