"""Training loop of the README: runs as printed, and equals one process under every plan."""

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

from tests.lab.commands import python
from tests.lab.parity import plan_for
from tests.lab.pool import run_ranks
from weft.plan import Plan

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "own_loop.py"
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "--local-addr", "127.0.0.1"]
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero 0": (2, {"zero": 0}),
    "zero 2": (2, {"zero": 2}),
    "zero 3": (2, {"zero": 3}),
    "tp2": (2, {"tp": 2}),
    "cp2": (2, {"cp": 2}),
    "tp2 x dp2": (4, {"tp": 2, "zero": 2}),
    "cp2 x dp2": (4, {"cp": 2, "zero": 0}),
}


def printed_program() -> str:
    """Program printed in the README."""
    section = (ROOT / "README.md").read_text().partition("\n## Your own loop\n")[2].partition("\n## ")[0]
    found = re.search(r'\n\n(    """.*?\n)(?=\S)', section, re.DOTALL)
    assert found
    return textwrap.dedent(found[1]).strip() + "\n"


def losses_in(output: str) -> list[float]:
    return [float(line.split()[-1]) for line in output.splitlines() if line.startswith("step")]


def run_program(rank: int, ranks: int, program: str, plan: Plan) -> list[float]:
    """Run the program on a rank of the pool, whose process group exists; return the losses that rank 0 prints."""
    replaced = {
        "weft.prepare(model, ": "weft.prepare(model, plan=PLAN, ",
        "torch.distributed.destroy_process_group()": "pass",
    }
    for old, new in replaced.items():
        assert program.count(old) == 1
        program = program.replace(old, new)
    output = StringIO()
    with redirect_stdout(output):
        exec(program, {"__name__": "own_loop", "PLAN": plan})
    return losses_in(output.getvalue())


def constants(program: str) -> dict[str, Any]:
    """Constants of the program: SIZES and TEXTS."""
    lines = [line for line in program.splitlines() if re.match(r"[A-Z]+ = ", line)]
    found: dict[str, Any] = {}
    exec("\n".join(lines), found)
    return found


def plain_losses(sizes: dict[str, int], texts: list[str], clip: Callable[..., Any]) -> list[float]:
    """Losses of the same training in one process, without Weft."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for start in range(0, 64, 8):
        rows = [torch.tensor(list(text.encode())) for text in texts[start : start + 8]]
        ids, labels = (pad_sequence(rows, batch_first=True, padding_value=value) for value in (0, -100))
        loss = model(input_ids=ids, attention_mask=(ids > 0).long(), labels=labels).loss
        loss.backward()
        clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def expected() -> list[float]:
    known = constants(printed_program())
    return plain_losses(known["SIZES"], known["TEXTS"], torch.nn.utils.clip_grad_norm_)


def test_the_printed_program_is_the_example() -> None:
    assert printed_program() == SCRIPT.read_text()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_printed_program_equals_one_process(layout: str, expected: list[float]) -> None:
    ranks, parallel = LAYOUTS[layout]
    found, *_ = run_ranks(ranks, run_program, printed_program(), plan_for("fp32", **parallel))
    assert len(found) == 8
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow("torchrun and two ranks import torch and Transformers")
@pytest.mark.parametrize("launcher", [[], TORCHRUN], ids=["python", "torchrun"])
def test_runs_as_printed(launcher: list[str], expected: list[float], tmp_path: Path) -> None:
    (tmp_path / "own_loop.py").write_text(printed_program())
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # two ranks need two devices, or none
    if launcher:
        argv = [sys.executable, *launcher, "own_loop.py"]
        result = subprocess.run(argv, capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path)
    else:
        result = python(printed_program(), cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stderr
    found = losses_in(result.stdout)
    assert len(found) == 8
    assert found == pytest.approx(expected, rel=0.02)  # precision "auto" depends on the device
    assert found[-1] < 0.7 * found[0]
