"""Invalid input: one screen with value, rule and fix, and a nonzero exit code."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.lab.commands import weft
from tests.lab.jobs import write_job
from weft.cli import main

LINES = 24  # height of a screen


def refuse(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """Run `weft` with arguments that must be refused before any rank starts; return its stderr."""
    monkeypatch.setattr(sys, "argv", ["weft", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    text = capsys.readouterr().err
    assert len(text.splitlines()) <= LINES
    assert "Traceback" not in text
    return text


def heads(count: int, kv_count: int) -> list[str]:
    table = {"num_attention_heads": count, "num_key_value_heads": kv_count, "hidden_size": 48}
    return [f"model.config.{key}={value}" for key, value in table.items()]


def blocks(count: int) -> list[str]:
    return [f"model.config.num_hidden_layers={count}"]


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
            ["stage_blocks assigns 3 blocks to 2 stages", "the model has 2 blocks"],
        ),
        (["plan.parallel.pp=2", "plan.pipeline.stage_blocks=[0,2]"], ["each a whole number of at least 1"]),
        (["plan.pipeline.virtual_stages=2"], ["virtual_stages without pp"]),
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
        (["plan.parallel.ep=2"], ["no block of this llama has an experts module"]),
        (["plan.parallel.ep=3"], ["ep 3 does not divide"]),
        (["plan.parallel.cp=2", "plan.parallel.cp_ulysses=3"], ["cp_ulysses does not divide cp"]),
        (["plan.parallel.cp=2", "model.config.model_type=bloom", "data.packing=false"], ["AttentionInterface"]),
        (["plan.parallel.tp=2", "model.config.model_type=ctrl"], ["does not know the role of", "multi_head_attention"]),
        (["data.seq_len=65"], ["data.seq_len = 65 is longer than the model's 64 positions", "64 or less"]),
        (["model.config.vocab_size=200"], ["the model has 200", "data.vocab_size to 200 or less"]),
        (["data.path=/nowhere/*.txt"], ["/nowhere/*.txt"]),
        (["model.config=missing.json"], ["there is no file missing.json"]),
        (["model.config.model_type=gptx"], ["gptx"]),
        (["model.config.hidden_size=33"], ["configuration"]),
        (["model.config.model_type=mamba"], ["mamba cannot keep packed documents apart", "data.packing = false"]),
        (
            ["plan.precision.param_dtype=fp16"],
            ["param_dtype = fp16 without loss_scale", 'set plan.precision.loss_scale to "dynamic"'],
        ),
        (["plan=/dev/zero"], ["/dev/zero has more than 1048576 bytes"]),
        ([f"train.steps={'9' * 5000}"], ["train.steps"]),
        ([f"train.steps=1{'0' * 30}"], ["train.steps = 1000000000000000000000000000000", "below 9.22"]),
        ([f"train.steps={'[' * 5000}"], ["train.steps"]),
        (['optimizer.lr="inf"'], ['optimizer.lr = "inf"', "finite"]),
        (["train.global_batch_size=1000000000000"], ["train.global_batch_size is a whole number", "at most 1e+07"]),
        (
            ["plan.parallel.pp=2", "train.global_batch_size=10000000", "train.micro_batch_size=1"],
            ["10000000 micro-batches with plan.parallel.pp = 2", "increase train.micro_batch_size"],
        ),
        (["model.config.num_hidden_layers=1000000000"], ["num_hidden_layers is at most 10000"]),
        (
            ["model.config={model_type='gpt2',n_layer=1000000000}"],
            ["n_layer is at most 10000"],
        ),
        (
            ["model.config={model_type='qwen3_moe',num_experts=1000000000}"],
            ["num_experts = 1000000000", "correct num_experts"],
        ),
        (["guard.node_rejoin_seconds=inf"], ["guard.node_rejoin_seconds = inf", "finite"]),
    ],
)
def test_invalid_setting(
    settings: list[str],
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = write_job(tmp_path)
    text = refuse(
        capsys, monkeypatch, "train", str(job), "--nproc-per-node", "2", *(f"--set={setting}" for setting in settings)
    )
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
        ("0F0,0F1,1F0,1F1,1B0,1B1,0B0,0B1\n,\n", ["no action on rank 1", "line 2"]),
        ("0F0,\0\n1F0\n", ["cannot read the slot '\\x00'"]),
    ],
)
def test_invalid_pipeline_schedule(
    table: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "own.csv"
    file.write_text(table, encoding="utf-8")
    batch = ["--set=train.global_batch_size=2", "--set=train.micro_batch_size=1"]
    plan = ["--set=plan.parallel.pp=2", f"--set=plan.pipeline.schedule={file}"]
    text = refuse(capsys, monkeypatch, "train", str(write_job(tmp_path)), "--nproc-per-node", "2", *batch, *plan)
    for word in words:
        assert word in " ".join(text.split())
    assert not (tmp_path / "run").exists()


def test_a_missing_job(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "there is no file nowhere.toml" in refuse(capsys, monkeypatch, "train", "nowhere.toml")


def test_an_empty_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    job = write_job(tmp_path)
    for file in (tmp_path / "text").iterdir():
        file.write_text("")
    assert "empty" in refuse(capsys, monkeypatch, "train", str(job), "--nproc-per-node", "2")


def test_a_model_without_known_roles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"model_type": "xlnet", "n_layer": 2, "d_model": 32, "n_head": 2, "d_inner": 32, "vocab_size": 300}
    job = write_job(tmp_path)
    text = refuse(
        capsys, monkeypatch, "train", str(job), "--nproc-per-node", "2", f"--set=model.config={_inline(config)}"
    )
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
    text = refuse(
        capsys, monkeypatch, "train", str(job), "--nproc-per-node", "2", *(f"--set={setting}" for setting in settings)
    )
    assert "need a vocabulary of 300, the model has 299" in text


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_no_disk_space_for_the_token_cache(tmp_path: Path) -> None:
    job, small = write_job(tmp_path), tmp_path / "small"
    (tmp_path / "text" / "large.txt").write_text("".join(f"{number} " for number in range(400_000)))
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)], check=False).returncode:
        pytest.skip("this sandbox cannot mount a tmpfs")
    try:
        done = weft("train", job, "--nproc-per-node", "2", f"--set=data.cache={small}")
        assert done.returncode == 2
        assert "space" in done.stderr
        left = {path.relative_to(small).parts[0].split("-")[0] for path in small.rglob("*")}
        assert left <= {"tokenizer"}  # complete and reusable by the next attempt; no partial files
    finally:
        subprocess.run(["umount", str(small)], check=True)


LLAMA = '"model_type": "llama", "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 300'

FILES: dict[str, bytes] = {
    "empty": b"",
    "binary": bytes(range(255, 0, -1)),
    "list.json": b"[1, 2]",
    "number.json": b"5",
    "cut.json": b'{"model_type": "llama"',
    "no_type.json": b'{"hidden_size": 32}',
    "misspelt.json": b'{"model_type": "lama"}',
    "list_type.json": b'{"model_type": ["llama"]}',
    "text_size.json": b'{"model_type": "llama", "hidden_size": "big"}',
    "negative.json": f'{{{LLAMA}, "intermediate_size": -8}}'.encode(),
    "no_blocks.json": f'{{{LLAMA}, "num_hidden_layers": 0}}'.encode(),
    "no_heads.json": b'{"model_type": "llama", "num_attention_heads": 0}',
    "words.txt": b"It was a dark and stormy night. " * 200,
    "half.toml": b"[train\nsteps = 3",
    "plan.toml": b"[parallel]\ntp = 2\n",
    "ranks.toml": b'inside_host = "memory"\n[[hosts]]\nname = "a"\nranks = -2\n',
    "types.toml": b'inside_host = 5\nhosts = "a"\n',
    "cluster.toml": b'device = "H100"\nhosts = "many"\n',
    "cut/export/config.json": b"{",
    "cut/job.toml": b"out =",
    "cut/step-00000001/manifest.json": b"[1]",
    "tokenizer/tokenizer.json": b"{",
}

WRONG: list[tuple[str, list[str]]] = [
    # Invalid job files.
    ("train {nowhere}", ["there is no file", "relative to the current folder"]),
    ("train {folder}", ["is a folder", "name the file in it"]),
    ("train {empty}", ["names neither a path nor a config"]),
    ("train {binary}", ["is not a TOML file", "https://toml.io"]),
    ("train {half.toml}", ["is not a TOML file"]),
    ("train {plan.toml}", ["this file is a plan"]),
    ("dryrun {nowhere} --world-size 2", ["there is no file"]),
    ("memory {binary}", ["is not a TOML file"]),
    ("compare {empty}", ["names neither a path nor a config"]),
    ("topology {half.toml}", ["is not a TOML file"]),
    ("export {cut} {to} --step 2", ["is not a TOML file"]),
    # Keys and values.
    ("train {job} --set trian.steps=1", ["unknown key trian", "did you mean [train]?"]),
    ("dryrun {job} --world-size 2 --set plan.paralel.tp=2", ["did you mean [plan.parallel]?"]),
    (
        "memory {job} --set optimizer.name=sgd",
        ['is "adamw", "muon", "adafactor", "lion" or "onebit-adam"', 'optimizer.name = "adamw"'],
    ),
    ("compare {job} --set-b plan.parallel.zero=-1", ["plan.parallel.zero = -1", 'is "auto", 0, 1, 2 or 3']),
    ("topology {job} --set train.steps=many", ["is a whole number of at least 1", "train.steps = 100"]),
    ("train {job} --set train.steps=-1", ["train.steps = -1", "train.steps = 100"]),
    ("train {job} --set train.seed=1000000000000000000000", ["train.seed = 1000000000000000000000"]),
    ("train {job} --set optimizer.lr=inf", ["optimizer.lr = inf"]),
    ("train {job} --set data.packing=5", ["data.packing is true or false"]),
    ("train {job} --set train=5", ["write [train], and its keys below"]),
    ("train {job} --set train", ["cannot read --set 'train'"]),
    ("plan {job} --device H100 --set data.seq_len=0", ["data.seq_len = 0", "of at least 2"]),
    # Configurations of models.
    *(
        (f"{command} {{{name}}}" if command == "anatomy" else f"{command} {{job}} --set model.config={{{name}}}", words)
        for command in ("anatomy", "dryrun --world-size 2", "train")
        for name, words in {
            "nowhere": ["there is no file"],
            "empty": ["the configuration is refused"],
            "binary": ["the configuration is refused"],
            "list.json": ["the configuration is refused"],
            "number.json": ["the configuration is refused"],
            "cut.json": ["the configuration is refused"],
            "no_type.json": ["has no 'model_type'", 'model_type = "llama"'],
            "misspelt.json": ["no model_type is called 'lama'", "llama"],
            "list_type.json": ["the configuration is refused"],
            "text_size.json": ["hidden_size", "correct the value"],
            "negative.json": ["cannot build", "sizes are positive"],
            "no_blocks.json": ["num_hidden_layers = 0", "at least one decoder block"],
            "no_heads.json": ["the configuration is refused"],
        }.items()
    ),
    ("anatomy {folder}", ["there is no file", "config.json"]),
    ("train {job} --set model.config=[1,2]", ["model.config is a string or a table"]),
    # Data and tokenizers.
    ("train {job} --set data.path={empty}", ["the corpus is empty", "set data.path to files with text"]),
    ("train {job} --set data.path={binary}", ["is not UTF-8 text"]),
    ("train {job} --set data.path=/proc/self/mem", ["cannot read /proc/self/mem"]),
    ("train {job} --set data.source=jsonl --set data.path={words.txt}", ["looks like text", 'data.source = "text"']),
    ("train {job} --set data.source=parquet --set data.path={words.txt}", ["looks like text"]),
    ("train {job} --set data.source=tokens --set data.path={words.txt}", ["is not an .npy file", "numpy.save"]),
    ("train {job} --set data.source=tokens --set data.path={folder}", ["no file matches *.npy below"]),
    ("train {job} --set data.tokenizer={nowhere}", ["there is no folder"]),
    ("train {job} --set data.tokenizer={binary}", ["is a file"]),
    ("train {job} --set data.tokenizer={folder}", ["cannot load a tokenizer"]),
    ("train {job} --set data.tokenizer={tokenizer}", ["cannot load a tokenizer"]),
    ("train {job} --set data.cache={empty}", ["cannot write the token cache"]),
    ("train {job} --set data.vocab_size=1000000000000", ["not enough space for the token cache"]),
    # Output and input folders.
    ("train {job} --out {empty}", ["Not a directory"]),
    ("compare {job} --set-b plan.parallel.zero=1 --out {empty}", ["Not a directory"]),
    ("dryrun {job} --world-size 2 --json {folder}", ["is a folder", "name another file"]),
    ("memory {job} --json {nowhere}/x.json", ["there is no folder"]),
    ("plan {job} --device CPU --out {nowhere}/plan.toml", ["there is no folder"]),
    ("topology --file {ranks.toml} --json {folder}", ["is a folder"]),
    ("calibrate --out {folder}", ["is a folder"]),
    ("train {job} --resume {nowhere}", ["there is no checkpoint in"]),
    ("export {nowhere} {to}", ["there is no folder"]),
    ("export {folder} {to}", ["there are no weights in"]),
    ("export {folder} {tokenizer}", ["exists", "name another folder"]),
    ("export {cut} {to}", ["the configuration is refused"]),
    ("report {nowhere}", ["there is no folder"]),
    ("report {tokenizer}", ["is no run folder", "a run writes run_id, metrics.jsonl, run.json into its folder"]),
    ("eval {tokenizer} --tasks x", ["is no run folder and no model folder"]),
    ("checkpoint ls {nowhere}", ["there is no folder"]),
    ("checkpoint ls {empty}", ["there is no folder"]),
    ("checkpoint diff {folder} {folder}", ["there is no checkpoint in"]),
    ("checkpoint diff {cut}/step-00000001 {folder}", ["the manifest is refused"]),
    ("checkpoint convert {folder} {to} --to weft", ["a Hugging Face folder a config.json"]),
    ("checkpoint convert {cut}/step-00000001 {to} --to hf --tokenizer {folder}", ["there is no tokenizer in"]),
    ("checkpoint convert {cut}/step-00000001 {to} --to weft", ["is already a checkpoint"]),
    # Topologies, clusters and tables of runs.
    ("topology --file {nowhere}", ["there is no file"]),
    ("topology --file {empty}", ["hosts is missing", "add hosts"]),
    ("topology --file {job}", ["unknown key model", "docs/topology.md"]),
    ("topology --file {ranks.toml}", ["hosts.0.ranks = -2", "correct hosts.0.ranks"]),
    ("topology --file {types.toml}", ["hosts = 'a'", "correct hosts"]),
    ("train {job} --set plan.comm.topology={binary}", ["is not a TOML file"]),
    ("plan {job} --cluster {binary}", ["is not a TOML file"]),
    ("plan {job} --cluster {cluster.toml}", ["hosts", "docs/planner.md"]),
]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Invalid files and folders, by their names in `WRONG`."""
    folder = tmp_path_factory.mktemp("paths")
    found = {"job": str(write_job(folder)), "nowhere": str(folder / "nowhere"), "to": str(folder / "to")}
    for name, content in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        found[name] = str(path)
    for name in ("folder", "cut", "tokenizer"):
        (folder / name).mkdir(exist_ok=True)
        found[name] = str(folder / name)
    (folder / "folder" / "job.toml").touch()
    return found


@pytest.mark.parametrize(("command", "words"), WRONG, ids=[command for command, _ in WRONG])
def test_invalid_input_is_refused_with_rule_and_fix(
    command: str,
    words: list[str],
    paths: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [re.sub(r"\{(.+?)\}", lambda name: paths[name[1]], word) for word in command.split()]
    if "train {job}" in command:
        arguments += ["--nproc-per-node", "2"]
    text = refuse(capsys, monkeypatch, *arguments)
    assert "  rule: " in text
    assert "  fix: " in text
    for word in words:
        assert word in text
    assert not list(tmp_path.iterdir())
    assert not Path(paths["to"]).exists()
    assert not (Path(paths["job"]).parent / "run").exists()


@pytest.mark.parametrize(
    "command",
    [
        *(
            "train --nproc-per-node 0",
            "train --nproc-per-node -1",
            "dryrun {job} --world-size 0",
            "memory {job} --device tpu",
            "compare",
            "trian",
        ),
        *("schema more", "export a b --dtype fp8", "checkpoint convert a b --to onnx", "topology --seconds -1"),
        *("compare {job} --tolerance -1", "anatomy", "checkpoint verify", "dryrun {job}"),
    ],
)
def test_invalid_option_is_refused(
    command: str, paths: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = refuse(capsys, monkeypatch, *command.replace("{job}", paths["job"]).split())
    assert "Usage: " in text
    assert "--help" in text
    assert "Error: " in text


def test_exit_code_of_the_installed_command(tmp_path: Path) -> None:
    """Runs the installed command instead of `main`."""
    command = [str(Path(sys.executable).parent / "weft"), "train", str(write_job(tmp_path)), "--set", "train.steps=0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert "train.steps = 0" in done.stderr
    assert "Traceback" not in done.stderr


def test_hosts_that_never_could_join(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job writes no checkpoint before its end."""
    monkeypatch.setenv("WEFT_TOKEN", "0" * 32)
    host = ["--node-rank", "0", "--rdzv-endpoint", "127.0.0.1:29400"]
    text = refuse(capsys, monkeypatch, "train", str(write_job(tmp_path)), "--nnodes", "2:4", *host)
    assert "--nnodes 2:4" in text
    assert "--set checkpoint.every=500" in text
    text = refuse(capsys, monkeypatch, "train", str(write_job(tmp_path)), "--nnodes", "4:2", *host)
    assert "1 <= MIN <= MAX" in text
