"""Load a Hugging Face folder into shards: seconds, memory and bytes read, by slices of each rank, and by rank 0 as a whole.

    python benchmarks/loading.py [--hidden 1536] [--layers 12] [--ranks 2] [--tp 1] [--dtype fp32] [--repeats 3]
    python benchmarks/loading.py --simulate 64 1024     # Llama of 70B, one rank of such a job

The weights are stored in bf16. Each time, the pages of the files are first dropped from the page cache. Peaks are above the
memory before that: anonymous memory, and all resident memory, which includes pages of mapped files that the kernel can drop.

A simulation has the files of a Llama of 70B with their headers, without data, which take no space on the disk, and loads them
as one rank does, in a process group that sends nothing: rank 0, which also finds the places of the weights, or another.
"""

import argparse
import json
import os
import tempfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import multiprocessing as mp

from weft.anatomy.build import build_as, build_on_meta
from weft.checkpoint import loading
from weft.checkpoint.model_config import read_config
from weft.checkpoint.plain_model import find_slices
from weft.checkpoint.stored_slices import SliceReader, StoredLayout
from weft.device.detect import detect
from weft.job import Model
from weft.parallel.parallelize import parallelize
from weft.parallel.runtime import allocate
from weft.parallel.weights import to_local
from weft.plan import Plan
from weft.plan.resolve import resolve_plan
from weft.planner.dryrun.modes import fake_world
from weft.precision.dtypes import DTYPES
from weft.topology.mesh import build_mesh

LLAMA_70B: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
FILE_BYTES = 5e9  # weights of a file of Llama of 70B, at most
HEADER = "| read by | rank | seconds | peak MiB: anonymous | resident | shards MiB | read MiB | from disk |"


def bytes_of(name: str) -> int:
    """Memory of this process by its name in /proc."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


class Peak(threading.Thread):
    """Peaks while the context is open, above the memory before, and bytes read from the disk."""

    def __enter__(self) -> "Peak":
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
        self.anonymous, self.before, self.done = 0, (bytes_of("RssAnon"), bytes_of("VmRSS")), threading.Event()
        self.disk = -self._read_from_disk()
        self.start()
        return self

    def run(self) -> None:
        while not self.done.wait(0.005):
            self.anonymous = max(self.anonymous, bytes_of("RssAnon") - self.before[0])

    def __exit__(self, *_: object) -> None:
        self.resident = bytes_of("VmHWM") - self.before[1]
        self.disk += self._read_from_disk()
        self.done.set()
        self.join()

    def _read_from_disk(self) -> int:
        lines = Path("/proc/self/io").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


class Reads:
    """Counter of what a rank reads of the files, in `SliceReader._rows`."""

    def __init__(self) -> None:
        self.count = self.bytes = 0

    def patch(self) -> Any:
        """Context in which reads are counted."""
        read = SliceReader._rows

        def counted(*arguments: Any) -> torch.Tensor:
            rows = read(*arguments)
            self.count, self.bytes = self.count + 1, self.bytes + rows.nbytes
            return rows

        return mock.patch.object(SliceReader, "_rows", counted)


def sharded(source: Model, ranks: int, tp: int, dtype: str) -> Any:
    """Model on the meta device under ZeRO-3, as a rank of `weft train` has it before its weights are loaded."""
    tables = {"parallel": {"zero": 3, "tp": tp}, "precision": {"param_dtype": dtype, "update": dtype}}
    plan = resolve_plan(Plan.model_validate(tables), ranks, native_bf16=True)
    model = build_on_meta(read_config(source), DTYPES[dtype])
    return parallelize(model, plan, build_mesh(plan, "cpu", ranks))


def shard_bytes(model: Any) -> int:
    """Bytes of the shards of this rank."""
    return sum(to_local(parameter).nbytes for parameter in model.parameters())


def load(rank: int, options: argparse.Namespace, folder: str, whole: bool, port: int) -> None:
    """Load the folder some times; each rank prints the seconds, its peaks and its shards."""
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=options.ranks)
    torch.set_num_threads(1)
    source, seconds, peaks, reads = Model(path=folder), [], list[Peak](), Reads()
    for _ in range(options.repeats):
        model = sharded(source, options.ranks, options.tp, options.dtype)
        for file in Path(folder).glob("*.safetensors"):
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        nowhere = mock.patch.object(loading, "find_slices", return_value=None)
        dist.barrier()
        with Peak() as peak, nowhere if whole else nullcontext(), reads.patch():
            start = time.perf_counter()
            loading.materialize(model, source, torch.device("cpu"))
            dist.barrier()
            seconds.append(time.perf_counter() - start)
        peaks.append(peak)
        held = shard_bytes(model)
        del model
    spread = f"{median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f})"
    found = [median(each) for each in zip(*((peak.anonymous, peak.resident, peak.disk) for peak in peaks), strict=True)]
    columns = [*found[:2], held, reads.bytes / options.repeats, found[2]]
    way = "rank 0, whole" if whole else "each rank, slices"
    for turn in range(options.ranks):
        if turn == rank:
            texts = " | ".join(f"{value / 2**20:,.0f}" for value in columns)
            print(f"| {way} | {rank} | {spread} | {texts} |", flush=True)
        dist.barrier()
    dist.destroy_process_group()


def write_headers(folder: Path) -> None:
    """Folder of a Llama of 70B in bf16, in 30 files as long as the real ones, without data: holes, which are read as zeros."""
    (folder / "config.json").write_text(json.dumps(LLAMA_70B))
    files: list[dict[str, Any]] = [{}]
    size = 0
    for name, weight in build_on_meta(read_config(Model(path=str(folder))), torch.bfloat16).state_dict().items():
        if size + weight.nbytes > FILE_BYTES:
            files.append({})
            size = 0
        files[-1][name] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": [size, size + weight.nbytes]}
        size += weight.nbytes
    index = {}
    for number, table in enumerate(files, 1):
        text = json.dumps(table).encode()
        text += b" " * (-len(text) % 8)
        path = folder / f"model-{number:05}-of-{len(files):05}.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        os.truncate(path, 8 + len(text) + max(entry["data_offsets"][1] for entry in table.values()))
        index |= dict.fromkeys(table, path.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def simulate(_: int, rank: int, ranks: int, folder: str, places: Any) -> None:
    """Load the folder of 70B as one rank under tp = 8 and ZeRO-3 over all other ranks, and print what it reads.

    Another rank than rank 0 gets the places of the weights from it.
    """
    torch.set_num_threads(1)
    source, reads = Model(path=folder), Reads()
    with fake_world(rank, ranks):
        model = sharded(source, ranks, 8, "bf16")
        with Peak() as peak, reads.patch():
            if rank == 0:
                loading.materialize(model, source, torch.device("cpu"))
            else:
                allocate(model, torch.device("cpu"))
                loading.read_weights(model, StoredLayout.parse(places))
        held = shard_bytes(model)
    numbers = (held, reads.bytes, peak.anonymous - held, peak.resident)
    texts = " | ".join(f"{value / 1e6:,.0f}" for value in numbers)
    print(f"| {ranks:,} | {rank:,} | {reads.count} | {texts} | {peak.resident / held:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="dtype of the shards")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--simulate", type=int, nargs="+", metavar="RANKS")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.simulate:
            write_headers(Path(folder))
            source = Model(path=folder)
            found = find_slices(source, read_config(source), torch.bfloat16, "causal")
            assert found is not None
            print("| ranks | rank | reads | shards MB | read MB | buffers MB | peak MB | of the shards |")
            print(f"|{'---|' * 8}")
            for ranks in options.simulate:
                for rank in (0, ranks // 2 + 3):
                    mp.spawn(simulate, (rank, ranks, folder, found[1].dump()))
            return
        table = {
            "model_type": "llama",
            "hidden_size": options.hidden,
            "intermediate_size": 3 * options.hidden,
            "num_hidden_layers": options.layers,
            "num_attention_heads": options.hidden // 64,
            "vocab_size": 32000,
        }
        plain = build_as("causal", read_config(Model(config=table)), torch.bfloat16)
        plain.save_pretrained(folder, max_shard_size="1GB")
        size = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
        del plain
        plan = f"{options.ranks} ranks, zero 3, tp {options.tp}, shards in {options.dtype}"
        print(f"{detect().instruction_set}; {plan}; a folder of {size / 2**20:.0f} MiB in bf16\n")
        print(f"{HEADER}\n|{'---|' * HEADER.count(' | ')}---|")
        for number, whole in enumerate((True, False)):
            mp.spawn(load, (options, folder, whole, 29600 + number), nprocs=options.ranks)


if __name__ == "__main__":
    main()
