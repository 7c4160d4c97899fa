"""Planner on published trainings: predicted steps, time of a search, scaling of the best plans. Needs no accelerator.

    python benchmarks/planner.py                 # four tables, some minutes on one core
    python benchmarks/planner.py --only cases    # or search, scaling, confirm

cases: trainings whose layout and speed were published. The step predicted for the published layout, with what is known of the
framework that ran it, beside the published step; and the best layout that a search finds for the same framework and devices.
A negative distance means that the best layout is predicted to be faster than the published one.
search: CPU seconds of a full search and of its reasons, by model and number of devices.
scaling: tokens per second and device of Weft's best plan, where the batch grows with the devices; docs/scaling.svg shows them.
confirm: seconds of short dry runs of some layouts, and their peak memory by formula beside the counted peak.
"""

import argparse
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.published.frameworks import STACKS
from benchmarks.published.known_shapes import KNOWN
from weft.job import Job
from weft.plan import Compute, Precision
from weft.planner.costmodel.hardware import GIB, ClusterSpec, cluster_of, find_device
from weft.planner.costmodel.layout import TrainingLayout
from weft.planner.costmodel.peak_memory import peak_memory
from weft.planner.costmodel.shape import Shape
from weft.planner.costmodel.step_time import step_time
from weft.planner.dryrun.extrapolate import trace_in_brief
from weft.planner.dryrun.layer_activations import trace_layers
from weft.planner.search.alternatives import sensitivity
from weft.planner.search.propose import describe, planned
from weft.planner.search.search import search
from weft.planner.search.space import Choice, Space
from weft.planner.search.space_of_job import space_of
from weft.planner.search.strategy import stack_for

PICTURE = Path(__file__).parents[1] / "docs" / "scaling.svg"
LLAMA_405B = Shape(126, 16384, 128, 8, 128, 53248, 128256)
LLAMA_8B = Shape(32, 4096, 32, 8, 128, 14336, 128256)
GPT3 = KNOWN["gpt3"]


@dataclass(frozen=True)
class Case:
    """Published training."""

    name: str
    shape: Shape
    device: str
    layout: TrainingLayout
    stack: str
    published: float
    """Published seconds of a step."""
    source: str


def of_rate(shape: Shape, layout: TrainingLayout, flops: float) -> float:
    """Seconds of a step at a rate of model FLOP/s per device."""
    return layout.global_batch * layout.seq * shape.flops(layout.seq) / flops / layout.num_devices


GPT3_LAYOUT = TrainingLayout(2048, 1536, 1, tp=8, sp=False, pp=16, vpp=1, dp=8, zero=0, recompute="full")
LLAMA_LAYOUT = TrainingLayout(8192, 2048, 1, tp=8, sp=True, pp=16, vpp=8, dp=128, zero=1)
DEEPSEEK_LAYOUT = TrainingLayout(4096, 15360, 1, pp=16, vpp=2, dp=128, ep=64, zero=1, recompute="light", dtype="fp8")
ASCEND_LAYOUT = TrainingLayout(2048, 1536, 1, tp=8, sp=True, pp=16, dp=3, zero=1, recompute="none")
CASES = (
    Case(
        "GPT-3 175B, 1,024 A100",
        GPT3,
        "A100-80",
        GPT3_LAYOUT,
        "megatron-2021",
        of_rate(GPT3, GPT3_LAYOUT, 140e12 * 3 / 4),  # the published rate counts recompute: 8 FLOPs for 6 of the model
        "Narayanan et al. 2021, section 5.1: 140 TFLOP/s",
    ),
    Case(
        "Llama 3 405B, 16,384 H100",
        LLAMA_405B,
        "H100",
        LLAMA_LAYOUT,
        "megatron-core",
        of_rate(LLAMA_405B, LLAMA_LAYOUT, 400e12),
        "Llama 3, table 4: 400 TFLOP/s",
    ),
    Case(
        "DeepSeek-V3, 2,048 H800",
        KNOWN["deepseekv3"],
        "H800",
        DEEPSEEK_LAYOUT,
        "megatron-core",
        15360 * 4096 / 1e12 * 180e3 * 3600 / 2048,
        "DeepSeek-V3, section 1: 180,000 device hours per trillion tokens",
    ),
    Case(
        "GPT-3 175B, 384 Ascend 910B",
        GPT3,
        "Ascend 910B",
        ASCEND_LAYOUT,
        "mindspeed",
        of_rate(GPT3, ASCEND_LAYOUT, 0.533 * 313e12),
        "MindSpeed, linearity: 53.4 and 53.2 % with 256 and 512 devices",
    ),
)


def overlapped(case: Case) -> Space:
    """Search space of a case, with the properties of its framework.

    DeepSeek's framework overlaps dispatch with computation (DualPipe), and balances its experts without an auxiliary loss: the
    busiest one has at most a tenth more rows than the mean (Wang et al. 2024, figure 2).
    """
    stack = STACKS[case.stack]
    if case.name.startswith("DeepSeek"):
        stack = replace(stack, ep_overlap=0.9, once_per_host=True, p2p_overlap=1.0, imbalance=1.1)
    cluster = cluster_of(find_device(case.device), case.layout.num_devices)
    return Space(case.shape, case.layout.seq, case.layout.global_batch, cluster, stack)


QWEN_235B = {
    "model_type": "qwen3_moe",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
LLAMA_405B_CONFIG = {
    "model_type": "llama",
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
# Name -> configuration, devices and layout.
CONFIRMED: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "Qwen3 235B-A22B": (QWEN_235B, 1024, {"dp": 1024, "zero": 3, "micro_batch": 4, "recompute": "full"}),
    "Qwen3 235B-A22B, tp": (
        QWEN_235B,
        1024,
        {"tp": 2, "sp": True, "dp": 512, "zero": 3, "micro_batch": 8, "recompute": "full"},
    ),
    "Qwen3 235B-A22B, pp": (
        QWEN_235B,
        1024,
        {"pp": 16, "dp": 64, "vpp": 5, "zero": 2, "schedule": "interleaved", "recompute": "full"},
    ),
    "Llama 3 405B": (
        LLAMA_405B_CONFIG,
        16384,
        {"tp": 8, "sp": True, "pp": 16, "dp": 128, "vpp": 7, "zero": 1, "schedule": "interleaved"},
    ),
}


def cases() -> Table:
    """Table of published trainings, predicted, with the best layout found."""
    table = Table(title="Published trainings")
    for name in ("training", "published, s", "predicted, s", "error", "GiB", "best layout", "its seconds", "distance"):
        table.add_column(name, overflow="fold")
    for case in CASES:
        space = overlapped(case)
        time_ = step_time(case.shape, case.layout, space.cluster, space.stack)
        memory = peak_memory(case.shape, case.layout, space.stack)
        best = search(space, 1).best
        found = [describe(best[0]), f"{best[0].time.seconds:.2f}"] if best else ["nothing fits", ""]
        table.add_row(
            f"{case.name} ({case.source}): {describe(Choice(case.layout, time_, memory))}",
            f"{case.published:.2f}",
            f"{time_.seconds:.2f}",
            f"{time_.seconds / case.published - 1:+.1%}",
            f"{memory.total / GIB:.1f}",
            *found,
            f"{best[0].time.seconds / time_.seconds - 1:+.1%}" if best else "",
        )
    return table


def searches() -> Table:
    """Table of CPU seconds of searches."""
    table = Table(title="CPU seconds of a search on H100, 4,096 tokens, four rows per device")
    for name in ("model", "devices", "layouts", "timed", "best five", "reasons", "best"):
        table.add_column(name, overflow="fold")
    models = {"Llama 8B": LLAMA_8B, "Qwen3 30B-A3B": KNOWN["qwen330b"], "Qwen3 235B-A22B": KNOWN["qwen3235b"]}
    for name, shape in (models | {"DeepSeek-V3": KNOWN["deepseekv3"]}).items():
        for devices in (64, 1024, 16384):
            space = Space(shape, 4096, 4 * devices, cluster_of(find_device("H100"), devices), STACKS["weft"])
            begin = time.process_time()
            found = search(space)
            searched = time.process_time()
            if found.best:
                sensitivity(space, found.best[0])
            end = time.process_time()
            best = describe(found.best[0]) if found.best else "nothing fits"
            row = (name, f"{devices:,}", f"{found.size:,}", f"{found.timed:,}", f"{searched - begin:.1f}")
            table.add_row(*row, f"{end - searched:.1f}", best)
    return table


def scaling() -> Table:
    """Table of the best plans by number of devices."""
    table = Table(title="Qwen3 30B-A3B, 4,096 tokens, eight rows per device, Weft's best plan")
    for name in ("device", "devices", "plan", "s a step", "tokens/s/device", "of the smallest"):
        table.add_column(name, overflow="fold")
    rates: dict[str, dict[int, float]] = {"Ascend 910B": {}, "H100": {}}
    for device, found in rates.items():
        preset = find_device(device)
        stack = stack_for(Precision(), Compute(), "npu" if device.startswith("Ascend") else "cuda")
        for devices in (8, 64, 384, 1024, 8192):
            cluster = ClusterSpec(preset, devices // preset.per_host, preset.per_host)
            best = search(Space(KNOWN["qwen330b"], 4096, 8 * devices, cluster, stack), 1).best
            if not best:
                table.add_row(device, f"{devices:,}", "nothing fits", "", "", "")
                continue
            rate = found[devices] = 8 * 4096 / best[0].time.seconds
            of_first = f"{rate / next(iter(found.values())):.0%}"
            table.add_row(
                device, f"{devices:,}", describe(best[0]), f"{best[0].time.seconds:.2f}", f"{rate:,.0f}", of_first
            )
    PICTURE.write_text(draw(rates))
    return table


def draw(rates: dict[str, dict[int, float]]) -> str:
    """SVG chart of tokens per second and device over the number of devices, on a logarithmic axis."""
    sizes = sorted({size for found in rates.values() for size in found})
    most, first, last = max(max(found.values()) for found in rates.values()), math.log(sizes[0]), math.log(sizes[-1])

    def at(size: int, rate: float) -> tuple[float, float]:
        return 70 + 560 * (math.log(size) - first) / (last - first), 300 - 250 * rate / most

    lines = ['<rect width="760" height="350" fill="white"/>', '<text x="20" y="30">tokens/s and device</text>']
    for size in sizes:
        x, y = at(size, 0)
        lines.append(f'<line x1="{x:.1f}" y1="{y}" x2="{x:.1f}" y2="50" stroke="#ddd"/>')
        lines.append(f'<text x="{x:.1f}" y="{y + 20}" text-anchor="middle">{size:,}</text>')
    for (name, found), color in zip(rates.items(), ("#d1495b", "#30638e"), strict=True):
        points = [at(*point) for point in found.items()]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        for (x, y), rate in zip(points, found.values(), strict=True):
            lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>')
            lines.append(f'<text x="{x:.1f}" y="{y - 8:.1f}" text-anchor="middle">{rate:,.0f}</text>')
        lines.append(f'<text x="{points[-1][0] + 30:.1f}" y="{points[-1][1] + 4:.1f}" fill="{color}">{name}</text>')
    lines.append('<text x="350" y="342" text-anchor="middle">devices</text>')
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 350" font-family="sans-serif" font-size="12">'
    return "\n".join([head, *lines, "</svg>"]) + "\n"


def confirmations() -> Table:
    """Table of short dry runs: their seconds, and their peak memory beside the formula's."""
    table = Table(title="Short dry runs: H100, 4,096 tokens, four rows per device")
    for name in ("model", "devices", "layout", "GiB by formula", "GiB counted", "seconds"):
        table.add_column(name, overflow="fold")
    for name, (config, devices, degrees) in CONFIRMED.items():
        data = {"source": "tokens", "path": "none.npy", "seq_len": 4096}
        job = Job.parse({"model": {"config": config}, "data": data, "train": {"global_batch_size": 4 * devices}})
        space = space_of(job, cluster_of(find_device("H100"), devices))
        space = replace(space, traced=trace_layers(job, "cuda", with_tp=True))
        layout = TrainingLayout(seq=4096, global_batch=4 * devices, expert_tp=1, **degrees)
        choice = Choice(layout, space.time(layout), space.memory(layout))
        begin = time.perf_counter()
        traces = trace_in_brief(planned(job, space, layout), devices, "cuda")
        seconds = time.perf_counter() - begin
        counted = max(found.count.peak for found in traces) / GIB
        row = (name, f"{devices:,}", describe(choice), f"{choice.memory.allocated / GIB:.1f}", f"{counted:.1f}")
        table.add_row(*row, f"{seconds:.0f}")
    return table


TABLES = {"cases": cases, "search": searches, "scaling": scaling, "confirm": confirmations}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(TABLES), default=list(TABLES))
    console = Console(width=170)
    for name in parser.parse_args().only:
        console.print(TABLES[name]())


if __name__ == "__main__":
    main()
