"""What `weft plan` says beside the layouts themselves."""

from dataclasses import replace
from typing import Any

import pytest

from tests.lab.families import family
from weft.job import Job
from weft.planner.costmodel.frameworks import STACKS
from weft.planner.costmodel.hardware import GB, GIB, ClusterSpec, Wire, find_device
from weft.planner.costmodel.layout import TrainingLayout
from weft.planner.costmodel.shape import Shape
from weft.planner.costmodel.step_time import StepTime
from weft.planner.search.propose import compressed_steps, describe, dry_run, leaner_than, propose, simple_first, unsplit
from weft.planner.search.search import EQUAL, Choice, Space, reason, search

DENSE = Shape(16, 2048, 16, 16, 128, 8192, 32000)


def space(bandwidth: float) -> Space:
    device = replace(find_device("A100-80"), between=Wire(1e-5, bandwidth, 0.0))
    return Space(DENSE, 4096, 16, ClusterSpec(device, 2, 8), STACKS["weft"])


def test_compressed_gradients_pay_on_slow_links_alone() -> None:
    layout = TrainingLayout(4096, 16, 1, dp=16, zero=1)
    slow, quick = space(0.1 * GB), space(1000 * GB)
    steps, plain = compressed_steps(slow, layout), slow.time(layout).seconds
    assert list(steps) == ["bf16", "fp16", "int8", "2:4"]
    assert steps["int8"] < steps["2:4"] < steps["bf16"] < plain
    assert min(compressed_steps(quick, layout).values()) > quick.time(layout).seconds  # encoding takes longer


def test_nothing_is_compressed_without_data_ranks() -> None:
    assert compressed_steps(space(GB), TrainingLayout(4096, 16, 1, tp=16, sp=True)) == {}


def test_heads_over_ranks_of_a_sequence_are_named() -> None:
    there = space(50 * GB)
    layout = TrainingLayout(4096, 16, 1, tp=2, sp=True, cp=8, ulysses=4)
    choice = Choice(layout, there.time(layout), there.memory(layout))
    assert describe(choice).startswith("tp 2, cp 8, heads over 4 of cp")


def timed(there: Space, layout: TrainingLayout, seconds: float) -> Choice:
    nothing = dict.fromkeys(vars(there.time(layout)), 0.0)
    return Choice(layout, StepTime(**nothing | {"compute": seconds}), there.memory(layout))


def test_of_equal_layouts_the_simplest_is_chosen_and_of_others_the_fastest() -> None:
    there = space(50 * GB)
    piped = TrainingLayout(4096, 16, 1, tp=4, sp=True, pp=4, dp=1, schedule="zb-h1")
    split, plain = TrainingLayout(4096, 16, 1, tp=2, sp=True, dp=8), TrainingLayout(4096, 16, 1, dp=16)
    fast, middle, near = timed(there, piped, 1.0), timed(there, split, 1.01), timed(there, plain, 1 + EQUAL - 1e-6)
    assert simple_first([fast, middle, near], []) == ([near, fast, middle], [])
    far = timed(there, plain, 1 + EQUAL)
    assert simple_first([fast, middle, far], []) == ([middle, fast, far], [])
    assert simple_first([fast, far], []) == ([fast, far], [])
    by_operators = [timed(there, split, seconds).time for seconds in (2.0, 1.0, 1.5)]
    assert simple_first([fast, middle, near], by_operators) == (
        [middle, near, fast],
        [by_operators[1], by_operators[2], by_operators[0]],
    )
    assert simple_first([], []) == ([], [])


def test_a_small_model_gets_no_technique_that_does_not_pay() -> None:
    found = propose(
        job_of(dict(family("llama"))), ClusterSpec(find_device("CPU"), 1, 2), confirm=False, say=lambda _: None
    )
    assert describe(found.best[0]).startswith("dp 2, zero 0, micro-batch")
    assert found.slower[0] == 0
    assert min(found.slower) > -EQUAL
    others = {axis for choice in found.best for axis in ("tp", "cp", "pp") if getattr(choice.layout, axis) > 1}
    assert others  # as fast within the uncertainty, and not chosen
    seconds = [choice.time.seconds for choice in found.best[1:]]
    assert seconds == sorted(seconds)
    shown = {choice.layout for choice in found.best}
    for direction in found.directions:  # nothing that is nearer is left out
        if direction.choice and direction.choice.layout not in shown:
            assert direction.choice.time.seconds >= seconds[-1]
    pp = next(direction for direction in found.directions if (direction.setting, direction.value) == ("pp", 2))
    assert reason(pp, found.best[0], found.space.cluster).startswith("pp 2: equal (")


def test_leaner_layouts_are_each_leaner_than_the_one_before() -> None:
    there = space(50 * GB)
    there = replace(there, cluster=replace(there.cluster, device=replace(there.cluster.device, memory=16 * GIB)))
    best = search(there, 1).best[0]
    totals = [choice.memory.total for choice in [best, *leaner_than(there, best)]]
    assert len(totals) > 1
    assert totals == sorted(set(totals), reverse=True)


def job_of(config: dict[str, object]) -> Job:
    data = {"source": "tokens", "path": "none.npy", "seq_len": 32}
    return Job.parse({"model": {"config": config}, "data": data, "train": {"global_batch_size": 16}})


FALCON = {"model_type": "falcon", "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def test_a_model_is_split_only_over_axes_that_it_takes() -> None:
    assert unsplit(job_of(dict(family("qwen3_moe")))) == {}
    refused = unsplit(job_of(FALCON))
    assert set(refused) == {"tp", "cp", "ep"}
    assert refused["tp"].startswith("tensor parallelism does not know the role of")
    found = propose(job_of(FALCON), ClusterSpec(find_device("H100"), 1, 8), say=lambda _: None)
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

    monkeypatch.setattr("weft.planner.search.propose.dry_run", refuse_once)
    small = ClusterSpec(replace(find_device("H100"), memory=2 * GIB), 1, 8)
    found = propose(job_of({**FALCON, "vocab_size": 50000, "hidden_size": 256}), small, say=lambda _: None)
    assert [choice for choice, _ in found.refused] == tried[:1]
    first, second = (choice.memory.total for choice in tried)
    assert second < first < found.space.cluster.device.memory
    assert found.traces
