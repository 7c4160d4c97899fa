"""Operators of dry runs are recorded, rebuilt and timed; the step time follows from them, communication, schedule and cores."""

import pickle
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.lab.plans import resolved
from tests.planner.dryrun.test_trace import DENSE, MOE, job_for
from weft.comm.recorder import Message
from weft.plan import Parallel, Pipeline, Plan
from weft.planner.calibrate.calibrate import file_of, fit_matmuls
from weft.planner.costmodel.cluster_file import read_cluster
from weft.planner.costmodel.hardware import GB, GIB, ClusterSpec, LinkModel, find_device
from weft.planner.costmodel.links import fit
from weft.planner.costmodel.network import all_gather, group, point_to_point
from weft.planner.costmodel.operator_timing import measured_step, message_seconds, time_step, work_of
from weft.planner.costmodel.operators import (
    KeywordArguments,
    Operation,
    OperatorLog,
    TensorSpec,
    bytes_in,
    freeze,
    mark_updates,
    seconds_of,
    thaw,
    time_operations,
)
from weft.planner.costmodel.roofline import fill
from weft.planner.dryrun.step_counts import StepCounts
from weft.planner.dryrun.trace import Trace, trace
from weft.planner.search.space_of_job import reason_against_local_device

CPU = torch.device("cpu")


# Recording and rebuilding operator calls


def log_of_training() -> list[Operation]:
    with FakeTensorMode():
        weight = torch.ones(8, 4, requires_grad=True)
        with OperatorLog() as log:
            loss = (torch.ones(2, 8) @ weight).t().reshape(8).square().sum()
            loss.backward()
            weight.detach().sub_(weight.grad)  # type: ignore[arg-type]
    return log.operations


def test_operator_log_records_phases_without_views() -> None:
    operations = mark_updates(log_of_training())
    names = [(operation.name.removeprefix("aten."), operation.phase) for operation in operations]
    assert ("mm.default", "forward") in names
    assert ("mm.default", "backward") in names
    assert names[-1] == ("sub_.Tensor", "update")
    assert not {"t.default", "transpose.int", "detach.default", "view.default"} & {name for name, _ in names}
    matmul = next(operation for operation in operations if operation.name == "aten.mm.default")
    assert matmul.arguments[0] == (
        TensorSpec((2, 8), (8, 1), torch.float32),
        TensorSpec((8, 4), (4, 1), torch.float32),
    )


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(3, 4).t(),
        torch.ones(3, 1).expand(3, 4),
        torch.zeros(0, 4),
        torch.ones(2, 2, dtype=torch.bfloat16),
        [torch.ones(2), None, 3, "text", [torch.ones(1)]],
        {"beta": 0.5, "alpha": torch.float16},
    ],
)
def test_freeze_thaw_round_trip(value: Any) -> None:
    back = thaw(freeze(value), CPU)
    assert freeze(back) == freeze(value)
    assert bytes_in(back) == bytes_in(value)
    assert hash(freeze(value)) == hash(freeze(back))


def test_values_of_index_tensors_are_recorded() -> None:
    index = torch.tensor([[3, 1], [2, 0]])
    assert torch.equal(thaw(freeze(index), CPU), index)
    with FakeTensorMode():
        fake = torch.zeros(3, dtype=torch.int64)
    assert torch.equal(thaw(freeze(fake), CPU), torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize("name", ["aten._grouped_mm", "weft.grouped_mm"])
def test_grouped_matmul_is_timed_with_random_group_sizes(name: str) -> None:
    x, w = TensorSpec((64, 16), (16, 1), torch.bfloat16), TensorSpec((4, 16, 16), (256, 16, 1), torch.bfloat16)
    with FakeTensorMode():
        borders = freeze(torch.zeros(4, dtype=torch.int32))
    products = list[int]()
    with mock.patch("torch.mm", lambda a, *_, **__: products.append(len(a))):
        seconds = seconds_of(Operation(f"{name}.default", ((x, w, borders), KeywordArguments(()))), CPU)
    assert seconds is not None
    assert seconds > 0
    assert any(products) == (name == "weft.grouped_mm")  # groups have rows


def test_operators_that_fail_are_logged_and_count_zero() -> None:
    wrong = Operation(
        "aten.mm.default", ((TensorSpec((2, 3), (3, 1), torch.float32),) * 2, KeywordArguments(())), "forward"
    )
    assert seconds_of(wrong, CPU) is None
    found, _ = made_trace(Plan(), 1, {})
    found.count.operations[wrong] = 2
    lines: list[str] = []
    job = job_for(DENSE, "fp32", 2, dp_shard=1)
    assert time_step(job, [found], cluster(1, 1), log=lines.append).compute == 0
    assert lines == ["not timed, counted as 0 s: aten.mm.default"]


def test_generators_and_streams_are_left_out() -> None:
    """Streams cannot be pickled, and dry runs on an accelerator record operators that take one."""
    frozen = freeze(((torch.Generator(), torch.Stream(device="cpu")), {"stream": torch.Stream(device="cpu")}))
    assert pickle.loads(pickle.dumps(frozen)) == frozen
    assert thaw(frozen, CPU) == [[None, None], {"stream": None}]


@pytest.mark.parametrize("model", [DENSE, MOE], ids=["dense", "moe"])
def test_every_operator_of_a_dry_run_can_be_timed(model: dict[str, Any]) -> None:
    job = job_for(model, "fp32", 2, dp_shard=2, zero=2)
    (found,) = trace(job, 2, [0])
    assert {operation.phase for operation in found.count.operations} == {"forward", "backward", "update"}
    seconds = time_operations(found.count.operations)
    assert [operation.name for operation, taken in seconds.items() if taken is None] == []
    assert work_of(found, seconds, ClusterSpec(find_device("CPU"), 1, 2)).on_core > 0


def test_operators_of_skipped_micro_batches_are_counted() -> None:
    few, many = (
        trace(job_for(DENSE, "fp32", size, dp_shard=1), 1, [0])[0].count.operations for size in (2, 1)
    )  # four and eight micro-batches

    def matmuls(operations: Counter[Operation]) -> int:
        return sum(times for operation, times in operations.items() if operation.name == "aten.mm.default")

    assert matmuls(many) == 2 * matmuls(few)


# Step time


def made_trace(
    plan: Plan, world: int, seconds: dict[str, float], messages: list[Message] | None = None
) -> tuple[Trace, dict[Operation, float | None]]:
    """Dry run whose phases take the given seconds, and the seconds per operation."""
    calls = {phase: Operation(phase, ()) for phase in seconds}
    operations = Counter({call._replace(phase=phase): 2 for phase, call in calls.items()})
    count = StepCounts({}, {}, {}, ("", [], ""), messages or [], 0, operations)
    times: dict[Operation, float | None] = {call: seconds[phase] / 2 for phase, call in calls.items()}
    return Trace(0, world, resolved(plan, world), 0, count, {}, 0, 0.0), times


PHASES = {"forward": 1.0, "backward": 2.0, "update": 0.5}
LINK = LinkModel(1e-3, 1 * GB, 0.0)


def cluster(ranks: int, cores: int, call: float = 0.0) -> ClusterSpec:
    return ClusterSpec(replace(find_device("CPU"), per_host=ranks, inside=LINK, cores=cores, call=call), 1, ranks)


def test_step_is_the_sum_of_phases_and_communication() -> None:
    plan = Plan(parallel=Parallel(tp=2, dp_shard=1))
    sent = [Message("all_gather", "tp", 10**6, torch.float32, "")] * 4
    found, seconds = made_trace(plan, 2, PHASES, sent)
    time = measured_step([found], seconds, cluster(2, 2), 1)
    assert time.compute == pytest.approx(3.0)
    assert time.optimizer == pytest.approx(0.5)
    assert time.tp == pytest.approx(4 * (1e-3 + 1e-3))
    assert time.seconds == pytest.approx(3.508)


def test_host_overhead_overlaps_on_accelerators_and_adds_on_cpu() -> None:
    found, seconds = made_trace(Plan(), 1, PHASES)
    assert measured_step([found], seconds, cluster(1, 1, call=0.3), 1).seconds == pytest.approx(3.5 + 6 * 0.3)
    assert measured_step([found], seconds, cluster(1, 0, call=0.3), 1).seconds == pytest.approx(3.0 + 0.6)


def test_ranks_share_the_cores_of_a_host() -> None:
    found, seconds = made_trace(Plan(parallel=Parallel(dp_shard=4)), 4, PHASES)
    assert measured_step([found], seconds, cluster(4, 2), 1).seconds == pytest.approx(7.0)
    assert measured_step([found], seconds, cluster(4, 4), 1).seconds == pytest.approx(3.5)


def test_communication_adds_to_the_time_on_shared_cores() -> None:
    """Links are measured between ranks that share cores."""
    sent = [Message("all_gather", "tp", 10**6, torch.float32, "")] * 4
    found, seconds = made_trace(Plan(parallel=Parallel(tp=4, dp_shard=1)), 4, PHASES, sent)
    known = measured_step([found], seconds, cluster(4, 2), 1)
    assert known.tp > 0
    assert known.seconds == pytest.approx(7.0 + known.tp)


def test_pipeline_bubble_follows_the_schedule() -> None:
    """1F1B with m micro-batches on p stages takes (m + p - 1) / m of a rank's own work."""
    plan = Plan(parallel=Parallel(pp=2, dp_shard=1), pipeline=Pipeline(schedule="1f1b"))
    found, seconds = made_trace(plan, 2, PHASES)
    time = measured_step([found, found], seconds, cluster(2, 2), 4)
    assert time.pipeline == pytest.approx(3.0 / 4)
    assert time.seconds == pytest.approx(3.75 + 0.5)


@pytest.mark.parametrize(
    ("axis", "size", "stride"),
    [("tp", 2, 1), ("cp_ring", 2, 2), ("dp_shard", 2, 4), ("dp_shard_cp_ring", 4, 2), ("world", 16, 1)],
)
def test_message_uses_the_links_of_its_axis(axis: str, size: int, stride: int) -> None:
    plan = resolved(Plan(parallel=Parallel(tp=2, cp=2, dp_shard=2, pp=2)), 16)
    hosts = ClusterSpec(find_device("H100"), 4, 4)
    message = Message("all_gather", axis, 10**8, torch.float32, "")
    full_bytes = 1e8 * size / (size - 1)
    assert message_seconds(message, plan, 16, hosts) == all_gather(group(hosts, size, stride), full_bytes)
    sent = message._replace(operation="send", axis="pp")
    assert message_seconds(sent, plan, 16, hosts) == point_to_point(group(hosts, 2, 8), 10**8)


def test_axis_excludes_the_ranks_of_sibling_axes() -> None:
    """dp_replicate and dp_shard, and cp_ring and cp_ulysses, are separate groups of two ranks."""
    plan = resolved(Plan(parallel=Parallel(dp_replicate=2, dp_shard=2, cp=4, cp_ulysses=2)), 16)
    hosts = ClusterSpec(find_device("H100"), 4, 4)
    for axis, stride in (("dp_replicate", 8), ("dp_shard", 4), ("cp_ring", 2), ("cp_ulysses", 1)):
        message = Message("all_gather", axis, 10**8, torch.float32, "")
        assert message_seconds(message, plan, 16, hosts) == all_gather(group(hosts, 2, stride), 2e8)


# Calibration


def test_link_model_is_recovered_from_its_times() -> None:
    link, sizes = LinkModel(2e-4, 1e9, 1e6), [2.0**power for power in range(8, 26, 2)]
    rows = [(size, 3 * link.latency + (size + np.sqrt(size * link.ramp)) / link.bandwidth) for size in sizes]
    found = fit(rows, 4)
    assert vars(found) == pytest.approx(vars(link), rel=1e-6)
    flat = fit([(size, 2e-3 - 1e-5 * index) for index, size in enumerate(sizes[:4])], 2)  # dominated by latency
    assert flat.latency == pytest.approx(2e-3, rel=0.05)
    assert flat.bandwidth > 1e9


def test_matmul_model_is_recovered_from_its_rates() -> None:
    true = replace(find_device("CPU"), units=1, tile=(32, 64), depth=64, efficiency={"fp32": 0.8, "bf16": 0.8})
    sizes = (32, 128, 512)
    rates = {
        ("fp32", m, n, k): 0.8 * true.peak["fp32"] * fill(true, m, n, k, "fp32")
        for m in sizes
        for n in sizes
        for k in sizes
    }
    found, missed = fit_matmuls(replace(find_device("CPU"), launch=0.0, cores=2), rates)
    assert (found.tile, found.depth, found.units) == (true.tile, true.depth, 1)
    assert found.rate("fp32") == pytest.approx(true.rate("fp32"))
    assert missed == pytest.approx(0.0, abs=1e-9)


def test_matmuls_shorter_than_a_launch_are_fitted_where_there_are_no_longer_ones() -> None:
    rates = {("fp32", size, size, size): 1e9 for size in (32, 64)}
    found, missed = fit_matmuls(replace(find_device("CPU"), launch=1.0, cores=2), rates)
    assert found.peak["fp32"] > 0
    assert missed < 1


def test_cluster_file_round_trip(tmp_path: Any) -> None:
    device = replace(find_device("CPU"), per_host=2, cores=2, call=3e-5, memory=12.0 * GIB, inside=LINK)
    path = tmp_path / "here.toml"
    path.write_text(file_of(ClusterSpec(device, 1, 2), 1.5, 1.1).to_toml(), encoding="utf-8")
    machine = read_cluster(path)
    assert (machine.scalar, machine.operators_scalar, machine.cluster.per_host) == (1.5, 1.1, 2)
    read = machine.cluster.device
    assert (read.cores, read.call, read.memory, read.tile) == (2, 3e-5, 12.0 * GIB, device.tile)
    assert read.inside == pytest.approx(LINK)


def test_operators_of_another_device_type_are_refused() -> None:
    assert reason_against_local_device("cpu", "1 CPU") is None
    refusal = reason_against_local_device("cuda", "8 H100")
    assert refusal is not None
    assert refusal.what.startswith("operators cannot be timed for 8 H100")
