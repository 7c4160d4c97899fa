"""Properties of the analytical step time and peak memory that hold for any constants."""

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
from benchmarks.published.frameworks import STACKS
from benchmarks.published.known_shapes import KNOWN
from benchmarks.published.published import check

from tests.lab.plans import resolved
from weft.errors import PlanError
from weft.parallel.pipeline.schedule import peak_in_flight
from weft.parallel.pipeline.schedules import build_schedule
from weft.plan import Memory as MemorySettings
from weft.plan import Parallel, Plan
from weft.planner.costmodel.hardware import cluster_of, find_device
from weft.planner.costmodel.layout import TrainingLayout, layers_of_ranks, layout_of, local_parameters
from weft.planner.costmodel.peak_memory import in_flight, peak_memory, split_in_flight
from weft.planner.costmodel.roofline import fill, flash_attention, grouped, matmul
from weft.planner.costmodel.shape import Shape
from weft.planner.costmodel.step_time import ForwardBackward, pipeline_time, step_time

LLAMA = KNOWN["llama270b"]
EXPERTS = KNOWN["qwen330b"]
DEEPSEEK = KNOWN["deepseekv3"]
CORE = STACKS["megatron-core"]
H100 = find_device("H100")
BASE = TrainingLayout(seq=4096, global_batch=128, tp=4, sp=True, pp=4, dp=8, zero=1)


def seconds(layout: TrainingLayout, shape: Shape = LLAMA) -> float:
    return step_time(shape, layout, cluster_of(H100, 128), CORE).seconds


def test_matmul_time_is_between_its_limits() -> None:
    assert 0.5 * H100.rate("bf16") < 2 * 8192**3 / matmul(H100, 8192, 8192, 8192) < H100.rate("bf16")
    assert matmul(H100, 1, 8192, 8192) > 2 * 8192 * 8192 / H100.bandwidth
    assert matmul(H100, 8, 8, 8) == H100.launch
    assert matmul(H100, 4096, 4096, 4096, "fp8") < matmul(H100, 4096, 4096, 4096)
    assert fill(H100, 4096, 4096, 100) < fill(H100, 4096, 4096, 128)
    assert fill(H100, 4096, 4096, 108) < 0.5 * fill(H100, 4096, 4096, 128), "108 is not a multiple of 8"
    assert grouped(H100, 4096, 128, 768, 2048) > matmul(H100, 4096, 768, 2048)
    assert flash_attention(H100, 1e12, 128, 8192, portable=True) > flash_attention(H100, 1e12, 128, 8192)


def test_step_time_grows_with_work_and_falls_with_devices() -> None:
    assert seconds(replace(BASE, global_batch=256)) > 1.7 * seconds(BASE)
    assert seconds(replace(BASE, recompute="full")) > 1.2 * seconds(BASE)
    assert seconds(replace(BASE, recompute="light")) > seconds(BASE)
    ways = [("light", 1.0), ("full", 0.25), ("attention", 1.0), ("full", 0.5), ("mlp", 1.0), ("full", 1.0)]
    times = [seconds(replace(BASE, recompute=way, recompute_share=share)) for way, share in ways]
    assert times == sorted(times)
    assert seconds(replace(BASE, dtype="fp8")) < seconds(BASE)
    assert seconds(replace(BASE, dp=16, tp=2)) < seconds(BASE), "less tp communication"
    assert seconds(replace(BASE, adapters=True)) < seconds(BASE)


def test_communication_is_attributed_to_its_axis() -> None:
    one = step_time(LLAMA, replace(BASE, tp=1, sp=False, pp=1, dp=128), cluster_of(H100, 128), CORE)
    assert (one.tp, one.cp, one.ep, one.pipeline) == (0, 0, 0, 0)
    assert one.gradients > 0
    moe = step_time(EXPERTS, TrainingLayout(4096, 128, ep=8, dp=16), cluster_of(H100, 16), CORE)
    far = step_time(EXPERTS, TrainingLayout(4096, 128, ep=16, dp=16), cluster_of(H100, 16), CORE)
    assert 0 < moe.ep < far.ep, "experts on other hosts"
    assert step_time(LLAMA, replace(BASE, cp=2, dp=4), cluster_of(H100, 128), CORE).cp > 0
    three = replace(BASE, tp=1, sp=False, pp=1, dp=128, zero=3)
    assert step_time(LLAMA, three, cluster_of(H100, 128), STACKS["fsdp"]).zero > 0


def test_bubble_of_equal_stages_matches_closed_form() -> None:
    """1F1B (p - 1)(F + B), interleaved 1 / v of that, ZB-H1 (p - 1)(F + B - 2 W); without communication."""
    layout = replace(BASE, tp=1, sp=False, dp=1, pp=8, global_batch=64)
    stack = replace(CORE, p2p_overlap=1.0)
    ranks = [ForwardBackward(1.0, 2.0)] * 8

    def bubble(changed: TrainingLayout) -> float:
        return pipeline_time(LLAMA, changed, cluster_of(H100, 8), stack, ranks, 1.0)

    assert bubble(layout) == pytest.approx(21, rel=0.01)
    assert bubble(replace(layout, vpp=2)) == pytest.approx(10.5, rel=0.01)
    assert bubble(replace(layout, schedule="zb-h1")) == pytest.approx(7, rel=0.01)
    assert bubble(replace(layout, schedule="zb-2p")) == pytest.approx(0, abs=0.1)


def test_first_and_last_stages_have_fewer_layers() -> None:
    assert layers_of_ranks(replace(LLAMA, layers=78), replace(BASE, pp=8)) == (9, 10, 10, 10, 10, 10, 10, 9)
    assert layers_of_ranks(LLAMA, replace(BASE, pp=8, vpp=5)) == (10,) * 8
    assert sum(layers_of_ranks(replace(LLAMA, layers=126), replace(BASE, pp=16, vpp=8))) == 126


def test_balanced_head_takes_layers_from_the_last_stage() -> None:
    small = replace(LLAMA, layers=16, hidden=2048, heads=32, kv_heads=32, head_dim=64, ffn=8192, vocab=131072)
    assert layers_of_ranks(small, replace(BASE, pp=4, balance_head=True)) == (4, 5, 5, 2)
    assert layers_of_ranks(small, replace(BASE, pp=1, balance_head=True)) == (16,)


def test_expert_tp_makes_ep_groups_span_more_hosts() -> None:
    """The stride of an ep group is etp: eight experts of two ranks each span two hosts."""
    layout = TrainingLayout(4096, 128, tp=2, sp=True, ep=8, dp=8, expert_tp=1)
    near = step_time(EXPERTS, layout, cluster_of(H100, 16), CORE)
    far = step_time(EXPERTS, replace(layout, expert_tp=2), cluster_of(H100, 16), CORE)
    assert far.ep > near.ep
    assert far.tp > near.tp, "expert tp gathers the rows"
    uneven = step_time(EXPERTS, layout, cluster_of(H100, 16), replace(CORE, imbalance=3.0))
    assert uneven.seconds > near.seconds
    without_tp = replace(layout, tp=1, sp=False, dp=16, expert_tp=2)
    compressed = step_time(EXPERTS, without_tp, cluster_of(H100, 16), replace(CORE, dispatch_bytes=1.0))
    assert 0 < compressed.tp < step_time(EXPERTS, without_tp, cluster_of(H100, 16), CORE).tp
    limited = replace(DEEPSEEK, top_groups=0)
    spread = TrainingLayout(4096, 128, ep=64, dp=64)
    once = STACKS["megatron-bridge"]
    cluster = cluster_of(H100, 64)
    assert step_time(DEEPSEEK, spread, cluster, once).ep < step_time(limited, spread, cluster, once).ep


def test_rows_in_8_bits_shorten_dispatch_alone() -> None:
    """Half of the messages have half of the bytes."""
    layout = TrainingLayout(4096, 64, ep=64, dp=64)
    plain, eight_bits = (
        step_time(DEEPSEEK, layout, cluster_of(H100, 64), replace(CORE, dispatch_bytes=size)).ep for size in (2.0, 1.0)
    )
    assert 0.74 * plain < eight_bits < 0.78 * plain


def test_local_parameters_sum_to_the_model() -> None:
    for shape, layout in (
        (LLAMA, BASE),
        (EXPERTS, TrainingLayout(4096, 64, pp=4, ep=8, dp=8)),
        (DEEPSEEK, TrainingLayout(4096, 64, pp=4, ep=8, dp=8)),
    ):
        parts = [local_parameters(shape, layout, rank) for rank in range(layout.pp)]
        shared = sum(part[0] for part in parts) * layout.tp
        experts = sum(part[1] for part in parts) * layout.ep * layout.etp
        assert shared + experts == pytest.approx(shape.parameters, rel=1e-3)


def test_each_memory_option_reduces_memory() -> None:
    base = peak_memory(LLAMA, BASE, CORE)
    assert base.total == base.states + base.activations + base.transient + base.reserve + base.framework
    assert base.allocated < base.reserved < base.total
    for recompute in ("light", "attention", "mlp", "full"):
        assert peak_memory(LLAMA, replace(BASE, recompute=recompute), CORE).activations < base.activations
    half = replace(BASE, recompute="full", recompute_share=0.5)
    full = replace(BASE, recompute="full")
    assert peak_memory(LLAMA, full, CORE).total < peak_memory(LLAMA, half, CORE).total
    assert peak_memory(LLAMA, replace(BASE, zero=0), CORE).states > base.states
    assert peak_memory(LLAMA, replace(BASE, sp=False), CORE).total > base.total
    assert peak_memory(LLAMA, replace(BASE, adapters=True), CORE).states < base.states
    assert peak_memory(LLAMA, BASE, replace(CORE, flash=False)).activations > base.activations


def test_micro_batches_in_flight() -> None:
    layout = replace(BASE, pp=8, dp=1, tp=1, global_batch=64)
    assert [in_flight(layout, rank) for rank in (0, 3, 7)] == [8, 5, 1]
    assert in_flight(replace(layout, vpp=2), 0) == 8 + 7 / 2
    assert in_flight(replace(layout, schedule="gpipe"), 7) == 64
    assert in_flight(replace(layout, schedule="zb-2p"), 0) == 16
    assert in_flight(replace(layout, global_batch=4), 0) == 4


@pytest.mark.parametrize(("schedule", "chunks"), [("zb-h1", 1), ("zb-h2", 1), ("zb-2p", 1), ("zbv", 2)])
def test_micro_batches_in_flight_of_zero_bubble_schedules(schedule: Any, chunks: int) -> None:
    order = build_schedule(schedule, 4, 16, chunks)
    layout = replace(BASE, pp=4, dp=1, tp=1, global_batch=16, schedule=schedule, vpp=chunks)
    for rank, slots in enumerate(order.slots):
        steps = [{"I": 1, "W": -1}.get(action.kind, 0) for slot in slots for action in slot]
        most = peak_in_flight(order)[rank], peak_in_flight(order, released_by="BI")[rank], max(accumulate(steps))
        assert split_in_flight(layout, rank) == tuple(count / chunks for count in most)


@pytest.mark.parametrize("change", [{"tp": 3}, {"pp": 64, "vpp": 2}, {"cp": 3}])
def test_invalid_degrees_are_refused(change: dict[str, int]) -> None:
    check(LLAMA, BASE)
    with pytest.raises(PlanError):
        check(LLAMA, replace(BASE, **change))
    with pytest.raises(PlanError):
        check(EXPERTS, replace(BASE, ep=3))


def test_layout_of_plan() -> None:
    parallel = Parallel(tp=2, pp=2, dp_replicate=2, dp_shard=2, zero=2)
    layout = layout_of(resolved(Plan(parallel=parallel, memory=MemorySettings(recompute=("block",))), 16), 4096, 32, 1)
    assert (layout.num_devices, layout.dp, layout.shard, layout.micro_batches) == (16, 4, 2, 8)
    assert (layout.recompute, layout.sp, layout.zero) == ("full", True, 2)
    assert layout_of(resolved(Plan(memory=MemorySettings(recompute=("norm",))), 1), 16, 1, 1).recompute == "light"
