"""Example packages: a gradient codec and a model with names of its own, installed by pip and used by commands."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import torch

from tests.lab.families import family
from tests.lab.jobs import write_job
from tests.lab.parity import assert_parity, plan_for
from tests.lab.pool import close_pools
from weft.anatomy.build import build_on_meta
from weft.anatomy.roles import STANDARD_NAMES
from weft.anatomy.transformers import read_anatomy
from weft.checkpoint.model_config import read_config
from weft.cli import main
from weft.comm.compression import codecs
from weft.errors import JobError, PlanError
from weft.job import Job, Model, Role
from weft.plan import Comm
from weft.training.metrics import read_metrics

PACKAGES = Path(__file__).parents[2] / "examples" / "packages"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder into which pip has installed both packages."""
    folder = tmp_path_factory.mktemp("installed")
    sources = [shutil.copytree(path, folder / "src" / path.name) for path in sorted(PACKAGES.iterdir())]
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--quiet", "--target", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, *map(str, sources)], check=True)
    return folder


@pytest.fixture
def beside(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The packages can be imported by this process, and by processes that it starts."""
    close_pools()  # their ranks do not have the path
    monkeypatch.syspath_prepend(installed)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(installed), os.environ.get("PYTHONPATH")])))
    yield installed
    close_pools()


def weft_train(job: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    argv = [str(Path(sys.executable).parent / "weft"), "train", str(job), *options]
    return subprocess.run(argv, capture_output=True, text=True, timeout=180, check=False)


# Codec


def test_an_installed_codec_trains(beside: Path, tmp_path: Path) -> None:
    """Its messages are a tenth of uncompressed ones, and error feedback makes up for what they leave out."""
    sent, losses = {}, {}
    for name in ("none", "top4"):
        comm = {"compression": name}
        job = write_job(tmp_path, plan={"comm": comm, "parallel": {"zero": 0}, "precision": {"param_dtype": "fp32"}})
        settings = ["train.steps=8", "optimizer.lr=0.01", "optimizer.warmup_steps=0", f"out={tmp_path / name}"]
        result = weft_train(job, "--nproc-per-node", "2", *(part for text in settings for part in ("--set", text)))
        assert result.returncode == 0, result.stderr
        rows = read_metrics(tmp_path / name / "metrics.jsonl")
        sent[name], losses[name] = rows[0].comm_bytes, rows[-1].loss
    assert sent["top4"] < 0.2 * sent["none"]
    assert losses["top4"] == pytest.approx(losses["none"], rel=0.1)


def test_the_installed_codec_follows_the_rules_of_codecs(beside: Path) -> None:
    feedback = codecs.build_feedback(Comm(compression="top4"))
    assert feedback is not None
    assert (feedback.codec.name, feedback.owner_codec.name) == ("top4", "int8")
    elements = torch.zeros(1, 64)
    elements[0, [3, 10, 50, 63]] = torch.tensor([1.0, -2.0, 4.0, 0.5])
    assert torch.equal(feedback.codec.decode(feedback.codec.encode(elements), 64), elements)


def test_a_codec_that_is_not_installed_is_refused() -> None:
    with pytest.raises(JobError, match=r'plan\.comm\.compression = "int9"') as caught:
        Job.parse({"model": {"config": {"model_type": "llama"}}, "plan": {"comm": {"compression": "int9"}}})
    assert caught.value.fix == 'did you mean plan.comm.compression = "int8"?'
    assert "the name of a codec of an installed package" in caught.value.rule


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("X = 7", "it is int, no Codec"),
        (
            "X = Codec('x', lambda n: n, lambda e: e.to(torch.uint8).repeat(1, 2), lambda m, n: m.float())",
            "bytes(1) is 1",
        ),
        ("X = Codec('x', lambda n: n, lambda e: e.nan_to_num().to(torch.uint8), lambda m, n: m.float())", "NaN is not"),
        ("X = Codec('x', lambda n: 4 * n, lambda e: as_bytes(e + e.sum()), decode)", "a message depends on other rows"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_codec_that_breaks_a_rule_is_refused(
    code: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = "import torch\nfrom weft.comm.compression.codec import Codec, as_bytes, from_bytes\n"
    head += "def decode(messages, length):\n    return from_bytes(messages, torch.float32)\n"
    (tmp_path / "broken_codec.py").write_text(head + code)
    information = tmp_path / "broken_codec-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-codec\nVersion: 1\n")
    (information / "entry_points.txt").write_text("[weft.codecs]\nbroken = broken_codec:X\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_codec", raising=False)
    with pytest.raises(PlanError) as caught:
        codecs.build_feedback(Comm(compression="broken"))
    assert caught.value.what.startswith("the codec broken cannot be used: ")
    assert words in caught.value.what
    assert caught.value.where == "plan.comm.compression"


# Model


def odd_job(folder: Path, *settings: str) -> Job:
    return Job.load(PACKAGES / "odd-model" / "job.toml", [f"out={folder / 'run'}", f"data.cache={folder}", *settings])


def test_every_role_has_a_standard_name() -> None:
    assert set(get_args(Role)) == set(STANDARD_NAMES)


def test_roles_make_a_model_known(beside: Path, tmp_path: Path) -> None:
    source = odd_job(tmp_path).model
    block = read_anatomy(build_on_meta(read_config(source), torch.float32)).blocks[1]
    assert (block.attention, block.mlp) == (("tower.1.mixer",), ("tower.1.net",))
    assert block.norms == ("tower.1.scale_in", "tower.1.scale_mid")


def test_the_command_prints_the_anatomy_of_a_job(
    beside: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["weft", "anatomy", str(PACKAGES / "odd-model" / "job.toml")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert "tower.*.mixer" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        (2, {"zero": 3}),
        (2, {"tp": 2}),
        (2, {"tp": 2, "sp": False}),
        (2, {"cp": 2}),
        (2, {"pp": 2}),
        (4, {"tp": 2, "pp": 2}),
    ],
    ids=str,
)
def test_a_model_with_roles_equals_one_process(
    ranks: int, parallel: dict[str, int], beside: Path, tmp_path: Path
) -> None:
    assert_parity(odd_job(tmp_path).model, plan_for("fp32", **parallel), ranks, micro_batch=1, rows_at_once=4)


def test_a_model_with_roles_trains_and_is_exported(beside: Path, tmp_path: Path) -> None:
    job = write_job(tmp_path)  # for its text
    job.write_text(odd_job(tmp_path, "plan.parallel.tp=2", "data.source=text", f"data.path={tmp_path}/text").to_toml())
    result = weft_train(
        job, "--nproc-per-node", "2", "--set", "train.steps=3", "--set", "plan.precision.param_dtype=fp32"
    )
    assert result.returncode == 0, result.stderr
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert rows[-1].loss < rows[0].loss
    exported = Job.parse({"model": {"path": str(tmp_path / "run" / "export"), "package": "odd_model"}}).model
    anatomy = read_anatomy(build_on_meta(read_config(exported), torch.float32))
    assert anatomy.blocks[0].attention  # the export has the roles


@pytest.mark.parametrize(
    ("setting", "words", "fix"),
    [
        ('model.roles.mixer="attn"', 'model.roles = "attn"', 'did you mean model.roles = "attention"?'),
        ('model.roles."mix("="mlp"', "model.roles", ""),
        ('model.package="no_such_model"', "no_such_model cannot be imported", "install its package"),
    ],
)
def test_wrong_roles_and_packages_are_refused(setting: str, words: str, fix: str, tmp_path: Path) -> None:
    with pytest.raises(JobError) as caught:
        read_config(odd_job(tmp_path, setting).model)
    assert words in caught.value.what
    assert fix in (caught.value.fix or "")


# Transport of experts, and technique


def test_an_installed_transport_and_technique_train(beside: Path, tmp_path: Path) -> None:
    """All-gathers replace the all-to-alls of experts, with the same loss; the technique shrinks gradients."""
    first = []
    for functions in ([], ["gather_experts", "shrink_gradient"]):
        techniques = [f"gathered_experts:{function}" for function in functions]
        plan = {"parallel": {"zero": 0, "ep": 2}, "precision": {"param_dtype": "fp32"}, "techniques": techniques}
        job = write_job(tmp_path, model={"config": {**family("qwen3_moe"), "vocab_size": 300}}, plan=plan)
        settings = ["train.steps=1", f"out={tmp_path / str(len(functions))}"]
        result = weft_train(job, "--nproc-per-node", "2", *(part for text in settings for part in ("--set", text)))
        assert result.returncode == 0, result.stderr
        first += read_metrics(tmp_path / str(len(functions)) / "metrics.jsonl")
    own, changed = first
    assert changed.loss == pytest.approx(own.loss, rel=1e-6)
    assert changed.comm_bytes != own.comm_bytes
    assert changed.grad_norm < 0.99 * own.grad_norm


def test_the_installed_transport_has_the_gradients_of_one_process(beside: Path) -> None:
    plan = plan_for("fp32", zero=0, ep=2).model_copy(update={"techniques": ("gathered_experts:gather_experts",)})
    assert_parity(Model(config=family("qwen3_moe")), plan, 2, 1)
