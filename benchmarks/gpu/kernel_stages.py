"""Stages of single operators: rates of the device, Triton kernels, FP8, attention."""

import math
import shutil
import subprocess
import time
from typing import Any

import torch
from bench import Bench, Rows
from systems import random_batch
from torch import Tensor

from weft.compat import flash_implementations
from weft.compute import dropout, fp8_cast, fp8_experts, gated_activation, rms_norm
from weft.compute.attention_choice import AttentionShape, choose_attention, time_attention
from weft.compute.cross_entropy import LogitTransform, Vocabulary, fused_loss_and_gradient, loss_and_gradient
from weft.compute.cross_entropy_kernels import can_launch
from weft.compute.experts import grouped_linear
from weft.compute.fp8 import block_shapes, fp8_matmul
from weft.compute.fp8_cast import quantize_layouts
from weft.compute.sequences import VarlenKernel
from weft.compute.varlen_attention import choose_kernel
from weft.compute.varlen_blocks import PLAIN_BLOCKS
from weft.parallel.sequence.attention_plan import plan_attention
from weft.parallel.sequence.context_grid import zigzag_indices
from weft.parallel.sequence.ring_attention import RingConfig, attend_step, attend_step_backward
from weft.training.attention import documents_of

SMI = "name,driver_version,power.limit,power.draw,clocks.sm,temperature.gpu"
"""Properties of a card that nvidia-smi prints."""


def ceilings(bench: Bench) -> Rows:
    """Rates of a copy and of a large matmul, alone and for 15 seconds, with clock and power of the card."""
    size = 512 if bench.small else 8192
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=bench.torch_device) for _ in range(2))
    yield {"rate": "bf16 matmul, TFLOP/s", "value": 2 * size**3 / bench.seconds(torch.mm, a, b) / 1e12, "card": _smi()}
    x = torch.randn(2**20 if bench.small else 2**30, device=bench.torch_device)
    y = torch.empty_like(x)
    yield {"rate": "copy, TB/s", "value": 2 * x.nbytes / bench.seconds(y.copy_, x) / 1e12, "card": _smi()}
    count, begin = 0, time.perf_counter()
    while (seconds := time.perf_counter() - begin) < (0.1 if bench.small else 15):
        for _ in range(100):
            torch.mm(a, b)
        card, count = _smi(), count + 100  # read while the card computes
        bench.device.synchronize()
    yield {"rate": "bf16 matmul for 15 s, TFLOP/s", "value": 2 * size**3 * count / seconds / 1e12, "card": card}


def _smi() -> str:
    """Line of nvidia-smi; empty without it."""
    command = ["nvidia-smi", f"--query-gpu={SMI}", "--format=csv,noheader", "--id=0"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() if shutil.which(command[0]) else ""


def kernels(bench: Bench) -> Rows:
    """Triton kernels beside operations of torch: error relative to float32, ms, and TB/s of the bytes that must be moved."""
    tokens, width, hidden, vocabulary = (64, 96, 160, 512) if bench.small else (16384, 2048, 8192, 128256)
    half: Any = {"dtype": torch.bfloat16, "device": bench.torch_device}
    x, dy = (torch.randn(tokens, width, **half) for _ in range(2))
    weight = torch.rand(width, **half) + 0.5
    gate, up, dh = (torch.randn(tokens, hidden, **half) for _ in range(3))
    logits = torch.randn(tokens // 8, vocabulary, **half)
    targets = torch.randint(vocabulary, (tokens // 8,), device=bench.torch_device)
    loss = (targets, -100, LogitTransform(), Vocabulary(), True)
    positions = (torch.arange(8, device=x.device), torch.arange(tokens // 8, device=x.device))
    made = {
        "rms_norm": (rms_norm.rms_norm, rms_norm.reference, (x, weight, 1e-6, 0.0, True), 2 * x.nbytes),
        "rms_norm backward": (
            rms_norm.rms_norm_backward,
            rms_norm.reference_backward,
            (dy, x, weight, 1e-6, 0.0, True),
            3 * x.nbytes,
        ),
        "gated_activation": (
            gated_activation.gated_activation,
            gated_activation.reference,
            (gate, up, "silu"),
            3 * gate.nbytes,
        ),
        "gated_activation backward": (
            gated_activation.gated_activation_backward,
            gated_activation.reference_backward,
            (dh, gate, up, "silu"),
            5 * gate.nbytes,
        ),
        "dropout": (
            dropout.launch if dropout.can_launch(x) else dropout.reference,
            dropout.reference,
            (x.view(8, -1, width), 1, *positions, 0, 0.1),
            2 * x.nbytes,
        ),
        "cross entropy with gradient": (
            fused_loss_and_gradient if can_launch(logits) else loss_and_gradient,
            loss_and_gradient,
            (logits, *loss),
            3 * logits.nbytes,
        ),
    }
    for name, (fused, plain, arguments, size) in made.items():
        wide = [a.float() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in arguments]
        expected = plain(*wide)
        copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
        found, errors = fused(*copies), []
        for a, b in zip(*((r if isinstance(r, tuple) else (r,)) for r in (found, expected)), strict=True):
            errors.append(((a.float() - b).norm() / b.norm()).item())
        del wide, expected, found, copies
        seconds, (own, host) = bench.seconds(plain, *arguments), bench.times(fused, *arguments)
        yield {
            "kernel": name,
            "error": f"{max(errors):.1e}",
            "torch, ms": f"{seconds * 1e3:.3f}",
            "Triton, ms": f"{own * 1e3:.3f}",
            "host, ms": f"{host * 1e3:.3f}",
            "TB/s": f"{size / own / 1e12:.2f}",
        }
        bench.free()


def fp8_casts(bench: Bench) -> Rows:
    """Rounding to FP8: ms of torch and of Triton, TB/s of the bytes that must be moved, and bits that differ from torch's."""
    tokens, width, experts = (256, 256, 4) if bench.small else (16384, 8192, 128)
    x = torch.randn(tokens, width, dtype=torch.bfloat16, device=bench.torch_device)
    ends = (torch.arange(1, experts + 1, device=bench.torch_device) * (tokens // experts)).to(torch.int32)
    starts, largest, e5m2 = ends - tokens // experts, fp8_cast.fp8_largest(x), torch.float8_e5m2
    made: dict[str, tuple[Any, Any, tuple[Any, ...], int]] = {
        "largest value": (fp8_cast.fp8_largest, lambda x: x.abs().amax().float(), (x,), 2),
        "both layouts": (fp8_cast.fp8_cast, fp8_cast.reference, (x, largest, e5m2, False, True, True, None), 4),
        "one layout": (fp8_cast.fp8_cast, fp8_cast.reference, (x, largest, e5m2, False, True, False, None), 3),
        "transposed layout": (fp8_cast.fp8_cast, fp8_cast.reference, (x, largest, e5m2, False, False, True, None), 3),
        "both layouts, blocks": (
            fp8_cast.fp8_cast_blocks,
            fp8_cast.reference_blocks,
            (x, torch.float8_e4m3fn, 1, True, True, None),
            4,
        ),
        "rows of experts": (fp8_experts.fp8_cast_rows, fp8_experts.reference_rows, (x, None), 3),
        "transposed rows of experts": (
            fp8_experts.fp8_transpose,
            fp8_experts.reference_transpose,
            (x, starts, ends, starts, tokens, None),
            3,
        ),
    }
    for name, (fused, plain, arguments, size) in made.items():
        of_torch = arguments[:-1] if arguments[-1] is None else arguments
        pairs = zip(*(_parts(run) for run in (fused(*arguments), plain(*of_torch))), strict=True)
        other = sum(int((a.float() != b.float()).sum()) for a, b in pairs)
        seconds, own = bench.seconds(plain, *of_torch), bench.seconds(fused, *arguments)
        row = {"cast": name, "torch, ms": seconds * 1e3, "Triton, ms": own * 1e3}
        yield {**row, "TB/s": size * x.numel() / own / 1e12, "values that differ": other}
        bench.free()


def _parts(results: Any) -> list[Tensor]:
    return list(results) if isinstance(results, tuple | list) else [results]


def fp8_grouped(bench: Bench) -> Rows:
    """Grouped matmul of experts, forward and backward with rounding: ms, TFLOP/s, and errors relative to bf16."""
    experts, num_rows, n, k = (4, 256, 64, 64) if bench.small else (128, 65536, 1536, 2048)
    generator = torch.Generator(bench.torch_device).manual_seed(0)
    shape: Any = {"generator": generator, "device": bench.torch_device, "dtype": torch.bfloat16}
    rows, weight = (
        torch.randn(num_rows, k, **shape).requires_grad_(),
        torch.randn(experts, n, k, **shape).requires_grad_(),
    )
    gradient = torch.randn(num_rows, n, **shape)
    chosen = torch.randint(experts, (num_rows,), generator=generator, device=bench.torch_device).sort().values
    borders = torch.searchsorted(chosen, torch.arange(experts, device=bench.torch_device), right=True).to(torch.int32)
    exact: list[Tensor] = []
    for name, linear in (("bf16", grouped_linear), ("fp8", fp8_experts.fp8_grouped_linear)):

        def both(linear: Any = linear) -> list[Tensor]:
            out = linear(rows, weight, True, borders)
            return [out.detach(), *torch.autograd.grad(out, (rows, weight), gradient)]

        results = both()
        exact = exact or results
        errors = [((a - b).float().norm() / b.float().norm()).item() for a, b in zip(results, exact, strict=True)]
        seconds = bench.seconds(both)
        rate = 6 * num_rows * n * k / seconds / 1e12
        yield {"matmul": name, "ms": seconds * 1e3, "TFLOP/s": rate, "errors": ", ".join(f"{e:.1e}" for e in errors)}


def attention(bench: Bench) -> Rows:
    """Forward and backward of each attention kernel at a shape, in ms, as a run times them at its start.

    "rows, X": causal attention of full rows by SDPA; "reference" is torch's own choice. "documents, X": packed rows.
    """
    batch, length, heads, kv_heads = (1, 256, 4, 2) if bench.small else (4, 4096, 32, 8)
    names = ["reference", *(name for name in bench.device.attention_kernels if name != "math" or bench.small)]
    failures: dict[str, str] = {}
    for size in (64, 128):
        kernel, _ = choose_kernel(bench.device.type, torch.bfloat16, size, size)
        for document in (300, 1024, 4096):
            positions = random_batch(16, batch, length, torch.device("cpu"), 0, document).position_ids
            if document >= length:
                positions = torch.arange(length).repeat(batch, 1)
            common = documents_of(positions), heads, kv_heads, size, size, torch.bfloat16, None
            found = time_attention(AttentionShape(*common, kernel), names, bench.device, bench.torch_device)
            masked = time_attention(AttentionShape(*common, None), ["reference"], bench.device, bench.torch_device)
            row: dict[str, Any] = {"head dim": size, "documents of": document}
            row["SDPA with a mask"] = f"{masked.rows['reference'] * 1e3:.2f}"
            row |= {f"rows, {name}": f"{found.rows.get(name, math.nan) * 1e3:.2f}" for name in names}
            of_documents = {**dict.fromkeys(flash_implementations(), math.nan), **found.documents}
            row |= {f"documents, {name}": f"{seconds * 1e3:.2f}" for name, seconds in of_documents.items()}
            choice = choose_attention(found.rows, found.documents)
            row["chosen"] = f"{choice.rows}, {choice.flash}"
            failures |= found.failures
            yield row
            bench.free()
    for name, reason in failures.items():
        print(f"no {name}: {reason}")


def ring(bench: Bench) -> Rows:
    """Attention of packed rows over an emulated ring, forward and backward of all its ranks one after the other.

    One rank is one call of the kernel. The error is that of out and gradients, relative to matmuls in float32.
    """
    batch, length, heads, kv_heads, size = (2, 256, 4, 2, 64) if bench.small else (2, 8192, 32, 8, 128)
    window = 64 if bench.small else 1024
    shape: Any = {"dtype": torch.bfloat16, "device": bench.torch_device}
    grad, q, k, v = (torch.randn(batch * length, h, size, **shape) for h in (heads, heads, kv_heads, kv_heads))
    kernel, reason = choose_kernel(bench.device.type, q.dtype, size, size)
    for name, document, hidden in (
        ("300 tokens", 300, None),
        ("rows", length, None),
        (f"rows, window {window}", length, window),
    ):
        documents = (torch.arange(length) // document).expand(batch, -1)
        wide = [x.float() for x in (grad, q, k, v)]
        expected = _emulate_ring(*wide, _rings(documents, 1, hidden, PLAIN_BLOCKS, bench.torch_device))
        row: dict[str, Any] = {"documents of": name, "kernel": kernel.name + (f": {reason}" if reason else "")}
        for ranks in (1, 2, 4):
            rings = _rings(documents, ranks, hidden, kernel, bench.torch_device)
            found = _emulate_ring(grad, q, k, v, rings)
            error = max(((a.float() - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True))
            row[f"{ranks} steps, error"] = f"{error:.1e}"
            row[f"{ranks} steps, ms"] = f"{bench.seconds(_emulate_ring, grad, q, k, v, rings) * 1e3:.2f}"
        yield row
        del wide, expected, found
        bench.free()


def _rings(
    documents: Tensor, ranks: int, window: int | None, kernel: VarlenKernel, device: torch.device
) -> list[RingConfig]:
    """Plan of each rank of a ring."""
    rows, length = documents.shape
    ids = torch.arange(rows, device=device)
    plans = [plan_attention(documents, rows, length, ranks, rank, window, device) for rank in range(ranks)]
    common = (kernel, 0.1, None, 0.0, 0, 0, ids)
    return [RingConfig(None, ranks, rank, length, plan, *common) for rank, plan in enumerate(plans)]


def _emulate_ring(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, rings: list[RingConfig]) -> list[Tensor]:
    """out, dq, dk and dv of the tokens of all ranks, in natural order."""
    ranks, rows = len(rings), len(rings[0].row_ids)
    own = [zigzag_indices(rings[0].seq_len, ranks, rank, q.device) for rank in range(ranks)]
    if ranks > 1:  # the tokens of a rank are one tensor, as in a real ring
        grads, queries, keys, values = (
            [x.unflatten(0, (rows, -1))[:, index].flatten(0, 1) for index in own] for x in (grad, q, k, v)
        )
    else:
        grads, queries, keys, values = [grad], [q], [k], [v]
    outs, dqs = [], []
    dks, dvs = ([torch.zeros_like(x, dtype=torch.float32) for x in own_side] for own_side in (keys, values))
    for rank, config in enumerate(rings):
        merged = dq = None
        for step in range(ranks):
            holder = (rank - step) % ranks
            merged = attend_step(config, step, queries[rank], keys[holder], values[holder], merged)
        out, lse = merged[0].to(q.dtype), merged[1]
        for step in range(ranks):
            holder = (rank - step) % ranks
            side = queries[rank], keys[holder], values[holder]
            dq, dk, dv = attend_step_backward(config, step, grads[rank], *side, out, lse, dq)
            for total, part in ((dks[holder], dk), (dvs[holder], dv)):
                if part is not None:
                    total += part
        outs.append(out)
        dqs.append(dq)
    order = torch.cat(own).argsort()
    parts = (torch.cat([x.unflatten(0, (rows, -1)) for x in side], 1) for side in (outs, dqs, dks, dvs))
    return [x[:, order].flatten(0, 1) for x in parts]


def matmuls(bench: Bench) -> Rows:
    """Matmuls of a linear layer in bf16 and in FP8: TFLOP/s, alone and with the rounding to FP8, and relative error."""
    for m, n, k in (
        [(256, 256, 256)] if bench.small else [(16384, 8192, 2048), (16384, 2048, 8192), (8192, 14336, 4096)]
    ):
        generator = torch.Generator(bench.torch_device).manual_seed(0)
        x, w = (
            torch.randn(size, generator=generator, device=bench.torch_device).to(torch.bfloat16)
            for size in ((m, k), (n, k))
        )
        exact, work = x.float() @ w.float().T, 2 * m * n * k / 1e12
        plain = bench.seconds(lambda x=x, w=w: x @ w.T)
        yield {"shape": f"{m} x {n} x {k}", "matmul": "bf16", "alone": work / plain, "rounded": "", "error": ""}
        for title, blocks in (("fp8", block_shapes(False)), ("fp8_block", block_shapes(True))):

            def sides(x: Any = x, w: Any = w, blocks: Any = blocks) -> Any:
                kinds = zip((x, w), blocks, strict=True)
                return [
                    part
                    for side, block in kinds
                    for part in quantize_layouts(side, torch.float8_e4m3fn, block, columns=False)[0]
                ]

            parts = sides()
            alone = bench.seconds(lambda parts=parts: fp8_matmul(*parts, torch.bfloat16))
            both = bench.seconds(lambda sides=sides: fp8_matmul(*sides(), torch.bfloat16))
            error = ((fp8_matmul(*parts, torch.bfloat16).float() - exact).norm() / exact.norm()).item()
            numbers = {"alone": work / alone, "rounded": work / both, "error": f"{error:.1e}"}
            yield {"shape": f"{m} x {n} x {k}", "matmul": title, **numbers}
