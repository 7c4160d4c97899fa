"""Cost of communication on one accelerator apart from its links: gradient codecs, and matmuls in chunks.

    python benchmarks/gpu/communication.py                       # below two minutes on an H100
    python benchmarks/gpu/communication.py --mib 64 --rows 512   # smoke run on any device

Codecs: seconds, GB/s of float32 elements, and memory beyond input and output, to encode and decode 1 GiB of gradients. A codec
pays if it takes less time than the link would take for the bytes it saves. The last column is the bandwidth of a link, per rank
and direction, below which the codec pays.

Chunks: a matmul whose rows are gathered, or scattered, in chunks can overlap with its communication
(`plan.comm.overlap_chunks`), but smaller matmuls use the device less well. Printed is the speed as a fraction of the full
matmul's by number of chunks, for 8192 rows in bfloat16, median of the repeats.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from weft.comm.compression.codec import decode, encode
from weft.comm.compression.codecs import CODECS
from weft.device.detect import detect

REPEATS = 9
CHUNKS = (1, 2, 4, 8, 16)
SHAPES = {  # input and output features of a weight
    "attention of 8 B, tp 2": (4096, 2048),
    "mlp up of 8 B, tp 2": (4096, 14336),
    "mlp down of 8 B, tp 2": (7168, 4096),
    "mlp up of 70 B, tp 8": (8192, 7168),
    "mlp down of 70 B, tp 8": (3584, 8192),
}


def seconds(run: Callable[[], object], synchronize: Callable[[], None]) -> float:
    """Median seconds of a call."""
    times = []
    for _ in range(REPEATS + 2):
        synchronize()
        begin = time.perf_counter()
        run()
        synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:])


def codecs(torch_device: torch.device, mib: int, synchronize: Callable[[], None]) -> Table:
    """Table of codecs, which encode and decode some MiB of gradients."""
    table = Table(title=f"{mib} MiB of float32")
    for column in ("", "bits", "encode, ms", "GB/s", "decode, ms", "GB/s", "extra MiB", "pays below, GB/s"):
        table.add_column(column, justify="left" if not column else "right")
    num_elements = mib * 2**18
    gradient = torch.randn(1, num_elements, device=torch_device)
    on_card = torch_device.type != "cpu"
    module = torch.get_device_module(torch_device.type)
    for name, codec in CODECS.items():
        messages = encode(codec, gradient)
        if on_card:
            module.reset_peak_memory_stats()
            before = module.memory_allocated()
        decoded = decode(codec, messages, num_elements)
        encode(codec, gradient)
        extra = module.max_memory_allocated() - before - decoded.nbytes - messages.nbytes if on_card else 0
        encode_seconds = seconds(lambda codec=codec: encode(codec, gradient), synchronize)
        decode_seconds = seconds(lambda codec=codec, sent=messages: decode(codec, sent, num_elements), synchronize)
        rates = (f"{gradient.nbytes / time / 1e9:.0f}" for time in (encode_seconds, decode_seconds))
        # With many ranks, each rank encodes all elements once, and decodes its own messages, received messages, and the result.
        saved, spent = 2 * (gradient.nbytes - messages.nbytes), encode_seconds + 3 * decode_seconds
        row = (
            f"{encode_seconds * 1e3:.2f}",
            next(rates),
            f"{decode_seconds * 1e3:.2f}",
            next(rates),
            f"{extra / 2**20:.0f}",
        )
        table.add_row(name, f"{8 * codec.bytes_per_element:.2f}", *row, f"{saved / spent / 1e9:.1f}")
    return table


def in_chunks(rows: Tensor, weight: Tensor, out: Tensor, count: int) -> None:
    """Matmul in chunks of rows."""
    for part, target in zip(rows.chunk(count), out.chunk(count), strict=True):
        torch.mm(part, weight, out=target)


def chunks(torch_device: torch.device, num_rows: int, synchronize: Callable[[], None]) -> Table:
    """Table of matmuls, full and in chunks."""
    table = Table(title=f"{num_rows} rows, bfloat16: speed by number of chunks, as a fraction of the full matmul's")
    for column in ("", "weight", "TFLOP/s", *map(str, CHUNKS[1:])):
        table.add_column(column, justify="left" if not column else "right")
    for name, (inputs, outputs) in SHAPES.items():
        rows = torch.randn(num_rows, inputs, device=torch_device, dtype=torch.bfloat16)
        weight = torch.randn(outputs, inputs, device=torch_device, dtype=torch.bfloat16).t()
        out = torch.empty(num_rows, outputs, device=torch_device, dtype=torch.bfloat16)
        times = [
            seconds(lambda n=count, a=rows, b=weight, c=out: in_chunks(a, b, c, n), synchronize) for count in CHUNKS
        ]
        speed = 2 * num_rows * inputs * outputs / times[0] / 1e12
        table.add_row(name, f"{inputs} x {outputs}", f"{speed:.0f}", *(f"{times[0] / t:.0%}" for t in times[1:]))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=8192)
    chosen = parser.parse_args()
    device = detect()
    device.use(0)
    torch_device = device.torch_device(0)
    console = Console(width=140)
    console.print(f"{device.name}, torch {torch.__version__}")
    console.print(codecs(torch_device, chosen.mib, device.synchronize))
    console.print(chunks(torch_device, chosen.rows, device.synchronize))


if __name__ == "__main__":
    main()
