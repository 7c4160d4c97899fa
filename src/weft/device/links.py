"""Interconnect between the accelerators of this host, parsed from `nvidia-smi topo -m` or `npu-smi info -t topo`."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping

TOOLS = {"cuda": ("nvidia-smi", "topo", "-m"), "npu": ("npu-smi", "info", "-t", "topo")}
VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
TOOL_SECONDS = 20.0
TERMINAL_CODES = re.compile(r"\x1b\[[0-9;]*m")  # nvidia-smi underlines its header
DEVICE = re.compile(r"(?:GPU|NPU)\d+")
# Link kind by the code that the tool prints; both tools use the same codes for PCIe.
KINDS = (
    (r"NV\d+", "nvlink"),
    (r"HCCS(_SW)?", "hccs"),
    (r"SIO", "die-to-die"),  # two dies of one package
    (r"PIX|PXB", "pcie-switch"),
    (r"PHB|NODE", "pcie"),  # through the host bridge of the processor
    (r"SYS", "pcie-sockets"),  # through the link between processors
)


def read_device_links(device_type: str, environment: Mapping[str, str] = os.environ) -> list[list[str]] | None:
    """Read the kind of link between each pair of visible devices, [devices, devices]; None if it cannot be determined.

    Args:
        device_type: "cpu", "cuda" or "npu".
        environment: environment variables; the list of visible devices is honored.
    """
    tool = TOOLS.get(device_type)
    if tool is None or shutil.which(tool[0]) is None:
        return None
    try:
        done = subprocess.run(tool, capture_output=True, text=True, timeout=TOOL_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    matrix = parse_device_links(done.stdout) if done.returncode == 0 else []
    order = visible_devices(environment.get(VISIBLE[device_type]), len(matrix))
    return [[matrix[a][b] for b in order] for a in order] if matrix and order is not None else None


def parse_device_links(text: str) -> list[list[str]]:
    """Parse the matrix that a vendor's tool prints: the kind of link, [devices, devices]; "" on the diagonal.

    An unknown code is returned in lower case. Text without a matrix gives an empty list.
    """
    lines = [TERMINAL_CODES.sub("", line).split() for line in text.splitlines()]
    header, *rows = [words for words in lines if words and DEVICE.fullmatch(words[0])] or [[]]
    count = sum(bool(DEVICE.fullmatch(word)) for word in header)
    if len(rows) != count or any(row[index + 1 : index + 2] != ["X"] for index, row in enumerate(rows)):
        return []
    matrix = [[_kind(code) for code in row[1 : count + 1]] for row in rows]
    return matrix if all(len(row) == count for row in matrix) else []


def visible_devices(listed: str | None, count: int) -> list[int] | None:
    """Parse the list of visible devices into indices, in the order of the list; None if it is not a list of indices.

    Args:
        listed: value of CUDA_VISIBLE_DEVICES or ASCEND_RT_VISIBLE_DEVICES; None: all devices are visible.
        count: number of devices of the host.
    """
    if listed is None:
        return list(range(count))
    words = [word.strip() for word in listed.split(",") if word.strip()]
    if not all(word.isdecimal() and int(word) < count for word in words):
        return None
    return [int(word) for word in words]


def _kind(code: str) -> str:
    if code == "X":
        return ""
    return next((kind for pattern, kind in KINDS if re.fullmatch(pattern, code)), code.lower())
