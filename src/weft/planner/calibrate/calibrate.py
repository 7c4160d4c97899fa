"""Measures what the planner has to know of this machine, in three or four minutes: rates of products by size, attention,
memory, links between ranks, what the host takes for a call, and, by four short trainings, how far predictions are off.

    found = calibrate(ranks=2)
    found.to_toml()                # a cluster file for `weft plan --cluster`

Rates are those of a rank while the others compute too, as far as cores are there.
"""

import itertools
import math
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from weft.device.device import detect
from weft.job import Job
from weft.planner.costmodel.cluster_file import ClusterFile, Figures, LinkFigures
from weft.planner.costmodel.hardware import GB, GIB, MIB, TERA, ClusterSpec, DeviceSpec, find_device, recognise
from weft.planner.costmodel.layout import layout_of
from weft.planner.costmodel.links import measure_links
from weft.planner.costmodel.operator_timing import time_step
from weft.planner.costmodel.operators import Like, Named, Operation, time_operations
from weft.planner.costmodel.roofline import fill
from weft.planner.costmodel.step_time import StepTime, step_time
from weft.planner.dryrun.trace import trace
from weft.planner.search.propose import space_of
from weft.train.metrics import read_metrics
from weft.train.run import train

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}
SIZES = (32, 128, 512, 2048)  # of products; three of them make 64
SEQ, HEADS, HEAD_DIM = 1024, 8, 64  # of attention
ATTENTION_FLOPS = 2 * SEQ * SEQ * HEADS * HEAD_DIM  # forward, causal
TILES, DEPTHS = (8, 16, 32, 64, 128, 256), (4, 16, 64, 128, 256, 512)
STREAM_BYTES = 2**26
WARM_UP = 2  # steps that are not counted
TRAININGS = 4  # large and small ones in turns
MODEL = {"model_type": "llama", "vocab_size": 2048, "num_attention_heads": 4, "num_key_value_heads": 2}
TRAIN = {"steps": 10, "evaluate_every": 0, "evaluate_rows": 4}
JOB: dict[str, Any] = {
    "model": {"config": {**MODEL, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 4}},
    "data": {"source": "python", "vocab_size": 2048, "seq_len": 256},
    "train": {**TRAIN, "micro_batch_size": 2},
    "plan": {"precision": {"param_dtype": "fp32"}, "parallel": {"zero": 1}},
}
SMALL_JOB: dict[str, Any] = {
    **JOB,
    "model": {"config": {**MODEL, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 8}},
    "data": {**JOB["data"], "seq_len": 128},
    "train": {**TRAIN, "micro_batch_size": 1},
}


def product(m: int, n: int, k: int, dtype: torch.dtype) -> Operation:
    """[m, k] x [k, n]."""
    return Operation("aten.mm.default", ((Like((m, k), (k, 1), dtype), Like((k, n), (n, 1), dtype)), Named(())))


def element_wise(numbers: int) -> Operation:
    """A sum of two vectors in float32: 12 bytes a number."""
    vector = Like((numbers,), (1,), torch.float32)
    return Operation("aten.add.Tensor", ((vector, vector), Named(())))


def attention(dtype: torch.dtype) -> Operation:
    """Causal, of one row."""
    strides = (HEADS * SEQ * HEAD_DIM, SEQ * HEAD_DIM, HEAD_DIM, 1)
    x = Like((1, HEADS, SEQ, HEAD_DIM), strides, dtype)
    return Operation("aten.scaled_dot_product_attention.default", ((x, x, x, None, 0.0, True), Named(())))


def calibrate(ranks: int, say: Callable[[str], None] = print) -> tuple[ClusterFile, float]:
    """Measure.

    Args:
        ranks: on this host.
        say: takes lines of progress.

    Returns:
        What a cluster file says of this machine, and by how much the products that were measured miss its formula, in the
        mean.

    Raises:
        DeviceError: the planner does not know the devices of this machine.
        WeftError: a rank failed.
    """
    detected = detect()
    on_cpu = detected.type == "cpu"
    cores = len(os.sched_getaffinity(0)) if on_cpu else 0
    memory = detected.total_memory_bytes // (ranks if on_cpu else 1)
    preset = replace(find_device("CPU") if on_cpu else recognise(detected.name), cores=cores)
    preset = replace(preset, native_bf16=detected.supports("bf16"))
    say("products, attention and memory")
    device, missed = measure_figures(preset, detected.type, min(ranks, cores) if on_cpu else 1)
    device = replace(device, per_host=ranks, memory=float(memory))
    if ranks > 1:
        say(f"links between {ranks} ranks")
        device = replace(device, inside=measure_links(ranks))
    say("what the host takes for a call: a small training on one rank")
    device = replace(device, call=seconds_of_call(ClusterSpec(device, 1, 1)))
    cluster = ClusterSpec(device, 1, ranks)
    by_formula, by_operators = [], []
    for number in range(TRAININGS):
        say(f"how far predictions are off: training {number + 1} of {TRAININGS} on {ranks} ranks")
        found = measured_run(SMALL_JOB if number % 2 else JOB, ranks, cluster)
        by_operators.append(math.log(found.seconds / found.by_operators))
        if not number % 2:  # what the host takes for small calls, formulas do not know
            by_formula.append(math.log(found.seconds / formula(found.job, ranks, cluster).seconds))
    factors = math.exp(statistics.mean(by_formula)), math.exp(statistics.mean(by_operators))
    return file_of(cluster, *factors), missed


def measure_figures(preset: DeviceSpec, device_type: str, processes: int) -> tuple[DeviceSpec, float]:
    """A preset with measured rates, and the mean error of the formula for products of all sizes, of one.

    Emulated bf16 is not measured, which takes minutes; nothing is planned in it, and attention is measured in fp32 there.
    """
    formats = {
        name: FORMATS[name] for name in preset.peak if name in FORMATS and (name == "fp32" or preset.native_bf16)
    }
    products = {
        (name, m, n, k): product(m, n, k, dtype)
        for name, dtype in formats.items()
        for m, n, k in itertools.product(SIZES, repeat=3)
    }
    vector, one = element_wise(STREAM_BYTES // 4), element_wise(1)
    attended = attention(FORMATS["bf16" if preset.native_bf16 else "fp32"])
    seconds = time_operations([*products.values(), vector, one, attended], processes, device_type)
    rates = {
        (name, m, n, k): 2.0 * m * n * k / (seconds[operation] or math.inf)
        for (name, m, n, k), operation in products.items()
    }
    device, missed = fit_products(replace(preset, launch=seconds[one] or preset.launch), rates)
    bandwidth = 3.0 * STREAM_BYTES / (seconds[vector] or math.inf)
    taken = seconds[attended]
    share = ATTENTION_FLOPS / taken / device.peak["bf16"] * (512 + SEQ) / SEQ if taken else preset.attention
    return replace(device, bandwidth=bandwidth, stream=1.0, attention=share, portable=share), missed


def fit_products(device: DeviceSpec, rates: dict[tuple[str, int, int, int], float]) -> tuple[DeviceSpec, float]:
    """Tile, depth and rates of long products with which the formula misses the measured rates by the least, in the mean of
    logarithms. Products that take no longer than two launches say nothing.

    Args:
        device: its units stay; a rank that is a process has one core.
        rates: FLOP/s by format and m, n, k.
    """
    units = 1 if device.cores else device.units
    telling = {key: rate for key, rate in rates.items() if 2.0 * math.prod(key[1:]) / rate > 2 * device.launch}
    best, least = device, math.inf
    for rows, columns, depth in itertools.product(TILES, TILES, DEPTHS):
        tried = replace(device, units=units, tile=(rows, columns), depth=depth)
        long: dict[str, list[float]] = {}  # rates of products without end, as each product has it
        for (number, m, n, k), rate in telling.items():
            long.setdefault(number, []).append(math.log(rate / fill(tried, m, n, k, number)))
        middle = {number: statistics.median(logs) for number, logs in long.items()}
        missed = statistics.mean(abs(value - middle[number]) for number, logs in long.items() for value in logs)
        if missed < least:
            measured = {number: math.exp(value) for number, value in middle.items()}
            peak = device.peak | {"bf16": measured["fp32"]} | measured
            best, least = replace(tried, peak=peak, efficiency=dict.fromkeys(peak, 1.0)), missed
    return best, math.expm1(least)


class Measured(NamedTuple):
    """A short training here."""

    job: Job
    calls: int
    """Of operators, in a step of the first rank."""
    seconds: float
    """Of a step, the median."""
    by_operators: float
    """The same, predicted by operators that were timed before and after it: what else a machine does comes and goes."""


def measured_run(table: dict[str, Any], ranks: int, cluster: ClusterSpec) -> Measured:
    """Train, and time the operators of it."""
    with tempfile.TemporaryDirectory(prefix="weft-calibrate-") as name:
        rows = {"global_batch_size": ranks * table["train"]["micro_batch_size"] * 2}
        job = Job.parse({**table, "out": f"{name}/run", "train": {**table["train"], **rows}})
        traces = trace(job, ranks, [0], detect().type)
        before = time_step(job, traces, cluster).seconds
        out = train(job, ranks=ranks, say=lambda line: None)
        after = time_step(job, traces, cluster).seconds
        steps = read_metrics(out / "metrics.jsonl")[WARM_UP:]
    seconds = statistics.median(step.step_seconds for step in steps)
    return Measured(job, sum(traces[0].count.operations.values()), seconds, (before + after) / 2)


def seconds_of_call(cluster: ClusterSpec) -> float:
    """What the host takes for a call of an operator, beside the operator: of a training so small that it is much of a step."""
    found = measured_run(SMALL_JOB, 1, replace(cluster, device=replace(cluster.device, call=0.0)))
    return max(0.0, found.seconds - found.by_operators) / found.calls


def formula(job: Job, ranks: int, cluster: ClusterSpec) -> StepTime:
    """The step of the job's plan by formula."""
    space = space_of(job, cluster)
    layout = layout_of(
        job.plan.resolve(ranks), job.data.seq_len, job.train.global_batch_size, job.train.micro_batch_size
    )
    return step_time(space.shape, layout, cluster, space.stack)


def file_of(cluster: ClusterSpec, by_formula: float, by_operators: float) -> ClusterFile:
    """The cluster as its file has it."""
    device, wire = cluster.device, cluster.device.inside
    return ClusterFile(
        device=device.name,
        hosts=1,
        devices_per_host=cluster.per_host,
        scalar=by_formula,
        operators_scalar=by_operators,
        figures=Figures(
            bf16_tflops=device.peak["bf16"] / TERA,
            fp32_tflops=device.peak["fp32"] / TERA,
            native_bf16=device.native_bf16,
            memory_gib=device.memory / GIB,
            memory_gb_per_second=device.bandwidth / GB,
            efficiency=device.efficiency["bf16"],
            attention_efficiency=min(1.0, device.attention),
            stream_efficiency=device.stream,
            launch_seconds=device.launch,
            call_seconds=device.call,
            units=device.units,
            tile=device.tile,
            depth=device.depth,
            cores=device.cores or None,
        ),
        inside=LinkFigures(latency_seconds=wire.latency, gb_per_second=wire.bandwidth / GB, ramp_mib=wire.ramp / MIB),
    )
