"""Runs that skip every update end with an error and without a result that looks trained."""

from pathlib import Path

import pytest

from tests.integrations.scripts_in_pool import script_on_rank
from tests.lab.jobs import write_job
from tests.lab.pool import RankError, run_ranks
from tests.lab.runs import train_in_the_pool
from tests.training.test_numbers import spoil_gradients
from weft.checkpoint.folders import list_checkpoints, step_of
from weft.errors import NumericError
from weft.job import Job
from weft.plan import Plan
from weft.training.metrics import read_metrics

SCRIPT = """
import sys, torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM
accelerator = Accelerator(cpu=True)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM(config)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
rows = torch.arange(8)[None]
for step in range(3):
    loss = model(input_ids=rows, labels=rows).loss
    accelerator.backward(loss * (1.0 if str(step) == sys.argv[1] else float("nan")))
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.must("fault: The updates of all steps were skipped")
def test_a_run_whose_steps_were_all_skipped_ends_with_an_error_and_without_an_export(tmp_path: Path) -> None:
    job = Job.load(write_job(tmp_path, train={"steps": 3}, checkpoint={"every": 2}))
    with pytest.raises(Exception, match="the updates of all 3 steps were skipped") as caught:
        train_in_the_pool(job, 2, fault=spoil_gradients)
    assert NumericError.__name__ in repr(caught.value) or isinstance(caught.value, NumericError)
    assert not (tmp_path / "run" / "export").exists()
    assert [row.skipped for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [True] * 3
    assert [step_of(path) for path in list_checkpoints(tmp_path / "run")] == [3, 2]


@pytest.mark.parametrize("good", ["none", "1"])
def test_a_script_whose_steps_were_all_skipped_ends_with_an_error(good: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    arguments = (str(tmp_path / "script.py"), [good], Plan())
    if good == "1":
        run_ranks(2, script_on_rank, *arguments)
        return
    with pytest.raises(RankError, match="NumericError: the updates of all 3 steps were skipped"):
        run_ranks(2, script_on_rank, *arguments)
