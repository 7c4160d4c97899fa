"""Detection of the device of this host, without initializing it."""

import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from typing import Any

import torch

from weft.device.accelerator import COLLECTIVES, Accelerator, Properties
from weft.device.cpu import Cpu
from weft.device.device import Device
from weft.errors import DeviceError

CHILD_SECONDS = 300.0  # to import torch from a slow file system
DEVICE_GROUP = "weft.devices"
"""Group of the entry points with which other packages add devices."""


def detect(torch_module: Any = torch, read: Callable[[], Properties] | None = None) -> Device:
    """Detect the accelerator of this host; without one, return the cpu.

    A type of accelerator that Weft does not know is created by the entry point of its name in the group "weft.devices", a
    class or function without arguments; without such an entry point it is ignored.

    Args:
        torch_module: torch, or a stand-in for it in tests.
        read: reads the properties of an accelerator; None: this process reads them.
    """
    if importlib.util.find_spec("torch_npu") is not None:
        importlib.import_module("torch_npu")  # makes npu known to torch
    accelerator = torch_module.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return Cpu()
    if accelerator.type in COLLECTIVES:
        return Accelerator(accelerator.type, torch_module, read)
    installed = entry_points(group=DEVICE_GROUP)
    return installed[accelerator.type].load()() if accelerator.type in installed.names else Cpu()


def detect_for_launcher(torch_module: Any = torch) -> Device:
    """Detect the device of this host for a process that starts ranks, and leaves the memory of an accelerator to them.

    Reading the properties of an accelerator initializes it, so that a child process reads them, once and when they are needed.
    """
    return detect(torch_module, cache(read_in_child))


def read_in_child() -> Properties:
    """Properties of the accelerator of this host, read by another process.

    Raises:
        DeviceError: the process failed; the message has the last line of its output.
    """
    command = [sys.executable, "-m", "weft.device.detect"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_SECONDS)
    if done.returncode:
        raise DeviceError(
            f"the properties of the accelerator cannot be read: {(done.stderr.strip().splitlines() or ['no output'])[-1]}",
            where=" ".join(command),
            rule="the driver of a device that torch finds must be able to use it",
            fix="check the driver and whether another process holds the device, for example with nvidia-smi or npu-smi info",
        )
    return Properties(*json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    found = detect()
    print(json.dumps(found.properties if isinstance(found, Accelerator) else None))
