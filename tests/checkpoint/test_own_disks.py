"""Checkpoints on the hosts' own disks: a host has a manifest and the files of its ranks; a run resumes where all files are.

Ranks of the pool take themselves to be on one host each, with folders of their own at the same relative paths.
"""

import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import weft
from tests.faults.kill import job_file
from tests.lab.families import family
from tests.lab.pool import run_ranks
from tests.lab.runs import run_rank
from weft.checkpoint import memory_tier, together
from weft.checkpoint.folders import list_checkpoints
from weft.checkpoint.manifest import read_manifest, verify_folder
from weft.data import Prepared, prepare
from weft.errors import CheckpointError, JobError
from weft.job import Job
from weft.training import same_inputs
from weft.training.metrics import read_metrics
from weft.training.run_folder import make_run_id

MODULES = (memory_tier, same_inputs, together)


@contextmanager
def on_disk(rank: int, disks: Path) -> Iterator[None]:
    """This rank on a host of its own, in the folder of its disk."""
    folder, before = disks / f"vm{rank}", os.getcwd()
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    patches = [mock.patch.object(module, "host_id", return_value=[f"vm{rank}"]) for module in MODULES]
    patches.append(mock.patch.object(platform, "node", return_value=f"vm{rank}"))
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()
        os.chdir(before)


def train(rank: int, world_size: int, disks: Path, job: Job, prepared: Prepared, resume: list[str]) -> tuple[str, str]:
    """Train on the disk of this rank; the output of the rank, and the error of the run."""
    with on_disk(rank, disks):
        out = Path("run")
        out.mkdir(exist_ok=True)
        if rank == 0:
            make_run_id(out)
        try:
            return run_rank(rank, world_size, job, prepared, out, resume, None)[0], ""
        except (CheckpointError, JobError) as error:
            return "", str(error)


class Disks:
    """Two hosts with disks of their own, and a job of theirs."""

    def __init__(self, folder: Path, **checkpoint: object):
        settings = {"every": 2, "per_host": True, **checkpoint}
        steps = {"steps": 4, "global_batch_size": 4, "micro_batch_size": 1}
        path = job_file(folder, "zero3 on 2", train=steps, checkpoint=settings)
        self.folder, self.job = folder / "disks", Job.load(path, ['out="run"'])
        self.folder.mkdir()
        self.prepared = prepare(self.job.data, model_folder=None, log=str)

    def train(self, *resume: str) -> list[tuple[str, str]]:
        return run_ranks(2, train, self.folder, self.job, self.prepared, list(resume), timeout=180)

    def files(self, host: int, step: int) -> list[str]:
        return sorted(path.name for path in (self.folder / f"vm{host}/run/step-{step:08d}").iterdir())

    def forget(self, step: int) -> None:
        """Remove the checkpoint of a step on all hosts."""
        for host in (0, 1):
            shutil.rmtree(self.folder / f"vm{host}/run/step-{step:08d}")

    @property
    def losses(self) -> list[float]:
        return [row.loss for row in read_metrics(self.folder / "vm0/run/metrics.jsonl")]


@pytest.fixture
def disks(tmp_path: Path) -> Disks:
    """Hosts that have trained four steps."""
    made = Disks(tmp_path)
    assert [error for _, error in made.train()] == ["", ""]
    return made


@pytest.mark.effect("checkpoint.per_host", "files of a checkpoint on the disk of each host")
def test_each_host_has_the_files_of_its_ranks_and_resumes_bit_equal(disks: Disks) -> None:
    for host in (0, 1):
        assert disks.files(host, 4) == ["manifest.json", f"shard-0000{host}.safetensors"]
    manifest = read_manifest(list_checkpoints(disks.folder / "vm1/run")[0])
    assert manifest.hosts == {"shard-00000.safetensors": "vm0", "shard-00001.safetensors": "vm1"}
    whole = disks.losses
    disks.forget(4)
    (first, error), _ = disks.train("auto")
    assert error == ""
    assert "resuming after step 2" in first
    assert disks.losses == whole


def test_a_host_without_its_disk_is_named(disks: Disks) -> None:
    shutil.rmtree(disks.folder / "vm1")
    (_, first), (_, second) = disks.train("auto")
    assert first == second
    assert "do not have all files of step-00000004 together" in first
    assert disks.losses  # nothing was started anew
    assert not (disks.folder / "vm1/run/step-00000004").exists()


def test_the_reason_names_the_host_that_wrote_a_file_and_an_older_checkpoint_is_used(disks: Disks) -> None:
    whole = disks.losses
    (disks.folder / "vm1/run/step-00000004/shard-00001.safetensors").unlink()
    (printed, error), _ = disks.train("auto")
    assert error == ""
    reason = "step-00000004 is skipped: no host has an undamaged shard-00001.safetensors, which vm1 has written"
    assert reason in printed
    assert "resuming after step 2" in printed
    assert disks.losses == whole


def test_a_host_receives_its_files_from_a_host_with_copies(disks: Disks) -> None:
    """The second host was replaced, and its files were copied to the first."""
    whole = disks.losses
    disks.forget(4)
    own, other = (disks.folder / f"vm{host}/run/step-00000002" for host in (0, 1))
    shutil.copy(other / "shard-00001.safetensors", own)
    verify_folder(own)  # an ordinary checkpoint
    shutil.rmtree(disks.folder / "vm1")
    (printed, error), _ = disks.train("auto")
    assert error == ""
    assert "resuming after step 2" in printed
    assert disks.losses == whole


@pytest.mark.parametrize("host", [0, 1])
def test_a_named_checkpoint_needs_the_files_of_all_hosts(host: int, disks: Disks) -> None:
    whole = disks.losses
    (_, error), _ = disks.train("run/step-00000002")
    assert error == ""
    assert disks.losses == whole
    shutil.rmtree(disks.folder / f"vm{host}/run/step-00000002", ignore_errors=True)
    shutil.rmtree(disks.folder / f"vm{host}/run/step-00000004", ignore_errors=True)
    for _, error in disks.train("run/step-00000004"):
        assert "do not have all files of step-00000004 together" in error


def test_a_checkpoint_of_one_host_says_where_its_other_files_are(disks: Disks) -> None:
    with pytest.raises(CheckpointError, match=r"shard-00001\.safetensors is missing; vm1 has written it"):
        verify_folder(disks.folder / "vm0/run/step-00000004")


def save_own_loop(rank: int, world_size: int, disks: Path, shared: bool) -> str:
    """`run.save` into a folder of the own disk of each host, or into one that all share."""
    folder = disks / "shared" if shared else Path("checkpoints")
    with on_disk(rank, disks), mock.patch.object(together, "SHARING_SECONDS", 0.3):
        config = LlamaConfig(**{**family("llama"), "vocab_size": 64})
        run = weft.prepare(
            AutoModelForCausalLM.from_config(config), optimizer=lambda shards: torch.optim.SGD(shards, lr=0.1)
        )
        try:
            run.save(folder / "step-1")
            run.finish()
        except JobError as error:
            return str(error)
        return ""


@pytest.mark.must("fault: Hosts do not share the folder of a run or of checkpoints", case="False")
@pytest.mark.parametrize("shared", [True, False])
def test_an_own_loop_saves_into_a_folder_that_its_hosts_share(shared: bool, tmp_path: Path) -> None:
    first, second = run_ranks(2, save_own_loop, tmp_path, shared)
    assert first == second
    assert ("the hosts do not share this folder" in first) is not shared
    if shared:
        assert [path.name for path in (tmp_path / "shared").iterdir()] == ["step-00000001"]
