"""Calibration of the planner to this machine, in three or four minutes.

    file, error = calibrate(ranks=2)
    file.to_toml()                 # a cluster file for `weft plan --cluster`

Measured are matmul rates by size, attention, memory bandwidth, links between ranks, the host overhead per operator call, and,
with four short training runs, the ratio of measured to predicted step time. Rates are measured on one rank while the other
ranks compute too, up to the number of cores.
"""

import itertools
import math
import statistics
import tempfile
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from weft.device.detect import detect
from weft.job import Job
from weft.launch.log import log
from weft.plan import resolve_plan
from weft.planner.costmodel.cluster_file import ClusterFile, Figures, LinkFigures
from weft.planner.costmodel.hardware import GB, GIB, MIB, TERA, ClusterSpec, DeviceSpec
from weft.planner.costmodel.layout import layout_of
from weft.planner.costmodel.links import measure_links
from weft.planner.costmodel.local_device import local_device
from weft.planner.costmodel.operator_timing import time_step
from weft.planner.costmodel.operators import KeywordArguments, Operation, TensorSpec, time_operations
from weft.planner.costmodel.roofline import fill
from weft.planner.costmodel.step_time import StepTime, step_time
from weft.planner.dryrun.trace import trace
from weft.planner.search.space_of_job import space_of
from weft.planner.train import train
from weft.training.metrics import read_metrics

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SIZES = (32, 128, 512, 2048)  # matmul dimensions; all 64 combinations of m, n and k are measured
SEQ, HEADS, HEAD_DIM = 1024, 8, 64  # dimensions of the measured attention
ATTENTION_FLOPS = 2 * SEQ * SEQ * HEADS * HEAD_DIM  # forward, causal
TILES, DEPTHS = (8, 16, 32, 64, 128, 256), (4, 16, 64, 128, 256, 512)
STREAM_BYTES = 2**26
WARM_UP = 2  # number of warm-up steps, excluded from the median
TRAININGS = 4  # number of training runs, alternating between the large and the small model
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


def matmul(m: int, n: int, k: int, dtype: torch.dtype) -> Operation:
    """Matmul [m, k] x [k, n]."""
    return Operation(
        "aten.mm.default",
        ((TensorSpec((m, k), (k, 1), dtype), TensorSpec((k, n), (n, 1), dtype)), KeywordArguments(())),
    )


def addition(num_elements: int) -> Operation:
    """Sum of two float32 vectors: 12 bytes of memory traffic per element."""
    vector = TensorSpec((num_elements,), (1,), torch.float32)
    return Operation("aten.add.Tensor", ((vector, vector), KeywordArguments(())))


def attention(dtype: torch.dtype) -> Operation:
    """Causal attention of one sequence."""
    strides = (HEADS * SEQ * HEAD_DIM, SEQ * HEAD_DIM, HEAD_DIM, 1)
    x = TensorSpec((1, HEADS, SEQ, HEAD_DIM), strides, dtype)
    return Operation("aten.scaled_dot_product_attention.default", ((x, x, x, None, 0.0, True), KeywordArguments(())))


def calibrate(ranks: int) -> tuple[ClusterFile, float]:
    """Measure this machine.

    Args:
        ranks: number of ranks on this host.

    Returns:
        The cluster file of this machine, and the mean relative error of the fitted matmul model.

    Raises:
        DeviceError: the planner has no preset for the devices of this machine.
        WeftError: a rank failed.
    """
    preset = local_device(ranks)
    log("measuring matmuls, attention and memory bandwidth")
    device, missed = measure_figures(preset, detect().type, min(ranks, preset.cores) if preset.cores else 1)
    if ranks > 1:
        log(f"measuring links between {ranks} ranks")
        device = replace(device, inside=measure_links(ranks))
    log("measuring the host overhead per operator call: a small training run on one rank")
    device = replace(device, call=seconds_of_call(ClusterSpec(device, 1, 1)))
    cluster = ClusterSpec(device, 1, ranks)
    by_formula, by_operators = [], []
    for index in range(TRAININGS):
        log(f"measuring the prediction error: training run {index + 1} of {TRAININGS} on {ranks} ranks")
        found = measured_run(SMALL_JOB if index % 2 else JOB, ranks, cluster)
        by_operators.append(math.log(found.seconds / found.by_operators))
        if not index % 2:  # the formulas do not model host overhead, which dominates the small runs
            by_formula.append(math.log(found.seconds / formula(found.job, ranks, cluster).seconds))
    factors = math.exp(statistics.mean(by_formula)), math.exp(statistics.mean(by_operators))
    return file_of(cluster, *factors), missed


def measure_figures(preset: DeviceSpec, device_type: str, processes: int) -> tuple[DeviceSpec, float]:
    """Replace the rates of a preset by measured ones.

    Emulated bf16 is not measured, because it takes minutes and no plan uses it; attention is then measured in fp32.

    Args:
        device_type: torch device type.
        processes: number of processes that measure concurrently.

    Returns:
        The device, and the mean relative error of the fitted matmul model.
    """
    dtypes = {name: DTYPES[name] for name in preset.peak if name in DTYPES and (name == "fp32" or preset.native_bf16)}
    matmuls = {
        (name, m, n, k): matmul(m, n, k, dtype)
        for name, dtype in dtypes.items()
        for m, n, k in itertools.product(SIZES, repeat=3)
    }
    vector, one = addition(STREAM_BYTES // 4), addition(1)
    attended = attention(DTYPES["bf16" if preset.native_bf16 else "fp32"])
    seconds = time_operations([*matmuls.values(), vector, one, attended], processes, device_type)
    rates = {
        (name, m, n, k): 2.0 * m * n * k / (seconds[operation] or math.inf)
        for (name, m, n, k), operation in matmuls.items()
    }
    device, missed = fit_matmuls(replace(preset, launch=seconds[one] or preset.launch), rates)
    bandwidth = 3.0 * STREAM_BYTES / (seconds[vector] or math.inf)
    taken = seconds[attended]
    share = ATTENTION_FLOPS / taken / device.peak["bf16"] * (512 + SEQ) / SEQ if taken else preset.attention
    return replace(device, bandwidth=bandwidth, stream=1.0, attention=share, portable=share), missed


def fit_matmuls(device: DeviceSpec, rates: dict[tuple[str, int, int, int], float]) -> tuple[DeviceSpec, float]:
    """Fit tile, depth and peak rates of the matmul model to measured rates, by the least mean absolute error of logarithms.

    Matmuls that take no longer than two kernel launches are ignored, unless all of a dtype do, as on a busy machine whose
    launches took long.

    Args:
        device: device to fit; its number of units is kept, except on CPU, where a rank has one core.
        rates: measured FLOP/s by dtype and m, n, k.

    Returns:
        The fitted device, and the mean relative error.
    """
    units = 1 if device.cores else device.units
    lasting = {key for key, rate in rates.items() if 2.0 * math.prod(key[1:]) / rate > 2 * device.launch}
    dtypes = {dtype for dtype, *_ in lasting}
    usable = {key: rate for key, rate in rates.items() if key in lasting or key[0] not in dtypes}
    best, least = device, math.inf
    for rows, columns, depth in itertools.product(TILES, TILES, DEPTHS):
        tried = replace(device, units=units, tile=(rows, columns), depth=depth)
        # Logarithms of the rate of a very large matmul, as implied by each measurement.
        long: dict[str, list[float]] = {}
        for (dtype, m, n, k), rate in usable.items():
            long.setdefault(dtype, []).append(math.log(rate / fill(tried, m, n, k, dtype)))
        middle = {dtype: statistics.median(logs) for dtype, logs in long.items()}
        missed = statistics.mean(abs(value - middle[dtype]) for dtype, logs in long.items() for value in logs)
        if missed < least:
            measured = {dtype: math.exp(value) for dtype, value in middle.items()}
            peak = device.peak | {"bf16": measured["fp32"]} | measured
            best, least = replace(tried, peak=peak, efficiency=dict.fromkeys(peak, 1.0)), missed
    return best, math.expm1(least)


class Measured(NamedTuple):
    """A short training run on this machine."""

    job: Job
    calls: int
    """Operator calls per step on the first rank."""
    seconds: float
    """Median step time."""
    by_operators: float
    """Step time predicted from timed operators: mean of a timing before and one after the run, as machine load varies."""


def measured_run(table: dict[str, Any], ranks: int, cluster: ClusterSpec) -> Measured:
    """Run a short training, and time its operators before and after it."""
    with tempfile.TemporaryDirectory(prefix="weft-calibrate-") as name:
        rows = {"global_batch_size": ranks * table["train"]["micro_batch_size"] * 2}
        job = Job.parse({**table, "out": f"{name}/run", "train": {**table["train"], **rows}})
        traces = trace(job, ranks, [0], detect().type)
        before = time_step(job, traces, cluster).seconds
        out = train(job, ranks=ranks, log=lambda line: None)
        after = time_step(job, traces, cluster).seconds
        steps = read_metrics(out / "metrics.jsonl")[WARM_UP:]
    seconds = statistics.median(step.step_seconds for step in steps)
    return Measured(job, sum(traces[0].count.operations.values()), seconds, (before + after) / 2)


def seconds_of_call(cluster: ClusterSpec) -> float:
    """Host overhead per operator call, from a training run so small that the overhead is a large part of its step."""
    found = measured_run(SMALL_JOB, 1, replace(cluster, device=replace(cluster.device, call=0.0)))
    return max(0.0, found.seconds - found.by_operators) / found.calls


def formula(job: Job, ranks: int, cluster: ClusterSpec) -> StepTime:
    """Step time of the job's plan by formula."""
    space = space_of(job, cluster)
    layout = layout_of(
        resolve_plan(job.plan, ranks, native_bf16=cluster.device.native_bf16),
        job.data.seq_len,
        job.train.global_batch_size,
        job.train.micro_batch_size,
    )
    return step_time(space.shape, layout, cluster, space.stack)


def file_of(cluster: ClusterSpec, by_formula: float, by_operators: float) -> ClusterFile:
    """Cluster file of a calibrated cluster."""
    device, link = cluster.device, cluster.device.inside
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
        inside=LinkFigures(latency_seconds=link.latency, gb_per_second=link.bandwidth / GB, ramp_mib=link.ramp / MIB),
    )
