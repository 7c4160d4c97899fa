"""Held-out rows of jobs with a trainer: each counts once, whatever the ranks and the batch; counts after filters."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from tests.integrations.scripts_in_pool import variables_of
from tests.lab.pool import run_ranks
from tests.posttraining.conftest import PAIRS, ROWS
from tests.posttraining.test_run import LAYOUTS, OPTIONS, train_on_rank
from weft.errors import DataError
from weft.integrations.even_rows import even_steps
from weft.plan import Plan
from weft.posttraining.job import TrainerJob
from weft.posttraining.trainers import check_job, config_class, make_trainer, trainer_class

HELD_OUT = 5
OWN: dict[str, dict[str, Any]] = {
    "dpo": {},
    "kto": {"loss_type": "apo_zero_unpaired"},  # without the divergence, which is an estimate over a batch
    "reward": {},
    "orpo": {},
}
COUNTED: dict[str, tuple[str, ...]] = {
    "dpo": ("loss", "rewards/chosen", "rewards/margins", "rewards/accuracies", "logps/rejected"),
    "kto": ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen"),
    "reward": ("loss", "accuracy", "margin", "mean_reward"),
    "orpo": ("rewards/margins", "logps/chosen", "log_odds_ratio"),
}
"""Metrics that are means over rows."""


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 5), st.sampled_from([1, 2, 3, 4]))
def test_each_row_is_in_one_step_with_as_many_on_each_rank(units: int, batch: int, ranks: int, group: int) -> None:
    order = [index for index in range(units) for _ in range(group)]
    by_rank = [even_steps(order, batch, rank, ranks, group) for rank in range(ranks)]
    assert Counter(row for step in by_rank[0] for row in step.all_rows) == Counter(order)
    for steps in zip(*by_rank, strict=True):
        assert len({len(step.rows) for step in steps}) == 1
        assert all(count == group for count in Counter(steps[0].all_rows).values())
        own = steps[:1] if steps[0].is_shared else steps
        assert [row for step in own for row in step.rows] == steps[0].all_rows
        assert len(steps[0].rows) <= max(batch, group)


@pytest.fixture(scope="module")
def reference(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a reference model, from which the model differs before the first step."""
    folder = tmp_path_factory.mktemp("reference") / "model"
    shutil.copytree(small_model, folder)
    config = transformers.AutoConfig.from_pretrained(small_model)
    config.initializer_range = 0.2
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def job_of(kind: str, model: Path, folder: Path, reference: Path, plan: Plan, batch: int) -> TrainerJob:
    rows = ROWS.get(kind, PAIRS)
    for name, part in (("train", rows[:16]), ("test", rows[16 : 16 + HELD_OUT])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    options = {**OPTIONS, "max_steps": 1, "max_length": 64, "per_device_eval_batch_size": batch, **OWN[kind]}
    trainer = {"kind": kind, "options": options} | ({"reference": str(reference)} if kind in ("dpo", "kto") else {})
    data = {"path": str(folder / "train.jsonl"), "eval_path": str(folder / "test.jsonl")}
    tables = {"out": str(folder / "run"), "model": {"path": str(model)}, "data": data, "trainer": trainer}
    return TrainerJob.model_validate({**tables, "plan": plan.model_dump()})


def _plain(rank: int, ranks: int, job: TrainerJob) -> dict[str, float]:
    """Evaluation of TRL alone, one row at a time."""
    from datasets import load_dataset

    AcceleratorState._reset_state(True)
    train, test = (load_dataset("json", data_files=path, split="train") for path in (job.data.path, job.data.eval_path))
    options = {**job.trainer.options, "per_device_eval_batch_size": 1}
    with mock.patch.dict("os.environ", variables_of(0, 1)):
        arguments = config_class(job.trainer.kind)(
            output_dir=job.out, report_to="none", use_cpu=True, bf16=False, **options
        )
        transformers.set_seed(1)
        more: dict[str, Any] = {"processing_class": transformers.AutoTokenizer.from_pretrained(job.model.path)}
        if job.trainer.reference:
            more["ref_model"] = AutoModelForCausalLM.from_pretrained(job.trainer.reference)
        trainer = trainer_class(job.trainer.kind)(
            model=job.model.path
            if job.trainer.kind != "orpo"
            else AutoModelForCausalLM.from_pretrained(job.model.path),
            args=arguments,
            train_dataset=train,
            eval_dataset=test,
            **more,
        )
        trainer.evaluate()
        found = trainer.state.log_history[-1]
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return dict(found)


def evaluation_at_start(out: Path) -> dict[str, float]:
    """First evaluation of a run."""
    history = json.loads((out / "trainer_state.json").read_text())["log_history"]
    return next(row for row in history if row["step"] == 0 and ("eval_loss" in row or "eval_reward" in row))


@pytest.mark.parametrize("kind", COUNTED)
@pytest.mark.parametrize(("layout", "batch"), [("zero 2", 2), ("zero 3", 4), ("tp2", 2)])
def test_each_held_out_row_counts_once(
    kind: str, layout: str, batch: int, small_model: Path, reference: Path, tmp_path: Path
) -> None:
    ranks, plan = LAYOUTS[layout]
    job = job_of(kind, small_model, tmp_path, reference, plan, batch)
    (expected,) = run_ranks(1, _plain, job, timeout=120)
    run_ranks(ranks, train_on_rank, job, None, timeout=120)
    found = evaluation_at_start(tmp_path / "run")
    if kind == "kto":  # one row alone has no margin
        expected["eval_rewards/margins"] = expected["eval_rewards/chosen"] - expected["eval_rewards/rejected"]
    for name in COUNTED[kind]:
        assert found[f"eval_{name}"] == pytest.approx(expected[f"eval_{name}"], rel=1e-4, abs=1e-5), name


def by_prompt(prompts: list[str], **_: Any) -> list[float]:
    """Reward that a prompt determines: its number."""
    return [float(prompt.split()[1]) for prompt in prompts]


@pytest.mark.parametrize(
    ("kind", "layout", "batch"), [("grpo", "zero 2", 4), ("rloo", "zero 3", 2), ("grpo", "tp2", 4)]
)
def test_each_held_out_prompt_counts_once(
    kind: str, layout: str, batch: int, small_model: Path, tmp_path: Path
) -> None:
    ranks, plan = LAYOUTS[layout]
    own = {"num_generations": 2, "num_generations_eval": 1 if layout == "tp2" else 4, "max_completion_length": 3}
    job = job_of("dpo", small_model, tmp_path, small_model, plan, batch)
    for name, part in (("train", ROWS["grpo"][:16]), ("test", ROWS["grpo"][16 : 16 + HELD_OUT])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    options = {**OPTIONS, **own, "max_steps": 1, "per_device_eval_batch_size": batch}
    trainer = {"kind": kind, "options": options, "rewards": ["tests.posttraining.test_held_out:by_prompt"]}
    job = TrainerJob.model_validate({**job.model_dump(), "trainer": trainer})
    run_ranks(ranks, train_on_rank, job, None, timeout=120)
    assert evaluation_at_start(tmp_path / "run")["eval_reward"] == pytest.approx(sum(range(16, 21)) / HELD_OUT)


def _kept(rank: int, ranks: int, job: TrainerJob) -> int:
    AcceleratorState._reset_state(True)
    try:
        with mock.patch.dict("os.environ", variables_of(rank, ranks)):
            return len(make_trainer(job).train_dataset)
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()


def as_messages(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of texts as rows of messages."""
    roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant", "completion": "assistant"}
    return [
        {key: [{"role": roles[key], "content": value}] if key in roles else value for key, value in row.items()}
        for row in rows
    ]


@pytest.mark.parametrize("form", ["texts", "messages", "without prompts"])
@pytest.mark.parametrize("kind", ["dpo", "kto", "reward"])
def test_rows_that_max_length_leaves_out_are_not_counted(
    kind: str, form: str, small_model: Path, write_rows: Callable[[list[Any]], Path], tmp_path: Path
) -> None:
    if (kind, form) == ("kto", "without prompts"):
        pytest.skip("judged answers have prompts")
    rows = [{**row, "prompt": row["prompt"] + " weft" * (index % 6)} for index, row in enumerate(ROWS[kind])]
    rows = as_messages(rows) if form == "messages" else rows
    if form == "without prompts":
        rows = [{name: row["prompt"] + row[name] for name in ("chosen", "rejected")} for row in rows]
    limits = {"texts": 6, "messages": 9, "without prompts": 6}
    limit = limits[form] + 5 * (kind == "reward")
    tables = {
        "out": str(tmp_path / "run"),
        "model": {"path": str(small_model)},
        "data": {"path": str(write_rows(rows))},
    }
    trainer = {"kind": kind, "options": {**OPTIONS, "max_length": limit}}
    job = TrainerJob.model_validate({**tables, "trainer": trainer, "plan": LAYOUTS["zero 2"][1].model_dump()})
    kept = run_ranks(2, _kept, job, timeout=120)[0]
    assert 0 < kept < len(rows)
    assert check_job(job, 2) == f"{kept} rows ({len(rows) - kept} left out by max_length = {limit}) to train on"
    none = {"kind": kind, "options": {**OPTIONS, "max_length": 3}}
    with pytest.raises(DataError, match="max_length = 3 leaves out all 32 rows"):
        check_job(TrainerJob.model_validate({**tables, "trainer": none}), 2)


def test_fewer_prompts_than_a_generation_takes_are_refused(
    small_model: Path, write_rows: Callable[[list[Any]], Path], tmp_path: Path
) -> None:
    options = {**OPTIONS, "num_generations": 4, "steps_per_generation": 4}
    trainer = {"kind": "grpo", "rewards": ["tests.posttraining.test_held_out:by_prompt"], "options": options}
    tables = {"out": str(tmp_path), "model": {"path": str(small_model)}, "trainer": trainer}
    path = write_rows(ROWS["grpo"][:7])
    with pytest.raises(DataError, match="7 prompts, and a generation takes 8"):
        check_job(TrainerJob.model_validate({**tables, "data": {"path": str(path)}}), 2)
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS["grpo"][:8]))
    check_job(TrainerJob.model_validate({**tables, "data": {"path": str(path)}}), 2)
