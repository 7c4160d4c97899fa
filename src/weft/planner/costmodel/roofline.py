"""How long one kernel takes: the slower of its arithmetic and its bytes, with what small sizes waste, and never under a launch.

A matrix product is cut into tiles, one a unit of the device at a time: few tiles leave units idle (half of the last wave, on
average), a short inner dimension is spent on beginnings and ends of tiles (depth), sizes that are no multiples of 8 or 64
numbers miss what the matrix units are made for.
"""

import math

from weft.planner.costmodel.hardware import DeviceSpec

BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0, "fp4": 0.5}


def matmul(device: DeviceSpec, m: float, n: float, k: float, number: str = "bf16", batch: float = 1.0) -> float:
    """Seconds of [m, k] x [k, n], `batch` times in one kernel.

    Args:
        number: format of the inputs; the result is written in 16 bits.
        batch: of equal products, as of heads or experts.
    """
    if min(m, n, k) <= 0:
        return 0.0
    arithmetic = 2 * m * n * k * batch / (device.rate(number) * fill(device, m, n, k, number, batch))
    size = BYTES.get(number, 2.0)
    moved = batch * (size * (m * k + k * n) + 2 * m * n) / (device.bandwidth * device.stream)
    return max(arithmetic, moved, device.launch)


def fill(device: DeviceSpec, m: float, n: float, k: float, number: str = "bf16", batch: float = 1.0) -> float:
    """Share of the rate of long products that one of these sizes reaches."""
    rows, columns = device.tile
    waves = batch * max(1.0, m / rows) * max(1.0, n / columns) / device.units
    depth = device.depth * 2 / BYTES.get(number, 2.0)
    edge = min(1.0, m / rows) * min(1.0, n / columns)
    return edge * waves / (waves + 0.5) * k / (k + depth) * aligned(min(n, k))


def aligned(size: float) -> float:
    """Share of the rate for a dimension that is no multiple of 64, or not even of 8 (NVIDIA, Matrix Multiplication)."""
    if size % 64 == 0 or size != int(size):
        return 1.0
    return 0.92 if size % 8 == 0 else 0.12  # kernels without matrix units


def flash_attention(device: DeviceSpec, flops: float, head_dim: float, seq: float, portable: bool = False) -> float:
    """Seconds of a fused attention that does `flops`; short sequences and narrow heads fill tiles badly."""
    narrow = min(1.0, head_dim / 128) ** 0.5
    share = device.portable if portable else device.attention
    rate = device.peak["bf16"] * share * narrow * seq / (seq + 512)
    return max(flops / rate, device.launch)


def plain_attention(
    device: DeviceSpec, tokens: float, seq: float, heads: float, head_dim: float, backward: bool, dropout: bool
) -> float:
    """Seconds of attention in separate kernels: two products a head (four in backward), and scores to memory and back.

    Bytes of a score: written 2, softmax 4, dropout 5 (where there is any), read 2; in backward 19, without dropout 12.
    """
    batch = tokens / seq * heads
    products = matmul(device, seq, seq, head_dim, batch=batch) + matmul(device, seq, head_dim, seq, batch=batch)
    moved = (19 if dropout else 12) if backward else (13 if dropout else 8)
    return products * (2 if backward else 1) + stream(device, batch * seq * seq * moved)


def stream(device: DeviceSpec, num_bytes: float) -> float:
    """Seconds of element-wise work that reads and writes so many bytes."""
    return num_bytes / (device.bandwidth * device.stream)


def grouped(device: DeviceSpec, tokens: float, experts: float, n: float, k: float, number: str = "bf16") -> float:
    """Seconds of products of `tokens` rows, spread evenly over the experts of a rank, in one kernel."""
    if not tokens or not experts:
        return 0.0
    rows = math.ceil(tokens / experts)
    return matmul(device, rows, n, k, number, experts)
