"""Weights and gradients on disk: the bits of a run in memory, read ahead in the order of use, and through checkpoints."""

import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.lab.bits import assert_same_bits_with, records_of
from tests.lab.families import family
from tests.lab.jobs import write_job
from tests.lab.pool import RankError, run_ranks
from tests.lab.runs import ObservedRun, observe
from weft.errors import PlanError
from weft.job import Job
from weft.memory.on_disk import ShardsOnDisk
from weft.memory.pool import Pool, mapped_files
from weft.plan import Memory, Parallel, Plan, Precision, resolve_plan
from weft.training.session import Session


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("name", ["gpt2", "qwen3_moe"])
def test_bits_are_those_of_a_run_in_memory(name: str, zero: int, tmp_path: Path) -> None:
    """Losses, norms, gradients and weights of three steps, on two ranks; shards of an odd vocabulary are padded."""
    plan = Plan(parallel=Parallel(zero=zero), precision=Precision(param_dtype="fp32"))  # type: ignore[arg-type]
    memory = Memory(parameters_device="disk", optimizer_device="disk", offload_dir=str(tmp_path))
    assert_same_bits_with({**family(name), "vocab_size": 97}, plan, 2, memory, micro_batch=1)


def units_read(rank: int, world_size: int, folder: Path) -> list[list[int]]:
    """Units that are read ahead in each of three forwards and backwards of four units."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    for unit in model:
        fully_shard(unit)
    fully_shard(model)
    on_disk = ShardsOnDisk(Pool(mapped_files(folder)), 1)
    on_disk.watch(model)
    on_disk.move(model)
    names = {id(file): index for index, file in enumerate(on_disk.weights[unit] for unit in model)}  # type: ignore[index]
    read: list[int] = []
    for file in on_disk.weights.values():
        file.read_ahead = partial(read.append, names.get(id(file), -1))  # type: ignore[method-assign]
    found = []
    for _ in range(3):
        read.clear()
        model(torch.ones(2, 4)).sum().backward()
        found.append(list(read))
    return found


def test_units_are_read_in_the_order_of_their_use(tmp_path: Path) -> None:
    """Order of forward, then of backward, without the model itself (-1), which has no weights."""
    first, second, third = run_ranks(1, units_read, tmp_path)[0]
    assert first == []
    assert [index for index in second if index >= 0] == [1, 2, 3, 3, 2, 1, 0]
    assert [index for index in third if index >= 0] == [0, 1, 2, 3, 3, 2, 1, 0]


def loads(session: Session) -> list[float]:
    """Sums of the weights. A probe."""
    return [float(parameter.full_tensor().double().sum()) for parameter in session.model.parameters()]  # type: ignore[attr-defined]


def test_a_run_resumes_from_disk_to_memory_and_back(tmp_path: Path) -> None:
    """Each run continues from a checkpoint of the one before, and all end with the same weights."""
    disk = {"parameters_device": "disk", "optimizer_device": "disk", "offload_dir": str(tmp_path / "files")}

    def run(memory: dict[str, str], name: str, resume: Path | None = None) -> ObservedRun:
        (tmp_path / name).mkdir()
        model, plan = {"config": {**family("llama"), "vocab_size": 300}}, {"parallel": {"zero": 3}, "memory": memory}
        tables = {"model": model, "train": {"steps": 6}, "checkpoint": {"every": 2, "keep": 9}, "plan": plan}
        job = Job.load(write_job(tmp_path / name, **tables))
        return observe(job, 2, probe=loads, resume=None if resume is None else str(resume))

    one = run(disk, "one")
    two = run({}, "two", one.folder / "step-00000002")
    three = run(disk, "three", two.folder / "step-00000004")
    assert len(three.metrics) == 2
    assert one.facts[0] == two.facts[0] == three.facts[0]


def test_weights_on_disk_need_zero() -> None:
    plan = Plan(parallel=Parallel(zero=0), memory=Memory(parameters_device="disk"))
    with pytest.raises(PlanError, match="parameters_device with zero"):
        resolve_plan(plan, 2, native_bf16=False)
    alone = Plan(memory=Memory(parameters_device="disk"))
    assert resolve_plan(alone, 1, native_bf16=False).parallel.zero == 3  # on one rank, "auto" is otherwise 0


def test_a_full_disk_is_refused_on_every_rank(tmp_path: Path) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(tmp_path)], check=False).returncode:
        pytest.skip("this sandbox cannot mount a tmpfs")
    try:
        memory = Memory(parameters_device="disk", offload_dir=str(tmp_path))
        plan = Plan(parallel=Parallel(zero=3), memory=memory)
        with pytest.raises(RankError, match=r"has no space for weights and gradients: rank \d: No space left"):
            records_of(family("llama"), plan, 2)
        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
