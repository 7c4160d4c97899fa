"""Roofline model of one kernel: the maximum of arithmetic, memory and launch time, with corrections for small sizes.

A matmul is divided into tiles; each compute unit (SM, AI core) works on one tile at a time. Three effects lower its rate:

- few tiles leave units idle (half of the last wave, on average);
- a short inner dimension is dominated by the start and the end of each tile (`DeviceSpec.depth`);
- dimensions that are not multiples of 64 or 8 elements use the matrix units badly or not at all.
"""

import math

from weft.planner.costmodel.hardware import DeviceSpec

FP8_BLOCK_RATE = 0.8
"""Rate of FP8 matmuls with a scale for each 128 values, relative to one scale a tensor (cuBLAS on an H100)."""
BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0, "fp8_block": 1.0, "fp4": 0.5}


def matmul(device: DeviceSpec, m: float, n: float, k: float, dtype: str = "bf16", batch: float = 1.0) -> float:
    """Seconds of a batched matmul [m, k] x [k, n] in one kernel.

    Args:
        device: the accelerator.
        m: rows of the output.
        n: columns of the output.
        k: inner dimension.
        dtype: dtype of the inputs; the output has 16 bits per element.
        batch: number of equal matmuls, such as one per head or per expert.
    """
    if min(m, n, k) <= 0:
        return 0.0
    rate = device.rate(dtype) * (FP8_BLOCK_RATE if dtype == "fp8_block" else 1.0)
    arithmetic = 2 * m * n * k * batch / (rate * fill(device, m, n, k, dtype, batch))
    size = BYTES.get(dtype, 2.0)
    moved = batch * (size * (m * k + k * n) + 2 * m * n) / (device.bandwidth * device.stream)
    return max(arithmetic, moved, device.launch)


def fill(device: DeviceSpec, m: float, n: float, k: float, dtype: str = "bf16", batch: float = 1.0) -> float:
    """Utilization of a matmul of these dimensions, as a share of the rate of large matmuls."""
    rows, columns = device.tile
    waves = batch * max(1.0, m / rows) * max(1.0, n / columns) / device.units
    depth = device.depth * 2 / BYTES.get(dtype, 2.0)
    edge = min(1.0, m / rows) * min(1.0, n / columns)
    return edge * waves / (waves + 0.5) * k / (k + depth) * aligned(min(n, k))


def aligned(size: float) -> float:
    """Share of the matmul rate for a dimension by its alignment to 64 or 8 elements (NVIDIA, Matrix Multiplication guide)."""
    if size % 64 == 0 or size != int(size):
        return 1.0
    return 0.92 if size % 8 == 0 else 0.12  # kernels without matrix units


def flash_attention(device: DeviceSpec, flops: float, head_dim: float, seq: float, portable: bool = False) -> float:
    """Seconds of fused attention with `flops` FLOPs; short sequences and small heads use tiles badly."""
    narrow = min(1.0, head_dim / 128) ** 0.5
    share = device.portable if portable else device.attention
    rate = device.peak["bf16"] * share * narrow * seq / (seq + 512)
    return max(flops / rate, device.launch)


def plain_attention(
    device: DeviceSpec, tokens: float, seq: float, heads: float, head_dim: float, backward: bool, dropout: bool
) -> float:
    """Seconds of unfused attention: two matmuls per head (four in backward), and scores written to memory and read back.

    Bytes per score in forward: write 2, softmax 4, dropout 5 (if any), read 2. In backward: 19, or 12 without dropout.
    """
    batch = tokens / seq * heads
    matmuls = matmul(device, seq, seq, head_dim, batch=batch) + matmul(device, seq, head_dim, seq, batch=batch)
    moved = (19 if dropout else 12) if backward else (13 if dropout else 8)
    return matmuls * (2 if backward else 1) + stream(device, batch * seq * seq * moved)


def stream(device: DeviceSpec, num_bytes: float) -> float:
    """Seconds of an element-wise kernel that reads and writes `num_bytes` bytes in total."""
    return num_bytes / (device.bandwidth * device.stream)


def grouped(device: DeviceSpec, tokens: float, experts: float, n: float, k: float, dtype: str = "bf16") -> float:
    """Seconds of a grouped matmul: `tokens` rows, evenly distributed over the experts of a rank, in one kernel."""
    if not tokens or not experts:
        return 0.0
    rows = math.ceil(tokens / experts)
    return matmul(device, rows, n, k, dtype, experts)
