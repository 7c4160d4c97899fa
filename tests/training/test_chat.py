"""Fine-tuning on chats: the tokens, masks and losses of TRL's SFTTrainer, under every form of parallelism."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.data.chats import MARKED, PLAIN, chats, save_tokenizer, write_jsonl
from tests.integrations.scripts_in_pool import plain
from tests.lab.families import family
from tests.lab.runs import observe, train_in_the_pool
from weft.data import IGNORED, Prepared, Rows, evaluation_batches, prepare
from weft.errors import JobError
from weft.job import Job
from weft.training.forward_backward import forward, token_loss
from weft.training.metrics import read_evaluations, read_metrics

COUNT, BATCH, STEPS, SEQ_LEN = 24, 8, 3, 160
KINDS: dict[str, dict[str, Any]] = {
    "assistant": {"template": MARKED, "trl": {"assistant_only_loss": True}},
    "completion": {"template": PLAIN, "trl": {"completion_only_loss": True}},
    "truncated": {"template": MARKED, "trl": {"assistant_only_loss": True}, "seq_len": 64},
    # Rows differ, but the chats of an epoch do not.
    "packed": {"template": MARKED, "trl": {"assistant_only_loss": True, "packing": True}, "packing": True},
}
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "one": (1, {"zero": 0}),
    "zero2": (2, {"zero": 2}),
    "tp2": (2, {"tp": 2, "zero": 0}),
    "cp2": (2, {"cp": 2, "zero": 0}),
    "pp2": (2, {"pp": 2, "zero": 0}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Function that returns a folder with model, chats and the finished reference of a kind."""
    base = tmp_path_factory.mktemp("chats")

    def made(kind: str) -> Path:
        folder = base / kind
        if not folder.exists():
            folder.mkdir()
            save_tokenizer(folder / "model", KINDS[kind]["template"])
            torch.manual_seed(0)
            config = LlamaConfig(**{**family("llama"), "vocab_size": 400, "max_position_embeddings": 256})
            LlamaForCausalLM(config).save_pretrained(folder / "model")
            records = chats(COUNT)
            if kind == "completion":
                records = [{"prompt": r["messages"][:-1], "completion": r["messages"][-1:]} for r in records]
            write_jsonl(folder / "chats.jsonl", records)
        return folder

    return made


def reference(folder: Path, kind: str) -> dict[str, Any]:
    """Tokens, labels and log of TRL's trainer in one process."""
    result = folder / "trl" / "result.json"
    if not result.exists():
        settings = {
            "max_steps": STEPS,
            "per_device_train_batch_size": rows_of_step(kind),
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
            "adam_beta2": 0.95,
            "adam_epsilon": 1e-3,
            "weight_decay": 0.0,
            "max_grad_norm": 1.0,
            "max_length": KINDS[kind].get("seq_len", SEQ_LEN) + 1,
            **KINDS[kind]["trl"],
        }
        plain("trl_chat.py", folder / "model", folder / "chats.jsonl", folder / "trl", json.dumps(settings))
    return json.loads(result.read_text())


def rows_of_step(kind: str) -> int:
    return COUNT if kind == "packed" else BATCH


def write_job(folder: Path, kind: str, out: str, parallel: dict[str, int], **data: Any) -> Job:
    job = {
        "out": str(folder / out),
        "model": {"path": str(folder / "model")},
        "data": {
            "format": "chat",
            "source": "jsonl",
            "path": str(folder / "chats.jsonl"),
            "seq_len": KINDS[kind].get("seq_len", SEQ_LEN),
            "packing": "packing" in KINDS[kind],
            "shuffle": False,
            "held_out": 0.0,
            "cache": str(folder / "cache"),
            **data,
        },
        "optimizer": {
            "lr": 1e-2,
            "warmup_steps": 0,
            "schedule": "constant",
            "betas": [0.9, 0.95],
            "eps": 1e-3,
            "weight_decay": 0.0,
        },
        "train": {"steps": STEPS, "global_batch_size": rows_of_step(kind), "micro_batch_size": 2},
        "plan": {"parallel": parallel, "precision": {"param_dtype": "fp32"}},
    }
    path = folder / f"{out}.toml"
    path.write_text(tomli_w.dumps(job))
    return Job.load(path)


@pytest.mark.parametrize("kind", ["assistant", "completion", "truncated"])
def test_tokens_and_masks_equal_those_of_trl(kind: str, folders: Callable[[str], Path]) -> None:
    folder = folders(kind)
    expected = reference(folder, kind)["rows"]
    job = write_job(folder, kind, "run-one", LAYOUTS["one"][1])
    prepared = prepare(job.data, model_folder=folder / "model", log=lambda line: None)
    rows = Rows(prepared.train, seq_len=job.data.seq_len, packing=False, shuffle=False, seed=0)
    assert len(rows) == len(expected) == COUNT
    for number, row in enumerate(expected):
        stored = rows[number].tokens
        assert torch.where(stored < 0, ~stored, stored).tolist() == row["ids"]
        assert torch.where(stored < 0, IGNORED, stored).tolist() == row["labels"]
    assert any(len(row["ids"]) == 65 for row in expected) == (kind == "truncated")


@pytest.mark.parametrize(
    ("kind", "layout"),
    [(kind, layout) for kind in KINDS for layout in LAYOUTS if kind != "truncated" or layout == "one"],
)
def test_losses_equal_those_of_trl(kind: str, layout: str, folders: Callable[[str], Path]) -> None:
    folder = folders(kind)
    expected = [row for row in reference(folder, kind)["log"] if "loss" in row]
    ranks, parallel = LAYOUTS[layout]
    job = write_job(folder, kind, f"run-{kind}-{layout}", parallel)
    if kind == "packed":  # a step has all chats on both sides
        found = prepare(job.data, model_folder=folder / "model", log=lambda line: None)
        rows = len(Rows(found.train, seq_len=SEQ_LEN, packing=True, shuffle=False, seed=0))
        job = job.model_copy(update={"train": job.train.model_copy(update={"global_batch_size": rows})})
    out, _ = train_in_the_pool(job, ranks)
    steps = read_metrics(out / "metrics.jsonl")
    assert [row.loss for row in steps] == pytest.approx([row["loss"] for row in expected], rel=1e-5)
    assert [row.grad_norm for row in steps] == pytest.approx([row["grad_norm"] for row in expected], rel=1e-4)
    assert steps[-1].loss < steps[0].loss - 0.2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_evaluation_counts_targets_only(layout: str, folders: Callable[[str], Path]) -> None:
    folder = folders("assistant")
    ranks, parallel = LAYOUTS[layout]
    job = write_job(folder, "assistant", f"held-out-{layout}", parallel, held_out=0.3, packing=True)
    out, _ = train_in_the_pool(job, ranks)
    model = AutoModelForCausalLM.from_pretrained(out / "export")
    prepared = Prepared.from_json((out / "prepared.json").read_text())
    rows = Rows(prepared.held_out, seq_len=SEQ_LEN, packing=False, shuffle=False, seed=0)
    batches = list(evaluation_batches(rows, micro_batch=1, data_rank=0, data_ranks=1))
    with torch.no_grad():
        total = sum(token_loss(model, forward(model, batch)).item() for batch in batches)
    targets = sum(int((batch.targets != IGNORED).sum()) for batch in batches)
    assert 0 < targets < prepared.held_out_tokens / 2
    assert read_evaluations(out / "evaluations.jsonl")[-1].held_out_loss == pytest.approx(total / targets, rel=1e-5)
    assert json.loads((out / "run.json").read_text())["sample"].startswith("<|im_start|>")


def test_the_first_screen_shows_a_chat_with_its_mask(folders: Callable[[str], Path]) -> None:
    folder = folders("assistant")
    job = write_job(folder, "assistant", "run-screen", LAYOUTS["one"][1])
    run = observe(job.model_copy(update={"train": job.train.model_copy(update={"steps": 1})}), 1)
    begin = next(number for number, line in enumerate(run.screen) if line.startswith("sample"))
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    asked = "<|im_start|>user\nQuestion 0 of chat 0: why? <|im_end|>\n<|im_start|>assistant\n"
    answer = "Answer 0: because. <|im_end|>\n"
    tokens, targets = (len(tokenizer(text)["input_ids"]) for text in (asked + answer, answer))
    assert run.screen[begin : begin + 3] == [
        f"sample      first chat: {targets} of {tokens} tokens have a loss, those after +",
        "            - " + asked.replace("\n", "\\n"),
        "            + " + answer.replace("\n", "\\n"),
    ]


def test_a_run_resumes_and_refuses_other_chats(folders: Callable[[str], Path]) -> None:
    folder = folders("assistant")
    job = write_job(folder, "assistant", "resumed", LAYOUTS["one"][1], packing=True, shuffle=True)
    job = job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update={"every": 2, "keep": 0})})
    out, _ = train_in_the_pool(job, 1)
    expected = read_metrics(out / "metrics.jsonl")
    assert expected[-1].step == STEPS
    checkpoint = str(out / "step-00000002")
    train_in_the_pool(job, 2, resume=checkpoint)
    resumed = read_metrics(out / "metrics.jsonl")
    assert [row.loss for row in resumed] == pytest.approx([row.loss for row in expected], rel=1e-5)
    other = job.model_copy(
        update={"data": job.data.model_copy(update={"too_long": "drop", "sets": {job.data.path: 2.0}})}
    )
    other = other.model_copy(update={"data": other.data.model_copy(update={"path": None})})
    with pytest.raises(JobError, match="differ from the tokens"):
        train_in_the_pool(other, 1, resume=checkpoint)
