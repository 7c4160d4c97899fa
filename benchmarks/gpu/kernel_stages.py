"""Stages of single operators: rates of the device, Triton kernels, updates, attention."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from bench import Bench, Rows
from systems import random_batch
from torch import Tensor, nn

from weft.compute import dropout, fp8_cast, fp8_experts, gated_activation, rms_norm
from weft.compute.cross_entropy import LogitTransform, Vocabulary, fused_loss_and_gradient, loss_and_gradient
from weft.compute.cross_entropy_kernels import can_launch
from weft.compute.experts import grouped_linear
from weft.compute.fp8 import block_shapes, fp8_matmul
from weft.compute.fp8_cast import quantize_layouts
from weft.compute.jit import has_triton
from weft.compute.sequences import VarlenKernel
from weft.compute.varlen_attention import choose_kernel
from weft.compute.varlen_blocks import PLAIN_BLOCKS
from weft.memory.chunked_step import chunked_step
from weft.memory.quantized_state import quantize_states
from weft.memory.weights import split_weights
from weft.optimizers.one_pass import divisor, update_in_one_pass
from weft.parallel.data.gradients import scale_gradients
from weft.parallel.sequence.attention_plan import AttentionPlans, plan_attention
from weft.parallel.sequence.context import attend
from weft.parallel.sequence.context_grid import zigzag_indices
from weft.parallel.sequence.ring_attention import RingConfig, attend_step, attend_step_backward
from weft.parallel.sequence.varlen import ONE_RANK


def ceilings(bench: Bench) -> Rows:
    """Rates of a large matmul and of a copy."""
    size = 512 if bench.small else 8192
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=bench.torch_device) for _ in range(2))
    flops = 2 * size**3 / bench.seconds(torch.mm, a, b)
    x = torch.randn(2**20 if bench.small else 2**30, device=bench.torch_device)
    y = torch.empty_like(x)
    rate = 2 * x.numel() * 4 / bench.seconds(y.copy_, x)
    return [{"bf16 matmul, TFLOP/s": flops / 1e12, "copy, TB/s": rate / 1e12}]


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
    rows: Rows = []
    for name, (fused, plain, arguments, size) in made.items():
        wide = [a.float() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in arguments]
        expected = plain(*wide)
        copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
        found, errors = fused(*copies), []
        for a, b in zip(*((r if isinstance(r, tuple) else (r,)) for r in (found, expected)), strict=True):
            errors.append(((a.float() - b).norm() / b.norm()).item())
        del wide, expected, found, copies
        seconds, (own, host) = bench.seconds(plain, *arguments), bench.times(fused, *arguments)
        rows.append(
            {
                "kernel": name,
                "error": f"{max(errors):.1e}",
                "torch, ms": f"{seconds * 1e3:.3f}",
                "Triton, ms": f"{own * 1e3:.3f}",
                "host, ms": f"{host * 1e3:.3f}",
                "TB/s": f"{size / own / 1e12:.2f}",
            }
        )
        bench.free()
    return rows


UPDATED_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1 + 4 / 256}
"""Bytes per element of a moment."""


def updates(bench: Bench) -> Rows:
    """Clipped updates of AdamW of all weights of a Llama of 1.2 billion parameters: ms, and TB/s of the bytes to be moved.

    Error: largest difference of a weight after three updates, relative to the largest update, of kernel and torch.
    """
    rows: Rows = []
    for weights in ("whole", "split", "split_even"):
        for states in UPDATED_BYTES:
            row: dict[str, Any] = {"weights": weights, "moments": states}
            size = 0
            for title, run in _update_functions(bench).items():
                model, optimizer, quantize = _make_update(bench, weights, states)
                gradients = [torch.randn(p.shape, device=bench.torch_device) for p in model.parameters()]
                size = sum(gradient.numel() for gradient in gradients)
                seconds = bench.seconds(run, optimizer, gradients, quantize, weights != "whole" or states != "fp32")
                row[f"{title}, ms"] = seconds * 1e3
                del model, optimizer, gradients
                bench.free()
            moved = size * (12 + 4 * UPDATED_BYTES[states])
            row["bytes per element"] = 12 + 4 * UPDATED_BYTES[states]
            row["TB/s"] = moved / seconds / 1e12  # of the last function
            row["error"] = _update_error(bench, weights, states) if _runs_triton(bench) else "-"
            rows.append(row)
    return rows


def _runs_triton(bench: Bench) -> bool:
    return has_triton() and bench.device.type == "cuda"


def _update_functions(bench: Bench) -> dict[str, Callable[..., None]]:
    found: dict[str, Callable[..., None]] = {"clip, then AdamW": _clip_first, "clip inside of AdamW": _clip_inside}
    return found | ({"Triton": _by_kernel} if _runs_triton(bench) else {})


def _make_update(bench: Bench, weights: str, states: str) -> Any:
    """Weights, their optimizer, and the function that quantizes its states."""
    width, hidden, vocabulary, layers = (64, 128, 512, 2) if bench.small else (2048, 8192, 128256, 16)
    block = (
        [(width, width)] * 2 + [(width // 4, width)] * 2 + [(hidden, width)] * 2 + [(width, hidden), (width,), (width,)]
    )
    shapes = [(vocabulary, width), *block * layers, (width,)]
    generator = torch.Generator(bench.torch_device).manual_seed(0)
    tensors = (torch.randn(shape, generator=generator, device=bench.torch_device) for shape in shapes)
    model = nn.ParameterList([nn.Parameter(tensor) for tensor in tensors])
    if weights != "whole":
        split_weights(model, even=weights == "split_even")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    quantize = None if states == "fp32" else quantize_states(optimizer, states)  # type: ignore[arg-type]
    return model, optimizer, quantize


def _set_gradients(optimizer: torch.optim.Optimizer, gradients: list[Tensor]) -> list[Tensor]:
    parameters: list[Tensor] = optimizer.param_groups[0]["params"]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return parameters


def _clip_first(optimizer: Any, gradients: list[Tensor], _: Any, in_chunks: bool) -> None:
    scale_gradients(_set_gradients(optimizer, gradients), 0.999)
    chunked_step(optimizer) if in_chunks else optimizer.step()


def _clip_inside(optimizer: Any, gradients: list[Tensor], _: Any, in_chunks: bool) -> None:
    _set_gradients(optimizer, gradients)
    with divisor(optimizer, 0.999):
        chunked_step(optimizer) if in_chunks else optimizer.step()


def _by_kernel(optimizer: Any, gradients: list[Tensor], quantize: Any, _: bool) -> None:
    _set_gradients(optimizer, gradients)
    update_in_one_pass(optimizer, 0.999, quantize)


def _update_error(bench: Bench, weights: str, states: str) -> str:
    sides = []
    for run in (_by_kernel, _clip_first):
        model, optimizer, quantize = _make_update(replace(bench, small=True), weights, states)
        before = [parameter.detach() + 0 for parameter in model.parameters()]
        for step in range(3):
            generator = torch.Generator(bench.torch_device).manual_seed(step)
            make = partial(torch.randn, generator=generator, device=bench.torch_device)
            run(optimizer, [make(parameter.shape) for parameter in before], quantize, False)
        sides.append([after.detach() - value for after, value in zip(model.parameters(), before, strict=True)])
    errors = [(a - b).abs().max() / b.abs().max() for a, b in zip(*sides, strict=True)]
    return f"{max(error.item() for error in errors):.1e}"


def fp8_casts(bench: Bench) -> Rows:
    """Rounding to FP8: ms of torch and of Triton, TB/s of the bytes that must be moved, and bits that differ from torch's."""
    rows: Rows = []
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
        rows.append({**row, "TB/s": size * x.numel() / own / 1e12, "values that differ": other})
        bench.free()
    return rows


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
    found: Rows = []
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
        found.append(
            {"matmul": name, "ms": seconds * 1e3, "TFLOP/s": rate, "errors": ", ".join(f"{e:.1e}" for e in errors)}
        )
    return found


def attention(bench: Bench) -> Rows:
    """Attention of packed rows, forward and backward, in ms."""
    rows: Rows = []
    batch, length, heads, kv_heads, size = (1, 256, 4, 2, 64) if bench.small else (4, 4096, 32, 8, 64)
    shape: Any = {"dtype": torch.bfloat16, "device": bench.torch_device}
    for document in (300, 1024, 4096):
        positions = random_batch(16, batch, length, torch.device("cpu"), 0, document).position_ids
        if document >= length:
            positions = torch.arange(length).repeat(batch, 1)
        q, k, v = (torch.randn(batch, h, length, size, **shape).requires_grad_() for h in (heads, kv_heads, kv_heads))
        ids = ((positions == 0).cumsum(1)).to(bench.torch_device)
        mask = (ids[:, :, None] == ids[:, None]).tril()[:, None]
        documents = (positions == 0).cumsum(1)
        systems: dict[str, tuple[Any, ...]] = {
            "SDPA with a mask": (_with_mask, q, k, v, mask),
            "SDPA, causal, without documents": (_causal, q, k, v),
            "by documents": (_by_documents, q, k, v, documents, AttentionPlans(bench.device.type)),
        }
        row: dict[str, Any] = {"documents of": document}
        for title, (run, *arguments) in systems.items():
            row[title] = f"{bench.seconds(run, *arguments) * 1e3:.2f}"
        rows.append(row)
    return rows


def _with_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> None:
    repeated = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))  # as Transformers does
    out = F.scaled_dot_product_attention(q, *repeated, attn_mask=mask)
    torch.autograd.grad(out.sum(), (q, k, v))


def _causal(q: Tensor, k: Tensor, v: Tensor) -> None:
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.autograd.grad(out.sum(), (q, k, v))


def _by_documents(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, plans: AttentionPlans) -> None:
    out = attend(q, k, v, documents, ONE_RANK, scale=q.shape[-1] ** -0.5, plans=plans)
    torch.autograd.grad(out.sum(), (q, k, v))


def ring(bench: Bench) -> Rows:
    """Attention of packed rows over an emulated ring, forward and backward of all its ranks one after the other.

    One rank is one call of the kernel. The error is that of out and gradients, relative to matmuls in float32.
    """
    rows: Rows = []
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
        rows.append(row)
        del wide, expected, found
        bench.free()
    return rows


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
    rows: Rows = []
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
        rows.append({"shape": f"{m} x {n} x {k}", "matmul": "bf16", "alone": work / plain, "rounded": "", "error": ""})
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
            rows.append({"shape": f"{m} x {n} x {k}", "matmul": title, **numbers})
    return rows
