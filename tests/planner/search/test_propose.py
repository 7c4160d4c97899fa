"""Planning: order of layouts, compression, low-memory layouts, unsupported axes, confirmation by dry runs."""

import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lab.families import family
from weft.errors import PlanError
from weft.job import Job
from weft.plan import Compute
from weft.planner.costmodel.frameworks import WEFT
from weft.planner.costmodel.hardware import GB, GIB, ClusterSpec, LinkModel, find_device
from weft.planner.costmodel.layout import TrainingLayout
from weft.planner.costmodel.shape import Shape
from weft.planner.costmodel.step_time import StepTime
from weft.planner.dryrun.modes import RealControlTensors
from weft.planner.search.alternatives import EQUAL, reason
from weft.planner.search.propose import (
    compressed_steps,
    describe,
    dry_run,
    lower_memory_layouts,
    propose,
    simplest_first,
)
from weft.planner.search.search import search
from weft.planner.search.space import Choice, Space
from weft.planner.search.space_of_job import unsplit

EXAMPLES = Path(__file__).parents[3] / "examples"
MOST_OPERATORS = 30_000  # in all dry runs of a plan for Llama 3.1 8B
DENSE = Shape(16, 2048, 16, 16, 128, 8192, 32000)


def space(bandwidth: float) -> Space:
    device = replace(find_device("A100-80"), between=LinkModel(1e-5, bandwidth, 0.0))
    return Space(DENSE, 4096, 16, ClusterSpec(device, 2, 8), WEFT)


def test_compressed_gradients_pay_off_only_on_slow_links() -> None:
    layout = TrainingLayout(4096, 16, 1, dp=16, zero=1)
    slow, quick = space(0.1 * GB), space(1000 * GB)
    steps, plain = compressed_steps(slow, layout), slow.time(layout).seconds
    assert list(steps) == ["bf16", "fp16", "int8", "2:4"]
    assert steps["int8"] < steps["2:4"] < steps["bf16"] < plain
    assert min(compressed_steps(quick, layout).values()) > quick.time(layout).seconds, (
        "encoding costs more than it saves"
    )


def test_no_compression_without_data_parallelism() -> None:
    assert compressed_steps(space(GB), TrainingLayout(4096, 16, 1, tp=16, sp=True)) == {}


def test_describe_names_the_ulysses_degree() -> None:
    search_space = space(50 * GB)
    layout = TrainingLayout(4096, 16, 1, tp=2, sp=True, cp=8, ulysses=4)
    choice = Choice(layout, search_space.time(layout), search_space.memory(layout))
    assert describe(choice).startswith("tp 2, cp 8, ulysses 4")


def timed(search_space: Space, layout: TrainingLayout, seconds: float) -> Choice:
    nothing = dict.fromkeys(vars(search_space.time(layout)), 0.0)
    return Choice(layout, StepTime(**nothing | {"compute": seconds}), search_space.memory(layout))


def test_simplest_equal_layout_is_first_and_others_are_sorted_by_time() -> None:
    search_space = space(50 * GB)
    piped = TrainingLayout(4096, 16, 1, tp=4, sp=True, pp=4, dp=1, schedule="zb-h1")
    split, plain = TrainingLayout(4096, 16, 1, tp=2, sp=True, dp=8), TrainingLayout(4096, 16, 1, dp=16)
    fast, middle, near = (
        timed(search_space, piped, 1.0),
        timed(search_space, split, 1.01),
        timed(search_space, plain, 1 + EQUAL - 1e-6),
    )
    assert simplest_first([fast, middle, near], []) == ([near, fast, middle], [])
    far = timed(search_space, plain, 1 + EQUAL)
    assert simplest_first([fast, middle, far], []) == ([middle, fast, far], [])
    assert simplest_first([fast, far], []) == ([fast, far], [])
    by_operators = [timed(search_space, split, seconds).time for seconds in (2.0, 1.0, 1.5)]
    assert simplest_first([fast, middle, near], by_operators) == (
        [middle, near, fast],
        [by_operators[1], by_operators[2], by_operators[0]],
    )
    assert simplest_first([], []) == ([], [])


def test_small_model_gets_plain_data_parallelism() -> None:
    job = job_of(dict(family("llama")))  # whose logits take most of the time
    own = Compute.model_validate({"kernels": {"linear_cross_entropy": "reference"}})
    job = job.model_copy(update={"plan": job.plan.model_copy(update={"compute": own})})
    found = propose(job, ClusterSpec(find_device("CPU"), 1, 2), confirm=False)
    assert describe(found.best[0]).startswith("dp 2, zero 0, micro-batch")
    assert found.slower[0] == 0
    assert min(found.slower) > -EQUAL
    others = {axis for choice in found.best for axis in ("tp", "cp", "pp") if getattr(choice.layout, axis) > 1}
    assert others  # equal within the uncertainty, but not chosen
    seconds = [choice.time.seconds for choice in found.best[1:]]
    assert seconds == sorted(seconds)
    shown = {choice.layout for choice in found.best}
    for alternative in found.alternatives:  # no faster layout is missing from the list
        if alternative.choice and alternative.choice.layout not in shown:
            assert alternative.choice.time.seconds >= seconds[-1]
    pp = next(
        alternative for alternative in found.alternatives if (alternative.setting, alternative.value) == ("pp", 2)
    )
    assert reason(pp, found.best[0], found.space.cluster).startswith("pp 2: equal (")


def test_lower_memory_layouts_have_decreasing_memory() -> None:
    search_space = space(50 * GB)
    search_space = replace(
        search_space,
        cluster=replace(search_space.cluster, device=replace(search_space.cluster.device, memory=16 * GIB)),
    )
    best = search(search_space, 1).best[0]
    totals = [choice.memory.total for choice in [best, *lower_memory_layouts(search_space, best)]]
    assert len(totals) > 1
    assert totals == sorted(set(totals), reverse=True)


def job_of(config: dict[str, object]) -> Job:
    data = {"source": "tokens", "path": "none.npy", "seq_len": 32}
    return Job.parse({"model": {"config": config}, "data": data, "train": {"global_batch_size": 16}})


FALCON = {"model_type": "falcon", "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def test_model_is_parallelized_only_over_supported_axes() -> None:
    assert unsplit(job_of(dict(family("qwen3_moe")))) == {}
    refused = unsplit(job_of(FALCON))
    assert set(refused) == {"cp", "ep"}
    assert "attention that does not go through AttentionInterface" in refused["cp"]
    found = propose(job_of(FALCON), ClusterSpec(find_device("H100"), 1, 8))
    assert all(choice.layout.cp == choice.layout.ep == 1 for choice in found.best)
    assert found.traces
    assert not found.refused
    assert {alternative.setting for alternative in found.alternatives}.isdisjoint({"cp", "ep"})


@pytest.mark.slow("fourteen dry runs of layers of a model of 8 billion parameters")
def test_plan_of_a_large_model_runs_few_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither chunks of the loss nor layers nor micro-batches are run one by one."""
    calls, dispatch = multiprocessing.Value("q", 0), RealControlTensors.__torch_dispatch__

    def count(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.prim.device.default:  # which computes nothing
            with calls.get_lock():
                calls.value += 1
        return dispatch(self, func, types, args, kwargs)

    monkeypatch.setattr(RealControlTensors, "__torch_dispatch__", count)  # in the forks of the dry runs, too
    job = Job.load(EXAMPLES / "llama-8b.toml", [])
    found = propose(job, ClusterSpec(find_device("H100"), 1, 8))
    assert found.traces
    assert 0 < calls.value < MOST_OPERATORS


def test_memory_that_formulas_miss_reduces_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Choice] = []

    def refuse_once(job: Job, space: Space, choice: Choice, limit: float) -> Any:
        tried.append(choice)
        if len(tried) == 1:
            return [], "too much", 1.02 * limit
        return dry_run(job, space, choice, limit)

    monkeypatch.setattr("weft.planner.search.propose.dry_run", refuse_once)
    small = ClusterSpec(replace(find_device("H100"), memory=2 * GIB), 1, 8)
    found = propose(job_of({**FALCON, "vocab_size": 50000, "hidden_size": 256}), small)
    assert [choice for choice, _ in found.refused] == tried[:1]
    first, second = (choice.memory.total for choice in tried)
    assert second < first < found.space.cluster.device.memory
    assert found.traces


@pytest.mark.slow("two searches of plans for a trillion parameters")
def test_a_trillion_parameters_do_not_fit_on_64_devices() -> None:
    """The figures of docs/planner.md."""
    job, device = Job.load(EXAMPLES / "trillion.toml", []), find_device("910B")
    with pytest.raises(
        PlanError, match=r"the smallest layout needs 175 GiB(.|\n)*use 256 devices, with tp 2, cp 4, pp 8, ep 32"
    ):
        propose(job, ClusterSpec(device, 8, 8), confirm=False)
    found = propose(job, ClusterSpec(device, 32, 8), confirm=False).best[0]
    assert "optimizer on host" in describe(found)
    assert (round(found.memory.total / 2**30), round(found.time.seconds)) == (58, 16)
