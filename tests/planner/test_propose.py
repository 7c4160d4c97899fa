"""What `weft plan` says beside the layouts themselves."""

from dataclasses import replace
from typing import Any

import pytest

from tests.lab.families import family
from weft.job import Job
from weft.planner.hardware import GB, GIB, Cluster, Wire, find_device
from weft.planner.layout import Layout
from weft.planner.propose import compressed_steps, describe, dry_run, propose, unsplit
from weft.planner.search import Choice, Space
from weft.planner.shape import Shape
from weft.planner.stacks import STACKS

DENSE = Shape(16, 2048, 16, 16, 128, 8192, 32000)


def space(bandwidth: float) -> Space:
    device = replace(find_device("A100-80"), between=Wire(1e-5, bandwidth, 0.0))
    return Space(DENSE, 4096, 16, Cluster(device, 2, 8), STACKS["weft"])


def test_compressed_gradients_pay_on_slow_links_alone() -> None:
    layout = Layout(4096, 16, 1, dp=16, zero=1)
    slow, quick = space(0.1 * GB), space(1000 * GB)
    steps, plain = compressed_steps(slow, layout), slow.time(layout).seconds
    assert list(steps) == ["bf16", "fp16", "int8", "2:4"]
    assert steps["int8"] < steps["2:4"] < steps["bf16"] < plain
    assert min(compressed_steps(quick, layout).values()) > quick.time(layout).seconds  # encoding takes longer


def test_nothing_is_compressed_without_data_ranks() -> None:
    assert compressed_steps(space(GB), Layout(4096, 16, 1, tp=16, sp=True)) == {}


def test_heads_over_ranks_of_a_sequence_are_named() -> None:
    there = space(50 * GB)
    layout = Layout(4096, 16, 1, tp=2, sp=True, cp=8, ulysses=4)
    choice = Choice(layout, there.time(layout), there.memory(layout))
    assert describe(choice).startswith("tp 2, cp 8, heads over 4 of cp")


def job_of(config: dict[str, object]) -> Job:
    data = {"source": "tokens", "path": "none.npy", "seq_len": 32}
    return Job.parse({"model": {"config": config}, "data": data, "train": {"global_batch": 16}})


FALCON = {"model_type": "falcon", "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def test_a_model_is_split_only_over_axes_that_it_takes() -> None:
    assert unsplit(job_of(dict(family("qwen3_moe")))) == {}
    refused = unsplit(job_of(FALCON))
    assert set(refused) == {"tp", "cp", "ep"}
    assert refused["tp"].startswith("tensor parallelism does not know the role of")
    found = propose(job_of(FALCON), Cluster(find_device("H100"), 1, 8), say=lambda _: None)
    assert all(choice.layout.tp == choice.layout.cp == choice.layout.ep == 1 for choice in found.best)
    assert found.traces
    assert not found.refused
    assert {direction.setting for direction in found.directions}.isdisjoint({"tp", "cp", "ep"})


def test_what_formulas_miss_is_taken_off_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Choice] = []

    def refuse_once(job: Job, space: Space, choice: Choice, limit: float) -> Any:
        tried.append(choice)
        if len(tried) == 1:
            return [], "too much", 1.02 * limit
        return dry_run(job, space, choice, limit)

    monkeypatch.setattr("weft.planner.propose.dry_run", refuse_once)
    small = Cluster(replace(find_device("H100"), memory=2 * GIB), 1, 8)
    found = propose(job_of({**FALCON, "vocab_size": 50000, "hidden_size": 256}), small, say=lambda _: None)
    assert [choice for choice, _ in found.refused] == tried[:1]
    first, second = (choice.memory.total for choice in tried)
    assert second < first < found.space.cluster.device.memory
    assert found.traces
