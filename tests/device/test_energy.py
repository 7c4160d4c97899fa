"""Energy counters: RAPL's files, NVML and npu-smi by stand-ins of their interfaces."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from weft.device.cpu import Cpu
from weft.device.energy import NPU_SMI_SECONDS, NpuSmiMeter, NvmlMeter, RaplMeter, open_meters, parse_npu_power

REPORT = """
        NPU ID                         : 0
        Chip Count                     : 1

        NPU Real-time Power(W)         : 92.5
        Chip ID                        : 0
"""


def domain(folder: Path, name: str, kind: str, microjoules: int) -> Path:
    path = folder / name
    path.mkdir()
    (path / "name").write_text(f"{kind}\n")
    (path / "energy_uj").write_text(f"{microjoules}\n")
    (path / "max_energy_range_uj").write_text("10000000\n")
    return path / "energy_uj"


def test_rapl_adds_packages_and_memory_and_follows_a_counter_that_wraps_around(tmp_path: Path) -> None:
    first = domain(tmp_path, "intel-rapl:0", "package-0", 9_000_000)
    second = domain(tmp_path, "intel-rapl:1", "package-1", 0)
    memory = domain(tmp_path, "intel-rapl:0:1", "dram", 500_000)
    cores = domain(tmp_path, "intel-rapl:0:0", "core", 0)  # part of package 0
    meter = RaplMeter(tmp_path)
    assert meter.joules() == 0
    first.write_text("1000000\n")  # 2 J, through the end of its range
    second.write_text("3000000\n")
    memory.write_text("1500000\n")
    cores.write_text("900000\n")
    assert meter.joules() == pytest.approx(2 + 3 + 1)
    second.write_text("4000000\n")
    assert meter.joules() == pytest.approx(7)


def test_only_the_first_rank_of_a_host_reads_the_counters_of_the_host(tmp_path: Path) -> None:
    domain(tmp_path, "intel-rapl:0", "package-0", 0)
    assert [meter.source for meter in open_meters(Cpu(), 0, tmp_path)] == ["RAPL"]
    assert open_meters(Cpu(), 1, tmp_path) == []


class CardWithoutCounter(Cpu):
    type = "cuda"


def test_the_energy_of_a_host_is_not_taken_for_that_of_its_accelerator(tmp_path: Path) -> None:
    domain(tmp_path, "intel-rapl:0", "package-0", 0)
    assert open_meters(CardWithoutCounter(), 0, tmp_path) == []


def test_a_host_without_readable_counters_has_no_meters(tmp_path: Path) -> None:
    assert open_meters(Cpu(), 0, tmp_path) == []
    domain(tmp_path, "intel-rapl:0", "package-0", 0).unlink()
    assert open_meters(Cpu(), 0, tmp_path) == []


def test_nvml_counts_from_the_start_in_joules() -> None:
    counter = [5000]
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: counter[0] if handle == "GPU-1" else 0,
    )
    meter = NvmlMeter("GPU-1", nvml)
    counter[0] = 7500
    assert meter.joules() == 2.5


def reporter(text: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", f"print({text!r})"], stdout=subprocess.PIPE, text=True)


def test_power_of_npu_smi_is_multiplied_by_time_and_read_again_in_the_background() -> None:
    now, texts = [0.0], [REPORT, REPORT.replace("92.5", "200"), "no report"]
    reports: list[subprocess.Popen[str]] = []

    def start() -> "subprocess.Popen[str]":
        reports.append(reporter(texts[len(reports)]))
        return reports[-1]

    meter = NpuSmiMeter(start, lambda: now[0])
    now[0] = NPU_SMI_SECONDS
    assert meter.joules() == pytest.approx(92.5 * NPU_SMI_SECONDS)  # and a new report starts
    reports[1].wait()
    now[0] += 1
    assert meter.joules() == pytest.approx(92.5 * (NPU_SMI_SECONDS + 1))
    now[0] += 1
    assert meter.joules() == pytest.approx(92.5 * (NPU_SMI_SECONDS + 1) + 200)
    now[0] += NPU_SMI_SECONDS
    meter.joules()
    reports[2].wait()
    meter.joules()
    before = meter.joules()
    now[0] += 1
    assert meter.joules() - before == pytest.approx(200)  # the third report failed


def test_a_report_without_power_is_not_a_meter() -> None:
    assert parse_npu_power("NPU Power Dissipation(W) : 66.0") == 66
    with pytest.raises(ValueError, match="no power"):
        NpuSmiMeter(lambda: reporter("no device"))
