"""Ahead-of-time compilation of the Triton kernels: no kernel spills, on any target."""

import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.compute.interpreter import needs_triton
from weft.cli.app import app
from weft.compute import aot
from weft.compute.aot import Usage

REGISTERS = 65536  # of a multiprocessor, on all targets


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(aot.tempfile, "tempdir", None)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))


def assert_fits(usages: list[Usage]) -> None:
    warps = {kernel.name: kernel.warps for kernel in aot.kernels()}
    for usage in usages:
        assert not usage.error, usage
        assert usage.spilled_bytes == 0, usage
        assert warps[usage.kernel] <= 32, usage
        assert usage.registers * warps[usage.kernel] * 32 <= REGISTERS, usage
        assert usage.shared_bytes <= 48 * 1024 or "16384" in usage.kernel, usage


@needs_triton
def test_kernels_of_one_target_do_not_spill() -> None:
    chosen = ("rms_norm_backward bf16 8192", "gated_activation_backward bf16 silu")
    kernels = [kernel for kernel in aot.kernels() if kernel.name in chosen]
    usages = aot.compile_all(kernels, [90])
    assert [usage.kernel for usage in usages] == list(chosen)
    assert_fits(usages)
    assert all(usage.wide_loads for usage in usages)
    started = time.perf_counter()
    assert aot.compile_all(kernels, [90]) == usages  # read from the cache, with the seconds of the compilation
    assert time.perf_counter() - started < min(usage.seconds for usage in usages) * 3 + 1


@needs_triton
@pytest.mark.parametrize("target", aot.TARGETS)
def test_no_kernel_spills(target: int) -> None:
    assert_fits(aot.compile_all(aot.kernels(), [target]))


def test_a_compilation_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    def work() -> Usage:
        (tmp_path / "pid").write_text(str(os.getpid()))
        time.sleep(60)
        return Usage("slow", 90)

    assert aot.limit_time(work, 0.5) is None
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert aot.limit_time(lambda: Usage("fast", 90), 30) == Usage("fast", 90)


@needs_triton
def test_doctor_prints_a_row_for_each_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = aot.kernels()[:2]
    monkeypatch.setattr(aot, "kernels", lambda: [first, second])
    usages = [Usage(kernel.name, target, 33, 64, 0) for kernel in (first, second) for target in aot.TARGETS]
    monkeypatch.setattr(aot, "compile_all", lambda kernels: usages)
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["doctor", "--kernels"])
    assert done.exit_code == 0, done.output
    assert "experts" in done.output
    for kernel in (first, second):
        assert done.output.count(kernel.name) == 1
    assert done.output.count("33 reg, 64 B shared, 0 B spilled") == len(usages)
    usages[-1] = Usage(second.name, aot.TARGETS[-1], error="fails")
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["doctor", "--kernels"])
    assert done.exit_code == 1
    assert "fails" in done.output
