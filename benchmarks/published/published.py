"""Published runs: read from a CSV table with one metric per line (docs/planner.md), with the measured step time of each run."""

import csv
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.published.frameworks import STACKS
from benchmarks.published.hardware import read_hardware
from benchmarks.published.known_shapes import known_shape
from weft.errors import DataError, PlanError, WeftError
from weft.planner.costmodel.frameworks import FrameworkModel
from weft.planner.costmodel.hardware import ClusterSpec
from weft.planner.costmodel.layout import Schedule, TrainingLayout
from weft.planner.costmodel.peak_memory import peak_memory
from weft.planner.costmodel.shape import Recompute, Shape

USABLE = 0.97  # usable share of a device's memory; drivers and page tables take the rest


class Source(NamedTuple):
    """Properties of a source's runs that its table does not contain."""

    stack: str
    """Name of the framework model."""
    sharded: str = ""
    """Name of the framework model of runs with ZeRO 3; empty: the same."""
    sweep: bool = False
    """True if the source sweeps over configurations, including bad ones; otherwise its configurations were tuned."""
    causal: bool = False
    """True if its model FLOPs count causal attention (half of the scores)."""
    even_routing: bool = False
    """True if routing is forced to be even."""
    has_step_times: bool = True
    """True if its step times are valid; otherwise only its memory figures are used."""


CORE = ("megatron-core", "megatron-fsdp")
# Sources by the prefix of a run's id before the first dash.
SOURCES: dict[str, Source] = {
    "sc21": Source("megatron-2021", sharded="deepspeed"),  # the paper's own comparison with ZeRO 3
    "mlm2020": Source("megatron-2021"),
    "kort": Source("megatron-2022"),
    "zb": Source("megatron-2022", sweep=True),
    "mtnlg": Source("megatron-deepspeed"),
    "bloom": Source("megatron-deepspeed", sweep=True),
    "glm": Source("megatron-deepspeed"),
    "neox": Source("megatron-deepspeed"),
    "dsazure": Source("deepspeed"),
    "mcoreh100": Source(*CORE),
    "megascale": Source(*CORE),
    "llama3": Source(*CORE, causal=True),
    "nem": Source(*CORE),
    "folding": Source(*CORE, causal=True, even_routing=True),  # tokens above an expert's share are dropped
    "nebius": Source(*CORE, sweep=True, causal=True),
    "simumax": Source(*CORE, sweep=True, even_routing=True),
    "mcoremoe": Source("megatron-bridge", causal=True),
    "moezoo": Source("megatron-bridge", causal=True),
    "bridge": Source("megatron-bridge", causal=True),
    "isamb": Source("megatron-bridge", has_step_times=False),  # its authors report a faulty network
    "hag": Source("research", sweep=True),
    "opt": Source("fsdp"),
    "foundry": Source("fsdp", sweep=True),
    "fms": Source("fms"),
    "titan": Source("torchtitan"),
    "tune": Source("torchtitan"),
    "smollm": Source("torchtitan"),
    "primerl": Source("torchtitan"),
    "moonlight": Source("torchtitan"),
    "ttnpu": Source("torchtitan"),
    "nano": Source("nanotron", sweep=True),
    "picotron": Source("nanotron"),
    "ms": Source("mindspeed"),
    "pangu": Source("mindspeed"),
    "scaletorch": Source("plain-torch", sweep=True),
}
UNKNOWN = Source("megatron-core", sharded="fsdp")
# Patterns in the notes of a run, and the changes to the framework model that they imply.
NOTES: tuple[tuple[str, dict[str, Any]], ...] = (
    (r"unfused attention|attention kernel:? (torch|megatron)|(torch|megatron) attention", {"flash": False}),
    (r"\bbalanced?\b|token drop", {"imbalance": 1.0}),
    (r"real routing", {"imbalance": FrameworkModel.imbalance}),
    (
        r"alltoall|dispatcher a2a",
        {
            "once_per_host": False,
            "ep_intra_node_rate": FrameworkModel.ep_intra_node_rate,
            "permute_bytes": FrameworkModel.permute_bytes,
        },
    ),
    (r"(?<!no )ep overlap|overlap on", {"ep_overlap": 0.7}),
    (r"mc2 enabled, legacy", {"elementwise_traffic": 2.6}),  # before Megatron-Core: fewer fused kernels
    (r"async ?tp", {"tp_overlap": 0.3, "tp_backward": 0.3}),  # its authors report 4 to 14 % faster steps
)
COLUMNS = ("id", "hardware", "num_devices", "model", "metric", "value")


@dataclass(frozen=True)
class PublishedRun:
    """One published run."""

    id: str
    family: str
    hardware: str
    model: str
    shape: Shape
    layout: TrainingLayout
    cluster: ClusterSpec
    stack: FrameworkModel
    metrics: dict[str, float]
    num_devices: int
    guessed: bool
    """True if the table does not state what is recomputed; then the least recomputation that fits is assumed."""

    @property
    def source(self) -> Source:
        """Source of the run."""
        return SOURCES.get(self.family, UNKNOWN)

    @property
    def group(self) -> tuple[str, str]:
        """Calibration group: source and framework, and device."""
        return f"{self.family}: {self.stack.name.removesuffix('-26.06')}", self.cluster.device.name

    @property
    def model_flops(self) -> float:
        """Model FLOPs per step."""
        return self.layout.global_batch * self.layout.seq * self.shape.flops(self.layout.seq)


def read_runs(path: Path) -> tuple[list[PublishedRun], dict[str, str]]:
    """Read the runs of a CSV file.

    Returns:
        The runs, and the ids of the runs that cannot be predicted, with the reason.

    Raises:
        DataError: the file is missing or is not a table of runs.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, ValueError, csv.Error) as error:
        what = f"cannot read {path}: {error.strerror if isinstance(error, OSError) else error}"
        rule, fix = (
            "a table of runs is a CSV file in UTF-8",
            "give a CSV file with the columns listed in docs/planner.md",
        )
        raise DataError(what, where=str(path), rule=rule, fix=fix) from None
    missing = [name for name in COLUMNS if rows and name not in rows[0]]
    if missing or not rows:
        raise DataError(
            f"the file has no column {', '.join(missing)}" if missing else "the file has no rows",
            where=str(path),
            rule="a table of runs has one metric per line, with the columns listed in docs/planner.md",
            fix="add the missing columns" if missing else "add at least one row",
        )
    lines: dict[str, list[Mapping[str, str]]] = defaultdict(list)
    for row in rows:
        if not row["metric"].startswith("predicted_"):
            lines[row["id"].split(".")[0]].append(row)
    runs, refused = [], {}
    for name, same in lines.items():
        try:
            runs.append(read_run(name, same))
        except WeftError as error:
            refused[name] = error.what
    return runs, refused


def read_run(name: str, rows: Sequence[Mapping[str, str]]) -> PublishedRun:
    """Build one run from its lines.

    Raises:
        WeftError: the device is unknown, required columns are empty, or the notes mark the run as an outlier.
    """
    row, family = rows[0], source_family(name.split("-")[0])
    if any("OUTLIER" in line.get("notes", "") for line in rows):
        raise DataError("the notes mark the run as an outlier", where=name)
    stack = stack_of_row(row, SOURCES.get(family, UNKNOWN))
    num_devices = _parse_int(row, "num_devices")
    shape, layout = shape_of_row(row), layout_of_row(row, stack)
    check(shape, layout)
    # If ep is a separate axis, its ranks have the same tokens and different experts.
    if layout.num_devices * layout.ep == num_devices and layout.ep > 1:
        layout = replace(layout, expert_tp=layout.tp)
    elif layout.num_devices != num_devices:
        raise DataError(
            f"tp {layout.tp} x pp {layout.pp} x cp {layout.cp} x dp {layout.dp} is not {num_devices} devices",
            where=name,
            rule="the product of the degrees is the number of devices",
            fix="correct the degrees, or remove the run",
        )
    cluster = read_hardware(row["hardware"], num_devices)
    layout = complete(row, shape, layout, cluster, stack)
    metrics = {line["metric"]: _parse_float(line, "value") for line in rows}
    return PublishedRun(
        name,
        family,
        row["hardware"],
        row["model"],
        shape,
        layout,
        cluster,
        stack,
        metrics,
        num_devices,
        guessed=not row.get("recompute"),
    )


def complete(
    row: Mapping[str, str], shape: Shape, layout: TrainingLayout, cluster: ClusterSpec, stack: FrameworkModel
) -> TrainingLayout:
    """Fill in the settings that a run's table does not state, with the values that tuning would choose.

    These are: the most virtual pipeline stages that divide the layers evenly, the least recomputation that fits, and, without
    a pipeline, the largest micro-batch that fits.
    """

    def fits(candidate: TrainingLayout) -> bool:
        return peak_memory(shape, candidate, stack).total <= USABLE * cluster.device.memory

    if not row.get("vpp") and layout.pp > 1 and stack.gather_overlap:
        even = [v for v in range(1, 9) if 0 in (shape.layers % (layout.pp * v), (shape.layers + 2) % (layout.pp * v))]
        layout = replace(layout, vpp=max(even, default=1))
    sizes = [layout.micro_batch]
    if not row.get("micro_batch") and layout.pp == 1:
        sizes = [size for size in (16, 8, 4, 2, 1) if layout.micro_batches % size == 0]
    kinds: tuple[tuple[Recompute, float], ...] = ((layout.recompute, layout.recompute_share),)
    if not row.get("recompute"):
        kinds = ("none", 1.0), ("light", 1.0), *(("full", share / 8) for share in range(1, 9))
    candidates = [
        replace(layout, micro_batch=size, recompute=kind, recompute_share=share, rest="light")
        for kind, share in kinds
        for size in sizes
    ]
    return next((candidate for candidate in candidates if fits(candidate)), candidates[-1])


def source_family(prefix: str) -> str:
    """Source by a run's id prefix: the longest known source that it starts with, else the prefix without trailing digits."""
    found = [family for family in SOURCES if prefix.startswith(family)]
    return max(found, key=len) if found else prefix.rstrip("0123456789")


def stack_of_row(row: Mapping[str, str], source: Source) -> FrameworkModel:
    """Framework model of a run: that of its source, adapted to the run's ZeRO stage, hardware, dtype and notes."""
    sharded = (row.get("zero") or "0")[0] == "3"
    stack = STACKS[source.sharded if sharded and source.sharded else source.stack]
    notes = row.get("notes", "").lower()
    if stack.name == "megatron-bridge" and re.search(r"\bGB\d00", row["hardware"]):
        release = re.search(r"release (\d\d\.\d\d)", notes)
        recent = "hybridep" in notes or (release is not None and float(release[1]) >= 26.06)
        # CUDA graphs reduce launch times.
        stack = STACKS["megatron-bridge-26.06"] if recent else replace(stack, moe_launch_seconds=2e-3)
    if stack.name == "megatron-deepspeed" and "bf16" in row.get("precision", ""):
        # 16-bit gradients and their float32 sum on every rank.
        stack = replace(stack, gradient_bytes=6, optimizer_bytes=12, reduce_bytes=4)
    if source.even_routing:
        stack = replace(stack, imbalance=1.0)
    for pattern, changes in NOTES:
        if re.search(pattern, notes):
            stack = replace(stack, **changes)
    return stack


def shape_of_row(row: Mapping[str, str]) -> Shape:
    """Dimensions of a run's model, from its line or else from the published configuration of the model.

    Raises:
        DataError: the number of layers or the hidden size is in neither.
    """
    known, name = known_shape(row["model"]), row["model"].lower()
    layers = int(row.get("layers") or 0)
    if known and (row.get("experts") or not row.get("ffn") or not layers):
        cut: dict[str, Any] = (
            {} if layers in (0, known.layers) or known.mamba_layers else {"layers": layers, "predict_ahead": 0}
        )
        if cut and known.dense_layers:
            cut["dense_layers"] = min(known.dense_layers, 1)
        return replace(known, **cut)
    hidden, heads = _parse_int(row, "hidden"), int(row.get("heads") or 0)
    if not layers:
        _parse_int(row, "layers")
    heads = heads or hidden // 128
    plain = any(part in name for part in ("gpt", "mpt", "opt-", "nemotron-4", "bloom", "falcon", "gopher"))
    small = name.startswith("qwen3") and hidden <= 2560
    return Shape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=int(row.get("kv_heads") or heads),
        head_dim=128 if name.startswith("qwen3") else hidden // heads,
        ffn=int(row.get("ffn") or 4 * hidden),
        vocab=int(row.get("vocab") or (51200 if plain else 32000)),
        gated=not plain,
        tied=plain or small or "tied embeddings=true" in row.get("notes", "").lower(),
        positions=int(row["seq"]) if plain and row.get("seq") else 0,
        biases=plain,
        experts=int(row.get("experts") or 0),
        top_k=int(row.get("topk") or 0),
        expert_ffn=int(row.get("ffn") or 0) if row.get("experts") else 0,
        window=known.window if known else 0,
        windowed=known.windowed if known else 0.5,
    )


def layout_of_row(row: Mapping[str, str], stack: FrameworkModel) -> TrainingLayout:
    """Layout of a run from its line.

    Raises:
        DataError: a degree, the sequence length or the batch size is missing.
    """
    seq, dp, pp = _parse_int(row, "seq"), _parse_int(row, "dp"), _parse_int(row, "pp")
    batch = _parse_int(row, "global_batch")
    batch = batch // seq if batch > 100 * seq else batch  # some tables give the batch size in tokens
    micro = int(row.get("micro_batch") or 1)
    notes, zero = row.get("notes", ""), row.get("zero") or str(stack.zero)
    vpp = int(row["vpp"]) if (row.get("vpp") or "").isdigit() else 1
    recompute = _recompute(row.get("recompute") or "none")
    return TrainingLayout(
        seq=seq,
        global_batch=batch,
        micro_batch=min(micro, max(1, batch // dp)),
        tp=_parse_int(row, "tp"),
        sp=row.get("sp") == "1" or (row.get("sp") == "" and int(row["tp"]) > 1 and stack.sp),
        pp=pp,
        vpp=vpp,
        balance_head=stack.balance_head,
        cp=int(row.get("cp") or 1),
        ep=int(row.get("ep") or 1),
        dp=dp,
        zero=int(zero[0]),
        shard=8 if "HSDP" in zero and dp > 8 else 0,
        recompute=recompute,
        recompute_share=0.7
        if "moe" in (row.get("recompute") or "")
        else 1.0,  # only the MoE part is recomputed, about 0.7 of a layer
        rest="light",
        dtype=_parse_dtype(row.get("precision") or "bf16"),
        schedule=_schedule(notes),
        fused_loss=stack.fused_loss or "fused cross entropy" in notes,
        offload="activation cpu offload" in notes.lower(),
        adapters="lora" in row["model"].lower(),
        expert_tp=_expert_tp(row, stack),
    )


def _recompute(text: str) -> Recompute:
    """Recompute mode from the wording of a table."""
    if text.startswith("full") or "moe" in text:
        return "full"
    if "norm" in text:
        return "light"
    return "selective" if text.startswith(("select", "core_attn", "mlp", "attention")) else "none"


def _expert_tp(row: Mapping[str, str], stack: FrameworkModel) -> int:
    """Expert tensor-parallel degree: from the notes, otherwise Megatron's default (tp)."""
    found = re.search(r"ETP=?(\d+)", row.get("notes", ""))
    if found:
        return int(found[1])
    return 1 if stack.once_per_host and int(row.get("ep") or 1) > 1 else int(row["tp"])


def _parse_dtype(text: str) -> str:
    plain = text.lower()
    if "rowwise" in plain:  # row-wise scaling costs about as much as fp8 gains
        return "bf16"
    return "fp4" if "fp4" in plain else "fp8" if "fp8" in plain else "bf16"


def _schedule(notes: str) -> Schedule:
    found = re.search(r"schedule (ZB-H1|ZB-1p|ZB-2p|ZB-H2)", notes, re.IGNORECASE)
    names: dict[str, Schedule] = {"zb-h1": "zb-h1", "zb-1p": "zb-h1", "zb-h2": "zb-h2", "zb-2p": "zb-2p"}
    return names[found[1].lower()] if found else "1f1b"


def _parse_int(row: Mapping[str, str], name: str) -> int:
    text = row.get(name) or ""
    if not text.isdigit() or int(text) < 1:
        raise DataError(
            f"{name} is {text!r}",
            where=row["id"],
            rule=f"{name} is an integer of at least 1",
            fix=f"set {name}, or remove the run",
        )
    return int(text)


def _parse_float(row: Mapping[str, str], name: str) -> float:
    try:
        return float(row[name])
    except ValueError:
        raise DataError(f"{name} is {row[name]!r}", where=row["id"], rule=f"{name} is a number") from None


def measured_seconds(run: PublishedRun) -> float | None:
    """Measured step time, from the metric that gives it most directly; None if there is none."""
    found, layout = run.metrics, run.layout
    tokens, devices = layout.global_batch * layout.seq, run.num_devices
    flops = layout.global_batch * layout.seq * run.shape.flops(layout.seq, run.source.causal)
    hardware = megatron_hardware_flops(run.shape, layout.global_batch, layout.seq)
    peak = run.cluster.device.peak["bf16"]
    readings = (
        ("iter_time_s", lambda value: value),
        ("iter_time_ms", lambda value: value / 1e3),
        ("tokens_per_s_per_dev", lambda value: tokens / devices / value),
        ("tokens_per_s", lambda value: tokens / value),
        ("samples_per_s_per_dev", lambda value: layout.global_batch / devices / value),
        ("samples_per_s", lambda value: layout.global_batch / value),
        ("tflops_per_dev_model", lambda value: flops / devices / value / 1e12),
        ("tflops_per_dev_hw", lambda value: hardware / devices / value / 1e12),
        ("mfu_pct", lambda value: flops / devices / peak / value * 100),
    )
    if not run.source.has_step_times:
        return None
    return next((to_seconds(found[name]) for name, to_seconds in readings if found.get(name)), None)


def megatron_hardware_flops(shape: Shape, batch: int, seq: int) -> float:
    """Hardware FLOPs of one GPT step with full recomputation: 96 B s L h^2 (1 + s / 6h + V / 16 L h).

    Source: Narayanan et al. 2021, section 5.1.
    """
    h, layers = shape.hidden, shape.layers
    return 96 * batch * layers * seq * h**2 * (1 + seq / (6 * h) + shape.vocab / (16 * h * layers))


def check(shape: Shape, layout: TrainingLayout) -> None:
    """Reject layouts that no framework can run.

    Raises:
        PlanError: a degree does not divide the dimension that it splits.
    """
    rules = (
        (
            layout.pp * layout.vpp > shape.layers,
            f"{layout.pp} x {layout.vpp} pipeline stages need more than the model's {shape.layers} layers",
            "each pipeline stage has at least one layer",
        ),
        (
            shape.heads % layout.tp > 0,
            f"tp {layout.tp} does not divide {shape.heads} heads",
            "tp divides the number of attention heads",
        ),
        (
            bool(shape.experts) and shape.experts % layout.ep > 0,
            f"ep {layout.ep} does not divide {shape.experts} experts",
            "ep divides the number of experts",
        ),
        (
            layout.seq % (2 * layout.cp) > 0 and layout.cp > 1,
            f"2 x cp {layout.cp} does not divide {layout.seq} tokens",
            "twice cp divides the sequence length",
        ),
    )
    for broken, what, rule in rules:
        if broken:
            raise PlanError(what, where="layout", rule=rule, fix="choose another degree")
