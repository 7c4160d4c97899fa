"""Hosts that differ in what their ranks read by themselves: refused on every rank, with host, name and both values.

Ranks of the pool take themselves to be on one host each, and start in folders of their own, with the same relative paths.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import weft
from tests.lab.families import family
from tests.lab.jobs import write_job
from tests.lab.pool import run_ranks
from weft.checkpoint import together
from weft.data import prepare
from weft.errors import JobError
from weft.integrations.accelerator import WeftAccelerator
from weft.integrations.trainer import with_weft
from weft.job import Job
from weft.posttraining import rank as trainer_rank
from weft.posttraining.job import TrainerJob
from weft.training import same_inputs
from weft.training.same_inputs import compare_hosts, read_code, read_job_inputs
from weft.training.session import open_session

TINY = {**family("llama"), "vocab_size": 64}


@contextmanager
def on_host(rank: int, folder: Path | None = None) -> Iterator[None]:
    """This rank on a host of its own, in its own folder."""
    before = os.getcwd()
    os.chdir(folder / str(rank) if folder else before)
    with (
        mock.patch.object(same_inputs, "host_id", return_value=[f"host {rank}"]),
        mock.patch.object(together, "host_id", return_value=[f"host {rank}"]),
    ):
        try:
            yield
        finally:
            os.chdir(before)


def refusal(rank: int, folder: Path | None, call: Any) -> str:
    """Text of the error that a call raises on this rank; "" without one."""
    with on_host(rank, folder):
        try:
            call()
        except JobError as error:
            return str(error)
    return ""


def compared(rank: int, world_size: int, tables: list[dict[str, str]]) -> str:
    return refusal(rank, None, lambda: compare_hosts(lambda: tables[rank]))


def test_the_first_difference_is_named_with_both_values_on_every_rank() -> None:
    tables = [{"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"}]
    first, second = run_ranks(2, compared, tables)
    assert first == second
    assert first.startswith("b: 2 on ")
    assert "(rank 0), and 3 on " in first
    assert "(rank 1); 1 more differ, such as c" in first


def test_modules_and_libraries_of_one_host_alone_are_no_difference() -> None:
    assert run_ranks(2, compared, [{"module a": "1"}, {"version of peft": "2"}]) == ["", ""]


def read_once(rank: int, world_size: int) -> tuple[int, int]:
    """Number of reads of this rank: on one host, and on two hosts of two ranks."""
    calls: list[int] = []

    def read() -> dict[str, str]:
        calls.append(rank)
        return {"a": "1"}

    with mock.patch.object(same_inputs, "host_id", return_value=["only"]):
        compare_hosts(read)
    alone = len(calls)
    with mock.patch.object(same_inputs, "host_id", return_value=[f"host {rank // 2}"]):
        compare_hosts(read)
    return alone, len(calls) - alone


def test_one_rank_of_each_of_several_hosts_reads() -> None:
    assert run_ranks(4, read_once) == [(0, 1), (0, 0), (0, 1), (0, 0)]


def make_hosts(folder: Path, change: str) -> None:
    """Folders of two hosts, of which the second differs; without ranks, of which Transformers lets one alone save."""
    for host in (0, 1):
        own, is_other = folder / str(host), host == 1
        (own / "model").mkdir(parents=True)
        torch.manual_seed(is_other and change == "weights")
        LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(own / "model")
        rows = np.random.default_rng(is_other and change == "tokens").integers(0, 64, (8, 33))
        np.save(own / "rows.npy", rows.astype(np.uint16))
        text = "import own_helper\n\ndef loss(logits, targets):\n    return own_helper.SCALE * logits.mean()\n"
        (own / "own_code.py").write_text(text + "# changed" * (is_other and change == "function"))
        (own / "own_helper.py").write_text(f"SCALE = {2 if is_other and change == 'helper' else 1}\n")
    if change == "missing file":
        (folder / "1" / "model" / "generation_config.json").unlink()


def compare_job(rank: int, world_size: int, folder: Path, change: str) -> str:
    """Open the session of a job on two hosts."""
    own = folder / str(rank)
    job = Job.parse(
        {
            "model": {"path": "model"},
            "data": {
                "source": "tokens",
                "path": "rows.npy",
                "seq_len": 32,
                "cache": str(own / "cache"),
                "held_out": 0.0,
            },
            "train": {"steps": 1, "global_batch_size": 2, "loss": "own_code:loss"},
            "plan": {"precision": {"param_dtype": "fp32"}},
        }
    )
    version = "9.9" if rank == 1 and change == "Transformers" else transformers.__version__
    for name in ("own_code", "own_helper"):
        sys.modules.pop(name, None)
    with on_host(rank, folder), mock.patch.object(sys.modules["transformers"], "__version__", version):
        prepared = prepare(job.data, model_folder=None, log=str)
        relative = [type(span)("rows.npy", span.starts, span.first, span.last, span.whole) for span in prepared.train]
        prepared = type(prepared)(**{**vars(prepared), "train": tuple(relative)})
        with (
            mock.patch.object(sys, "path", [str(folder / str(rank)), *sys.path]),
            mock.patch("weft.training.session.connect", return_value=(rank, world_size, rank)),
        ):
            try:
                open_session(job, prepared)
            except JobError as error:
                return str(error)
            finally:
                for name in ("own_code", "own_helper"):
                    sys.modules.pop(name, None)
    return ""


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("weights", "model/model.safetensors (model.path)"),
        ("tokens", "rows.npy (tokens)"),
        ("function", "module own_code"),
        ("helper", "module own_helper"),
        ("missing file", "model/generation_config.json (model.path)"),
        ("Transformers", "version of transformers"),
    ],
    ids=["weights", "tokens", "function", "helper", "missing", "version"],
)
@pytest.mark.must("fault: A host differs in versions, code, model or tokens", case="weights")
def test_a_run_on_hosts_that_differ_is_refused_before_its_first_step(change: str, named: str, tmp_path: Path) -> None:
    make_hosts(tmp_path, change)
    first, second = run_ranks(2, compare_job, tmp_path, change)
    assert first == second
    assert first.startswith(f"{named}: ")


def test_hosts_with_the_same_inputs_train(tmp_path: Path) -> None:
    make_hosts(tmp_path, "nothing")
    assert run_ranks(2, compare_job, tmp_path, "nothing") == ["", ""]


def prepare_loop(rank: int, world_size: int, folder: Path) -> str:
    """`weft.prepare` of a model whose folder is another one on the second host."""
    with on_host(rank, folder):
        model = LlamaForCausalLM.from_pretrained("model")
        return refusal(
            rank, folder, lambda: weft.prepare(model, optimizer=lambda shards: torch.optim.SGD(shards, lr=0.1))
        )


def test_an_own_loop_with_another_model_folder_is_refused(tmp_path: Path) -> None:
    make_hosts(tmp_path, "weights")
    first, second = run_ranks(2, prepare_loop, tmp_path)
    assert first == second
    assert first.startswith("model folder of the script: model/model.safetensors (model): ")


def train_script(rank: int, world_size: int, door: str, folder: Path) -> str:
    """A script of accelerate or Trainer whose rows are others on the second host."""
    rows = torch.full((8, 4), rank)
    model = LlamaForCausalLM(LlamaConfig(**TINY))

    def call() -> None:
        if door == "accelerate":
            loader: Any = DataLoader(TensorDataset(rows), batch_size=2)
            WeftAccelerator().prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
        else:
            data = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in rows]
            arguments = TrainingArguments(str(folder), max_steps=1, report_to="none", save_strategy="no")
            with_weft(Trainer)(model, arguments, train_dataset=data).train()

    return refusal(rank, None, call)


@pytest.mark.parametrize("door", ["accelerate", "Trainer"])
def test_a_script_with_other_rows_is_refused(door: str, tmp_path: Path) -> None:
    first, second = run_ranks(2, train_script, door, tmp_path)
    assert first == second
    assert first.startswith("rows of data set ")
    assert "8 rows, digest" in first


def compare_trainer_job(rank: int, world_size: int, folder: Path) -> str:
    """Inputs of a job of TRL whose rows are others on the second host."""
    own = folder / str(rank)
    own.mkdir()
    LlamaConfig(**TINY).save_pretrained(own / "model")
    (own / "rows.jsonl").write_text(f'{{"prompt": "a", "chosen": "b", "rejected": "{rank}"}}\n')
    job = TrainerJob.model_validate(
        {"model": {"path": "model"}, "data": {"path": "rows.jsonl"}, "trainer": {"kind": "dpo"}, "out": str(folder)}
    )
    return refusal(rank, folder, partial(compare_hosts, partial(trainer_rank._read_inputs, job)))


def test_a_job_of_trl_with_other_rows_is_refused(tmp_path: Path) -> None:
    first, second = run_ranks(2, compare_trainer_job, tmp_path)
    assert first == second
    assert first.startswith("rows.jsonl (data.path): ")


def test_values_of_this_host(tmp_path: Path) -> None:
    """Versions of what is imported, the digest of Weft, and modules of the user, but none of installed packages."""
    found = read_code()
    assert found["version of torch"] == torch.__version__
    assert "digest" in found["version of weft"]
    assert "module tests.lab.jobs" in found
    roots = {name.removeprefix("module ").partition(".")[0] for name in found if name.startswith("module ")}
    assert not roots & {"torch", "weft", "json"}
    job = Job.load(write_job(tmp_path))
    prepared = prepare(job.data, model_folder=None, log=str)
    tokens = [name for name in read_job_inputs(job, prepared) if name.endswith("(tokens)")]
    assert tokens
    assert all(str(tmp_path / "cache") in name for name in tokens)
