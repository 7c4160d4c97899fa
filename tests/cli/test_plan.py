"""`weft plan`: the plan trains as predicted, and invalid input is refused."""

import sys
from pathlib import Path

import pytest

from tests.lab import commands
from tests.lab.jobs import write_job
from weft.cli import main
from weft.job import Job, read_toml
from weft.observe.prediction import compare
from weft.observe.record import read_run


def weft(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["weft", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.mark.slow("twenty dry runs, and a run of whole processes")
def test_a_plan_is_found_and_trains(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    job, plan, page = write_job(tmp_path, train={"steps": 4}), tmp_path / "plan.toml", tmp_path / "page.html"
    options = ["--device", "CPU", "--per-host", 2, "--out", plan, "--explain", page, "--timeline", tmp_path / "t.json"]
    assert weft(monkeypatch, "plan", job, *options) == 0
    text = capsys.readouterr().out
    assert "counted on rank" in text
    assert "fewest devices: 1" in text
    within = [line for line in text.splitlines() if line.startswith("within ")]
    assert len(set(within)) == len(within)
    html = page.read_text(encoding="utf-8")
    assert "<title>0.0347 M parameters on 2 CPU" in html
    assert html.index("ms per step") < html.index("GiB per rank")
    assert "equal" in html
    assert len(html) < 100_000
    found = Job.load(job, [f'plan="{plan}"']).plan.prediction
    assert found is not None
    assert found.sent_bytes
    assert sum(found.terms.values()) == pytest.approx(found.step_seconds)
    settings = ["--set", f"plan={plan}", "--set", f"train.micro_batch_size={found.micro_batch}", "--nproc-per-node", 2]
    done = commands.weft("train", job, *settings)
    assert done.returncode == 0, done.stderr
    assert "predicted" in done.stdout
    lines = {line.name: line for line in compare(read_run(tmp_path / "run"))}
    assert lines["step"].measured > 0
    for name, line in lines.items():  # counted quantities are exact
        assert not name.startswith("sent over") or line.predicted == line.measured
    assert lines["memory: parameters"].off == 0
    assert lines["memory"].off == pytest.approx(0, abs=0.1)


def test_operators_are_timed_on_this_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    job, plan, cluster = write_job(tmp_path), tmp_path / "plan.toml", tmp_path / "here.toml"
    cluster.write_text(
        'device = "CPU"\ndevices_per_host = 2\noperators_scalar = 2.0\n[figures]\ncores = 2\n', encoding="utf-8"
    )
    assert (
        weft(monkeypatch, "plan", job, "--cluster", cluster, "--measure", "--no-confirm", "--best", 1, "--out", plan)
        == 0
    )
    assert "by operators" in capsys.readouterr().out
    found = Job.load(job, [f'plan="{plan}"']).plan.prediction
    assert found is not None
    assert 0 < found.terms["optimizer"] < found.terms["compute"] < found.step_seconds


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--device", "H100", "--measure"],
            ["operators cannot be timed for 8 H100", "the device type of this machine is cpu"],
        ),
        (["--device", "H10"], ["the planner has no device 'H10'", "write 'H100'"]),
        ([], ["no cluster is named"]),
        (["--device", "H100", "--max-dollars", 1], ["1 dollars per hour do not pay for one H100", "one device costs"]),
        (["--device", "Ascend 910B", "--max-dollars", 1], ["the price of Ascend 910B is not known"]),
        (["--device", "H100", "--cluster", "here.toml"], ["named twice"]),
        (["--cluster", "nowhere.toml"], ["there is no file nowhere.toml"]),
        (
            ["--device", "H100", "--set", "train.global_batch_size=3", "--nnodes", "7"],
            ["no combination of degrees uses all devices of 7 hosts of 8 H100", "a global batch of 3 rows"],
        ),
    ],
)
def test_invalid_input(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    options: list[str],
    words: list[str],
) -> None:
    assert weft(monkeypatch, "plan", write_job(tmp_path), *options, "--out", tmp_path / "plan.toml") == 2
    text = capsys.readouterr().err
    assert all(word in text for word in words), text
    assert not (tmp_path / "plan.toml").exists()


def test_model_that_does_not_fit_gets_a_suggestion(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    job = Path(__file__).parents[2] / "examples" / "llama-70b.toml"
    options = [
        "--device",
        "A100-40",
        "--nproc-per-node",
        2,
        "--set",
        "train.global_batch_size=64",
        "--no-confirm",
        "--out",
        tmp_path / "plan.toml",
    ]
    assert weft(monkeypatch, "plan", job, *options) == 2
    text = capsys.readouterr().err
    assert "no layout fits on 2 A100-40" in text
    assert "use " in text


def test_limits_that_are_too_small(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    job = Path(__file__).parents[2] / "examples" / "llama-70b.toml"
    options = ["--device", "H100", "--nnodes", 8, "--max-devices", 3, "--no-confirm", "--out", tmp_path / "plan.toml"]
    assert weft(monkeypatch, "plan", job, *options, "--set", "train.global_batch_size=96") == 2
    text = capsys.readouterr().err
    assert "no layout fits on 3 H100" in text
    assert "use " in text


@pytest.mark.must("command: plan")
@pytest.mark.must("format: plan, plan.toml")
def test_plan_file_contains_the_prediction(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    assert weft(monkeypatch, "plan", write_job(tmp_path), "--device", "A100", "--no-confirm", "--out", plan) == 0
    tables = read_toml(plan)
    assert tables["prediction"]["cluster"] == "8 A100-80"
    assert set(tables["prediction"]["memory"]) == {"states", "activations", "transient", "reserve", "framework"}
