"""Parsing of the link matrices that the vendors' tools print."""

import sys
from pathlib import Path

import pytest

from weft.device.links import parse_device_links, read_device_links, visible_devices

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1
"""


def table(codes: list[list[str]], name: str, nics: int, affinity: str) -> str:
    """Matrix as the tools print it: tabs, an underlined header, devices, network cards, then further columns."""
    count = len(codes)
    heads = [f"{name}{n}" for n in range(count)] + [f"NIC{n}" for n in range(nics)]
    lines = ["\t\x1b[4m" + "\t".join([*heads, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"]) + "\x1b[0m"]
    for index, row in enumerate(codes):
        cells = [" X " if code == "X" else code for code in row] + ["PXB", "SYS"][:nics]
        lines.append("\t".join([f"{name}{index}", *cells, affinity, "0", "\tN/A"]))
    for nic in range(nics):
        row = ["PXB"] * count + [" X " if other == nic else "SYS" for other in range(nics)]
        lines.append("\t".join([f"NIC{nic}", *row]))
    return "\n".join(lines) + "\n" + LEGEND


def matrix(code: str, count: int = 8) -> list[list[str]]:
    return [["X" if a == b else code for b in range(count)] for a in range(count)]


def pcie_host() -> list[list[str]]:
    """Eight cards on two sockets, pairs below one switch, the first two bridged by NVLink."""
    codes = [["PXB" if a // 2 == b // 2 else "NODE" if a // 4 == b // 4 else "SYS" for b in range(8)] for a in range(8)]
    for rank in range(8):
        codes[rank][rank] = "X"
    codes[0][1] = codes[1][0] = "NV4"
    return codes


def test_nvlink_host() -> None:
    found = parse_device_links(table(matrix("NV18"), "GPU", 2, "0-55,112-167"))
    assert [len(row) for row in found] == [8] * 8
    assert {kind for row in found for kind in row} == {"nvlink", ""}
    assert [found[rank][rank] for rank in range(8)] == [""] * 8


def test_pcie_host() -> None:
    found = parse_device_links(table(pcie_host(), "GPU", 2, "0-31"))
    assert found[0][1] == "nvlink"
    assert found[2][3] == "pcie-switch"
    assert found[0][2] == "pcie"
    assert found[0][7] == "pcie-sockets"
    assert all(found[a][b] == found[b][a] for a in range(8) for b in range(8))


def test_one_device_without_network_cards() -> None:
    text = "\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t\t\t\tN/A\n" + LEGEND
    assert parse_device_links(text) == [[""]]


def test_hccs_host() -> None:
    """npu-smi separates columns by spaces and prints one more column."""
    heads = "".join(f"NPU{n}       " for n in range(8))
    rows = [
        f"NPU{a}       "
        + "".join(f"{'X' if a == b else 'SIO' if a // 2 == b // 2 else 'HCCS'}       " for b in range(8))
        for a in range(8)
    ]
    text = "\n".join(
        [f"\t   {heads}CPU Affinity", *(f"{row}144-167" for row in rows), "", "Legend:", "", "  X    = Self"]
    )
    found = parse_device_links(text)
    assert found[0][:3] == ["", "die-to-die", "hccs"]
    assert len(found) == 8


def test_unknown_code_is_returned_in_lower_case() -> None:
    assert parse_device_links(table(matrix("XGMI", 2), "GPU", 0, "0"))[0][1] == "xgmi"


@pytest.mark.parametrize("text", ["", "No devices were found\n", "GPU0\n", "\tGPU0\tGPU1\nGPU0\tX\tNV1\nGPU1\tNV1\n"])
def test_text_without_a_matrix_is_empty(text: str) -> None:
    assert parse_device_links(text) == []


@pytest.mark.parametrize(
    ("listed", "expected"),
    [(None, [0, 1, 2, 3]), ("2,0", [2, 0]), ("", []), ("GPU-8932f937-d72c", None), ("7", None)],
)
def test_visible_devices(listed: str | None, expected: list[int] | None) -> None:
    assert visible_devices(listed, 4) == expected


def test_missing_tool_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_device_links("cuda") is None
    assert read_device_links("npu") is None
    assert read_device_links("cpu") is None


@pytest.mark.skipif(sys.platform == "win32", reason="the tool is a shell script")
def test_links_are_read_from_the_tool_in_visible_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(table(pcie_host(), "GPU", 2, "0-31"))
    tool = tmp_path / "nvidia-smi"
    loop = f'while read -r line; do echo "$line"; done < {tmp_path}/text'
    tool.write_text(f'#!/bin/sh\n[ "$1 $2" = "topo -m" ] && {loop}\ntrue\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = read_device_links("cuda", {"CUDA_VISIBLE_DEVICES": "7,0,1"})
    assert found == [
        ["", "pcie-sockets", "pcie-sockets"],
        ["pcie-sockets", "", "nvlink"],
        ["pcie-sockets", "nvlink", ""],
    ]
