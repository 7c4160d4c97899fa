"""End-to-end runs with two launched ranks, from a job to an export that Transformers loads."""

import json
import math
import signal
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.lab.commands import start_weft, weft
from tests.lab.jobs import write_job
from tests.lab.plans import resolved_job
from tests.lab.runs import train_in_the_pool
from weft.checkpoint.convert import to_huggingface
from weft.checkpoint.folders import folder_of
from weft.checkpoint.manifest import DTYPE_BYTES, read_manifest
from weft.data import Prepared, Rows, evaluation_batches
from weft.device.detect import detect
from weft.job import Job
from weft.observe.report import write_report
from weft.training.forward_backward import forward, token_loss
from weft.training.job_checks import check_model
from weft.training.metrics import format_count, read_evaluations, read_metrics
from weft.training.startup import checkpoint_bytes, startup_screen


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run with 12 steps on two ranks."""
    folder = tmp_path_factory.mktemp("finished")
    steps = {"steps": 12, "global_batch_size": 4, "micro_batch_size": 1, "evaluate_every": 4}
    job = write_job(folder, train=steps, optimizer={"lr": 1e-2}, checkpoint={"every": 6})
    done = weft("train", job, "--nproc-per-node", "2")
    assert done.returncode == 0, done.stderr
    return folder / "run"


def test_metrics_have_every_step(finished: Path) -> None:
    rows = read_metrics(finished / "metrics.jsonl")
    assert [row.step for row in rows] == list(range(1, 13))
    assert rows[-1].loss < rows[0].loss - 0.5
    for row in rows:
        assert not row.skipped
        assert row.tokens > 0
        assert row.comm_bytes == rows[0].comm_bytes > 0
        assert row.comm is not None
        assert sum(sent["bytes"] for sent in row.comm.values()) == row.comm_bytes
        seconds = [sent["exposed_seconds"] + sent["hidden_seconds"] for sent in row.comm.values()]
        assert 0 < sum(seconds) < row.step_seconds
        assert row.peak_memory_bytes > 10**8
        assert row.mfu is not None
        assert 0 < row.mfu < 1
        assert row.tokens_per_second == pytest.approx(row.tokens / row.step_seconds)
        assert (row.peak is None) == (row.step != 2)
    peak = rows[1].peak
    assert peak is not None
    assert {"parameters", "gradients", "optimizer", "activations: attention"} <= peak.keys()
    assert "aten" in (rows[1].peak_operation or "")
    evaluations = read_evaluations(finished / "evaluations.jsonl")
    assert [evaluation.step for evaluation in evaluations] == [0, 4, 8, 12]
    assert evaluations[-1].held_out_loss < evaluations[0].held_out_loss


def held_out_loss_of_the_export(out: Path) -> float:
    """Held-out loss of the export, computed by plain Transformers."""
    model = AutoModelForCausalLM.from_pretrained(out / "export")
    prepared = Prepared.from_json((out / "prepared.json").read_text())
    rows = Rows(prepared.held_out, seq_len=32, packing=True, shuffle=False, seed=0)
    batches = list(evaluation_batches(rows, micro_batch=4, data_rank=0, data_ranks=1, max_rows=256))
    with torch.no_grad():
        total = sum(token_loss(model, forward(model, batch)).item() for batch in batches)
    tokens = sum(int((batch.targets != -100).sum()) for batch in batches)
    return total / tokens


def test_the_export_has_the_weights_that_were_evaluated(finished: Path) -> None:
    expected = read_evaluations(finished / "evaluations.jsonl")[-1].held_out_loss
    assert held_out_loss_of_the_export(finished) == pytest.approx(expected, rel=1e-5)


def test_the_export_has_its_tokenizer(finished: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(finished / "export")
    text = "The quick brown fox\n\tjumps."
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    config = json.loads((finished / "export" / "config.json").read_text())
    assert config["eos_token_id"] == tokenizer.eos_token_id
    assert config["use_cache"]


def test_the_export_is_as_readable_as_other_files(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    usual = (tmp_path / "file").stat().st_mode
    files = [path for path in finished.rglob("*") if path.is_file()]
    assert finished / "export" / "model.safetensors" in files
    assert [path for path in files if path.stat().st_mode != usual] == []


def test_startup_screen_describes_the_run(finished: Path) -> None:
    job = resolved_job(Job.load(finished / "job.toml"), 2)
    prepared = Prepared.from_json((finished / "prepared.json").read_text())
    anatomy = check_model(job, detect()).choices.anatomy
    lines = startup_screen(job, prepared, detect(), 2, anatomy, finished, "forward in fp32, as the plan says")
    screen = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines}
    assert list(screen) == ["device", "precision", "model", "data", "training", "checkpoint", "output"]
    assert screen["device"].startswith(f"2 ranks on {detect().name}")
    assert detect().instruction_set in screen["device"]
    assert screen["device"].endswith("dp_shard 2, zero 0")
    assert screen["precision"] == "forward in fp32, as the plan says; fp32 reduction, fp32 update"
    assert screen["model"] == "llama, 34.7k parameters"
    assert screen["data"].startswith(f"{format_count(prepared.train_tokens)} tokens to train on")
    share = prepared.held_out_tokens / (prepared.train_tokens + prepared.held_out_tokens)
    assert f"{format_count(prepared.held_out_tokens)} held out ({share:.1%})" in screen["data"]
    assert screen["training"].startswith("12 steps of 4 rows x 32 tokens: 1.54k tokens")
    assert "every 6 steps and at the end, the newest 2 are kept" in screen["checkpoint"]
    assert screen["output"] == str(finished)
    unset = job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update={"every": 0})})
    assert "only when a signal ends the run" in startup_screen(unset, prepared, detect(), 2, anatomy, finished, "")[5]


def test_announced_checkpoint_size_is_correct(finished: Path) -> None:
    parameters = json.loads((finished / "run.json").read_text())["parameters"]
    announced = checkpoint_bytes(Job.load(finished / "job.toml"), parameters)
    tensors = [
        entry for entry in read_manifest(folder_of(finished, 6)).tensors.items() if not entry[0].startswith("rng/")
    ]
    written = sum(math.prod(entry.shape) * DTYPE_BYTES[entry.dtype] for _, entry in tensors)
    assert announced <= written <= 1.01 * announced


def test_exported_checkpoint_differs_from_the_final_weights(finished: Path, tmp_path: Path) -> None:
    for step in (6, 12):
        to_huggingface(folder_of(finished, step), tmp_path / str(step), dtype="fp32", run=finished)
    middle = AutoModelForCausalLM.from_pretrained(tmp_path / "6").state_dict()
    end = AutoModelForCausalLM.from_pretrained(tmp_path / "12").state_dict()
    export = AutoModelForCausalLM.from_pretrained(finished / "export").state_dict()
    assert all(torch.equal(end[name], export[name]) for name in export)
    assert not any(torch.equal(middle[name], export[name]) for name in export)


def test_the_summary_and_the_report(finished: Path) -> None:
    summary = json.loads((finished / "run.json").read_text())
    assert summary["world_size"] == 2
    assert summary["run_id"] == (finished / "run_id").read_text()
    assert set(summary["baselines"]) == {"unigram", "bigram"}
    assert summary["sample"]
    for kind, size in summary["memory"]["predicted"].items():
        unit = 4 * 2 * 300 * 32 if kind == "gradients" else 0  # embedding and head, until the next reduction
        assert size - 10_000 <= summary["memory"]["measured"][kind] <= size + unit + 10_000
    page = write_report(finished).read_text()
    assert "bigram" in page
    assert summary["device"] in page
    assert "Peak memory of a step" in page


def test_same_job_is_bit_equal(finished: Path, tmp_path: Path) -> None:
    job = Job.load(finished / "job.toml", [f"out={tmp_path / 'again'}"])
    again, _ = train_in_the_pool(job, ranks=2)  # in other processes, which have run other jobs before
    for first, second in zip(
        read_metrics(finished / "metrics.jsonl"), read_metrics(again / "metrics.jsonl"), strict=True
    ):
        assert (first.loss, first.grad_norm) == (second.loss, second.grad_norm)
    assert (finished / "export/model.safetensors").read_bytes() == (again / "export/model.safetensors").read_bytes()


@pytest.mark.effect("out", "folder of an earlier run, which is moved aside")
def test_an_earlier_run_is_moved_aside(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = [f"out={out}", "train.steps=1", "train.evaluate_every=0", "checkpoint.every=0"]
    for _ in range(2):
        train_in_the_pool(Job.load(finished / "job.toml", settings), ranks=2)
    assert (tmp_path / "run.1" / "export").is_dir()
    assert (out / "export").is_dir()


def test_sigterm_ends_a_pipeline_cleanly(tmp_path: Path) -> None:
    """Tests of SIGINT are in test_interruption.py."""
    number, plan = signal.SIGTERM, {"parallel": {"pp": 2}, "precision": {"param_dtype": "fp32"}}
    job = write_job(tmp_path, train={"steps": 100_000, "global_batch_size": 4, "micro_batch_size": 1}, plan=plan)
    out = tmp_path / "run"
    process = start_weft("train", job, "--nproc-per-node", "2", merge=True)
    deadline = time.monotonic() + 90
    while not (out / "metrics.jsonl").exists() or len((out / "metrics.jsonl").read_text().splitlines()) < 3:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "no step within 90 s"
        time.sleep(0.02)
    process.send_signal(number)
    printed = process.communicate(timeout=90)[0]
    assert process.returncode == 128 + number, printed
    assert f"stopped by {number.name}" in printed
    assert "Traceback" not in printed
    assert "error" not in printed
    rows = read_metrics(out / "metrics.jsonl")
    assert [row.step for row in rows] == list(range(1, len(rows) + 1))
    assert read_evaluations(out / "evaluations.jsonl")[-1].step == rows[-1].step
    AutoModelForCausalLM.from_pretrained(out / "export")
    assert read_manifest(folder_of(out, rows[-1].step)).position.step == rows[-1].step
    assert (out / "report.html").exists()
