"""Published runs are read from a table, predicted, calibrated on one run per group, and scored."""

import csv
import math
import sys
from pathlib import Path

import pytest
from benchmarks.published.__main__ import main
from benchmarks.published.published import SOURCES, UNKNOWN, measured_seconds, read_runs, source_family, stack_of_row
from benchmarks.published.scatter import write_scatter
from benchmarks.published.validate import (
    SHRINKAGE,
    FitAccuracy,
    interval,
    judge,
    judge_fit,
    memory_errors,
    order_by_difference,
    predicted_seconds,
    score,
    spearman,
)

from weft.errors import DataError
from weft.planner.costmodel.peak_memory import peak_memory
from weft.planner.costmodel.step_time import CALIBRATED

COLUMNS = [
    "id",
    "source",
    "hardware",
    "num_devices",
    "model",
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "ffn",
    "vocab",
    "experts",
    "topk",
    "seq",
    "global_batch",
    "micro_batch",
    "tp",
    "sp",
    "pp",
    "vpp",
    "cp",
    "ep",
    "dp",
    "zero",
    "recompute",
    "precision",
    "metric",
    "value",
    "notes",
]
RUN = {
    "hardware": "H100-80GB SXM (8x400Gb IB/node)", "num_devices": "64", "model": "Llama-7B", "layers": "32", "hidden": "4096",
    "heads": "32", "kv_heads": "32", "ffn": "11008", "vocab": "32000", "seq": "4096", "global_batch": "256", "micro_batch": "1",
    "sp": "1", "vpp": "1", "cp": "1", "ep": "1", "zero": "1", "recompute": "none", "precision": "bf16",
}  # fmt: skip
LAYOUTS = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1), (8, 2), (8, 4)]


def line(name: str, metric: str, value: float, **changes: object) -> dict[str, str]:
    row = {**dict.fromkeys(COLUMNS, ""), **RUN, **{key: str(entry) for key, entry in changes.items()}}
    return row | {"id": f"{name}.{metric}", "metric": metric, "value": str(value)}


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return path


def sweep(path: Path, factor: float) -> Path:
    """Sweep on a machine that is slower than predicted by `factor`."""
    rows = [
        line(f"made-{i}", "iter_time_s", 1.0, tp=tp, pp=pp, dp=64 // tp // pp) for i, (tp, pp) in enumerate(LAYOUTS)
    ]
    runs, _ = read_runs(write(path, rows))
    for row, run in zip(rows, runs, strict=True):
        row["value"] = str(factor * predicted_seconds(run))
    rows.append(line("made-0", "predicted_seconds_by_somebody", 1e9, tp=1, pp=1, dp=64))
    return write(path, rows)


def test_exact_predictions_have_no_error(tmp_path: Path) -> None:
    runs, refused = read_runs(sweep(tmp_path / "runs.csv", 1.0))
    assert (len(runs), refused) == (10, {})
    outcomes, calibrations = judge(runs)
    assert len(outcomes) == 9, "the run that calibrates is not scored"
    assert [found.scalar for found in calibrations.values()] == [pytest.approx(1.0)]
    found, constant = score(outcomes), score(outcomes, baseline=True)
    assert found.mape == pytest.approx(0, abs=1e-9)
    assert (found.groups, found.spearman, found.regret) == (1, pytest.approx(1.0), pytest.approx(0.0))
    assert constant.mape > 0.05
    assert constant.spearman == 0


def test_calibration_corrects_part_of_a_constant_slowdown(tmp_path: Path) -> None:
    outcomes, calibrations = judge(read_runs(sweep(tmp_path / "runs.csv", 1.5))[0])
    (found,) = calibrations.values()
    assert found.scalar == pytest.approx(1.5**SHRINKAGE)
    assert score(outcomes).bias == pytest.approx(1.5 ** (SHRINKAGE - 1) - 1)


def test_all_step_time_metrics_agree(tmp_path: Path) -> None:
    tokens, flops = 256 * 4096, read_runs(sweep(tmp_path / "a.csv", 1.0))[0][0].shape.flops(4096, causal=False)
    metrics = {
        "iter_time_s": 2.0,
        "iter_time_ms": 2000.0,
        "tokens_per_s": tokens / 2,
        "tokens_per_s_per_dev": tokens / 128,
        "samples_per_s": 128,
        "samples_per_s_per_dev": 2,
        "tflops_per_dev_model": tokens * flops / 128e12,
        "mfu_pct": tokens * flops / 128e12 / 989 * 100,
    }
    rows = [line(f"one-{i}", name, value, tp=1, pp=1, dp=64) for i, (name, value) in enumerate(metrics.items())]
    runs, _ = read_runs(write(tmp_path / "b.csv", rows))
    assert [measured_seconds(run) for run in runs] == [pytest.approx(2.0)] * len(metrics)
    (run,), _ = read_runs(write(tmp_path / "c.csv", [line("one-1", "search_minutes", 3, tp=1, pp=1, dp=64)]))
    assert measured_seconds(run) is None


def test_memory_and_fit(tmp_path: Path) -> None:
    small = {"tp": 1, "pp": 1, "dp": 64, "layers": 8}
    huge = {"tp": 1, "pp": 1, "dp": 64, "layers": 80, "zero": 0}
    rows = [line("m-1", "fits", 1, **small), line("m-2", "fits", 0, **huge), line("m-3", "fits", 1, **huge)]
    rows += [line("m-4", "fits", 0, **small), line("m-1", "mem_gib_alloc", 10, **small)]
    runs, _ = read_runs(write(tmp_path / "runs.csv", rows))
    assert judge_fit(runs) == FitAccuracy(right=2, false_fits=1, false_refusals=1)
    assert judge_fit(runs).runs == 4
    memory = peak_memory(runs[0].shape, runs[0].layout, runs[0].stack)
    assert memory_errors(runs[0]) == {"mem_gib_alloc": memory.allocated / (10 * 2**30) - 1}


def test_incomplete_lines_are_completed_or_refused(tmp_path: Path) -> None:
    rows = [
        line("a-1", "iter_time_s", 1, tp=1, pp=1, dp=64, layers=8, recompute="", micro_batch=""),
        line("b-1", "iter_time_s", 1, tp=1, pp=1, dp=32),
        line("c-1", "iter_time_s", 1, tp="", pp=1, dp=64),
        line("d-1", "iter_time_s", 1, tp=1, pp=1, dp=64, hardware="abacus"),
        line("e-1", "iter_time_s", 1, tp=1, pp=1, dp=64, model="Qwen3-30B-A3B", layers="", ffn="", experts=128),
        line("mcore-1", "iter_time_s", 1, tp=1, pp=4, dp=16, vpp=""),
        line("f-1", "iter_time_s", 1, tp=1, pp=1, dp=64, notes="OUTLIER in source"),
    ]
    runs, refused = read_runs(write(tmp_path / "runs.csv", rows))
    assert list(refused) == ["b-1", "c-1", "d-1", "f-1"]
    assert "tp is ''" in refused["c-1"]
    chosen, experts, stages = runs
    assert (chosen.guessed, chosen.layout.micro_batch, chosen.layout.recompute) == (True, 4, "none")
    assert experts.shape.experts == 128
    assert stages.layout.vpp == 8


def test_invalid_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read"):
        read_runs(tmp_path / "missing.csv")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match="no column id"):
        read_runs(tmp_path / "other.csv")
    _, refused = read_runs(
        write(tmp_path / "bad.csv", [line("x-1", "iter_time_s", 1, tp=1, pp=1, dp=64) | {"value": "fast"}])
    )
    assert refused == {"x-1": "value is 'fast'"}


def test_sources_select_framework_models() -> None:
    def stack(source: str, **row: str) -> str:
        return stack_of_row({"hardware": "H100"} | row, SOURCES.get(source_family(source), UNKNOWN)).name

    assert source_family("mcoremoe") == "mcoremoe"
    assert source_family("heard2") == "heard"
    assert (stack("nano"), stack("sc21t1"), stack("sc21t2", zero="3")) == ("nanotron", "megatron-2021", "deepspeed")
    assert (stack("heard"), stack("heard", zero="3")) == ("megatron-core", "fsdp")
    assert stack("bridge", hardware="GB300", notes="release 26.08") == "megatron-bridge-26.06"
    even = stack_of_row({"hardware": "H100", "notes": "forced balance"}, UNKNOWN)
    assert (
        even.imbalance == 1 < stack_of_row({"hardware": "H100", "notes": "real routing"}, SOURCES["bridge"]).imbalance
    )


def test_interval_of_a_constant_slowdown(tmp_path: Path) -> None:
    outcomes, _ = judge(read_runs(sweep(tmp_path / "runs.csv", 1.2))[0])
    low, high, coverage = interval(outcomes, calibrated=False)
    assert (low, high, coverage) == (pytest.approx(1.2), pytest.approx(1.2), 1.0)
    assert interval(outcomes, calibrated=True).high == pytest.approx(1.2 ** (1 - SHRINKAGE))
    assert CALIBRATED[0] < 1 < CALIBRATED[1]


def test_page_shows_each_run(tmp_path: Path) -> None:
    outcomes, _ = judge(read_runs(sweep(tmp_path / "runs.csv", 1.2))[0])
    write_scatter(outcomes, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "made-1: Llama-7B on 64 H100" in text
    assert "http" not in text.split("<main>")[1], "the page loads nothing"


def test_order_accuracy_of_pairs(tmp_path: Path) -> None:
    outcomes, _ = judge(read_runs(sweep(tmp_path / "runs.csv", 1.2))[0])
    found = order_by_difference(outcomes)
    assert sum(order.pairs for order in found) == math.comb(len(outcomes), 2)
    assert {order.right for order in found} == {1.0}  # all measured times are 1.2 times the predicted ones
    turned = [one._replace(measured=1 / one.measured) for one in outcomes]
    assert {order.right for order in order_by_difference(turned)} == {0.0}


def test_spearman_correlation() -> None:
    assert spearman([1, 2, 3], [10, 20, 30]) == 1
    assert spearman([1, 2, 3], [30, 20, 10]) == -1
    assert spearman([1, 1, 1], [1, 2, 3]) == 0
    assert spearman([1, 2, 2, 3], [1, 2, 2, 3]) == 1


def test_command_prints_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = sweep(tmp_path / "runs.csv", 1.2)
    monkeypatch.setattr(sys, "argv", ["benchmarks.published", str(path), "--out", str(tmp_path / "page.html")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    text = capsys.readouterr().out
    assert "made" in text
    assert "tuned" in text
    assert "10 runs read, 0 runs skipped" in text
    assert (tmp_path / "page.html").exists()
