"""Stages of training steps: parity with the CPU, host waits, kernels of a step."""

import time
import warnings
from typing import Any

import torch
from bench import Bench, Rows, count_waits
from systems import LLAMA_1B, MOE, TINY, random_batch, weft_trainer

from weft.checkpoint.huggingface import gather_weights
from weft.plan import Compute, Parallel, Plan, Precision


def parity(bench: Bench) -> Rows:
    """Three steps in float32 on the accelerator and on the CPU."""
    for name, config in TINY.items():
        for document in (0, 24):
            plan, found = Plan(precision=Precision(param_dtype="fp32")), []
            for where in (torch.device("cpu"), bench.torch_device):
                step, model, _ = weft_trainer(config, plan, where, on_host=True)
                losses = [step([random_batch(512, 4, 64, where, seed, document)]) for seed in range(3)]
                found.append((torch.tensor(losses), {k: w.cpu() for k, w in gather_weights(model).items()}))
            (losses, weights), (own_losses, own_weights) = found
            error = max(((own_weights[k] - w).abs().max() / w.abs().max()).item() for k, w in weights.items())
            yield {
                "model": name,
                "documents of": document or "a row",
                "loss": f"{((own_losses - losses).abs() / losses).max().item():.1e}",
                "weights": f"{error:.1e}",
            }


def waits(bench: Bench) -> Rows:
    """Calls for which the host waits for the device in one step, by line."""
    plans = {f"zero {stage}": Plan(parallel=Parallel(zero=stage)) for stage in (0, 3)}
    for name, config in TINY.items():
        for title, plan in plans.items():
            step, *_ = weft_trainer(config, plan, bench.torch_device)
            batches = [random_batch(512, 4, 64, bench.torch_device, seed, 24) for seed in range(2)]
            for _ in range(2):
                step(batches)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                if bench.device.type == "cuda":
                    torch.cuda.set_sync_debug_mode("warn")
                step(batches)
                if bench.device.type == "cuda":
                    torch.cuda.set_sync_debug_mode("default")
            found = count_waits(caught)
            lines = ", ".join(f"{count} x {line}" for line, count in found.most_common())
            yield {"model": name, "plan": title, "waits": sum(found.values()), "lines": lines}


def profile(bench: Bench) -> Rows:
    """Kernels of one packed step of Weft in compiled blocks, by time."""
    compute = Compute(compile="off" if bench.small else "blocks")
    plan = Plan(parallel=Parallel(zero=0), compute=compute)
    yield from _profile(bench, TINY["llama"] if bench.small else LLAMA_1B, plan, 4)


def profile_experts(bench: Bench) -> Rows:
    """Kernels of one packed step of four blocks of Qwen3-30B-A3B, by time."""
    yield from _profile(bench, TINY["qwen3_moe"] if bench.small else MOE, Plan(parallel=Parallel(zero=0)), 2)


def _profile(bench: Bench, config: dict[str, Any], plan: Plan, num_rows: int) -> Rows:
    step, *_ = weft_trainer(config, plan, bench.torch_device)
    batch = random_batch(config["vocab_size"], num_rows, 128 if bench.small else 4096, bench.torch_device, 0, 300)
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
    yield {"kernel": f"all, in {wall * 1e3:.0f} ms under the profiler", "ms": f"{busy:.1f}", "calls": ""}
    for event in sorted(kernels, key=lambda event: -event.self_device_time_total)[:25]:
        yield {"kernel": event.key[:80], "ms": f"{event.self_device_time_total / 1e3:.2f}", "calls": event.count}
    calls: Any = profiler.key_averages(group_by_input_shape=True)
    for event in sorted(calls, key=lambda event: -event.self_device_time_total)[:25]:
        if event.device_type.name == "CPU" and event.self_device_time_total > 0:
            shapes = ", ".join("x".join(map(str, shape)) for shape in event.input_shapes if shape)[:60]
            time_ms = f"{event.self_device_time_total / 1e3:.2f}"
            yield {"kernel": f"{event.key} of {shapes}", "ms": time_ms, "calls": event.count}
