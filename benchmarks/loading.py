"""Load a Hugging Face folder into shards: seconds and memory, by slices that each rank reads, and by rank 0 as a whole.

    python benchmarks/loading.py [--hidden 1536] [--layers 12] [--ranks 2] [--repeats 3]

The weights are stored in bf16 and trained in float32. Peaks are of anonymous memory, without pages of files, which the kernel
can drop.
"""

import argparse
import tempfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from unittest import mock

import torch
import torch.distributed as dist
from torch import multiprocessing as mp

from weft.anatomy.build import build_as, build_on_meta
from weft.checkpoint import loading
from weft.checkpoint.model_config import read_config
from weft.device.detect import detect
from weft.job import Model
from weft.parallel.parallelize import parallelize
from weft.parallel.weights import to_local
from weft.plan import Plan
from weft.plan.resolve import resolve_plan
from weft.topology.mesh import build_mesh


def anonymous_bytes() -> int:
    """Anonymous memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


class Peak(threading.Thread):
    """Peak of anonymous memory while the context is open, above that before, in `bytes`."""

    def __enter__(self) -> "Peak":
        self.bytes, self.before, self.done = 0, anonymous_bytes(), threading.Event()
        self.start()
        return self

    def run(self) -> None:
        while not self.done.wait(0.005):
            self.bytes = max(self.bytes, anonymous_bytes() - self.before)

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.join()


def load(rank: int, ranks: int, folder: str, whole: bool, repeats: int, port: int) -> None:
    """Load the folder some times; each rank prints the seconds, its peak and its shards."""
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    source = Model(path=folder)
    plan = resolve_plan(Plan.model_validate({"parallel": {"zero": 3}}), ranks, native_bf16=False)
    seconds, peaks, held = [], [], 0
    for _ in range(repeats):
        model = build_on_meta(read_config(source), torch.float32)
        parallelize(model, plan, build_mesh(plan, "cpu", ranks))
        nowhere = mock.patch.object(loading, "find_slices", return_value=None)
        dist.barrier()
        with Peak() as peak, nowhere if whole else nullcontext():
            start = time.perf_counter()
            loading.materialize(model, source, torch.device("cpu"))
            dist.barrier()
            seconds.append(time.perf_counter() - start)
        peaks.append(peak.bytes)
        held = sum(to_local(parameter).nbytes for parameter in model.parameters())
        del model
    way = "rank 0, whole" if whole else "each rank, slices"
    spread = f"{median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f})"
    for turn in range(ranks):
        if turn == rank:
            print(f"| {way} | {rank} | {spread} | {median(peaks) / 2**20:.0f} | {held / 2**20:.0f} |", flush=True)
        dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    table = {
        "model_type": "llama",
        "hidden_size": options.hidden,
        "intermediate_size": 3 * options.hidden,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.hidden // 64,
        "vocab_size": 32000,
    }
    with tempfile.TemporaryDirectory() as folder:
        plain = build_as("causal", read_config(Model(config=table)), torch.bfloat16)
        plain.save_pretrained(folder)
        size = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
        del plain
        print(
            f"{detect().instruction_set}; {options.ranks} ranks, zero 3; a folder of {size / 2**20:.0f} MiB in bf16\n"
        )
        print("| read by | rank | seconds | peak MiB | shards MiB |\n|---|---|---|---|---|")
        for number, whole in enumerate((True, False)):
            arguments = (options.ranks, folder, whole, options.repeats, 29600 + number)
            mp.spawn(load, arguments, nprocs=options.ranks)


if __name__ == "__main__":
    main()
