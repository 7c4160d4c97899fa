"""Profile of some steps on one rank: operators and kernels by torch's profiler, collectives by Weft's timers.

    profiler = Profiler(session, out)
    profiler.begin(step)         # before every step
    profiler.end(step)           # after it

All ranks call both, because they exchange clocks and wait for the ranks that write; only `train.profile_ranks` record. Each
writes two files into `profile/` of the run folder, which `weft.observe.profile` merges:

    rank-N.trace.json    trace of torch's profiler
    rank-N.json          record of this module, see `Profiler._record`; times in seconds of `time.perf_counter`

The second step of a process, whose memory is tracked anyway, also records each operator with its FLOPs and bytes.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from weft.anatomy.flops import training_flops_per_token
from weft.backends.instrumented import CollectiveTiming, InstrumentedGroup
from weft.comm.clocks import ClockOffset, measure_offset
from weft.comm.objects import any_rank
from weft.comm.recorder import RING, axis_of
from weft.data import RowSplit
from weft.device.counters import LINE_BYTES, Counters
from weft.device.device import Device
from weft.errors import JobError
from weft.files import make_folder, replace_file
from weft.job import Train
from weft.launch.log import log
from weft.memory.live_bytes import LiveBytes
from weft.memory.operator_trace import CacheModel, OperatorTrace, rows_of, samples_of
from weft.parallel.pipeline.schedule import slot_text
from weft.parallel.runtime import runtime
from weft.precision.dtypes import DTYPES
from weft.training.progress import WARM_UP_STEPS
from weft.training.session import Session

FOLDER = "profile"
CLOCK = "weft: clock"  # range in the trace whose time on this rank's clock is known
CLOCK_MARKS = 8
STEPS_AFTER = 2  # unprofiled steps after the profile, for its cost
MOST_RANKS = 8  # profiled by default
STREAM_ELEMENTS = 2**23  # of float32, in each of three tensors that are together larger than a cache
MATMUL_SIZE, RATE_TRIES = 512, 8


class Profiler:
    """Profile of the steps `train.profile_steps` on this rank; does nothing in other steps and without the key.

    Args:
        out: run folder.
    """

    def __init__(self, session: Session, out: Path):
        train, rank, start = session.job.train, session.rank, session.position.step
        self.session, self.folder = session, out / FOLDER
        wanted = train.profiled()
        first = max(wanted.start, start + WARM_UP_STEPS + 1)
        self.steps = range(first, min(first + len(wanted), train.steps + 1))
        """Steps to profile; later than wanted if the process would still be warming up."""
        ranks = train.profile_ranks or range(MOST_RANKS)
        self.records = bool(self.steps) and rank in ranks
        self.operators: OperatorTrace | None = None
        self.torch_profiler: Any = None
        self.marks: list[tuple[float, float]] = []
        self.collectives: list[tuple[CollectiveTiming, int]] = []
        self.times: list[tuple[int, float, float]] = []
        self.cpu_seconds: list[float] = []
        self.first_plain_step = start + WARM_UP_STEPS + 1
        self.offset = ClockOffset(0.0, 0.0)
        self.counters: Counters | None = None
        self.no_counters = ""

    @property
    def last_step(self) -> int:
        """Step after which a run with `train.profile_only` ends; 0 for other runs."""
        return self.steps[-1] + STEPS_AFTER if self.steps and self.session.job.train.profile_only else 0

    @contextmanager
    def trace_operators(self, live: LiveBytes) -> Iterator[None]:
        """Record the operators of a step inside of `live`, if this rank records."""
        if not self.records:
            yield
            return
        capacity = self.session.device.cache_bytes
        shared = (
            int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())) if self.session.device.type == "cpu" else 1
        )
        self.operators = OperatorTrace(live, CacheModel(capacity // shared) if capacity else None)
        with self.operators:
            yield

    def begin(self, step: int) -> None:
        """Start the profile before its first step, and the clock of each of its steps. Collective at the first step."""
        if step not in self.steps:
            return
        if step == self.steps[0]:
            self.offset = measure_offset(self.session.rank)
            if self.records:
                self._start()
            any_rank(False)  # the start of the profiler takes seconds on some ranks
        self.step_start, self.cpu_start = time.perf_counter(), time.process_time()

    def end(self, step: int) -> None:
        """Stop the profile after its last step and write its files if they can be written. Collective at the last step."""
        if step not in self.steps:
            return
        self.times.append((step, self.step_start, time.perf_counter()))
        self.cpu_seconds.append(time.process_time() - self.cpu_start)
        if step == self.steps[-1]:
            if self.records:
                self._stop()
            rates = measure_rates(
                self.session.device, self.session.torch_device, DTYPES[self.session.job.plan.precision.param_dtype]
            )  # on all ranks at once
            if self.records:
                try:
                    self._write(rates)
                except OSError as error:
                    log(
                        f"the profile of rank {self.session.rank} cannot be written: {error.strerror}; training continues"
                    )
            any_rank(False)  # the next steps wait for no rank that writes

    def _start(self) -> None:
        try:
            self.counters = Counters() if self.session.device.type == "cpu" else None
        except OSError as error:
            self.no_counters = str(error)
        self.torch_profiler = self.session.device.profiler()
        self.torch_profiler.start()
        self._mark_clock()
        InstrumentedGroup.timers.append(self._add_collective)

    def _stop(self) -> None:
        InstrumentedGroup.timers.remove(self._add_collective)
        self.session.device.synchronize()
        self._mark_clock()
        self.torch_profiler.stop()

    def _mark_clock(self) -> None:
        for _ in range(CLOCK_MARKS):
            before = time.perf_counter()
            with record_function(CLOCK):
                pass
            self.marks.append((before, time.perf_counter()))

    def _add_collective(self, timing: CollectiveTiming) -> None:
        self.collectives.append((timing, threading.get_native_id()))

    def _write(self, rates: dict[str, Any]) -> None:
        make_folder(self.folder)
        rank = self.session.rank
        self.torch_profiler.export_chrome_trace(str(self.folder / f"rank-{rank}.trace.json"))
        text = json.dumps(self._record() | {"rates": rates})
        replace_file(self.folder / f"rank-{rank}.json", text)
        self.torch_profiler, self.operators, self.collectives = None, None, []

    def _record(self) -> dict[str, Any]:
        """Contents of the record of this rank, without its rates."""
        session, trace = self.session, self.operators
        job, mesh, cache = session.job, session.mesh, trace and trace.cache
        counts, self.counters = (self.counters.read() if self.counters else None), None
        names = mesh.mesh_dim_names or ()
        pipeline = runtime(session.model).pipeline
        return {
            "rank": session.rank,
            "world_size": dist.get_world_size(),
            "axes": {axis: mesh.get_local_rank(axis) for axis in names if mesh[axis].size() > 1},
            "device": session.device.name,
            "device_type": session.device.type,
            "work": {
                "family": session.anatomy.family,
                "parameters": session.anatomy.parameters,
                "blocks": len(session.anatomy.blocks),
                "rows": job.train.global_batch_size,
                "seq_len": job.data.seq_len,
            },
            "flops_per_token": training_flops_per_token(session.anatomy, session.model.config, job.data.seq_len),
            "plan": job.plan.model_dump(exclude={"prediction"}, exclude_none=True),
            "steps": self.times,
            "cpu_seconds": self.cpu_seconds,
            "first_plain_step": self.first_plain_step,
            "collectives": [_collective(timing, thread) for timing, thread in self.collectives],
            "clock": {"marks": self.marks, "offset": self.offset.seconds, "error": self.offset.error},
            "slots": _slots(pipeline, session) if pipeline else [],
            "operators": rows_of(trace.costs) if trace else [],
            "memory": samples_of(trace.samples) if trace else [],
            "cache": {
                "capacity": cache.capacity if cache else None,
                "accessed": cache.accessed if cache else None,
                "fetched": cache.fetched if cache else None,
                "compulsory": cache.compulsory if cache else None,
                "references": counts and counts[0],
                "misses": counts and counts[1],
                "counted_bytes": counts and counts[1] * LINE_BYTES,
                "no_counters": self.no_counters,
            },
        }


def _collective(timing: CollectiveTiming, thread: int) -> dict[str, Any]:
    """Record of a collective; `bytes` are sent by this rank under a ring algorithm, as the recorder counts them."""
    axis, link = axis_of(timing.group)
    ring = RING.get(timing.operation)
    return {
        "axis": axis,
        "link": link,
        "operation": timing.operation,
        "bytes": ring(timing.bytes, timing.group.size()) if ring else 0,
        "size": timing.bytes,
        "issued": timing.issued,
        "returned": timing.returned,
        "done": timing.done,
        "waited": timing.waited,
        "ended": timing.ended,
        "thread": thread,
    }


def _slots(pipeline: Any, session: Session) -> list[str]:
    """Slots of this rank in the schedule of a step, in order, as `weft.parallel.pipeline.schedule` writes them."""
    micro_batches = RowSplit.of_job(session.job).num_micro_batches
    return [slot_text(slot) for slot in pipeline.schedule_of(micro_batches).slots[pipeline.rank]]


def measure_rates(device: Device, torch_device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Peak FLOP/s of matmuls and memory bandwidth in bytes/s of a rank: published, or measured where nothing is published.

    Measured rates are those of a rank while the other ranks of the host measure too.
    """
    if device.memory_bandwidth:
        return {"flops": device.peak_flops(dtype), "bandwidth": device.memory_bandwidth, "measured": False}
    a, b, total = (torch.ones(STREAM_ELEMENTS, device=torch_device) for _ in range(3))
    x, y, product = (torch.ones(MATMUL_SIZE, MATMUL_SIZE, dtype=dtype, device=torch_device) for _ in range(3))
    adding = _fastest(device, lambda: torch.add(a, b, out=total))
    multiplying = _fastest(device, lambda: torch.mm(x, y, out=product))
    bandwidth = 3 * a.numel() * a.element_size() / adding
    return {"flops": 2 * MATMUL_SIZE**3 / multiplying, "bandwidth": bandwidth, "measured": True}


def _fastest(device: Device, call: Callable[[], object]) -> float:
    """Seconds of the fastest of a few calls."""
    seconds = []
    for _ in range(RATE_TRIES):
        device.synchronize()
        start = time.perf_counter()
        call()
        device.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def check_profiled_ranks(train: Train, world_size: int) -> None:
    """Refuse to profile ranks that the job does not have.

    Raises:
        JobError: names the first such rank.
    """
    missing = sorted(rank for rank in train.profile_ranks if rank >= world_size)
    if missing:
        raise JobError(
            f"train.profile_ranks names rank {missing[0]} of a job with {world_size} ranks",
            where="train.profile_ranks",
            rule="ranks are numbered from 0",
            fix=f"name ranks from 0 to {world_size - 1}, or leave it out for the first {MOST_RANKS}",
        )
