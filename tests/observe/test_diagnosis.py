"""Diagnosis of recorded runs: three in which something became slow, one healthy one on a busy machine, and changes of them."""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.lab.hosts import unsupported_reason
from tests.lab.jobs import write_job
from tests.lab.runs import train_in_the_pool
from weft.cli.app import app
from weft.errors import DataError
from weft.job import Job
from weft.observe.diagnosis import diagnose, judge
from weft.observe.rank_timeline import Timeline, find_phase, read_timeline
from weft.plan import Prediction
from weft.training.metrics import read_metrics

TRACES = Path(__file__).parent / "traces"
ROOT = Path(__file__).parents[2]


def unpack(name: str, folder: Path) -> Path:
    """Run folder with the times of a recorded run of `benchmarks/diagnosis.py`; its machine was busy with other programs."""
    (folder / "logs").mkdir(parents=True)
    (folder / "run_id").write_text("recorded")
    rank = -1
    for line in gzip.decompress((TRACES / f"{name}.jsonl.gz").read_bytes()).decode().splitlines():
        rank = json.loads(line).get("rank", rank)
        with (folder / "logs" / f"times-{rank:05}.jsonl").open("a") as file:
            file.write(line + "\n")
    return folder


def timeline(name: str, folder: Path) -> Timeline:
    return read_timeline(unpack(name, folder))


@pytest.mark.parametrize(
    ("name", "host", "step"), [("rank", 0, 88), ("link", 1, 91), ("data", 0, 115)], ids=["rank", "link", "data"]
)
def test_what_became_slow_in_a_recorded_run_is_named(name: str, host: int, step: int, tmp_path: Path) -> None:
    found = diagnose(unpack(name, tmp_path))
    assert found.verdict is not None
    assert (found.verdict.kind, found.verdict.hosts) == (name, (host,))
    assert abs(found.verdict.since - step) < 25  # rows are prefetched, so that a slow source is noticed later
    assert found.verdict.evidence
    assert f"host {host}" in found.headline


def test_a_recorded_healthy_run_accuses_nobody(tmp_path: Path) -> None:
    found = diagnose(unpack("healthy", tmp_path))
    assert (found.verdict, found.headline) == (None, "healthy")


def test_all_ranks_slower_alike_accuse_nobody(tmp_path: Path) -> None:
    run = changed(timeline("healthy", tmp_path), lambda run, name, values: scaled(values, 3.0))
    found = judge(run)
    assert found.verdict is None
    assert any("the machine as a whole is slower" in note for note in found.notes)


def test_a_phase_that_has_ended_is_named_with_both_steps(tmp_path: Path) -> None:
    run = quiet(timeline("healthy", tmp_path))
    third = len(run.steps) // 3
    slow = slice(third, 2 * third)
    add(run, "compute", 1, slow, 0.1)
    verdict = judge(run).verdict
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("rank", (1,))
    assert (verdict.since, verdict.until) == (run.steps[slow.start], run.steps[slow.stop] - 1)


@pytest.mark.parametrize(("term", "kind"), [("compute", "rank"), ("data", "data"), ("outside", "outside")])
def test_the_term_of_a_slow_rank_is_named(term: str, kind: str, tmp_path: Path) -> None:
    run = quiet(timeline("healthy", tmp_path))
    add(run, term, 2, slice(len(run.steps) // 2, None), 0.05)
    verdict = judge(run).verdict
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == (kind, (2,))
    assert verdict.seconds == pytest.approx(0.05, rel=0.2)


def test_a_rank_that_is_slow_from_the_start_is_named(tmp_path: Path) -> None:
    run = quiet(timeline("healthy", tmp_path))
    add(run, "compute", 2, slice(None), 0.15)
    verdict = judge(run).verdict
    assert verdict is not None
    assert (verdict.kind, verdict.ranks, verdict.since) == ("rank", (2,), 1)


def test_slow_checkpoints_are_named(tmp_path: Path) -> None:
    run = quiet(timeline("healthy", tmp_path))
    half = len(run.steps) // 2
    for index in range(2, len(run.steps), 2):
        seconds = 0.005 if index < half else 0.2
        run.checkpoint[:, index] += seconds
        run.seconds[:, index] += seconds
    verdict = judge(run).verdict
    assert verdict is not None
    assert verdict.kind == "checkpoint"


def test_ranks_that_wait_for_cores_are_told_apart_by_their_cores_only(tmp_path: Path) -> None:
    run = quiet(timeline("healthy", tmp_path))
    half = slice(len(run.steps) // 2, None)
    add(run, "compute", 1, half, 0.1)
    run.queued[1, half] += 0.1
    assert judge(run).verdict is None  # three ranks share the cores: which of them waits is chance
    own = replace(run, places=[replace(place, cores=f"set {place.rank}") for place in run.places])
    verdict = judge(own).verdict
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("cores", (1,))


def test_slow_messages_without_measured_links_are_named_by_axis(tmp_path: Path) -> None:
    run = replace(quiet(timeline("healthy", tmp_path)), links=[])
    half = slice(len(run.steps) // 2, None)
    for rank in range(len(run.places)):
        run.wait["dp_shard between"][rank, half] += 0.2
        run.seconds[rank, half] += 0.2
    verdict = judge(run).verdict
    assert verdict is not None
    assert verdict.kind == "communication"
    assert "dp_shard between" in verdict.text


def test_slow_messages_over_links_that_kept_their_rate_accuse_nobody(tmp_path: Path) -> None:
    run = quiet(timeline("healthy", tmp_path))
    half = slice(len(run.steps) // 2, None)
    run.wait["dp_shard between"][:, half] += 0.2
    run.seconds[:, half] += 0.2
    run.links.append(replace(run.links[0], after=run.last - 1))
    assert judge(run).verdict is None


def test_expected_times_are_those_of_the_planner_if_it_predicted_the_run(tmp_path: Path) -> None:
    terms = {"compute": 0.02, "zero": 0.01, "pipeline": 0.0, "optimizer": 0.001}
    figures: dict[str, Any] = {"tokens_per_second": 1.0, "memory_bytes": 1, "memory": {}}
    predicted = Prediction(cluster="3 hosts", micro_batch=4, step_seconds=0.031, terms=terms, **figures)
    found = judge(timeline("healthy", tmp_path), predicted)
    expected = {term.name: term.expected for term in found.terms}
    assert expected["compute"] == pytest.approx(0.021)
    assert expected["step"] == 0.031
    assert found.source == "the plan's prediction for 3 hosts"


def test_a_change_point_is_found_in_noise_with_outliers() -> None:
    dice = np.random.default_rng(0)
    series = dice.normal(1.0, 0.1, 100)
    series[dice.integers(0, 100, 8)] += 5
    assert find_phase(series) is None
    series[60:] += 0.5
    phase = find_phase(series)
    assert phase is not None
    assert abs(phase.start - 60) <= 2
    assert phase.rise == pytest.approx(0.5, abs=0.1)


@pytest.mark.must("command: doctor")
def test_exit_code_and_json(tmp_path: Path) -> None:
    target = tmp_path / "found.json"
    done = CliRunner().invoke(app, ["doctor", str(unpack("rank", tmp_path / "rank")), "--json", str(target)])
    assert done.exit_code == 1, done.output
    assert json.loads(target.read_text())["verdict"]["kind"] == "rank"
    done = CliRunner().invoke(app, ["doctor", str(unpack("healthy", tmp_path / "healthy"))])
    assert done.exit_code == 0
    assert done.output.splitlines()[-1] == "healthy"


def test_a_folder_without_times_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run_id").write_text("recorded")
    with pytest.raises(DataError, match="has no times of its ranks"):
        diagnose(tmp_path)
    with pytest.raises(DataError, match="there is no folder"):
        diagnose(tmp_path / "missing")


def test_times_of_a_run_add_up_to_its_steps(tmp_path: Path) -> None:
    job = write_job(tmp_path, train={"steps": 16}, checkpoint={"every": 5}, data={"seq_len": 16})
    out, _ = train_in_the_pool(Job.load(job), 2)
    written = [json.loads(line) for line in (out / "logs" / "times-host-00000.jsonl").read_text().split("\n") if line]
    logs = [[line for line in written if line["rank"] == rank] for rank in (0, 1)]
    for place, *lines in logs:
        assert place["world_size"] == 2
        assert [line["first"] for line in lines] == [1, *(line["last"] + 1 for line in lines[:-1])]
        assert lines[-1]["last"] == 16
        for line in lines:
            parts = sum(line["wait"].values()) + line["data"] + line["outside"] + line["checkpoint"]
            assert 0 < parts < line["seconds"]
    within = sum(line["seconds"] - line["outside"] - line["checkpoint"] for line in logs[0][1:])
    steps = sum(row.step_seconds for row in read_metrics(out / "metrics.jsonl"))
    assert within == pytest.approx(steps, rel=0.01)
    blocked = sum(row.checkpoint_seconds for row in read_metrics(out / "metrics.jsonl"))
    assert sum(line["checkpoint"] for line in logs[0][1:]) == pytest.approx(blocked, abs=1e-4)
    with pytest.raises(DataError, match="a diagnosis needs 20 lines"):
        diagnose(out)


@pytest.mark.exclusive("times of steps are compared")
@pytest.mark.timeout(900)
def test_plants_in_real_runs_on_emulated_hosts_are_named() -> None:
    if reason := unsupported_reason():
        pytest.skip(reason)
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "diagnosis.py"),
        "--plants",
        "3",
        "--healthy",
        "1",
        "--hosts",
        "3",
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr


def environment() -> dict[str, str]:

    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}


def quiet(run: Timeline) -> Timeline:
    """A run with the usual times of another one in every bin, and little noise."""
    dice = np.random.default_rng(1)
    return changed(run, lambda run, name, values: usual(values) * dice.uniform(0.98, 1.02, (1, values.shape[1])))


def usual(values: np.ndarray) -> np.ndarray:
    return np.broadcast_to(np.median(values), values.shape).copy()


def scaled(values: np.ndarray, factor: float) -> np.ndarray:
    """Values whose second half is larger by a factor."""
    return np.where(np.arange(values.shape[1]) < values.shape[1] // 2, values, factor * values)


def changed(run: Timeline, change: Callable[[Timeline, str, np.ndarray], np.ndarray]) -> Timeline:
    names = ("seconds", "data", "checkpoint", "outside", "queued")
    fields = {name: change(run, name, getattr(run, name)) for name in names}
    wait = {where: change(run, where, values) for where, values in run.wait.items()}
    return replace(run, **fields, wait=wait)


def add(run: Timeline, term: str, rank: int, where: slice, seconds: float) -> None:
    """Let a rank take longer for a term, and the others wait for it."""
    run.seconds[:, where] += seconds
    others = [other for other in range(len(run.places)) if other != rank]
    run.wait["dp_shard between"][others, where] += seconds
    if term != "compute":
        getattr(run, term)[rank, where] += seconds
