"""Device interface on cpu, and on a stand-in for torch that records the accelerator calls."""

import mmap
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from weft.device import cpu
from weft.device.accelerator import Accelerator, Properties, published_rates
from weft.device.cpu import Cpu, has_bf16_instructions
from weft.device.detect import detect, detect_for_launcher, read_in_child
from weft.device.device import Device
from weft.errors import DeviceError
from weft.launch.launcher import default_ranks
from weft.plan import Plan, resolve_plan
from weft.precision.dtypes import check_dtypes, explain_precision
from weft.training.startup import describe_device


class FakeTorch:
    """Stand-in for torch with two accelerators of one type; `calls` lists the calls made."""

    def __init__(
        self,
        type: str = "cuda",
        name: str = "NVIDIA H200",
        capability: tuple[int, int] = (9, 0),
        hip: str | None = None,
    ):
        self.calls: list[tuple[Any, ...]] = []
        major, minor = capability
        properties = SimpleNamespace(name=name, total_memory=150_000_000_000, major=major, minor=minor)
        self.accelerator = SimpleNamespace(
            current_accelerator=lambda check_available: SimpleNamespace(type=type),
            device_count=lambda: 2,
            current_device_index=lambda: 1,
            set_device_index=self._record("set_device_index"),
            current_stream=self._record("current_stream", "the current stream"),
            synchronize=self._record("synchronize"),
            max_memory_allocated=self._record("max_memory_allocated", 9),
            reset_peak_memory_stats=self._record("reset_peak_memory_stats"),
        )
        self.get_device_module = lambda kind: SimpleNamespace(
            get_device_properties=self._record("get_device_properties", properties)
        )
        self.npu = SimpleNamespace(is_bf16_supported=lambda: True)
        self.version = SimpleNamespace(hip=hip)

    def _record(self, name: str, result: Any = None) -> Any:
        return lambda *args, **kwargs: self.calls.append((name, *args, *kwargs.items())) or result

    def Stream(self, *args: Any) -> str:
        self.calls.append(("Stream", *args))
        return "a stream"

    def Event(self, *args: Any, enable_timing: bool) -> str:
        self.calls.append(("Event", *args, enable_timing))
        return "an event"


def test_cpu_is_detected_without_an_accelerator() -> None:
    none = SimpleNamespace(accelerator=SimpleNamespace(current_accelerator=lambda check_available: None))
    assert isinstance(detect(none), Cpu)
    assert isinstance(detect(FakeTorch(type="mps")), Cpu)  # no process group back end: cpu and gloo
    assert detect().type == (torch.accelerator.current_accelerator(True) or torch.device("cpu")).type


def test_a_device_of_another_package_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other_devices.py").write_text(
        "from weft.device.cpu import Cpu\n\nclass Slow(Cpu):\n    type = 'mps'\n"
    )
    information = tmp_path / "other_devices-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: other-devices\nVersion: 1\n")
    (information / "entry_points.txt").write_text("[weft.devices]\nmps = other_devices:Slow\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert type(detect(FakeTorch(type="mps"))).__name__ == "Slow"
    assert isinstance(detect(FakeTorch(type="xpu")), Cpu)


def test_cpu_properties() -> None:
    device: Device = Cpu()
    assert (device.type, device.backend, device.count) == ("cpu", "gloo", 1)
    assert device.torch_device(3) == torch.device("cpu")
    assert device.name
    assert device.total_memory_bytes > 2**28
    assert device.memory_bandwidth is None


def test_cpu_memory_is_that_of_the_process() -> None:
    device = Cpu()
    with mmap.mmap(-1, 64 * 2**20) as block:  # fresh pages, where a tensor might reuse what the process has freed
        block.write(b"x" * len(block))
        assert device.peak_memory_bytes() >= len(block)


def test_cpu_peak_flops_is_measured_and_keeps_the_thread_count() -> None:
    device, threads = Cpu(), torch.get_num_threads()
    rate = device.peak_flops(torch.float32)
    assert rate is not None
    assert 1e8 < rate < 1e14
    assert torch.get_num_threads() == threads
    assert device.peak_flops(torch.int64) is None
    assert device.peak_flops(torch.float8_e4m3fn) is None


BF16_OF = """
import torch
from weft.device.cpu import Cpu, matmul_rate
rates = [matmul_rate(dtype, 256, 1) for dtype in (torch.bfloat16, torch.float32)]
print(Cpu().supports("bf16"), rates[0] > 1.25 * rates[1], "|", Cpu().instruction_set)
"""


@pytest.mark.exclusive("measures rates of matmuls")
@pytest.mark.parametrize(
    "variables", [{}, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, {"ONEDNN_MAX_CPU_ISA": "AVX2"}], ids=str
)
def test_cpu_supports_bf16_only_where_its_matmuls_are_faster_than_fp32(variables: dict[str, str]) -> None:
    """Each case runs in its own process: oneDNN reads the variable that hides instructions once per process."""
    command = [sys.executable, "-c", BF16_OF]
    found = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=True)
    claimed, faster = found.stdout.partition("|")[0].split()
    assert claimed == faster
    assert ("no native bf16" in found.stdout) == (claimed == "False")
    assert not variables or claimed == "False"


def test_cpu_peak_of_bf16_is_the_rate_of_the_fastest_native_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no utilization exceeds 1, and none is relative to an emulated dtype."""
    rates = {torch.float32: 2e9, torch.bfloat16: 1e9}
    measured: list[torch.dtype] = []
    monkeypatch.setattr(cpu, "matmul_rate", lambda dtype, *_: measured.append(dtype) or rates[dtype])
    for native, dtypes in ((True, [torch.float32, torch.bfloat16]), (False, [torch.float32])):
        monkeypatch.setattr(Cpu, "_native_bf16", native)
        measured.clear()
        assert Cpu().peak_flops(torch.bfloat16) == 2e9
        assert measured == dtypes


@pytest.mark.parametrize(("slowdowns", "native"), [((1, 1, 1), True), ((8, 1, 1), False), ((8, 8, 1), False)])
def test_one_slow_measurement_does_not_make_emulated_bf16_native(
    slowdowns: tuple[int, ...], native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other work on the machine slows the measurement of fp32."""
    bf16 = 2.0 if native else 0.8  # rate relative to that of fp32
    slow = iter(slowdowns)
    monkeypatch.setattr(cpu, "onednn_accepts", lambda dtype: True)
    monkeypatch.setattr(cpu, "has_bf16_instructions", lambda: None)
    monkeypatch.setattr(cpu, "matmul_rate", lambda dtype, *_: bf16 if dtype == torch.bfloat16 else 1.0 / next(slow))
    assert Cpu().supports("bf16") == native


def test_cpu_streams_and_events_have_the_torch_interface() -> None:
    device = Cpu()
    start, end, side = device.event(), device.event(), device.stream()
    start.record()
    with side as entered:
        assert entered is side
        side.wait_stream(device.current_stream())
        side.wait_event(start)
        torch.ones(100).sum()
    end.record(side)
    end.wait(device.current_stream())
    end.synchronize()
    device.synchronize()
    assert end.query()
    assert side.query()
    assert start.elapsed_time(end) > 0
    assert start.elapsed_time(side.record_event()) > start.elapsed_time(end)
    interface = {
        name
        for name in dir(torch.Stream)
        if name in ("wait_stream", "wait_event", "record_event", "synchronize", "query")
    }
    assert interface <= set(dir(side))
    assert {"record", "wait", "synchronize", "query", "elapsed_time"} <= set(dir(start)) & set(dir(torch.Event))


def test_cpu_computes_every_supported_feature() -> None:
    assert Cpu().supports("fp64")
    assert Cpu().emulates
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert (torch.ones(16, 16, dtype=dtype) @ torch.ones(16, 16, dtype=dtype))[0, 0] == 16
    assert Cpu().supports("grouped_matmul")
    offsets = torch.tensor([3, 8], dtype=torch.int32)
    assert F.grouped_mm(torch.ones(8, 16), torch.ones(2, 16, 16), offs=offsets)[7, 0] == 16
    assert not Cpu().supports("float8")


@pytest.mark.parametrize(("type", "backend"), [("cuda", "cpu:gloo,cuda:nccl"), ("npu", "cpu:gloo,npu:hccl")])
def test_accelerator_is_detected_without_initializing_it(type: str, backend: str) -> None:
    stand_in = FakeTorch(type=type)
    device = detect(stand_in)
    assert isinstance(device, Accelerator)
    assert (device.type, device.backend, device.count) == (type, backend, 2)
    assert stand_in.calls == []


PROPERTIES = Properties("NVIDIA H200", 150_000_000_000, 9, 0, True)


def test_a_launcher_does_not_initialize_the_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading properties initializes CUDA; a launcher that did so would hold memory of the ranks' devices."""
    stand_in, children = FakeTorch(), []

    def raises(*_: Any) -> None:
        raise AssertionError("the launcher reads the properties of the device")

    stand_in.get_device_module = lambda kind: SimpleNamespace(get_device_properties=raises)
    monkeypatch.setattr("weft.device.detect.read_in_child", lambda: children.append("child") or PROPERTIES)
    device = detect_for_launcher(stand_in)
    assert default_ranks(device) == 2
    assert children == [], "the number of devices needs no child process"
    plan = resolve_plan(Plan(), 2, native_bf16=device.supports("bf16"))
    check_dtypes(plan.precision, device)
    assert explain_precision(Plan().precision, device) == "forward in bf16, which this device computes natively"
    assert describe_device(device, 2, plan) == "2 ranks on NVIDIA H200: dp_shard 2, zero 3"
    assert device.total_memory_bytes == PROPERTIES.total_memory
    assert children == ["child"], "the child process runs once"
    assert stand_in.calls == []


TORCH_NPU = """
import torch
from types import SimpleNamespace
from tests.lab import npu
libraries = npu.install()
properties = SimpleNamespace(name="Ascend910B3", total_memory=2**36)
torch.npu.get_device_properties = lambda index: properties if index == 0 else None
"""


def test_a_child_process_reads_the_properties(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch_npu.py").write_text(TORCH_NPU)
    paths = [str(tmp_path), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    assert read_in_child() == Properties("Ascend910B3", 2**36, 0, 0, True)
    (tmp_path / "torch_npu.py").write_text("raise RuntimeError('driver too old')")
    with pytest.raises(DeviceError, match="driver too old"):
        read_in_child()


def test_accelerator_calls() -> None:
    stand_in = FakeTorch()
    device = detect(stand_in)
    assert device.torch_device(1) == torch.device("cuda", 1)
    device.use(1)
    assert device.stream() == "a stream"
    assert device.current_stream() == "the current stream"
    assert device.event() == "an event"
    device.synchronize()
    assert device.peak_memory_bytes() == 9
    device.reset_peak_memory()
    assert (device.name, device.total_memory_bytes) == ("NVIDIA H200", 150_000_000_000)
    assert stand_in.calls == [
        ("set_device_index", 1),
        ("Stream", "cuda"),
        ("current_stream",),
        ("Event", "cuda", True),
        ("synchronize",),
        ("max_memory_allocated",),
        ("reset_peak_memory_stats",),
        ("get_device_properties", 1),
        ("get_device_properties", 1),
    ]


@pytest.mark.parametrize(
    ("stand_in", "expected"),
    [
        (FakeTorch(capability=(7, 5)), {"fp16", "fp64"}),
        (FakeTorch(capability=(8, 0)), {"fp16", "fp64", "bf16"}),
        (FakeTorch(capability=(8, 9)), {"fp16", "fp64", "bf16", "float8"}),
        (FakeTorch(capability=(10, 0)), {"fp16", "fp64", "bf16", "float8", "grouped_matmul"}),
        (FakeTorch(capability=(9, 0), hip="7.0"), {"fp16", "fp64", "bf16"}),
        (FakeTorch(capability=(9, 4), hip="7.0"), {"fp16", "fp64", "bf16", "float8", "grouped_matmul"}),
        (FakeTorch(type="npu"), {"fp16", "bf16"}),
    ],
)
def test_features_by_compute_capability(stand_in: FakeTorch, expected: set[str]) -> None:
    device = detect(stand_in)
    features = ("bf16", "fp16", "fp64", "grouped_matmul", "float8")
    assert {feature for feature in features if device.supports(feature)} == expected
    assert device.has_grouped_matmul == device.has_float8_dtype == (device.type != "npu")


@pytest.mark.parametrize(
    ("name", "half", "gigabytes"),
    [
        ("NVIDIA A100-SXM4-40GB", 312, 1555),
        ("NVIDIA A100-SXM4-80GB", 312, 2039),
        ("NVIDIA A100 80GB PCIe", 312, 1935),
        ("NVIDIA A100-PCIE-40GB", 312, 1555),
        ("NVIDIA H100 80GB HBM3", 989.4, 3350),
        ("NVIDIA H100 PCIe", 756.5, 2000),
        ("NVIDIA H100 NVL", 835.5, 3900),
        ("NVIDIA H800", 989.4, 3350),
        ("NVIDIA H200", 989.4, 4800),
        ("NVIDIA B200", 2250, 8000),
        ("NVIDIA GB200", 2500, 8000),
        ("NVIDIA L40S", 362.05, 864),
        ("NVIDIA GeForce RTX 4090", 165.2, 1008),
        ("AMD Instinct MI300X", 1307.4, 5300),
        ("Ascend910B3", 313, 1600),
        ("Ascend910_9392", 376, 1600),
    ],
)
def test_published_rates_by_name(name: str, half: float, gigabytes: float) -> None:
    device = detect(FakeTorch(name=name))
    assert device.peak_flops(torch.bfloat16) == device.peak_flops(torch.float16) == half * 1e12
    assert device.memory_bandwidth == gigabytes * 1e9


def test_unpublished_rate_is_none() -> None:
    unknown = detect(FakeTorch(name="NVIDIA GeForce GT 710"))
    assert published_rates(unknown.name) is None
    assert unknown.peak_flops(torch.bfloat16) is None
    assert unknown.memory_bandwidth is None
    a100 = detect(FakeTorch(name="NVIDIA A100-SXM4-80GB"))
    assert a100.peak_flops(torch.float8_e4m3fn) is None
    assert a100.peak_flops(torch.float64) is None
    assert a100.peak_flops(torch.int8) is None
    assert a100.peak_flops(torch.float32) == 19.5e12


X86 = "processor\t: 0\nvendor_id\t: X\nflags\t\t: fpu avx2 avx512f{more}\n\nprocessor\t: 1\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (X86.format(more=" avx512_bf16"), True),
        (X86.format(more=" amx_tile amx_bf16"), True),
        (X86.format(more=" avx512_vnni"), False),
        ("processor\t: 0\nFeatures\t: fp asimd bf16 i8mm\n", True),
        ("processor\t: 0\nFeatures\t: fp asimd\n", False),
        ("processor\t: 0\n", None),
    ],
)
def test_the_processor_is_asked_for_bf16_instructions(
    text: str, expected: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer does not depend on the load of the machine, so that a job has the same dtype in every run."""
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    (tmp_path / "cpuinfo").write_text(text)
    assert has_bf16_instructions(tmp_path / "cpuinfo") is expected
    assert has_bf16_instructions(tmp_path / "missing") is None
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert has_bf16_instructions(tmp_path / "cpuinfo") is None
