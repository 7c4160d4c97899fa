"""`weft run`: an unmodified script as a command, and the doors `turn_on` and `with_weft`."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.scripts_in_pool import SCRIPTS, plain, under
from tests.integrations.test_trainer import BATCH, assert_same_logs, assert_same_weights, log_of, plan_of
from tests.lab.commands import weft
from weft.integrations import launch as launch_module
from weft.launch.launcher import launch


def weft_run(folder: Path, *arguments: object) -> "subprocess.CompletedProcess[str]":
    """`weft run` in a fork, whose ranks are new processes."""
    return weft("run", *arguments, cwd=folder, timeout=300)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    plain("trainer_lm.py", folder, "--batch", BATCH)
    return folder


def launch_forks(argv: list[str], **options: Any) -> None:
    """As `launch`, with ranks that are forks of the command."""
    launch([argument for argument in argv if argument != "-u"], **options, use_forkserver=True)


@pytest.mark.parametrize("ranks", [pytest.param("forks", marks=pytest.mark.must("command: run")), "new processes"])
def test_the_command_runs_an_unmodified_script(
    ranks: str, reference: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if ranks == "forks":
        monkeypatch.setattr(launch_module, "launch", launch_forks)
    (tmp_path / "plan.toml").write_text("[parallel]\ntp = 2\n")
    done = weft_run(tmp_path, "--plan", "plan.toml", SCRIPTS / "trainer_lm.py", "out", "--batch", BATCH)
    assert done.returncode == 0, done.stderr
    assert_same_logs(log_of(tmp_path / "out"), log_of(reference))
    assert "rank-0.out" not in {path.name for path in (tmp_path / "weft-logs").iterdir()}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--plan", "plan.toml", "missing.py"), "there is no script missing.py"),
        (("--plan", "none.toml", "script.py"), "none.toml"),
        (("--plan", "plan.toml", "--nproc-per-node", "3", "script.py"), "3 ranks cannot be divided"),
    ],
)
def test_bad_input_is_refused_before_a_rank_starts(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("[parallel]\ntp = 2\n")
    (tmp_path / "script.py").write_text("")
    done = weft_run(tmp_path, *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "fix:" in done.stderr


@pytest.mark.parametrize("door", ["turn_on", "with_weft"])
@pytest.mark.parametrize("layout", ["zero 3", "tp2"])
def test_one_line_equals_one_process(door: str, layout: str, reference: Path, tmp_path: Path) -> None:
    """The script with one changed line, without `weft run`."""
    text = (SCRIPTS / "trainer_lm.py").read_text()
    ranks, plan, batch = plan_of(layout)
    before = f"import weft\nfrom weft.plan import Plan\nPLAN = Plan.model_validate_json('{plan.model_dump_json()}')\n"
    if door == "turn_on":
        text = text.replace("trainer.train(", "trainer = weft.turn_on(trainer, PLAN)\ntrainer.train(")
    else:
        text = text.replace("trainer = Trainer(", "trainer = weft.with_weft(Trainer, PLAN)(")
    script = tmp_path / "script.py"
    script.write_text(before + text)
    under(None, ranks, str(script), tmp_path / "out", "--batch", batch)
    assert_same_logs(log_of(tmp_path / "out"), log_of(reference))
    assert_same_weights(tmp_path / "out" / "final", reference / "final")
