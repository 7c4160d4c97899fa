"""Profiles of real runs on two ranks, with and without planted faults."""

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from tests.lab.families import family
from tests.lab.jobs import write_job
from tests.lab.runs import Fault, train_in_the_pool
from weft.data import Rows
from weft.errors import JobError
from weft.job import Job
from weft.observe.profile.profile import job_to_profile, write_profile
from weft.parallel.pipeline.plan_schedule import load_schedule
from weft.parallel.pipeline.schedule import slot_text
from weft.planner.train import train
from weft.training.metrics import read_metrics

HERE = "tests.observe.test_profile_runs"
MODEL = {**family("llama"), "vocab_size": 300, "num_hidden_layers": 4}
TRAIN = {"steps": 6, "global_batch_size": 4, "micro_batch_size": 1}
PROFILED = {**TRAIN, "profile_steps": "4-5"}
SHARDED = {"parallel": {"zero": 3}, "precision": {"param_dtype": "fp32"}}
PIPELINE = {"parallel": {"pp": 2, "zero": 1}, "precision": {"param_dtype": "fp32"}}
LATE = 0.25


def profiled_run(folder: Path, fault: Fault | None = None, **tables: Any) -> tuple[Path, dict[str, Any]]:
    """Run a profiled job; return its run folder and the summary."""
    job = write_job(folder, **{"train": PROFILED, "model": {"config": MODEL}, "plan": SHARDED, **tables})
    out, _ = train_in_the_pool(Job.load(job), 2, fault=fault)
    return out, write_profile(out / "profile")


def merged(out: Path) -> list[dict[str, Any]]:
    """Entries of the merged trace."""
    return json.loads(gzip.decompress((out / "profile" / "trace.json.gz").read_bytes()))["traceEvents"]


def check_traffic(out: Path, summary: dict[str, Any], axis: str) -> None:
    """Bytes by operation are those that the recorder counted."""
    row = read_metrics(out / "metrics.jsonl")[3]
    assert row.comm is not None
    expected = {name: size for name, size in row.comm[axis].items() if name.endswith("_bytes")}
    sent = {f"{r['operation']}_bytes": r["bytes"] for r in summary["collectives"] if r["operation"] != "receive"}
    assert {r["axis"] for r in summary["collectives"]} == {axis}
    assert sent == pytest.approx(expected)
    spans = [e for e in merged(out) if e.get("cat") == "collective" and e["pid"] == 0]
    assert {e["args"]["axis"] for e in spans} == {axis}
    assert sum(e["args"]["bytes"] for e in spans) == pytest.approx(2 * sum(expected.values()))


def check_terms(summary: dict[str, Any]) -> None:
    for rank in summary["ranks"]:
        assert sum(rank["terms"].values()) == pytest.approx(rank["seconds"])
        assert 0.02 < rank["terms"]["computation"] / rank["seconds"] < 1


def test_profile_of_fsdp(tmp_path: Path) -> None:
    out, summary = profiled_run(tmp_path, train={**PROFILED, "profile_only": True, "steps": 50})
    check_terms(summary)
    check_traffic(out, summary, "dp_shard")
    assert summary["steps"] == [4, 5]
    assert [rank["rank"] for rank in summary["ranks"]] == [0, 1]
    assert summary["pipeline"] is None
    assert summary["cost"]["plain_steps"] == 3  # steps 3, 6 and 7
    kinds = {kind for _, sizes in summary["memory"] for kind in sizes}
    assert kinds >= {"parameters", "gathered parameters", "gradients", "optimizer", "activations"}
    assert 0 < summary["cache"]["compulsory"] <= summary["cache"]["fetched"] < summary["cache"]["accessed"]
    known = [o for o in summary["operators"] if o["name"] == "aten::mm" and o["flops"]]
    assert known, "operators of trace and step are matched by name and shapes"
    entries = merged(out)
    names = {e["name"] for e in entries if e.get("cat") == "user_annotation"}
    assert names >= {"weft: data", "weft: forward", "weft: backward", "weft: update"}
    for pid in (0, 1):
        steps = [e for e in entries if e.get("cat") == "step" and e["pid"] == pid]
        operators = [e for e in entries if e.get("cat") == "cpu_op" and e["pid"] == pid]
        first, last = steps[0]["ts"], steps[-1]["ts"] + steps[-1]["dur"]
        assert all(first <= e["ts"] < last for e in operators if e["name"] == "aten::mm")


def test_profile_of_a_pipeline(tmp_path: Path) -> None:
    out, summary = profiled_run(tmp_path, plan=PIPELINE, train={**PROFILED, "profile_only": True, "steps": 50})
    check_terms(summary)
    check_traffic(out, summary, "pp")
    assert [row.step for row in read_metrics(out / "metrics.jsonl")] == list(range(1, 8))  # two steps after the profile
    assert not (out / "export").exists()
    assert summary["pipeline"]["equals_schedule"]
    schedule = load_schedule(Job.load(out / "job.toml").plan, 4)
    entries = merged(out)
    for rank, lane in enumerate(summary["pipeline"]["slots"].values()):
        expected = [slot_text(slot) for slot in schedule.slots[rank]]
        assert [text for text, _, _ in lane] == expected
        spans = [e["name"] for e in entries if e.get("cat") == "slot" and e["pid"] == rank]
        assert [name for name in spans if name in expected] == 2 * expected
    forward = {text: (start, end) for lane in summary["pipeline"]["slots"].values() for text, start, end in lane}
    assert all(forward[f"0F{index}"][1] <= forward[f"1F{index}"][1] for index in range(4))
    assert summary["terms"]["pipeline wait"] > 0


@pytest.mark.parametrize("plan", [{}, PIPELINE], ids=["fsdp", "pipeline"])
def test_losses_are_those_of_a_run_without_a_profile(plan: dict[str, Any], tmp_path: Path) -> None:
    out, _ = profiled_run(tmp_path, plan=plan)
    write_job(tmp_path, train=TRAIN, model={"config": MODEL}, plan=plan)
    plain, _ = train_in_the_pool(Job.load(tmp_path / "job.toml", [f"out={tmp_path / 'plain'}"]), 2)
    rows = [read_metrics(folder / "metrics.jsonl") for folder in (out, plain)]
    assert len(rows[0]) == 6
    assert [(row.loss, row.grad_norm) for row in rows[0]] == [(row.loss, row.grad_norm) for row in rows[1]]
    assert not (plain / "profile").exists()


class SlowRows(Rows):
    """Rows that take long to read."""

    def __getitem__(self, index: Any) -> Any:
        time.sleep(4 * LATE)
        return super().__getitem__(index)


def slow_rows(session: Any) -> None:
    """Let the rows of a session, and of no other, take long to read."""
    session.train_rows.__class__ = SlowRows


def slow_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy after a sleep."""
    time.sleep(LATE)
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")


def loss_with_a_late_rank(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy, after a sleep on rank 1."""
    if dist.get_rank() == 1:
        time.sleep(LATE)
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")


def test_slow_data_is_the_term_data(tmp_path: Path) -> None:
    # Four steps are read ahead, each of them two rows in 2 s: later steps are ready every 0.5 s at most.
    _, summary = profiled_run(tmp_path, slow_rows, train={**PROFILED, "steps": 8, "profile_steps": "5-8"})
    assert all(rank["terms"]["data"] > LATE for rank in summary["ranks"])
    assert max(summary["terms"], key=summary["terms"].get) == "data"


def test_a_sleep_in_the_step_is_a_gap_of_the_host(tmp_path: Path) -> None:
    _, summary = profiled_run(tmp_path, train={**PROFILED, "loss": f"{HERE}:slow_loss"})
    assert all(rank["terms"]["host"] > 2 * LATE for rank in summary["ranks"])  # two micro-batches
    longest = summary["gaps"][0]
    assert longest["seconds"] >= 0.95 * LATE
    assert longest["phase"] == "forward"


def test_a_late_rank_is_exposed_communication_of_the_other(tmp_path: Path) -> None:
    _, summary = profiled_run(tmp_path, train={**PROFILED, "loss": f"{HERE}:loss_with_a_late_rank"})
    first, second = summary["ranks"]
    assert first["terms"]["communication: dp_shard"] > 2 * LATE * 0.9
    assert second["terms"]["host"] > 2 * LATE
    assert second["terms"]["communication: dp_shard"] < first["terms"]["communication: dp_shard"] - LATE


def test_ranks_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    job = Job.load(write_job(tmp_path))
    with pytest.raises(JobError, match="rank 7 of a job with 2 ranks"):
        train(job_to_profile(job, 1, 0, [7], tmp_path / "run"), ranks=2, log=lambda text: None)
