"""Jobs with a trainer: their ranks have the losses and weights of TRL alone, and the command prints what training changes."""

import html
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig, LlamaForCausalLM

from tests.faults.kill import Command
from tests.integrations.scripts_in_pool import variables_of
from tests.lab.adapters import WIDE, round_weights
from tests.lab.commands import start_weft
from tests.lab.plans import resolved
from tests.lab.pool import run_ranks
from tests.launch.test_inside import launcher_command
from tests.posttraining.conftest import ROWS
from weft.errors import CheckpointError
from weft.evaluation.source import model_folder
from weft.job import Adapter, read_plan
from weft.launch.heartbeat import Heartbeat
from weft.plan import Parallel, Plan, Precision
from weft.posttraining.export import export_model
from weft.posttraining.job import TrainerJob
from weft.posttraining.rank import train
from weft.posttraining.report import write_report
from weft.posttraining.run import changes
from weft.posttraining.trainers import check_job, make_trainer
from weft.training.metrics import read_task_evaluations

OPTIONS = {
    "max_steps": 3,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 2,
    "logging_steps": 1,
    "seed": 1,
    "save_strategy": "no",
    "learning_rate": 3e-3,
}
FP32 = Precision(param_dtype="fp32")
LAYOUTS = {
    "zero 2": (2, Plan(parallel=Parallel(zero=2), precision=FP32)),
    "zero 3": (2, Plan(parallel=Parallel(zero=3), precision=FP32)),
    "tp2": (2, Plan(parallel=Parallel(tp=2), precision=FP32)),
}
COUNTED = ("loss", "eval_loss", "grad_norm", "rewards/margins", "eval_rewards/accuracies")


def count_weft(completions: list[str], **_: Any) -> list[float]:
    """Reward: share of the word weft."""
    return [text.split().count("weft") / 8 for text in completions]


def job_of(kind: str, model: Path, rows: Path, out: Path, plan: Plan | None, **options: Any) -> TrainerJob:
    rewards = ["tests.posttraining.test_run:count_weft"] if kind in ("grpo", "rloo") else []
    own = {"num_generations": 4, "max_completion_length": 8} if rewards else {"max_length": 64}
    tables = {
        "out": str(out),
        "model": {"path": str(model)},
        "data": {"path": str(rows), "held_out": 0.25},
        "trainer": {"kind": kind, "rewards": rewards, "options": {**OPTIONS, **own, **options}},
    }
    return TrainerJob.model_validate({**tables, "plan": plan.model_dump() if plan else None})


def train_on_rank(rank: int, ranks: int, job: TrainerJob, resume: str | None) -> None:
    AcceleratorState._reset_state(True)
    try:
        with mock.patch.dict("os.environ", variables_of(rank, ranks)):
            train(job, [resume] if resume else [], Heartbeat.open())
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()


def _plain(rank: int, ranks: int, kind: str, model: str, rows: str, out: str, options: dict[str, Any]) -> None:
    """TRL alone, as its documentation writes it."""
    from datasets import load_dataset
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer

    AcceleratorState._reset_state(True)
    classes = {"dpo": (DPOConfig, DPOTrainer), "kto": (KTOConfig, KTOTrainer), "reward": (RewardConfig, RewardTrainer)}
    config, trainer_class = classes[kind]
    parts = load_dataset("json", data_files=rows, split="train").train_test_split(test_size=8, seed=1)
    more = {"eval_on_start": True, "report_to": "none", "use_cpu": True, "bf16": False, "max_length": 64}
    transformers.set_seed(1)
    with mock.patch.dict("os.environ", variables_of(0, 1)):
        trainer = trainer_class(
            model=model,
            args=config(output_dir=out, **{**OPTIONS, **options}, **more),
            train_dataset=parts["train"],
            eval_dataset=parts["test"],
        )
        trainer.train()
        trainer.evaluate()
        trainer.save_model(f"{out}/export")
        trainer.save_state()
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def logs_of(out: Path) -> list[dict[str, float]]:
    history = json.loads((out / "trainer_state.json").read_text())["log_history"]
    return [kept for row in history if (kept := {key: row[key] for key in COUNTED if key in row})]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


# KTO estimates its divergence within each micro-batch, so that only ranks that share rows have that of one process.
@pytest.mark.must("parity: jobs with a trainer of TRL", case="dpo-zero 2")
@pytest.mark.parametrize(
    ("kind", "layout"), [*((kind, layout) for kind in ("dpo", "reward") for layout in LAYOUTS), ("kto", "tp2")]
)
def test_a_job_equals_trl_in_one_process(
    kind: str, layout: str, small_model: Path, write_rows: Callable[[list[Any]], Path], tmp_path: Path
) -> None:
    rows, (ranks, plan) = write_rows(ROWS[kind]), LAYOUTS[layout]
    data_ranks = ranks // plan.parallel.tp
    batches = {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 4}
    run_ranks(1, _plain, kind, str(small_model), str(rows), str(tmp_path / "plain"), batches, timeout=120)
    own = {name: size // data_ranks for name, size in batches.items()}
    job = job_of(kind, small_model, rows, tmp_path / "weft", plan, **own)
    check_job(job, ranks)
    run_ranks(ranks, train_on_rank, job, None, timeout=120)
    found, expected = logs_of(tmp_path / "weft"), logs_of(tmp_path / "plain")
    assert len(found) == len(expected) == 5
    for now, then in zip(found, expected, strict=True):
        # The mean of an evaluation over ranks of different rows is that of TRL on several processes.
        assert now == pytest.approx(then, rel=1e-4, abs=1e-5)
    saved = weights_of(tmp_path / "plain" / "export")
    weights = weights_of(tmp_path / "weft" / "export")
    assert weights.keys() == saved.keys()
    for name, value in saved.items():
        assert torch.allclose(weights[name], value, atol=2e-4), name


def test_the_planner_chooses_the_plan_of_a_job(
    small_model: Path, write_rows: Callable[[list[Any]], Path], tmp_path: Path
) -> None:
    rows, out = write_rows(ROWS["dpo"]), tmp_path / "auto"
    job = job_of("dpo", small_model, rows, out, None)
    check_job(job, 2)
    run_ranks(2, train_on_rank, job, None, timeout=120)
    chosen = read_plan(out / "plan.toml")
    assert resolved(chosen, 2).parallel.data_ranks == 2
    run_ranks(2, train_on_rank, job_of("dpo", small_model, rows, tmp_path / "given", chosen), None, timeout=120)
    assert logs_of(out) == logs_of(tmp_path / "given")


def test_ranks_of_another_launcher_train_bit_equal(
    small_model: Path, write_rows: Callable[[list[Any]], Path], tmp_path: Path
) -> None:
    """Two tasks of srun, and Weft's launcher."""
    rows, outs = write_rows(ROWS["dpo"]), [tmp_path / "srun", tmp_path / "weft"]
    (tmp_path / "job.toml").write_text(job_of("dpo", small_model, rows, outs[0], LAYOUTS["zero 3"][1]).to_toml())
    command = ["train", str(tmp_path / "job.toml"), "--out"]
    for out, launch in zip(outs, (launcher_command("srun"), [sys.executable, "-m", "weft"]), strict=True):
        own = ["--nproc-per-node", "2"] if out == outs[1] else []
        done = subprocess.run([*launch, *command, str(out), *own], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("report      ") == 1
    assert logs_of(outs[0]) == logs_of(outs[1])
    first, second = (weights_of(out / "export") for out in outs)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
@pytest.mark.parametrize("layout", ["zero 2", "tp2"])
def test_rewards_rise(
    kind: str, layout: str, small_model: Path, write_rows: Callable[[list[Any]], Path], tmp_path: Path
) -> None:
    rows, (ranks, plan) = write_rows(ROWS[kind]), LAYOUTS[layout]
    job = job_of(kind, small_model, rows, tmp_path / "run", plan, max_steps=20, learning_rate=2e-2, beta=0.0)
    job = job.model_copy(update={"data": job.data.model_copy(update={"held_out": 0.0})})
    check_job(job, ranks)
    run_ranks(ranks, train_on_rank, job, None, timeout=120)
    history = json.loads((tmp_path / "run" / "trainer_state.json").read_text())["log_history"]
    rewards = [row["reward"] for row in history if "reward" in row]
    assert len(rewards) == 20
    assert sum(rewards[-4:]) > 4 * sum(rewards[:4])


def test_a_run_resumes_under_another_plan(
    small_model: Path, write_rows: Callable[[list[Any]], Path], tmp_path: Path
) -> None:
    rows = write_rows(ROWS["dpo"])
    saving = {"save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 4}
    job = job_of("dpo", small_model, rows, tmp_path / "run", LAYOUTS["zero 2"][1], **saving)
    run_ranks(2, train_on_rank, job, None, timeout=120)
    rest = {**saving, "per_device_train_batch_size": 8}
    again = job_of("dpo", small_model, rows, tmp_path / "again", LAYOUTS["tp2"][1], **rest)
    run_ranks(2, train_on_rank, again, str(tmp_path / "run" / "checkpoint-2"), timeout=120)
    whole, resumed = ([row for row in logs_of(tmp_path / name) if "grad_norm" in row] for name in ("run", "again"))
    assert len(whole) == len(resumed) == 3
    assert resumed[-1] == pytest.approx(whole[-1], rel=1e-4, abs=1e-5)


def test_the_command_trains_evaluates_and_exports(
    small_model: Path, write_rows: Callable[[list[Any]], Path], tmp_path: Path
) -> None:
    rows, out = write_rows(ROWS["dpo"]), tmp_path / "run"
    path = tmp_path / "job.toml"
    path.write_text(job_of("dpo", small_model, rows, tmp_path / "not here", LAYOUTS["zero 2"][1]).to_toml())
    (tmp_path / "texts.jsonl").write_text('{"text": "Say 1 : weft warp"}\n')
    keys = {"adapter.kind": "lora", "adapter.r": 4, "eval.tasks": [str(tmp_path / "texts.jsonl")], "eval.every": 2}
    set_ = [part for key, value in keys.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    with Command(start_weft("train", path, "--nproc-per-node", 2, "--out", out, *set_)) as command:
        assert command.wait() == 0, command.printed()
    printed = [line.text for line in command.lines]
    assert "data        24 rows to train on, 8 rows to evaluate on" in printed
    assert "evaluation  after step 0 -> after step 3" in printed
    assert "tasks       after step 0 -> after step 3" in printed
    assert any(line.startswith("step 2  texts/word_perplexity ") for line in printed)
    assert [row.step for row in read_task_evaluations(out / "eval.jsonl")] == [0, 2, 3]
    assert printed[-2:] == [f"model       {out / 'export'}", f"report      {out / 'report.html'}"]
    assert not any("Warning" in line or "Traceback" in line for line in printed), command.printed()
    assert (out / "export" / "adapter_config.json").is_file()
    assert TrainerJob.load(out / "job.toml").adapter.r == 4


@pytest.mark.must("format: adapter folder of PEFT", case="reward")
@pytest.mark.parametrize("kind", ["dpo", "reward"])
def test_adapters_are_exported_and_merged(
    kind: str, small_model: Path, write_rows: Callable[[list[Any]], Path], tmp_path: Path
) -> None:
    rows, out = write_rows(ROWS[kind]), tmp_path / "run"
    plain = job_of(kind, small_model, rows, out, LAYOUTS["zero 3"][1])
    job = plain.model_copy(update={"adapter": Adapter(kind="lora", r=4)})
    out.mkdir()
    (out / "job.toml").write_text(job.to_toml())
    with pytest.raises(CheckpointError, match="has no model yet"):
        export_model(out, tmp_path / "early", merge=True, dtype="fp32")
    run_ranks(2, train_on_rank, job, None, timeout=120)
    with pytest.raises(CheckpointError, match="has adapters at its end"), model_folder(out, None):
        pass
    code = html.unescape(re.findall(r"<pre[^>]*>(.*?)</pre>", write_report(out).read_text(), re.DOTALL)[0])
    exec(code.replace('"..."', '"weft"'), {})  # as the report prints it
    export_model(out, tmp_path / "adapters", merge=False, dtype="fp32")
    export_model(out, tmp_path / "merged", merge=True, dtype="fp32")
    loader = AutoModelForCausalLM if kind == "dpo" else AutoModelForSequenceClassification
    more = {} if kind == "dpo" else {"num_labels": 1}
    base = loader.from_pretrained(small_model, **more)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    rows_of_ids = torch.arange(5, 15)[None]
    merged = loader.from_pretrained(tmp_path / "merged")
    assert torch.allclose(merged(rows_of_ids).logits, adapted(rows_of_ids).logits, atol=1e-5)
    assert merged(rows_of_ids).logits.shape[-1] == (1 if kind == "reward" else base.config.vocab_size)
    with pytest.raises(CheckpointError, match="exists"):
        export_model(out, tmp_path / "merged", merge=True, dtype="fp32")


def test_changes_are_those_of_the_first_and_the_last_evaluation(tmp_path: Path) -> None:
    rows = [{"eval_loss": 2.0, "eval_rewards/margins": 0, "eval_runtime": 3.0, "step": 0}, {"loss": 1.0, "step": 1}]
    rows += [{"eval_loss": 1.5, "step": 1}, {"eval_loss": 1.25, "eval_rewards/margins": 0.5, "eval_new": 1, "step": 2}]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
    assert changes(tmp_path) == [
        "evaluation  after step 0 -> after step 2",
        "  loss             2 -> 1.25",
        "  rewards/margins  0 -> 0.5",
        f"model       {tmp_path / 'export'}",
    ]


def test_changes_of_a_run_without_evaluation(tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text('{"log_history": [{"loss": 1.0, "step": 1}]}')
    assert changes(tmp_path) == [f"model       {tmp_path / 'export'}"]


class Recorder:
    """Generator of a user: counts what it gets, and returns completions of different lengths."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.calls: list[tuple[int, int]] = []

    def set_weight(self, name: str, weight: torch.Tensor) -> None:
        assert type(weight) is torch.Tensor
        self.names.append(name)

    def generate(self, prompts: list[list[int]], settings: dict[str, Any], seed: int) -> list[list[int]]:
        assert settings["max_new_tokens"] == 8
        self.calls.append((len(prompts), seed))
        return [[8, 9, 10, 2][index % 3 :] for index in range(len(prompts))]


def _with_recorder(rank: int, ranks: int, job: TrainerJob) -> tuple[list[str], list[tuple[int, int]], list[float]]:
    AcceleratorState._reset_state(True)
    try:
        with mock.patch.dict("os.environ", variables_of(rank, ranks)):
            trainer, recorder = make_trainer(job), Recorder()
            trainer.generator = recorder
            trainer.train()
            lengths = [row["completions/mean_length"] for row in trainer.state.log_history if "reward" in row]
            return recorder.names, recorder.calls, lengths
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()


@pytest.mark.parametrize("layout", ["zero 3", "tp2"])
def test_a_generator_of_a_user_gets_each_weight_and_all_prompts(
    layout: str, small_model: Path, write_rows: Callable[[list[Any]], Path], tmp_path: Path
) -> None:
    ranks, plan = LAYOUTS[layout]
    job = job_of("grpo", small_model, write_rows(ROWS["grpo"]), tmp_path / "run", plan)
    job = job.model_copy(update={"data": job.data.model_copy(update={"held_out": 0.0})})
    (names, calls, lengths), (_, others, _) = run_ranks(ranks, _with_recorder, job, timeout=120)
    weights = dict(AutoModelForCausalLM.from_pretrained(small_model).named_parameters())
    assert names == list(weights) * 3  # before each of three steps
    assert [rows for rows, _ in calls] == [4 if layout == "zero 3" else 2] * 6  # of each rank
    assert len({seed for _, seed in calls}) == 6
    assert others == []  # rank 0 alone calls it
    assert all(2 <= length <= 4 for length in lengths)


@pytest.mark.parametrize(("layout", "adapter"), [("zero 3", "none"), ("zero 2", "lora"), ("tp2", "none")])
def test_a_process_generates_the_completions_of_a_copy(
    layout: str, adapter: Any, small_model: Path, write_rows: Callable[[list[Any]], Path], tmp_path: Path
) -> None:
    rows, (ranks, plan) = write_rows(ROWS["grpo"]), LAYOUTS[layout]
    for generator in ("copy", "process"):
        more = {"learning_rate": 2e-2, "per_device_eval_batch_size": 4}
        job = job_of("grpo", small_model, rows, tmp_path / generator, plan, **more)
        trainer = job.trainer.model_copy(update={"generator": generator})
        job = job.model_copy(update={"trainer": trainer, "adapter": Adapter(kind=adapter, r=4)})
        job.check("job")
        run_ranks(ranks, train_on_rank, job, None, timeout=120)
    found, expected = (
        [
            {key: row[key] for key in row if key in (*COUNTED, "reward", "entropy", "eval_reward")}
            for row in json.loads((tmp_path / name / "trainer_state.json").read_text())["log_history"]
        ]
        for name in ("process", "copy")
    )
    assert found == expected
    assert sum("reward" in row for row in found) == 3
    assert sum("eval_reward" in row for row in found) == 2


def test_adapters_of_a_trainer_train_beside_weights_in_4_bits(
    small_model: Path, write_rows: Callable[[list[Any]], Path], tmp_path: Path
) -> None:
    """Losses and adapters are those of the rounded weights."""
    sources = [tmp_path / "exact", tmp_path / "rounded"]
    for source in sources:
        shutil.copytree(small_model, source)
    torch.manual_seed(0)
    config = LlamaConfig.from_pretrained(small_model, **WIDE)
    model = LlamaForCausalLM(config)
    model.save_pretrained(sources[0])
    round_weights(model)
    model.save_pretrained(sources[1])
    found = []
    for source, frozen in zip(sources, ("nf4", "whole"), strict=True):
        precision = Precision(param_dtype="fp32", frozen_weights=frozen)
        plan = LAYOUTS["zero 3"][1].model_copy(update={"precision": precision})
        job = job_of("dpo", source, write_rows(ROWS["dpo"]), tmp_path / f"run-{frozen}", plan)
        job = job.model_copy(update={"adapter": Adapter(kind="lora", r=4)})
        run_ranks(2, train_on_rank, job, None, timeout=120)
        found.append(load_file(tmp_path / f"run-{frozen}" / "export" / "adapter_model.safetensors"))
    assert found[0].keys() == found[1].keys()
    for name, weight in found[1].items():
        torch.testing.assert_close(found[0][name], weight, rtol=1e-5, atol=1e-7)
