"""Jobs with a trainer: what is refused before a rank starts."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import pytest
import tomli_w
import torch

from tests.posttraining.conftest import PAIRS, ROWS, experts_model
from weft.device.detect import detect
from weft.errors import CheckpointError, DataError, JobError, PlanError, WeftError
from weft.job import has_trainer
from weft.posttraining.job import Rows, TrainerJob
from weft.posttraining.rows import check_rows, read_rows
from weft.posttraining.trainers import check_job, generator_device


def tables(**changes: Any) -> dict[str, Any]:
    start = {"out": "run", "model": {"path": "model"}, "data": {"path": "rows.jsonl"}, "trainer": {"kind": "dpo"}}
    return {**start, **changes}


GRPO = {"kind": "grpo", "rewards": ["math:floor"]}


def load(folder: Path, **changes: Any) -> TrainerJob:
    path = folder / "job.toml"
    path.write_text(tomli_w.dumps(tables(**changes)))
    return TrainerJob.load(path)


def test_a_job_is_read_and_written(tmp_path: Path) -> None:
    job = load(tmp_path, trainer={"kind": "kto", "options": {"beta": 0.2, "max_steps": 4}})
    (tmp_path / "again.toml").write_text(job.to_toml())
    assert TrainerJob.load(tmp_path / "again.toml") == job
    assert TrainerJob.load(tmp_path / "again.toml", ["trainer.options.beta=0.3"]).trainer.options["beta"] == 0.3
    assert has_trainer(tmp_path / "again.toml")
    auto = load(tmp_path, plan="auto")
    assert auto.plan is None
    (tmp_path / "again.toml").write_text(auto.to_toml())
    assert TrainerJob.load(tmp_path / "again.toml") == auto


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer": {"kind": "dqo"}}, 'trainer.kind = "dqo"'),
        ({"trainer": {"kind": "dpo", "beta": 0.1}}, "unknown key trainer.beta"),
        ({"trainer": {"kind": "grpo"}}, "grpo with no rewards"),
        ({"trainer": {"kind": "dpo", "rewards": ["a:b"]}}, "dpo with 1 rewards"),
        ({"data": {"path": "a", "eval_path": "b", "held_out": 0.1}}, "data.eval_path with data.held_out"),
        ({"adapter": {"kind": "qlora"}}, "adapter.kind = qlora"),
        ({"trainer": {"kind": "dpo", "generator": "process"}}, '"process" for trainer.kind = dpo'),
        (
            {"trainer": {**GRPO, "generator": "process", "options": {"model_init_kwargs": {"revision": "a"}}}},
            '"process" with model_init_kwargs',
        ),
        ({"adapter": {"kind": "none", "path": "somewhere"}}, "adapter.kind = none with adapter.path = somewhere"),
    ],
)
def test_jobs_that_break_a_rule_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=message):
        load(tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"trainer": {"kind": "dpo", "options": {"learning_rat": 1}}}, JobError, "did you mean learning_rate?"),
        ({"trainer": {"kind": "dpo", "options": {"bf16": True}}}, JobError, "set plan.precision.param_dtype"),
        ({"trainer": {"kind": "dpo", "options": {"output_dir": "a"}}}, JobError, "set out"),
        ({"trainer": {"kind": "grpo", "rewards": ["nowhere"]}}, JobError, "no folder and no function nowhere"),
        ({"trainer": {"kind": "grpo", "rewards": ["math:lug"]}}, JobError, "math has no function lug"),
        ({"model": {"path": "nowhere"}}, JobError, "there is no folder nowhere"),
        ({"adapter": {"kind": "lora", "targets": ["q_prok"]}}, JobError, "q_proj"),
        ({"data": {"path": "nowhere.jsonl"}}, DataError, "there is no file nowhere.jsonl"),
        ({"data": {"path": "rows.jsonl", "held_out": 0.001}}, DataError, "0 of 32 rows are held out"),
        ({"plan": {"parallel": {"pp": 2}}}, JobError, "trainer.kind = dpo with plan.parallel.pp = 2"),
        ({"plan": {"parallel": {"tp": 3}}}, PlanError, "3"),
    ],
)
def test_jobs_that_cannot_run_are_refused(
    changes: dict[str, Any],
    error: type[Exception],
    message: str,
    small_model: Path,
    write_rows: Callable[[list[Any]], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(write_rows(PAIRS).parent)
    job = load(tmp_path, **{"model": {"path": str(small_model)}, **changes})
    with pytest.raises(error, match=message):
        check_job(job, 2)


@pytest.mark.parametrize("place", ["model.path", "trainer.rewards"])
@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", {"model_type": "mine", "auto_map": {"AutoConfig": "mine.MineConfig"}}, "'mine' is no family"),
        ("config.json", {"model_type": "lama"}, "no model_type is called 'lama'"),
        ("config.json", {"hidden_size": "wide", "model_type": "llama"}, "hidden_size"),
        ("config.json", "{", "cannot be read"),
        ("tokenizer.json", "{", "cannot load a tokenizer"),
        ("tokenizer.json", {"version": "9"}, "cannot load a tokenizer"),
    ],
)
def test_a_folder_that_the_library_cannot_read_is_refused(
    file: str,
    content: Any,
    message: str,
    place: str,
    small_model: Path,
    write_rows: Callable[[list[Any]], Path],
    tmp_path: Path,
) -> None:
    """Of the model and of a reward model: before a rank starts, and without running code of the folder."""
    broken = tmp_path / "broken"
    shutil.copytree(small_model, broken)
    (broken / file).write_text(content if isinstance(content, str) else json.dumps(content))
    (broken / "mine.py").write_text("raise SystemExit")
    rewards = {"kind": "grpo", "rewards": [str(broken)]}
    changes = {"model": {"path": str(broken)}} if place == "model.path" else {"trainer": rewards}
    job = load(tmp_path, **{"model": {"path": str(small_model)}, "data": {"path": str(write_rows(PAIRS))}, **changes})
    with pytest.raises(WeftError, match=message) as caught:
        check_job(job, 2)
    assert caught.value.exit_code == 2
    assert caught.value.rule
    assert caught.value.fix


def test_a_checkpoint_that_does_not_exist_is_refused(
    small_model: Path, write_rows: Callable[[list[Any]], Path], tmp_path: Path
) -> None:
    job = load(tmp_path, model={"path": str(small_model)}, data={"path": str(write_rows(PAIRS))})
    with pytest.raises(CheckpointError, match="there is no checkpoint in nosuch"):
        check_job(job, 2, "nosuch")


def test_a_folder_with_adapters_is_refused(
    small_model: Path, write_rows: Callable[[list[Any]], Path], tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    job = load(tmp_path, model={"path": str(tmp_path)}, data={"path": str(write_rows(PAIRS))})
    with pytest.raises(JobError, match="weft export RUN TO --merge"):
        check_job(job, 2)


def test_the_auxiliary_loss_of_routers_is_refused_where_tokens_are_split(
    small_model: Path, write_rows: Callable[[list[Any]], Path], tmp_path: Path
) -> None:
    model = experts_model(tmp_path / "experts", small_model)
    changes: dict[str, Any] = {"model": {"path": str(model)}, "data": {"path": str(write_rows(PAIRS))}}
    job = load(tmp_path, plan={"parallel": {"tp": 2}}, **changes)
    with pytest.raises(JobError, match=r"router_aux_loss_coef = 0\.001 with plan\.parallel\.tp = 2"):
        check_job(job, 2)
    check_job(load(tmp_path, plan={"parallel": {"ep": 2}}, **changes), 2)
    check_job(TrainerJob.load(tmp_path / "job.toml", ["trainer.options.router_aux_loss_coef=0"]), 2)


def test_the_process_that_generates_needs_a_device_without_a_rank() -> None:
    assert generator_device(detect(), 4) == torch.device("cpu")
    device = mock.Mock(type="cuda", count=4, torch_device=lambda index: torch.device("cuda", index))
    assert generator_device(device, 3) == torch.device("cuda", 3)
    with pytest.raises(JobError, match="with 4 ranks on 4 cuda devices") as caught:
        generator_device(device, 4)
    assert "--nproc-per-node 3" in str(caught.value.fix)


def messages(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in pairs]


GOOD = {"chosen": messages(("assistant", "yes")), "rejected": messages(("assistant", "no"))}


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [
        ("dpo", {"prompt": "a", "chosen": "b"}, "have no column rejected"),
        ("grpo", {"question": "a"}, "these have question"),
        ("dpo", {"prompt": "a", "chosen": " ", "rejected": "b"}, "chosen of row 2 is empty"),
        ("dpo", {**GOOD, "prompt": []}, "prompt of row 2 is empty"),
        ("dpo", {**GOOD, "prompt": messages(("", "a"))}, "prompt of row 2 has a message without role"),
        ("dpo", {**GOOD, "prompt": messages(("user", "a")), "chosen": messages(("user", "b"))}, "not of the assistant"),
        ("kto", {"prompt": "a", "completion": "b", "label": 1}, "label of row 2 is 1"),
    ],
)
def test_rows_that_break_a_rule_are_refused(kind: Any, row: dict[str, Any], message: str) -> None:
    good = {**row, "prompt": messages(("user", "a"))} if isinstance(row.get("chosen"), list) else dict(row)
    if "chosen" in good:
        good |= {name: GOOD["chosen"] if isinstance(row["chosen"], list) else "b" for name in ("chosen", "rejected")}
    if "column" in message or "these" in message:
        good = row
    if kind == "kto":  # Arrow has one type in a column
        message = "label of row 1"
    with pytest.raises(DataError, match=message):
        check_rows(datasets.Dataset.from_list([good, row]), kind, "rows", has_template=True)


def test_messages_need_a_template() -> None:
    rows = datasets.Dataset.from_list([{**GOOD, "prompt": messages(("user", "a"))}])
    check_rows(rows, "dpo", "rows", has_template=True)
    with pytest.raises(DataError, match="row 1 has messages, and the tokenizer has no chat template"):
        check_rows(rows, "dpo", "rows", has_template=False)


def test_rows_of_all_forms_are_read(write_rows: Callable[[list[Any]], Path], tmp_path: Path) -> None:
    path = write_rows(PAIRS)
    dataset = datasets.Dataset.from_list(PAIRS)
    dataset.to_parquet(tmp_path / "rows.parquet")
    dataset.save_to_disk(tmp_path / "folder")
    for name in (path, tmp_path / "rows.parquet", tmp_path / "folder"):
        assert read_rows(Rows(path=str(name)), 0)[0].to_list() == PAIRS
    assert len(read_rows(Rows(path=str(tmp_path / "*.jsonl")), 0)[0]) == 32
    train, held_out = read_rows(Rows(path=str(path), held_out=0.25), 0)
    assert (len(train), len(held_out)) == (24, 8)
    both = read_rows(Rows(path=str(path), eval_path=str(tmp_path / "rows.parquet")), 0)
    assert [len(part) for part in both] == [32, 32]


@pytest.mark.parametrize("text", ["not JSON\n", '{"prompt": 1}\n{"prompt": ["a"]}\n', ""])
def test_files_that_are_damaged_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=r"rows cannot be read|no rows|prompt of row 1 is int"):
        check_rows(read_rows(Rows(path=str(path)), 0)[0], "grpo", "rows", has_template=True)


def test_rows_of_every_kind_pass() -> None:
    for kind, rows in ROWS.items():
        check_rows(datasets.Dataset.from_list(json.loads(json.dumps(rows))), kind, "rows", has_template=False)
