"""Conversion between layouts and plans, cost and goodput, and simulated pipelines."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.published.known_shapes import KNOWN

from tests.lab.families import family
from tests.lab.plans import resolved
from weft.errors import PlanError
from weft.job import Job
from weft.parallel.pipeline.plan_schedule import runs_jointly
from weft.parallel.pipeline.schedules import build_schedule
from weft.plan import Compute, Plan, Precision
from weft.planner.costmodel.frameworks import WEFT, FrameworkModel
from weft.planner.costmodel.hardware import ClusterSpec, find_device
from weft.planner.costmodel.layout import layout_of
from weft.planner.costmodel.shape import Shape
from weft.planner.costmodel.step_time import ForwardBackward, mlp_time, zero_times
from weft.planner.costmodel.timeline import refined, timeline_of, write_trace
from weft.planner.search.options import MEMORY_OPTIONS, Degrees, ExpertOptions
from weft.planner.search.search import search
from weft.planner.search.space import Space
from weft.planner.search.space_of_job import space_of
from weft.planner.search.strategy import cost_of, goodput, matmul_dtype, plan_of, stack_for

MOE = Shape(8, 512, 8, 8, 64, 0, 32000, experts=8, top_k=2, expert_ffn=1024)
EXPERTS = [ExpertOptions(joint, slots) for joint in (False, True) for slots in (0, 2)]
SPACE = Space(MOE, 2048, 16, ClusterSpec(find_device("A100-80"), 2, 2), WEFT, expert_options=EXPERTS)
LAYOUTS = [
    SPACE.layout(degrees, options, experts)
    for index, degrees in enumerate(SPACE.all_degrees())
    if index % 21 == 0
    for options in MEMORY_OPTIONS
    for experts in SPACE.expert_options_of(degrees)
]


def test_layout_to_plan_round_trip() -> None:
    for layout in LAYOUTS:
        plan = resolved(plan_of(layout, Plan()), layout.num_devices)
        same = layout_of(plan, layout.seq, layout.global_batch, layout.micro_batch)
        assert replace(same, shard=layout.shard, dtype=layout.dtype) == layout  # shard 0 means all data ranks
        assert plan.parallel.dp_replicate * plan.parallel.dp_shard == layout.dp
        assert (plan.memory.optimizer_device == "host", bool(plan.memory.offload)) == (
            layout.optimizer_on_host,
            layout.offload,
        )


def test_dtypes_determine_bytes_per_parameter() -> None:
    def sizes(**dtypes: str) -> tuple[float, float, float]:
        stack = stack_for(Precision.model_validate(dtypes), Compute(), "cuda")
        return stack.weight_bytes, stack.gradient_bytes, stack.optimizer_bytes

    assert sizes() == (2, 4, 12)
    assert sizes(weights="split") == (2, 4, 10)
    assert sizes(param_dtype="fp32") == (4, 4, 8)
    assert sizes(reduce_dtype="bf16") == (2, 2, 12)
    assert sizes(optimizer_state_dtype="int8")[2] == pytest.approx(4 + 2 * (1 + 4 / 256))


LLAMA = Shape(16, 2048, 32, 8, 64, 8192, 128256, tied=True)
# Measured tokens/s on one H100, one document of 4,096 tokens a row (docs/compute.md).
MEASURED = (
    (LLAMA, {"kernels": "auto"}, "forward", 2, 1, 48_775),
    (LLAMA, {"kernels": "auto"}, "forward", 4, 1, 54_468),
    (LLAMA, {"kernels": "auto"}, "forward", 4, 4, 56_320),
    (LLAMA, {"compile": "blocks"}, "forward", 2, 1, 52_346),
    (LLAMA, {"compile": "blocks"}, "forward", 4, 1, 57_601),
    (LLAMA, {"compile": "blocks"}, "forward", 4, 4, 59_890),
    (LLAMA, {"compile": "blocks"}, "fp8", 4, 2, 68_693),
    (LLAMA, {"compile": "blocks"}, "fp8_block", 4, 2, 59_025),
    (replace(KNOWN["qwen330b"], layers=4), {"kernels": "auto"}, "forward", 2, 1, 65_674),
)


@pytest.mark.parametrize(("shape", "compute", "matmul", "rows", "micro_batches", "measured"), MEASURED)
def test_operators_and_fp8_are_predicted_as_measured(
    shape: Shape, compute: dict[str, str], matmul: str, rows: int, micro_batches: int, measured: float
) -> None:
    precision = Precision.model_validate({"matmul": matmul})
    cluster = ClusterSpec(find_device("H100"), 1, 1)
    stack = stack_for(precision, Compute.model_validate(compute), "cuda")
    dtype = matmul_dtype(precision, cluster.device)
    space = Space(shape, 4096, rows * micro_batches, cluster, stack, dtype=dtype)
    layout = space.layout(Degrees(1, 1, 1, 1, 1, 0, 0, rows, "1f1b", 1), MEMORY_OPTIONS[0])
    tokens = rows * micro_batches * 4096 / space.time(layout).seconds
    assert tokens == pytest.approx(measured, rel=0.1)


def test_the_models_own_code_moves_more_bytes() -> None:
    def of(device_type: str, **settings: Any) -> FrameworkModel:
        return stack_for(Precision(), Compute.model_validate(settings), device_type)

    traffic = [
        of("cuda", **settings).elementwise_traffic for settings in ({"compile": "blocks"}, {}, {"kernels": "reference"})
    ]
    assert traffic == sorted(traffic)
    assert of("npu").elementwise_traffic == traffic[-1]
    assert of("cuda").fused_loss
    assert not of("cuda", kernels="reference").fused_loss


def test_the_layout_decides_on_joint_experts_and_replicas() -> None:
    comm = {"expert_overlap": "joint", "expert_compression": "fp8"}
    tables = {"parallel": {"expert_balance": "replicate", "ep": 2}, "comm": comm}
    base = Plan.model_validate(tables)
    found = set()
    for layout in LAYOUTS[::17]:
        plan = resolved(plan_of(layout, base), layout.num_devices)
        assert (plan.parallel.expert_balance == "replicate") == (layout.expert_slots > 0)
        assert (plan.comm.expert_compression == "fp8") == (layout.ep > 1)
        assert runs_jointly(plan) == layout.joint_experts
        found.add((layout.joint_experts, layout.pp > 1, layout.expert_slots))
    assert found == {
        (joint, pipeline, slots) for joint in (False, True) for pipeline in (False, True) for slots in (0, 2)
    }


def test_experts_gain_from_fp8_with_a_scale_for_each_row_only() -> None:
    shape, cluster, seconds = replace(KNOWN["qwen330b"], layers=4), ClusterSpec(find_device("H100"), 1, 1), {}
    for matmul in ("forward", "fp8", "fp8_block"):
        precision = Precision.model_validate({"matmul": matmul})
        stack = stack_for(precision, Compute(), "cuda")
        layout = Space(shape, 4096, 8, cluster, stack, dtype=matmul_dtype(precision, cluster.device)).layout(
            Degrees(1, 1, 1, 1, 1, 0, 0, 8, "1f1b", 1), MEMORY_OPTIONS[0]
        )
        seconds[matmul] = mlp_time(shape, layout, cluster, stack).sum
    assert seconds["fp8"] < 0.9 * seconds["forward"]
    assert seconds["fp8_block"] == pytest.approx(seconds["forward"])


def test_experts_gain_from_fp8_where_the_device_groups_it() -> None:
    job = Job.model_validate({"model": {"config": family("qwen3_moe")}, "plan": {"precision": {"matmul": "fp8"}}})
    for name, is_cast in (("H100", True), ("L40S", False)):
        assert space_of(job, ClusterSpec(find_device(name), 1, 8)).stack.casts_experts == is_cast


def test_zero_3_gathers_fp8_weights_in_one_byte() -> None:
    cluster = ClusterSpec(find_device("H100"), 4, 1)
    times = []
    for matmul in ("fp8", "fp8_block"):
        stack = stack_for(Precision.model_validate({"matmul": matmul}), Compute(), "cuda")
        space = Space(LLAMA, 4096, 4, cluster, replace(stack, prefetch=False), dtype=matmul)
        layout = space.layout(Degrees(1, 1, 1, 4, 1, 3, 4, 1, "1f1b", 1), MEMORY_OPTIONS[0])
        times.append(zero_times(LLAMA, layout, cluster, space.stack, ForwardBackward(0, 0)).forward)
    assert 0.5 < times[0] / times[1] < 0.6  # messages have a latency too


def test_fp8_needs_a_device_with_fp8() -> None:
    fp8, emulated = Precision(matmul="fp8"), Precision(matmul="fp8", emulate_fp8=True)
    assert matmul_dtype(fp8, find_device("H100")) == "fp8"
    assert matmul_dtype(emulated, find_device("A100-80")) == "fp32"
    assert matmul_dtype(Precision(), find_device("A100-80")) == "bf16"
    with pytest.raises(PlanError, match="matmul = 'fp8' on A100-80"):
        matmul_dtype(fp8, find_device("A100-80"))


def test_cost_from_step_time() -> None:
    layout = next(layout for layout in LAYOUTS if layout.num_devices == 4)
    cluster = ClusterSpec(replace(find_device("A100-80"), dollars_per_hour=2.0, watts=500, grams_co2_per_kwh=350), 2, 2)
    one = cost_of(MOE, layout, 1.0, cluster, 0.0)
    assert one.tokens_per_second == layout.global_batch * layout.seq
    assert one.mfu == pytest.approx(one.tokens_per_second * MOE.flops(layout.seq) / (4 * 312e12))
    assert one.joules_per_token == pytest.approx(2000 / one.tokens_per_second)
    assert one.grams_co2_per_million_tokens == pytest.approx(one.joules_per_token * 1e6 / 3.6e6 * 350)
    assert one.dollars_per_trillion_tokens == pytest.approx(8 / 3600 / one.tokens_per_second * 1e12)
    assert (one.goodput, one.checkpoint_seconds) == (1, math.inf)
    slow = cost_of(MOE, layout, 1.0, cluster, 0.0, scalar=2.0)
    assert slow.tokens_per_second == one.tokens_per_second / 2
    failing = cost_of(MOE, layout, 1.0, cluster, 100.0)
    assert failing.goodput < 1
    assert failing.dollars_per_trillion_tokens > one.dollars_per_trillion_tokens


def test_checkpoint_interval_is_optimal() -> None:
    mean = 7200.0
    share, between = goodput(mean, blocked=5.0)
    assert between == pytest.approx(math.sqrt(2 * 5 * mean))

    def lost(seconds: float) -> float:
        return 5.0 / seconds + seconds / 2 / mean

    assert lost(between) <= min(lost(between * 0.9), lost(between * 1.1))
    assert goodput(mean / 10)[0] < share < 1


def test_simulated_bubble_is_near_its_formula() -> None:
    """With equal stages, formula and simulation differ only in communication and the head."""
    wide = replace(SPACE, shape=replace(MOE, layers=32, vocab=1000))
    seen = set()
    for degrees in wide.all_degrees():
        layout = wide.layout(degrees, MEMORY_OPTIONS[0])
        if layout.pp == 1 or layout.micro_batches < 2 * layout.pp or layout.micro_batch > 2:
            continue
        time = wide.time(layout)
        seen.add(layout.schedule)
        if layout.schedule in ("1f1b", "zb-h1") or 32 % (layout.pp * layout.vpp) == 0:
            assert refined(wide, layout, time).seconds == pytest.approx(time.seconds, rel=0.1), layout
    assert seen == {"1f1b", "zb-h1", "zbv", "interleaved", "interleaved-overlap", "dualpipev"}


def test_write_trace(tmp_path: Path) -> None:
    best = search(replace(SPACE, cluster=ClusterSpec(find_device("A100-80"), 1, 4)), 1).best[0]
    layout = replace(best.layout, pp=2, dp=2, tp=1, cp=1, sp=False, ep=1, micro_batch=1, schedule="1f1b", vpp=1)
    timeline = timeline_of(SPACE, layout)
    assert timeline.schedule == build_schedule("1f1b", 2, layout.micro_batches)
    write_trace(timeline, SPACE.time(layout), tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    assert len(events) == 2 * (2 * layout.micro_batches + 2)
    assert max(event["ts"] + event["dur"] for event in events) >= timeline.makespan * 1e6
    assert {event["tid"] for event in events} == {0, 1}
