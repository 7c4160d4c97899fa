"""Detection of the device of this host, without initializing it."""

import importlib
import importlib.util
from importlib.metadata import entry_points
from typing import Any

import torch

from weft.device.accelerator import COLLECTIVES, Accelerator
from weft.device.cpu import Cpu
from weft.device.device import Device

DEVICE_GROUP = "weft.devices"
"""Group of the entry points with which other packages add devices."""


def detect(torch_module: Any = torch) -> Device:
    """Detect the accelerator of this host; without one, return the cpu.

    A type of accelerator that Weft does not know is created by the entry point of its name in the group "weft.devices", a
    class or function without arguments; without such an entry point it is ignored.

    Args:
        torch_module: torch, or a stand-in for it in tests.
    """
    if importlib.util.find_spec("torch_npu") is not None:
        importlib.import_module("torch_npu")  # makes npu known to torch
    accelerator = torch_module.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return Cpu()
    if accelerator.type in COLLECTIVES:
        return Accelerator(accelerator.type, torch_module)
    installed = entry_points(group=DEVICE_GROUP)
    return installed[accelerator.type].load()() if accelerator.type in installed.names else Cpu()
