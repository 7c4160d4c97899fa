"""Stages of training steps: parity with the CPU, host waits, speed beside other systems, kernels of a step."""

import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench import Bench, Rows
from systems import LLAMA_1B, MOE, TINY, System, plain_trainer, random_batch, weft_trainer

from weft.anatomy.build import build_on_meta
from weft.anatomy.flops import training_flops_per_token
from weft.anatomy.transformers import read_anatomy
from weft.checkpoint.huggingface import gather_weights
from weft.checkpoint.model_config import read_config
from weft.job import Model
from weft.plan import Compute, Kernels, Parallel, Plan, Precision

NONE = Kernels(linear_cross_entropy="reference", rms_norm="reference", gated_activation="reference")
LOSS_ONLY = Kernels(rms_norm="reference", gated_activation="reference")
LADDER = {
    "Weft, reference kernels, masks": Plan(compute=Compute(kernels=NONE, attention="sdpa")),
    "+ linear cross entropy": Plan(compute=Compute(attention="sdpa", kernels=LOSS_ONLY)),
    "+ attention by documents": Plan(compute=Compute(kernels=LOSS_ONLY)),
    "+ Triton norms and activations": Plan(),
    "zero 0": Plan(parallel=Parallel(zero=0)),
}

FP8_MOE = {**TINY["qwen3_moe"], "moe_intermediate_size": 32}
"""Sizes that FP8 matmuls of experts divide."""
TWICE = ("+ Triton norms and activations", "zero 0")
"""Systems that are measured with twice the rows too; plain Transformers does not fit 80 GB."""


def parity(bench: Bench) -> Rows:
    """Three steps in float32 on the accelerator and on the CPU."""
    rows: Rows = []
    for name, config in TINY.items():
        for document in (0, 24):
            plan, found = Plan(precision=Precision(param_dtype="fp32")), []
            for where in (torch.device("cpu"), bench.torch_device):
                step, model, _ = weft_trainer(config, plan, where, on_host=True)
                losses = [step([random_batch(512, 4, 64, where, seed, document)]) for seed in range(3)]
                found.append((torch.tensor(losses), {k: w.cpu() for k, w in gather_weights(model).items()}))
            (losses, weights), (own_losses, own_weights) = found
            error = max(((own_weights[k] - w).abs().max() / w.abs().max()).item() for k, w in weights.items())
            rows.append(
                {
                    "model": name,
                    "documents of": document or "a row",
                    "loss": f"{((own_losses - losses).abs() / losses).max().item():.1e}",
                    "weights": f"{error:.1e}",
                }
            )
    return rows


def waits(bench: Bench) -> Rows:
    """Calls for which the host waits for the device in one step, by line."""
    rows: Rows = []
    plans = {"zero 0": Plan(parallel=Parallel(zero=0)), "zero 3": Plan()}
    for name, config in TINY.items():
        for title, plan in plans.items():
            step, *_ = weft_trainer(config, plan, bench.torch_device)
            batches = [random_batch(512, 4, 64, bench.torch_device, seed, 24) for seed in range(2)]
            for _ in range(2):
                step(batches)
            found: Counter[str] = Counter()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                if bench.device.type == "cuda":
                    torch.cuda.set_sync_debug_mode("warn")
                step(batches)
                if bench.device.type == "cuda":
                    torch.cuda.set_sync_debug_mode("default")
            for warning in caught:
                if "synchroniz" in str(warning.message):
                    found[f"{'/'.join(Path(warning.filename).parts[-2:])}:{warning.lineno}"] += 1
            lines = ", ".join(f"{count} x {line}" for line, count in found.most_common())
            rows.append({"model": name, "plan": title, "waits": sum(found.values()), "lines": lines})
    return rows


def speed(bench: Bench) -> Rows:
    """Tokens/s, MFU and peak memory of a Llama of 1.2 billion parameters, with one document a row and packed."""
    systems: dict[str, Callable[..., System]] = {
        title: partial(weft_trainer, plan=plan) for title, plan in LADDER.items()
    }
    systems["plain, bf16 autocast"] = partial(plain_trainer, weights=torch.float32, autocast=True)
    systems["plain, bf16 weights"] = partial(plain_trainer, weights=torch.bfloat16, autocast=False)
    config, num_rows, seq_len = (TINY["llama"], 2, 128) if bench.small else (LLAMA_1B, 2, 4096)
    twice = {f"{title}, twice the rows": system for title, system in systems.items() if title in TWICE}
    rows = _compare(bench, systems, config, num_rows, seq_len) + _compare(bench, twice, config, 2 * num_rows, seq_len)
    if not bench.small:
        liger = partial(plain_trainer, weights=torch.float32, autocast=True, liger=True)
        rows += _compare(bench, {"plain + Liger, bf16 autocast": liger}, config, num_rows, seq_len)
        rows += _compare(bench, {"plain + Liger, twice the rows": liger}, config, 2 * num_rows, seq_len)
    return rows


def compiled(bench: Bench) -> Rows:
    """Tokens/s of the Llama of `speed` with compiled blocks, and with four micro-batches a step."""
    blocks, whole = _blocks(bench), Parallel(zero=0)
    systems: dict[str, Callable[..., System]] = {
        "zero 0": partial(weft_trainer, plan=Plan(parallel=whole)),
        "zero 0, compiled blocks": partial(weft_trainer, plan=Plan(parallel=whole, compute=blocks)),
        "zero 3, compiled blocks": partial(weft_trainer, plan=Plan(compute=blocks)),
    }
    plain = partial(plain_trainer, weights=torch.float32, autocast=True, compiled=not bench.small)
    config, num_rows, seq_len = (TINY["llama"], 2, 128) if bench.small else (LLAMA_1B, 2, 4096)
    rows = _compare(bench, systems | {"plain, bf16 autocast, torch.compile": plain}, config, num_rows, seq_len)
    twice = {f"{title}, twice the rows": system for title, system in systems.items() if title.startswith("zero 0")}
    rows += _compare(bench, twice, config, 2 * num_rows, seq_len)
    long = {f"{title}, twice the rows, four micro-batches": system for title, system in systems.items() if "0" in title}
    return rows + _compare(bench, long, config, 2 * num_rows, seq_len, micro_batches=4)


def _blocks(bench: Bench) -> Compute:
    """Compiled blocks; not with small models, whose compilation for a CPU takes minutes."""
    return Compute(compile="off" if bench.small else "blocks")


def fp8(bench: Bench) -> Rows:
    """Tokens/s of the Llama of `speed`, in compiled blocks, with FP8 matmuls and without."""
    config, num_rows, seq_len = (TINY["llama"], 2, 128) if bench.small else (LLAMA_1B, 4, 4096)
    systems = _in_fp8(bench, "zero 0, compiled blocks", _blocks(bench))
    return _compare(bench, systems, config, num_rows, seq_len, micro_batches=2, documents=(0,))


def fp8_experts(bench: Bench) -> Rows:
    """Tokens/s of four blocks of Qwen3-30B-A3B with FP8 matmuls, of linear layers and of experts, and without."""
    config, num_rows, seq_len = (FP8_MOE, 2, 128) if bench.small else (MOE, 2, 4096)
    return _compare(bench, _in_fp8(bench, "zero 0", Compute()), config, num_rows, seq_len, documents=(0,))


def fp8_losses(bench: Bench) -> Rows:
    """Losses of steps 10, 20 and 30 with FP8 matmuls and without, in small models."""
    configs = {"Llama": TINY["llama"], "experts": FP8_MOE}
    if not bench.small:
        configs["Llama"] = {**LLAMA_1B, "num_hidden_layers": 4}
    rows: Rows = []
    for name, config in configs.items():
        for title, make in _in_fp8(bench, name, Compute()).items():
            step, *_ = make(config=config, device=bench.torch_device)
            batches = [random_batch(256, 2, 128, bench.torch_device, seed % 3, 64) for seed in range(30)]
            losses = [step([batch]) for batch in batches][9::10]
            rows.append({"system": title, "losses": ", ".join(f"{loss:.4f}" for loss in losses)})
            del step
            bench.free()
    return rows


def _in_fp8(bench: Bench, title: str, compute: Compute) -> dict[str, Callable[..., System]]:
    """Systems with matmuls in bf16 and in FP8."""
    systems: dict[str, Callable[..., System]] = {}
    for matmul in ("forward", "fp8"):
        precision = Precision(matmul=matmul, emulate_fp8=matmul == "fp8" and bench.device.type == "cpu")
        plan = Plan(parallel=Parallel(zero=0), precision=precision, compute=compute)
        systems[f"{title}, matmul = {matmul}"] = partial(weft_trainer, plan=plan)
    return systems


def _compare(
    bench: Bench,
    systems: dict[str, Callable[..., System]],
    config: dict[str, Any],
    num_rows: int,
    seq_len: int,
    micro_batches: int = 1,
    documents: tuple[int, ...] = (0, 300),
) -> Rows:
    """Rows of each system, by length of documents: 0 for one a row, or about so many tokens."""
    source = read_config(Model(config=config))
    flops = training_flops_per_token(read_anatomy(build_on_meta(source, torch.float32)), source, seq_len)
    rows: Rows = []
    for title, make in systems.items():
        try:
            found = _rates(bench, make, config, (micro_batches, num_rows, seq_len), flops, documents)
        except Exception as error:  # such as too little memory: the other systems still run
            what = f"{type(error).__name__}: {str(error)[:60]}"
            found = [{"documents of": "", "tokens/s": what, "MFU": "", "GiB": ""}]
        rows += [{"system": title, **row} for row in found]
        print(*rows[-len(found) :], sep="\n", flush=True)  # a stage that is cut off has not measured in vain
        bench.free()
    return rows


def _rates(
    bench: Bench,
    make: Callable[..., System],
    config: dict[str, Any],
    shape: tuple[int, int, int],
    flops: float,
    documents: tuple[int, ...],
) -> Rows:
    """Rates by length of documents, as in `_compare`; `shape`: micro-batches, rows, tokens of a row."""
    step, *_ = make(config=config, device=bench.torch_device)
    micro_batches, num_rows, seq_len = shape
    peak, rows = bench.device.peak_flops(torch.bfloat16), Rows()
    for document in documents:
        batches = [
            random_batch(config["vocab_size"], num_rows, seq_len, bench.torch_device, seed, document)
            for seed in range(8)
        ]
        for batch in batches[:2]:
            step([batch] * micro_batches)
        bench.device.reset_peak_memory()
        found = []
        for batch in batches[2:]:
            bench.device.synchronize()
            start = time.perf_counter()
            step([batch] * micro_batches)
            bench.device.synchronize()
            found.append(micro_batches * num_rows * seq_len / (time.perf_counter() - start))
        median = statistics.median(found)
        rows.append(
            {
                "documents of": document or "a row",
                "tokens/s": f"{median:.0f} ({min(found):.0f}-{max(found):.0f})",
                "MFU": f"{flops * median / peak:.1%}" if peak else "",
                "GiB": f"{bench.device.peak_memory_bytes() / 2**30:.1f}",
            }
        )
    return rows


def experts(bench: Bench) -> Rows:
    """Tokens/s and peak memory of four blocks of Qwen3-30B-A3B."""
    config, num_rows, seq_len = (TINY["qwen3_moe"], 2, 128) if bench.small else (MOE, 2, 4096)
    systems: dict[str, Callable[..., System]] = {
        "Weft, zero 3": partial(weft_trainer, plan=Plan()),
        "Weft, zero 0": partial(weft_trainer, plan=Plan(parallel=Parallel(zero=0))),
        "plain, bf16 autocast": partial(plain_trainer, weights=torch.float32, autocast=True),
        "plain, bf16 weights": partial(plain_trainer, weights=torch.bfloat16, autocast=False),
    }
    return _compare(bench, systems, config, num_rows, seq_len)


def profile(bench: Bench) -> Rows:
    """Kernels of one packed step of Weft, by time."""
    return _profile(bench, TINY["llama"] if bench.small else LLAMA_1B, Plan())


def profile_experts(bench: Bench) -> Rows:
    """Kernels of one packed step of four blocks of Qwen3-30B-A3B, by time."""
    return _profile(bench, TINY["qwen3_moe"] if bench.small else MOE, Plan(parallel=Parallel(zero=0)))


def _profile(bench: Bench, config: dict[str, Any], plan: Plan) -> Rows:
    rows_of, seq_len = (2, 128) if bench.small else (2, 4096)
    step, *_ = weft_trainer(config, plan, bench.torch_device)
    batch = random_batch(config["vocab_size"], rows_of, seq_len, bench.torch_device, 0, 300)
    for _ in range(2):
        step([batch])
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if bench.device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    bench.device.synchronize()
    begin = time.perf_counter()
    with torch.profiler.profile(activities=kinds, record_shapes=True) as profiler:
        step([batch])
        bench.device.synchronize()
    wall = time.perf_counter() - begin
    events: Any = profiler.key_averages()
    kernels = [
        event
        for event in events
        if event.device_type.name != "CPU" and not event.is_user_annotation and event.self_device_time_total > 0
    ]
    busy = sum(event.self_device_time_total for event in kernels) / 1e3
    rows: Rows = [{"kernel": f"all, in {wall * 1e3:.0f} ms under the profiler", "ms": f"{busy:.1f}", "calls": ""}]
    for event in sorted(kernels, key=lambda event: -event.self_device_time_total)[:30]:
        time_ms = f"{event.self_device_time_total / 1e3:.2f}"
        rows.append({"kernel": event.key[:100], "ms": time_ms, "calls": event.count})
    calls: Any = profiler.key_averages(group_by_input_shape=True)
    for event in sorted(calls, key=lambda event: -event.self_device_time_total)[:40]:
        if event.device_type.name == "CPU" and event.self_device_time_total > 0:
            shapes = ", ".join("x".join(map(str, shape)) for shape in event.input_shapes if shape)[:100]
            time_ms = f"{event.self_device_time_total / 1e3:.2f}"
            rows.append({"kernel": f"{event.key} of {shapes}", "ms": time_ms, "calls": event.count})
    return rows
