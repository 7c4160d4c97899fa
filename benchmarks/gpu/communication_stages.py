"""Stages of communication apart from its links: codecs of gradients, and matmuls in chunks."""

import torch
from bench import Bench, Rows
from torch import Tensor

from weft.comm.compression.codec import decode, encode
from weft.comm.compression.codecs import CODECS

CHUNKS = (1, 2, 4, 8, 16)
SHAPES = {  # input and output features of a weight
    "attention of 8 B, tp 2": (4096, 2048),
    "mlp up of 8 B, tp 2": (4096, 14336),
    "mlp down of 8 B, tp 2": (7168, 4096),
    "mlp up of 70 B, tp 8": (8192, 7168),
    "mlp down of 70 B, tp 8": (3584, 8192),
}


def codecs(bench: Bench) -> Rows:
    """Time and memory beyond input and output to encode and decode 1 GiB of float32 gradients.

    A codec pays if it takes less time than the link would take for the bytes it saves: below the bandwidth of the last column,
    of a link, per rank and direction.
    """
    num_elements = 2 ** (20 if bench.small else 28)
    gradient = torch.randn(1, num_elements, device=bench.torch_device)
    for name, codec in CODECS.items():
        messages = encode(codec, gradient)
        bench.device.reset_peak_memory()
        before = bench.device.peak_memory_bytes()
        decoded = decode(codec, messages, num_elements)
        encode(codec, gradient)
        extra = bench.device.peak_memory_bytes() - before - decoded.nbytes - messages.nbytes
        encoding = bench.seconds(encode, codec, gradient)
        decoding = bench.seconds(decode, codec, messages, num_elements)
        # With many ranks, each rank encodes all elements once, and decodes its own messages, received messages, and the result.
        saved = 2 * (gradient.nbytes - messages.nbytes)
        yield {
            "codec": name,
            "bits": 8 * codec.bytes_per_element,
            "encode, ms": encoding * 1e3,
            "encode, GB/s": gradient.nbytes / encoding / 1e9,
            "decode, ms": decoding * 1e3,
            "decode, GB/s": gradient.nbytes / decoding / 1e9,
            "extra MiB": "" if bench.device.type == "cpu" else extra / 2**20,
            "pays below, GB/s": saved / (encoding + 3 * decoding) / 1e9,
        }
        del messages, decoded


def chunks(bench: Bench) -> Rows:
    """Speed of a bf16 matmul of 8,192 rows by number of chunks, as a fraction of the full matmul's.

    A matmul whose rows are gathered, or scattered, in chunks can overlap with its communication
    (`plan.comm.overlap_chunks`), but smaller matmuls use the device less well.
    """
    num_rows, scale = (64, 16) if bench.small else (8192, 1)
    for name, (inputs, outputs) in SHAPES.items():
        shape = {"device": bench.torch_device, "dtype": torch.bfloat16}
        rows = torch.randn(num_rows, inputs // scale, **shape)
        weight = torch.randn(outputs // scale, inputs // scale, **shape).t()
        out = torch.empty(num_rows, outputs // scale, **shape)
        times = [bench.seconds(_in_chunks, rows, weight, out, count) for count in CHUNKS]
        row = {"weight": name, "TFLOP/s": 2 * rows.numel() * weight.shape[1] / times[0] / 1e12}
        yield row | {
            f"{count} chunks": f"{times[0] / seconds:.0%}" for count, seconds in zip(CHUNKS, times, strict=True)
        }


def _in_chunks(rows: Tensor, weight: Tensor, out: Tensor, count: int) -> None:
    for part, target in zip(rows.chunk(count), out.chunk(count), strict=True):
        torch.mm(part, weight, out=target)
