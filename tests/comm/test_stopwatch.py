"""Exposed and hidden seconds by events: exact with simulated streams, and equal to those of the clock on CPU ranks."""

import time
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from tests.lab.families import family
from tests.lab.parity import packed_batches, plan_for, share
from tests.lab.plans import resolved
from tests.lab.pool import run_ranks
from weft.anatomy.build import build_on_meta
from weft.backends import hierarchical
from weft.checkpoint.loading import materialize
from weft.checkpoint.model_config import read_config
from weft.comm.collectives import gather_dim, start_all_reduce, start_all_to_all
from weft.comm.stopwatch import CollectiveClock, DeviceClock, blocking, collective_clock, mark, wait
from weft.device.cpu import Cpu
from weft.job import Model, Optimizer
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.parallel.data.fsdp_timing import time_fsdp
from weft.parallel.parallelize import parallelize
from weft.plan import Memory, Parallel, Plan
from weft.topology.mesh import build_mesh, data_rank
from weft.training.optimizer import build_optimizer
from weft.training.step import train_step

LATE = 0.3  # seconds by which rank 1 is late
SLACK = 0.12


class Stream:
    """Stream whose time moves when work is added; a context manager that makes it the current stream."""

    def __init__(self, device: "SimulatedDevice"):
        self.device, self.now = device, 0.0

    def __enter__(self) -> None:
        self.device.streams.append(self)

    def __exit__(self, *exception: object) -> None:
        self.device.streams.pop()


class Event:
    """Event whose time is read when the device has reached it."""

    def __init__(self, device: "SimulatedDevice"):
        self.device = device

    def record(self, stream: Stream) -> None:
        self.seconds = stream.now

    def query(self) -> bool:
        return self.seconds <= self.device.reached

    def elapsed_time(self, end: "Event") -> float:
        assert self.query()
        assert end.query(), "the host would wait"
        return 1e3 * (end.seconds - self.seconds)


class SimulatedDevice(Cpu):
    """Accelerator with simulated time."""

    type = "cuda"

    def __init__(self) -> None:
        self.reached = float("inf")
        self.streams = [Stream(self)]

    def stream(self) -> Any:
        return Stream(self)

    def current_stream(self) -> Any:
        return self.streams[-1]

    def event(self) -> Any:
        return Event(self)

    def compute(self, seconds: float) -> None:
        """Add work to the current stream."""
        self.current_stream().now += seconds


class Work:
    """Collective that ends at a time."""

    def __init__(self, device: SimulatedDevice, end: float):
        self.device, self.end = device, end

    def wait(self) -> None:
        stream = self.device.current_stream()
        stream.now = max(stream.now, self.end)


class Group:
    """Group of two ranks along tp."""

    group_desc = "mesh_tp"

    def size(self) -> int:
        return 2


def test_the_clock_of_an_accelerator_reads_events() -> None:
    device, group = SimulatedDevice(), Group()
    assert isinstance(collective_clock(Cpu()), CollectiveClock)
    with collective_clock(device) as clock:
        assert isinstance(clock, DeviceClock)
        with blocking(group):  # type: ignore[arg-type]
            Work(device, 2.0).wait()  # 2 s exposed
        device.compute(1.0)
        began = mark()
        device.compute(3.0)  # from 3 to 6
        wait(Work(device, 8.0), group, began)  # type: ignore[arg-type]  # 3 s hidden, 2 s exposed
        began = mark()
        device.compute(4.0)  # from 8 to 12
        wait(Work(device, 9.5), group, began)  # type: ignore[arg-type]  # 1.5 s hidden
        device.reached = 11.0
        assert clock.take() == ({"tp": 4.0}, {"tp": 3.0}), "the host does not wait"
        device.reached = 12.0
        assert clock.take() == ({"tp": 0.0}, {"tp": 1.5})
        assert clock.take() == ({}, {})
    assert mark() is None
    wait(Work(device, 20.0), group)  # type: ignore[arg-type]
    assert device.current_stream().now == 20.0
    assert clock.take() == ({}, {})


def late_collectives(rank: int, ranks: int) -> list[dict[str, float]]:
    """Exposed seconds of collectives that rank 1 joins late, by the clock and by events; asynchronous, as between hosts."""
    with mock.patch.object(hierarchical, "host_id", return_value=[f"host {rank}"]):
        group = build_mesh(Plan(parallel=Parallel(tp=ranks)), "cpu", ranks).get_group("tp")
    x = torch.ones(8, 4, requires_grad=True)

    def late() -> None:
        dist.barrier()
        time.sleep(LATE * rank)

    with CollectiveClock() as clock, DeviceClock(Cpu()) as events:
        late()
        gather_dim(x.detach(), group, 0)
        late()
        pending = start_all_reduce(torch.ones(4), group)
        pending.wait()
        late()
        start_all_to_all(x, group)().sum().backward()
    return [clock.take()[0], events.take()[0]]


def test_events_and_clock_agree_on_exposed_seconds() -> None:
    (by_clock, by_events), _ = run_ranks(2, late_collectives)
    assert by_events.keys() == by_clock.keys() == {"tp between"}
    assert by_events["tp between"] == pytest.approx(by_clock["tp between"], abs=SLACK)
    assert by_events["tp between"] > 2 * LATE


class Blocks(nn.Module):
    """Two layers, whose second one can be late in forward or in backward."""

    def __init__(self, seconds: float):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        time.sleep(self.seconds)
        return self.second(hidden).tanh()


def fsdp_step(
    rank: int, ranks: int, timed: bool, own_buffers: bool = False
) -> tuple[dict[str, float], dict[str, float], int, list[Tensor]]:
    """Exposed seconds of two micro-batches under FSDP2, by the clock and by events; number of waits, and the gradients."""
    group = build_mesh(Plan(parallel=Parallel(dp_shard=ranks)), "cpu", ranks)
    if own_buffers:  # a group of torch, which asks its backend for memory
        group = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp_shard",))
    torch.manual_seed(0)
    model = Blocks(LATE * rank)
    for unit in (model.first, model.second, model):
        fully_shard(unit, mesh=group["dp_shard"])
    if timed:
        time_fsdp(model, {}, reduce_scatters=True)
    if own_buffers:
        for unit in (model.first, model.second, model):
            cast(FSDPModule, unit).set_allocate_memory_from_process_group_for_comm(True)
    with CollectiveClock() as clock, DeviceClock(Cpu()) as events:
        for _ in range(2):
            dist.barrier()
            model(torch.ones(4, 16) * (rank + 1)).sum().backward()
    waits = len(events.spans)
    measured, _ = events.take()
    gradients = [parameter.grad.full_tensor() for parameter in model.parameters() if parameter.grad is not None]
    return clock.take()[0], measured, waits, gradients


def test_waits_of_fsdp_are_seen_and_gradients_are_unchanged() -> None:
    """Rank 0 waits for rank 1 in the all-gather of the second layer."""
    timed, plain = (run_ranks(2, fsdp_step, is_timed) for is_timed in (True, False))
    by_clock, by_events, waits, _ = timed[0]
    # Two all-gathers in forward, two in backward and two reduce-scatters; the last one is added in the next forward.
    assert waits == 2 * 6 - 1
    assert by_clock["dp_shard"] > LATE
    assert by_events["dp_shard"] == pytest.approx(by_clock["dp_shard"], abs=2 * SLACK)
    assert plain[0][1] == {}
    for (*_, found), (*_, expected) in zip(timed, plain, strict=True):
        assert len(found) == 4
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_buffers_of_the_process_group_can_be_used_with_measured_units() -> None:
    own, plain = (run_ranks(2, fsdp_step, is_timed, is_timed) for is_timed in (True, False))
    for (*_, found), (*_, expected) in zip(own, plain, strict=True):
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert own[0][1] == {}


def trained(
    rank: int, ranks: int, parallel: dict[str, Any], recompute: tuple[str, ...], timed: bool
) -> tuple[list[float], set[str]]:
    """Losses of two steps of a model, and the axes whose waits were seen by events."""
    source = Model(config=family("llama"))
    plan = resolved(plan_for("fp32", **parallel), ranks)
    plan = plan.model_copy(update={"memory": Memory(recompute=recompute)})
    mesh = build_mesh(plan, "cpu", ranks)
    model = parallelize(build_on_meta(read_config(source), torch.float32), plan, mesh).train()
    materialize(model, source, torch.device("cpu"))
    if timed:
        time_fsdp(model, {}, reduce_scatters=True)
    optimizer = DistributedOptimizer(build_optimizer(model, Optimizer()), model, Cpu())
    losses, seen = [], set[str]()
    for batch in packed_batches(96)[:2]:
        with DeviceClock(Cpu()) as clock:
            micro_batches = share(batch, data_rank(mesh), plan.parallel.data_ranks, 2)
            losses.append(train_step(model, optimizer, micro_batches, 1.0).loss)
        seen |= {span.where for span in clock.spans}
    return losses, seen


@pytest.mark.parametrize(
    ("parallel", "recompute", "axes"),
    [({"zero": 3}, ("block",), {"dp_shard"}), ({"zero": 2, "tp": 2, "dp_shard": 1}, (), {"tp"})],
    ids=str,
)
def test_a_measured_model_trains_to_the_same_bits(
    parallel: dict[str, Any], recompute: tuple[str, ...], axes: set[str]
) -> None:
    measured, plain = (run_ranks(2, trained, parallel, recompute, timed) for timed in (True, False))
    assert [losses for losses, _ in measured] == [losses for losses, _ in plain]
    assert all(seen == axes for _, seen in measured)
