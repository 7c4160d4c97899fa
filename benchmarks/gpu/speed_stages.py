"""Stages of speed: tokens/s, MFU and peak memory of training steps, of Weft and of systems that users would take instead."""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from bench import Bench, Row, Rows
from systems import LLAMA_1B, MOE, TINY, System, liger_patches, plain_trainer, random_batch, weft_trainer

from weft.anatomy.build import build_on_meta
from weft.anatomy.flops import training_flops_per_token
from weft.anatomy.transformers import read_anatomy
from weft.checkpoint.model_config import read_config
from weft.job import Model
from weft.plan import Compute, Kernels, Parallel, Plan, Precision

Systems = dict[str, Callable[..., System]]

NONE = Kernels(linear_cross_entropy="reference", rms_norm="reference", gated_activation="reference")
LOSS_ONLY = Kernels(rms_norm="reference", gated_activation="reference")

FP8_MOE = {**TINY["qwen3_moe"], "moe_intermediate_size": 32}
"""Sizes that FP8 matmuls of experts divide."""
GPT2 = {"model_type": "gpt2", "vocab_size": 50257, "attn_pdrop": 0.0}
"""GPT-2 of 124 million parameters with dropout 0.1 of embeddings and residuals."""
SMALL_GPT2 = {**GPT2, "vocab_size": 512, "n_embd": 128, "n_layer": 2, "n_head": 4}
ROWS = (8, 4, 2)
"""Rows of 4,096 tokens in a micro-batch; the first of them that fits is measured."""


def _weft(zero: int, compute: Compute | None = None, **precision: Any) -> Callable[..., System]:
    tables = {"parallel": Parallel(zero=zero), "compute": compute or Compute(), "precision": Precision(**precision)}
    return partial(weft_trainer, plan=Plan(**tables))


def _autocast(**options: Any) -> Callable[..., System]:
    return partial(plain_trainer, weights=torch.float32, autocast=True, **options)


def _blocks(bench: Bench) -> Compute:
    """Compiled blocks; not with small models, whose compilation for a CPU takes minutes."""
    return Compute(compile="off" if bench.small else "blocks")


def _llama(bench: Bench) -> tuple[dict[str, Any], int]:
    """Llama of 1.2 billion parameters, and tokens of a row."""
    return (TINY["llama"], 128) if bench.small else (LLAMA_1B, 4096)


def baselines(bench: Bench) -> Rows:
    """Weft beside systems that users would take, each with the most rows that fit.

    Packed rows have variable-length flash attention in all systems, full rows causal SDPA.
    """
    config, seq_len = _llama(bench)
    rows = (2,) if bench.small else ROWS
    systems: Systems = {
        "Weft, zero 0, compiled blocks": _weft(0, _blocks(bench)),
        "FSDP2, bf16, compiled blocks": partial(
            plain_trainer, weights=torch.float32, autocast=False, varlen=True, fsdp="eager" if bench.small else "blocks"
        ),
        "Transformers, bf16 autocast": _autocast(varlen=True),
    }
    yield from _compare(bench, systems, config, rows, seq_len)
    if find_spec("liger_kernel"):
        with liger_patches():
            yield from _compare(bench, {"Liger, bf16 autocast": _autocast(varlen=True)}, config, rows, seq_len)
    yield from _compare(bench, {"Weft, zero 0": _weft(0)}, config, rows, seq_len)


def speed(bench: Bench) -> Rows:
    """Llama with one document a row and packed: what each operator of Weft gains, beside plain Transformers with masks."""
    config, seq_len = _llama(bench)
    systems: Systems = {
        "Weft, zero 3, reference kernels, masks": _weft(3, Compute(kernels=NONE, attention="sdpa")),
        "+ linear cross entropy": _weft(3, Compute(kernels=LOSS_ONLY, attention="sdpa")),
        "+ attention by documents": _weft(3, Compute(kernels=LOSS_ONLY)),
        "+ Triton norms and activations": _weft(3),
        "Weft, zero 0": _weft(0),
        "plain, bf16 autocast": _autocast(),
        "plain, bf16 weights": partial(plain_trainer, weights=torch.bfloat16, autocast=False),
    }
    yield from _compare(bench, systems, config, (2,), seq_len)


def compiled(bench: Bench) -> Rows:
    """Llama with compiled blocks, and with four micro-batches a step."""
    blocks = _blocks(bench)
    config, seq_len = _llama(bench)
    systems = {"zero 0": _weft(0), "zero 0, compiled blocks": _weft(0, blocks)}
    rest = {"zero 3, compiled blocks": _weft(3, blocks)}
    rest["plain, bf16 autocast, torch.compile"] = _autocast(compiled=not bench.small)
    yield from _compare(bench, systems | rest, config, (2,), seq_len)
    yield from _compare(bench, systems, config, (4,), seq_len)
    yield from _compare(bench, systems, config, (4,), seq_len, micro_batches=4)


def fp8(bench: Bench) -> Rows:
    """Llama in compiled blocks, with FP8 matmuls and without."""
    config, seq_len = _llama(bench)
    systems = _in_fp8(bench, "zero 0, compiled blocks", _blocks(bench))
    yield from _compare(bench, systems, config, (2,) if bench.small else (4,), seq_len, micro_batches=2)


def fp8_experts(bench: Bench) -> Rows:
    """Four blocks of Qwen3-30B-A3B with FP8 matmuls, of linear layers and of experts, and without."""
    config, seq_len = (FP8_MOE, 128) if bench.small else (MOE, 4096)
    yield from _compare(bench, _in_fp8(bench, "zero 0", Compute()), config, (2,), seq_len, documents=(0,))


def fp8_losses(bench: Bench) -> Rows:
    """Losses of steps 10, 20 and 30 with FP8 matmuls and without, in small models."""
    configs = {"Llama": TINY["llama"], "experts": FP8_MOE}
    if not bench.small:
        configs["Llama"] = {**LLAMA_1B, "num_hidden_layers": 4}
    for name, config in configs.items():
        for title, make in _in_fp8(bench, name, Compute()).items():
            step, *_ = make(config=config, device=bench.torch_device)
            batches = [random_batch(256, 2, 128, bench.torch_device, seed % 3, 64) for seed in range(30)]
            losses = [step([batch]) for batch in batches][9::10]
            yield {"system": title, "losses": ", ".join(f"{loss:.4f}" for loss in losses)}
            del step
            bench.free()


def _in_fp8(bench: Bench, title: str, compute: Compute) -> Systems:
    """Systems with matmuls in bf16 and in FP8."""
    emulate = bench.device.type == "cpu"
    return {
        f"{title}, matmul = forward": _weft(0, compute),
        f"{title}, matmul = fp8": _weft(0, compute, matmul="fp8", emulate_fp8=emulate),
    }


def experts(bench: Bench) -> Rows:
    """Four blocks of Qwen3-30B-A3B."""
    config, seq_len = (TINY["qwen3_moe"], 128) if bench.small else (MOE, 4096)
    systems: Systems = {
        "Weft, zero 0": _weft(0),
        "plain, bf16 weights": partial(plain_trainer, weights=torch.bfloat16, autocast=False),
        "Weft, zero 3": _weft(3),
        "plain, bf16 autocast": _autocast(),
    }
    yield from _compare(bench, systems, config, (2,), seq_len)


def dropout(bench: Bench) -> Rows:
    """GPT-2 with dropout, whose masks depend on positions in Weft; the same model without dropout shows its cost."""
    config, rows, seq_len = (SMALL_GPT2, 2, 128) if bench.small else (GPT2, 16, 1024)
    for rate in (0.1, 0.0):
        systems = {f"Weft, zero 0, dropout {rate}": _weft(0), f"plain, bf16 autocast, dropout {rate}": _autocast()}
        rated = {**config, "resid_pdrop": rate, "embd_pdrop": rate}
        yield from _compare(bench, systems, rated, (rows,), seq_len, documents=(0,))


def _compare(
    bench: Bench,
    systems: Systems,
    config: dict[str, Any],
    num_rows: Sequence[int],
    seq_len: int,
    micro_batches: int = 1,
    documents: Sequence[int] = (0, 300),
) -> Rows:
    """Rates of each system, by length of documents: 0 for one a row, or about so many tokens.

    Args:
        num_rows: numbers of rows of a micro-batch, of which the first one that fits is measured.
    """
    for title, make in systems.items():
        try:
            for document in documents:
                batch = _most_rows(bench, make, config, num_rows, seq_len, micro_batches, document)
                yield {"system": title, **batch}
        except Exception as error:  # the other systems still run
            yield {"system": title, "error": f"{type(error).__name__}: {str(error)[:100]}"}
        bench.free()


def _most_rows(
    bench: Bench,
    make: Callable[..., System],
    config: dict[str, Any],
    num_rows: Sequence[int],
    seq_len: int,
    micro_batches: int,
    document: int,
) -> Row:
    """Rate of a system with the first number of rows that fits."""
    *larger, smallest = num_rows
    for rows in larger:
        with suppress(torch.OutOfMemoryError):
            return _rate(bench, make, config, (micro_batches, rows, seq_len), document)
        bench.free()  # here, where no traceback refers to the model
    return _rate(bench, make, config, (micro_batches, smallest, seq_len), document)


def _rate(
    bench: Bench, make: Callable[..., System], config: dict[str, Any], shape: tuple[int, int, int], document: int
) -> Row:
    """Rate of a system; `shape`: micro-batches, rows, tokens of a row.

    MFU counts the work that is done: causal attention inside of documents.
    """
    micro_batches, num_rows, seq_len = shape
    step, *_ = make(config=config, device=bench.torch_device)
    made = partial(random_batch, config["vocab_size"], num_rows, seq_len, bench.torch_device)
    batches = [made(seed, document // 10 if bench.small else document) for seed in range(8)]
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
    median, peak = statistics.median(found), bench.device.peak_flops(torch.bfloat16)
    flops = flops_per_token(config, torch.cat([batch.host_positions() for batch in batches[2:]]))
    return {
        "documents of": document or "a row",
        "batch": f"{micro_batches} x {num_rows} rows",
        "tokens/s": f"{median:.0f} ({min(found):.0f}-{max(found):.0f})",
        "MFU": f"{flops * median / peak:.1%}" if peak else "",
        "GiB": f"{bench.device.peak_memory_bytes() / 2**30:.1f}",
    }


def flops_per_token(config: dict[str, Any], positions: torch.Tensor) -> float:
    """Training FLOPs per token, with causal attention inside of documents.

    A row of s tokens is counted as s keys for each token, which is twice the mean position + 1.

    Args:
        config: configuration of the model.
        positions: int64, position of each token in its document.
    """
    source = read_config(Model(config=config))
    anatomy = read_anatomy(build_on_meta(source, torch.float32))
    return training_flops_per_token(anatomy, source, 2 * positions.double().mean().item() + 1)
