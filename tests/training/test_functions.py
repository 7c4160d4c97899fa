"""Functions of the user's own code in a job: optimizer, schedule, loss and callbacks, in the pool and as a command."""

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.lab.commands import weft
from tests.lab.jobs import write_job
from tests.lab.runs import train_in_the_pool
from weft.checkpoint.folders import list_checkpoints
from weft.checkpoint.manifest import read_manifest
from weft.errors import DataError, JobError
from weft.job import Job
from weft.training.functions import check_functions, checked_loss
from weft.training.metrics import read_evaluations, read_metrics
from weft.training.optimizer import learning_rate

MODULE = """
import json
from pathlib import Path

import torch
import torch.nn.functional as F


def sgd(groups, settings):
    return torch.optim.SGD(groups, lr=settings.lr, momentum=0.9)


def adamw(groups, settings):
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)


def halves(step, steps, settings):
    return settings.lr * 0.5 ** (step - 1)


def cross_entropy(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")


def nothing(groups, settings):
    return None


class Follow:
    def __init__(self, job):
        self.file = Path(job.out) / "seen.jsonl"

    def write(self, event, value):
        with self.file.open("a") as file:
            file.write(json.dumps([event, value]) + "\\n")

    def on_step(self, metrics):
        self.write("step", metrics.loss)

    def on_evaluation(self, evaluation):
        self.write("evaluation", evaluation.held_out_loss)

    def on_checkpoint(self, folder):
        assert (folder / "manifest.json").exists()
        self.write("checkpoint", folder.name)

    def on_end(self, folder):
        assert (folder / "export").exists()
        self.write("end", str(folder))


def follows_nothing(job):
    return object()
"""
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero 3": (2, {"zero": 3}),
    "tp2": (2, {"tp": 2}),
    "cp2": (2, {"cp": 2}),
    "pp2": (2, {"pp": 2}),
}


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss that Weft computes itself."""
    assert logits.shape == (*targets.shape, 300)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with the module `own_code`, which is the current folder of this process and of new ranks."""
    (tmp_path / "own_code.py").write_text(MODULE)
    (tmp_path / "broken_code.py").write_text("\n1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_code", raising=False)
    return tmp_path


def job_of(folder: Path, parallel: dict[str, Any], out: str, **tables: Any) -> Job:
    tables["train"] = {"steps": 3, "global_batch_size": 4, "micro_batch_size": 1, **tables.get("train", {})}
    plan = {"parallel": parallel, "precision": {"param_dtype": "fp32"}}
    return Job.load(write_job(folder, plan=plan, **tables), [f"out={folder / out}"])


def command(job: Path, *options: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    return weft("train", job, *options, timeout=180, cwd=folder)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_loss_of_ones_own_equals_the_loss_that_it_copies(layout: str, tmp_path: Path) -> None:
    """The function gets the full logits and targets under every plan."""
    ranks, parallel = LAYOUTS[layout]
    expected, _ = train_in_the_pool(job_of(tmp_path, parallel, "expected", optimizer={"lr": 0.01}), ranks)
    own = job_of(tmp_path, parallel, "own", optimizer={"lr": 0.01}, train={"loss": f"{__name__}:cross_entropy"})
    found, _ = train_in_the_pool(own, ranks)
    for mine, theirs in zip(
        read_metrics(found / "metrics.jsonl"), read_metrics(expected / "metrics.jsonl"), strict=True
    ):
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-5)
        assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)


@pytest.mark.slow("a complete command, which imports the module from its current folder")
def test_a_command_uses_functions_of_its_folder(own_code: Path) -> None:
    job = write_job(
        own_code,
        optimizer={"name": "own_code:sgd", "schedule": "own_code:halves", "lr": 0.1},
        train={"steps": 4, "global_batch_size": 4, "loss": "own_code:cross_entropy", "callbacks": ["own_code:Follow"]},
        checkpoint={"every": 2},
    )
    done = command(job, "--nproc-per-node", "2", folder=own_code)
    assert done.returncode == 0, done.stderr
    run = own_code / "run"
    rows = read_metrics(run / "metrics.jsonl")
    assert [row.learning_rate for row in rows] == [0.1, 0.05, 0.025, 0.0125]
    seen = [json.loads(line) for line in (run / "seen.jsonl").read_text().splitlines()]
    assert [value for event, value in seen if event == "step"] == [row.loss for row in rows]
    held_out = [row.held_out_loss for row in read_evaluations(run / "evaluations.jsonl")]
    assert [value for event, value in seen if event == "evaluation"] == held_out
    assert [value for event, value in seen if event == "checkpoint"] == ["step-00000002", "step-00000004"]
    assert seen[-1] == ["end", str(run)]
    manifest = read_manifest(list_checkpoints(run)[0])
    assert manifest.job["optimizer"]["name"] == "own_code:sgd"
    assert manifest.job["train"]["loss"] == "own_code:cross_entropy"
    assert not any("exp_avg" in name for name in manifest.tensors)  # the states are those of SGD
    assert any(name.startswith("momentum_buffer/") for name in manifest.tensors)


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"optimizer": {"name": "own_code:sdg"}}, "did you mean own_code:sgd"),
        ({"optimizer": {"schedule": "broken_code:rate"}}, r"(?s)ZeroDivisionError.*broken_code\.py:2"),
        ({"optimizer": {"schedule": "no_such_module:rate"}}, "no_such_module cannot be imported: ModuleNotFoundError"),
        ({"train": {"callbacks": ["own_code:Folow"]}}, "did you mean own_code:Follow"),
        ({"train": {"loss": "own_code:json"}}, "own_code has no function json"),
    ],
)
def test_functions_that_do_not_exist_are_refused_at_start(tables: Any, said: str, own_code: Path) -> None:
    with pytest.raises(JobError, match=said):
        check_functions(Job.load(write_job(own_code, **tables)))


RETURNED = {
    "a list": ("[0.5]", r"own_code:made returns \[0\.5\]"),
    "nothing": ("None", "own_code:made returns None"),
    "text": ("'0.1'", "own_code:made returns '0.1'"),
    "infinite": ("1e300", "own_code:made returns 1e"),
    "an error": ("1 / 0", "own_code:made failed: ZeroDivisionError"),
}


@pytest.mark.parametrize("case", RETURNED)
@pytest.mark.parametrize("key", ["optimizer.schedule", "train.loss"])
def test_what_functions_return_is_checked_before_a_rank_starts(key: str, case: str, own_code: Path) -> None:
    value, said = RETURNED[case]
    (own_code / "own_code.py").write_text(f"def made(*arguments):\n    return {value}\n")
    table, _, name = key.partition(".")
    job = Job.load(write_job(own_code, **{table: {name: "own_code:made"}}))
    if (key, case) == ("train.loss", "an error"):  # may be due to the trial
        check_functions(job)
        return
    with pytest.raises(DataError, match=said) as caught:
        check_functions(job)
    assert key in str(caught.value)
    assert caught.value.fix


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("logits.sum().detach()", "a tensor without a gradient"),
        ("logits[0, :, 0]", r"a tensor \(2,\) of torch.float32"),
        ("(logits.sum(), 1)", r"own_code:made returns \(tensor"),
        ("logits.sum().reshape(1, 1)", ""),
    ],
)
def test_a_loss_is_one_element_with_a_gradient(value: str, said: str, own_code: Path) -> None:
    (own_code / "own_code.py").write_text(f"def made(logits, targets):\n    return {value}\n")
    job = Job.load(write_job(own_code, train={"loss": "own_code:made"}))
    if not said:
        check_functions(job)
        assert checked_loss("own_code:made")(torch.ones(1, 2, 3, requires_grad=True), torch.ones(1, 2)).shape == ()
        return
    with pytest.raises(DataError, match=said):
        check_functions(job)


@pytest.mark.parametrize("made", ["numpy.float32(0.5)", "torch.tensor(0.5)", "numpy.array(0.5)"])
def test_rates_are_numbers_of_any_library(made: str, own_code: Path) -> None:
    (own_code / "own_code.py").write_text(f"import numpy, torch\n\ndef rate(*arguments):\n    return {made}\n")
    settings = Job.load(write_job(own_code, optimizer={"schedule": "own_code:rate"})).optimizer
    assert learning_rate(1, 3, settings) == 0.5


def test_a_name_that_is_neither_a_choice_nor_a_function_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r'"adamw".*"onebit-adam" or a function of yours, as "package\.module:function"'):
        Job.load(write_job(tmp_path, optimizer={"name": "adam"}))


def test_schedules_decay_to_their_floor() -> None:
    settings = Job.parse({"model": {"config": {}}}).optimizer.model_copy(
        update={"lr": 1.0, "warmup_steps": 0, "floor": 0.2}
    )
    for schedule, middle in (("linear", 0.6), ("polynomial", 0.2 + 0.8 * 0.25), ("cosine", 0.6)):
        rates = [learning_rate(step, 100, settings.model_copy(update={"schedule": schedule})) for step in (50, 100)]
        assert rates == pytest.approx([middle, 0.2])


# Techniques


def technique_of_the_page(model: Any, anatomy: Any, plan: Any, mesh: Any) -> None:
    """Technique of docs/extending.md: a hook on the embedding, which one pipeline stage has."""
    page = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
    listing = re.search(r"    # mine.py\n(.*?)\n\n(?=\S)", page, re.DOTALL)
    assert listing
    found: dict[str, Any] = {}
    exec(textwrap.dedent(listing[1]), found)
    found["shrink_gradient"](model, anatomy, plan, mesh)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_technique_runs_under_every_plan(layout: str, tmp_path: Path) -> None:
    """The reference is one rank, whose gradient norm differs from that of the model without the technique."""
    technique = {"techniques": [f"{__name__}:technique_of_the_page"]}
    steps = {}
    for name, count, parallel, more in (
        ("without", 1, {"zero": 0}, {}),
        ("one", 1, {"zero": 0}, technique),
        ("several", *LAYOUTS[layout], technique),
    ):
        plan = {"parallel": parallel, "precision": {"param_dtype": "fp32"}, **more}
        train = {"steps": 3, "global_batch_size": 4, "micro_batch_size": 1}
        job = Job.load(write_job(tmp_path, plan=plan, train=train, optimizer={"lr": 0.01}), [f"out={tmp_path / name}"])
        out, _ = train_in_the_pool(job, count)
        steps[name] = [(row.loss, row.grad_norm) for row in read_metrics(out / "metrics.jsonl")]
    for found, expected in zip(steps["several"], steps["one"], strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    assert steps["one"][0] != pytest.approx(steps["without"][0], rel=1e-3)


def test_a_technique_that_does_not_exist_is_refused(own_code: Path) -> None:
    job = Job.load(write_job(own_code, plan={"techniques": ["own_code:missing"]}))
    with pytest.raises(JobError, match="own_code has no function missing") as caught:
        check_functions(job)
    assert caught.value.where == "plan.techniques[0] = own_code:missing"
