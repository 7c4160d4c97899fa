"""How the accelerators of this host are joined, as the tool of their vendor prints it.

Beside `device.py` the one other place that knows vendors.
"""

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
# By the code of the tool; both tools speak of PCIe in the same words.
KINDS = (
    (r"NV\d+", "nvlink"),
    (r"HCCS(_SW)?", "hccs"),
    (r"SIO", "die-to-die"),  # two dies of one package
    (r"PIX|PXB", "pcie-switch"),
    (r"PHB|NODE", "pcie"),  # over the host bridge of the processor
    (r"SYS", "pcie-sockets"),  # over the link between processors
)


def read_device_links(device_type: str, environment: Mapping[str, str] = os.environ) -> list[list[str]] | None:
    """The kind of link between the devices that this process sees, [devices, devices]; None where nobody knows.

    Args:
        device_type: "cpu", "cuda" or "npu".
        environment: may hold the list of visible devices.
    """
    tool = TOOLS.get(device_type)
    if tool is None or shutil.which(tool[0]) is None:
        return None
    try:
        done = subprocess.run(tool, capture_output=True, text=True, timeout=TOOL_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = parse_device_links(done.stdout) if done.returncode == 0 else []
    order = visible_devices(environment.get(VISIBLE[device_type]), len(found))
    return [[found[a][b] for b in order] for a in order] if found and order is not None else None


def parse_device_links(text: str) -> list[list[str]]:
    """The kind of link between the devices in the matrix that a tool has printed, [devices, devices]; "" on the diagonal.

    A code that is not known stands for itself, in lower case. Without a matrix: an empty list.
    """
    lines = [TERMINAL_CODES.sub("", line).split() for line in text.splitlines()]
    header, *rows = [words for words in lines if words and DEVICE.fullmatch(words[0])] or [[]]
    count = sum(bool(DEVICE.fullmatch(word)) for word in header)
    if len(rows) != count or any(row[number + 1 : number + 2] != ["X"] for number, row in enumerate(rows)):
        return []
    matrix = [[_kind(code) for code in row[1 : count + 1]] for row in rows]
    return matrix if all(len(row) == count for row in matrix) else []


def visible_devices(listed: str | None, count: int) -> list[int] | None:
    """Numbers of the devices that a process sees, in its order; None if they are named in another way than by numbers.

    Args:
        listed: value of the variable that chooses them; None: all.
        count: devices of the host.
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
