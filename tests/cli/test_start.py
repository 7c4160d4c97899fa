"""Commands that must not import torch: help, version, completion and refused jobs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import weft
from tests.lab.jobs import write_job

HEAVY = {"torch", "transformers", "plotly", "pyarrow", "tokenizers"}
MAIN = f"""
import json, sys
from weft.cli import main
calls = json.loads(sys.argv[1])
for sys.argv in calls:
    try:
        main()
    except SystemExit as left:
        print(f"exit code {{left.code}}", file=sys.stderr)
print({{name.partition(".")[0] for name in sys.modules}} & {HEAVY!r}, file=sys.stderr)
"""


def call(*commands: list[str], code: int) -> subprocess.CompletedProcess[str]:
    """Run commands in one process, check their exit codes, and check that no heavy package was imported."""
    calls = json.dumps([["weft", *command] for command in commands])
    done = subprocess.run([sys.executable, "-c", MAIN, calls], capture_output=True, text=True, timeout=100, check=True)
    assert done.stderr.count(f"exit code {code}\n") == len(commands), done.stderr
    assert done.stderr.splitlines()[-1] == "set()"
    assert "Traceback" not in done.stderr
    return done


def test_help_does_not_import_torch_transformers_or_numpy() -> None:
    from weft.cli.app import app
    from weft.cli.checkpoint import checkpoint

    commands = [info.callback.__name__ for info in app.registered_commands if info.callback]
    nested = [["checkpoint", info.callback.__name__] for info in checkpoint.registered_commands if info.callback]
    assert len(commands) > 10
    assert len(nested) == 5
    done = call(
        *([*words, "--help"] for words in ([], *([name] for name in commands), ["checkpoint"], *nested)), code=0
    )
    assert done.stdout.count("Usage: ") == len(commands) + len(nested) + 2


def test_summaries_of_commands_are_not_cut_off() -> None:
    summaries = call(["--help"], ["checkpoint", "--help"], code=0).stdout.split()
    assert [word for word in summaries if word.endswith("...")] == ["[ARGS]...", "[ARGS]..."]


def test_refused_job_does_not_import_torch(tmp_path: Path) -> None:
    """Neither torch nor any other package that takes seconds."""
    job, broken, file = str(write_job(tmp_path)), tmp_path / "broken.toml", tmp_path / "file"
    broken.write_text("[train")
    file.write_text("")
    books, no_weights, empty = (tmp_path / name for name in ("books", "no_weights", "empty"))
    books.mkdir()
    empty.mkdir()
    (books / "a.txt").write_text("text")
    no_weights.mkdir()
    (no_weights / "config.json").write_text('{"model_type": "llama"}')
    of_trainer = tmp_path / "dpo.toml"
    of_trainer.write_text(
        'out = "run"\n[model]\npath = "nosuch"\n[data]\npath = "rows.jsonl"\n[trainer]\nkind = "dpo"\n'
    )
    no_model = ["--set", "model={path='nosuch'}"]
    refused = [
        *(
            ["train", job, "--set", setting]
            for setting in (
                "data.path=/nowhere/*.txt",
                f"data.path={empty}",
                "data.tokenizer=nosuch",
                "data.source=chats",
                "model.config=nosuch.json",
                "plan.parallel.tp=3",
                "distillation={teacher='nosuch'}",
            )
        ),
        ["train", job, "--resume", "nosuch"],
        ["train", job, "--resume", str(books)],
        ["train", job, *no_model],
        ["train", job, "--set", "model={path='a/hub-id'}"],
        ["train", job, "--set", f"model={{path='{no_weights}'}}"],
        ["train", job, "--set", "train.learning_rate=1"],
        ["train", str(of_trainer)],
        ["profile", job, "--set", "data.path=/nowhere"],
        ["profile", job, "--set", "plan.parallel.tp=3"],
        ["anatomy", "nosuch.json"],
        ["anatomy", str(books)],
        ["report", "nosuch"],
        ["report", str(books)],
        ["doctor", str(books)],
        ["export", "nosuch", "to"],
        ["export", str(books), "to"],
        ["export", str(books), str(empty)],
        ["export", "nosuch", "to", "--step", "3"],
        ["eval", "nosuch", "--tasks", "x"],
        ["eval", str(books), "--tasks", "x"],
        ["compress", "nosuch", "to"],
        ["compress", str(no_weights), str(empty)],
        ["topology", "--file", "nosuch.toml"],
        ["topology", job, "--set", "plan.parallel.tp=3"],
        ["plan", job],
        ["plan", job, "--device", "H100", *no_model],
        ["dryrun", job, "--world-size", "4", "--set", "plan.parallel.tp=3"],
        ["dryrun", job, "--world-size", "4", *no_model],
        ["memory", job, "--world-size", "4", "--set", "plan.parallel.tp=3"],
        ["compare", job, "--set", "data.path=nosuch"],
        ["checkpoint", "convert", "nosuch", "to", "--to", "hf"],
        ["checkpoint", "diff", "nosuch", "nosuch"],
        ["launch", "hosts", job, "--hostfile", "nosuch"],
        ["launch", "ray", job, "--num-workers", "2", "--set", "data.path=nosuch"],
        ["run", "--plan", "nosuch.toml", str(file)],
        ["train", "nowhere.toml"],
        ["train", str(tmp_path)],
        ["train", str(broken)],
        ["train", job, "--set", "train.stepz=3"],
        ["train", job, "--set", "train.steps=0"],
        ["train", job, "--nproc-per-node", "2", "--set", "plan.parallel.tp=3"],
        ["train", job, "--out", str(file)],
        ["train", job, "--set", f"checkpoint.folder={file}/checkpoints"],
        ["plan", "nowhere.toml", "--device", "H100"],
        ["dryrun", "nowhere.toml", "--world-size", "2"],
        ["memory", "nowhere.toml"],
        ["compare", "nowhere.toml"],
        ["topology", "nowhere.toml"],
        ["checkpoint", "convert", "a", "b", "--to", "hf", "--job", "nowhere.toml"],
    ]
    call(*refused, code=2)
    assert not (books / "report.html").exists()


def test_the_version() -> None:
    assert call(["--version"], code=0).stdout == f"weft {weft.__version__}\n"
    assert weft.__version__[0].isdecimal()


def test_shell_completion_knows_the_commands() -> None:
    """Request of a shell after `weft ca` and the tab key."""
    weft_command = str(Path(sys.executable).parent / "weft")
    environment = os.environ | {"_WEFT_COMPLETE": "complete_bash", "COMP_WORDS": "weft ca", "COMP_CWORD": "1"}
    done = subprocess.run([weft_command], capture_output=True, text=True, timeout=100, check=True, env=environment)
    assert done.stdout.split() == ["calibrate"]


def test_ctrl_c_exits_with_130_and_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """In a command without ranks, because the launcher of ranks handles signals itself."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("weft.posttraining.job.job_schema", interrupted)
    monkeypatch.setattr(sys, "argv", ["weft", "schema"])
    with pytest.raises(SystemExit) as left:
        weft_main()
    assert left.value.code == 130
    assert capsys.readouterr() == ("", "weft: stopped by SIGINT\n")


def weft_main() -> None:
    from weft.cli import main

    main()


OFFLINE = """
import os, sys
from weft.cli import main
sys.argv = ["weft", "schema"]
try:
    main()
except SystemExit:
    pass
import huggingface_hub.constants
print(huggingface_hub.constants.HF_HUB_OFFLINE, file=sys.stderr)
"""


@pytest.mark.parametrize(("given", "offline"), [({}, "True"), ({"HF_HUB_OFFLINE": "0"}, "False")])
def test_commands_are_offline_by_default(given: dict[str, str], offline: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"} | given
    done = subprocess.run([sys.executable, "-c", OFFLINE], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == offline
