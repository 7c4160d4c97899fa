"""What communication costs one accelerator beside its links: codecs of gradients, and matrix products in chunks.

    python benchmarks/gpu/communication.py                       # below two minutes on an H100
    python benchmarks/gpu/communication.py --mib 64 --rows 512   # anywhere, to see that it runs

Codecs: seconds, GB/s of float32 numbers and memory beside input and output, to encode and decode 1 GiB of gradients. A codec
pays where it takes less time than the bytes it saves would take on the link: the last column is the bandwidth of a link, for
each rank and direction, below which it does.

Chunks: a product whose rows are gathered, or scattered, in chunks can hide its communication (`plan.comm.overlap_chunks`),
but smaller products keep the device less busy: speed as a share of the whole product's, 8192 rows in bfloat16, median of the
repeats, by number of chunks.
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
from weft.device.device import detect

REPEATS = 9
CHUNKS = (1, 2, 4, 8, 16)
SHAPES = {  # of a weight: inputs, outputs
    "attention of 8 B, tp 2": (4096, 2048),
    "mlp up of 8 B, tp 2": (4096, 14336),
    "mlp down of 8 B, tp 2": (7168, 4096),
    "mlp up of 70 B, tp 8": (8192, 7168),
    "mlp down of 70 B, tp 8": (3584, 8192),
}


def seconds(run: Callable[[], object], synchronize: Callable[[], None]) -> float:
    """Median time of a call."""
    times = []
    for _ in range(REPEATS + 2):
        synchronize()
        begin = time.perf_counter()
        run()
        synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:])


def codecs(place: torch.device, mib: int, synchronize: Callable[[], None]) -> Table:
    """Encode and decode some MiB of gradients."""
    table = Table(title=f"{mib} MiB of float32")
    for column in ("", "bits", "encode, ms", "GB/s", "decode, ms", "GB/s", "beside, MiB", "pays below, GB/s"):
        table.add_column(column, justify="left" if not column else "right")
    numbers = mib * 2**18
    gradient = torch.randn(1, numbers, device=place)
    on_card = place.type != "cpu"
    module = torch.get_device_module(place.type)
    for name, codec in CODECS.items():
        messages = encode(codec, gradient)
        if on_card:
            module.reset_peak_memory_stats()
            before = module.memory_allocated()
        back = decode(codec, messages, numbers)
        encode(codec, gradient)
        beside = module.max_memory_allocated() - before - back.nbytes - messages.nbytes if on_card else 0
        there = seconds(lambda codec=codec: encode(codec, gradient), synchronize)
        again = seconds(lambda codec=codec, sent=messages: decode(codec, sent, numbers), synchronize)
        rates = (f"{gradient.nbytes / time / 1e9:.0f}" for time in (there, again))
        # Of many ranks each encodes all numbers once, and decodes what it sends, what comes, and the result.
        saved, spent = 2 * (gradient.nbytes - messages.nbytes), there + 3 * again
        row = (f"{there * 1e3:.2f}", next(rates), f"{again * 1e3:.2f}", next(rates), f"{beside / 2**20:.0f}")
        table.add_row(name, f"{8 * codec.bytes_per_number:.2f}", *row, f"{saved / spent / 1e9:.1f}")
    return table


def in_chunks(rows: Tensor, weight: Tensor, out: Tensor, count: int) -> None:
    """A product, some rows at a time."""
    for part, target in zip(rows.chunk(count), out.chunk(count), strict=True):
        torch.mm(part, weight, out=target)


def chunks(place: torch.device, num_rows: int, synchronize: Callable[[], None]) -> Table:
    """Products whole and in chunks."""
    table = Table(title=f"{num_rows} rows, bfloat16: speed by number of chunks, as a share of the whole product's")
    for column in ("", "weight", "TFLOP/s", *map(str, CHUNKS[1:])):
        table.add_column(column, justify="left" if not column else "right")
    for name, (inputs, outputs) in SHAPES.items():
        rows = torch.randn(num_rows, inputs, device=place, dtype=torch.bfloat16)
        weight = torch.randn(outputs, inputs, device=place, dtype=torch.bfloat16).t()
        out = torch.empty(num_rows, outputs, device=place, dtype=torch.bfloat16)
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
    place = device.torch_device(0)
    console = Console(width=140)
    console.print(f"{device.name}, torch {torch.__version__}")
    console.print(codecs(place, chosen.mib, device.synchronize))
    console.print(chunks(place, chosen.rows, device.synchronize))


if __name__ == "__main__":
    main()
