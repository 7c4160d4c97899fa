"""Bad input: one screen that names the value, the rule and the fix, and an exit code that is not zero."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.lab.jobs import write_job
from weft.cli import main

LINES = 24  # of one screen


def refuse(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """Run `weft` with arguments that must be refused before any rank starts; return what it prints to stderr."""
    monkeypatch.setattr(sys, "argv", ["weft", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    text = capsys.readouterr().err
    assert len(text.splitlines()) <= LINES
    assert "Traceback" not in text
    return text


def heads(number: int, kv_number: int) -> list[str]:
    table = {"num_attention_heads": number, "num_key_value_heads": kv_number, "hidden_size": 48}
    return [f"model.config.{key}={value}" for key, value in table.items()]


def blocks(number: int) -> list[str]:
    return [f"model.config.num_hidden_layers={number}"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["train.stepz=3"], ["unknown key train.stepz", "did you mean train.steps?"]),
        (["plan.parallel.dp_replicate=3"], ["2 ranks cannot be divided by dp_replicate 3", "multiple of 3"]),
        (["plan.parallel.pp=2", "model.config.num_hidden_layers=1"], ["1 blocks cannot fill 2 stages"]),
        (["plan.parallel.pp=2", "plan.pipeline.schedule=1f2b"], ["unknown schedule '1f2b'", "did you mean '1f1b'?"]),
        (
            ["plan.parallel.pp=2", "plan.pipeline.schedule=dualpipev", "plan.pipeline.virtual_stages=2", *blocks(4)],
            ["1 micro-batches with dualpipev on 2 ranks", "at least 4 micro-batches"],
        ),
        (
            ["plan.parallel.pp=2", "plan.pipeline.stage_blocks=[1,2]"],
            ["stage_blocks names 3 blocks in 2 stages", "there are 2 blocks"],
        ),
        (["plan.parallel.pp=2", "plan.pipeline.stage_blocks=[0,2]"], ["greater than or equal to 1"]),
        (["plan.pipeline.virtual_stages=2"], ["virtual_stages > 1 without a pipeline"]),
        (["plan.parallel.pp=2", "plan.pipeline.schedule=missing.csv"], ["missing.csv cannot be read"]),
        (
            ["plan.parallel.tp=2", *heads(3, 3)],
            ["3 attention heads cannot be divided by tp = 2", "one of 1, 3"],
        ),
        (
            ["plan.parallel.tp=2", *heads(6, 3)],
            ["3 KV heads cannot be divided by tp = 2"],
        ),
        (
            ["plan.parallel.tp=2", "model.config.intermediate_size=49"],
            ["49 hidden units", "cannot be divided by tp = 2"],
        ),
        (
            ["plan.parallel.tp=2", "data.seq_len=31"],
            ["31 tokens", "cannot be divided by tp = 2", "set data.seq_len = 32"],
        ),
        (["plan.parallel.cp=2", "data.seq_len=30"], ["30 tokens", "multiple of 4", "set data.seq_len = 32"]),
        (["plan.parallel.ep=2"], ["no block of this llama has a module of experts"]),
        (["plan.parallel.ep=3"], ["ep 3 does not divide"]),
        (["plan.parallel.cp=2", "plan.parallel.cp_ulysses=3"], ["cp_ulysses does not divide cp"]),
        (["plan.parallel.cp=2", "model.config.model_type=bloom", "data.packing=false"], ["AttentionInterface"]),
        (["plan.parallel.tp=2", "model.config.model_type=gpt_neox"], ["does not know the role of", "query_key_value"]),
        (["data.seq_len=65"], ["data.seq_len = 65 is longer than the model's 64 positions", "64 or less"]),
        (["model.config.vocab_size=200"], ["the model has 200", "data.vocab_size to 200 or less"]),
        (["data.path=/nowhere/*.txt"], ["/nowhere/*.txt"]),
        (["model.config=missing.json"], ["there is no file missing.json"]),
        (["model.config.model_type=gptx"], ["gptx"]),
        (["model.config.hidden_size=33"], ["configuration"]),
        (["model.config.model_type=mamba"], ["mamba cannot keep packed documents apart", "data.packing = false"]),
        (["plan.precision.forward=fp16"], ["fp16 forward without a loss scale", 'loss_scale = "dynamic"']),
    ],
)
def test_a_bad_setting(
    settings: list[str],
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = write_job(tmp_path)
    text = refuse(capsys, monkeypatch, "train", str(job), "--ranks", "2", *(f"--set={setting}" for setting in settings))
    for word in words:
        assert word in text
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (
            "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",
            ["rank 0 waits with 0B0 for 1B0 on rank 1, which waits with 1F1 for 0F1"],
        ),
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1\n", ["1B1"]),
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1G1\n", ["cannot read the slot '1G1'", "line 2, cell 4"]),
    ],
)
def test_a_pipeline_schedule_that_cannot_run(
    table: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "own.csv"
    file.write_text(table, encoding="utf-8")
    batch = ["--set=train.global_batch=2", "--set=train.micro_batch=1"]
    plan = ["--set=plan.parallel.pp=2", f"--set=plan.pipeline.schedule={file}"]
    text = refuse(capsys, monkeypatch, "train", str(write_job(tmp_path)), "--ranks", "2", *batch, *plan)
    for word in words:
        assert word in " ".join(text.split())
    assert not (tmp_path / "run").exists()


def test_a_missing_job(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "there is no file nowhere.toml" in refuse(capsys, monkeypatch, "train", "nowhere.toml")


def test_an_empty_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    job = write_job(tmp_path)
    for file in (tmp_path / "text").iterdir():
        file.write_text("")
    assert "empty" in refuse(capsys, monkeypatch, "train", str(job), "--ranks", "2")


def test_a_model_without_known_roles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"model_type": "xlnet", "n_layer": 2, "d_model": 32, "n_head": 2, "d_inner": 32, "vocab_size": 300}
    job = write_job(tmp_path)
    text = refuse(capsys, monkeypatch, "train", str(job), "--ranks", "2", f"--set=model.config={_inline(config)}")
    assert "no blocks found" in text
    assert "looked for" in text


def _inline(table: dict[str, object]) -> str:
    """A TOML inline table."""
    return "{" + ", ".join(f"{key} = {value!r}" for key, value in table.items()).replace("'", '"') + "}"


def test_tokens_larger_than_the_vocabulary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "rows.npy", np.full((50, 33), 299, dtype=np.int32))
    settings = ["data.source=tokens", f"data.path={tmp_path / 'rows.npy'}", "model.config.vocab_size=299"]
    job = write_job(tmp_path)
    text = refuse(capsys, monkeypatch, "train", str(job), "--ranks", "2", *(f"--set={setting}" for setting in settings))
    assert "need a vocabulary of 300, the model has 299" in text


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_no_disk_space_for_the_token_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, small = write_job(tmp_path), tmp_path / "small"
    (tmp_path / "text" / "large.txt").write_text("".join(f"{number} " for number in range(400_000)))
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)], check=False).returncode:
        pytest.skip("this sandbox cannot mount a tmpfs")
    try:
        text = refuse(capsys, monkeypatch, "train", str(job), "--ranks", "2", f"--set=data.cache={small}")
        assert "space" in text
        left = {path.relative_to(small).parts[0].split("-")[0] for path in small.rglob("*")}
        assert left <= {"tokenizer"}  # complete, and of use to the next attempt; nothing half-written
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_the_command_exits_with_its_code(tmp_path: Path) -> None:
    """The installed command itself, once."""
    command = [str(Path(sys.executable).parent / "weft"), "train", str(write_job(tmp_path)), "--set", "train.steps=0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert "train.steps = 0" in done.stderr
    assert "Traceback" not in done.stderr
