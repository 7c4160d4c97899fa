"""Sums for reinforcement learning: prompts and rewards of the example."""

import json
import sys
from pathlib import Path

import pytest

from examples import arithmetic
from weft.posttraining.job import TrainerJob
from weft.posttraining.trainers import _reward

ROOT = Path(__file__).parents[2]


def test_rewards_are_for_right_numbers() -> None:
    texts = ["12", " 12. ", "7 + 5 = 12", "The answer is 12.", "112", "12 or 13", "thirteen"]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    assert arithmetic.is_right(completions=completions, answer=[12] * 7) == [1, 1, 0.5, 0.5, 0, 0, 0]


def test_prompts_are_those_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "data" / "sums.jsonl"
    monkeypatch.setattr(sys, "argv", ["arithmetic.py", str(path)])
    arithmetic.main()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 400
    assert rows[0]["prompt"][0]["content"].startswith("What is ")
    job = TrainerJob.load(ROOT / "examples" / "grpo.toml")
    monkeypatch.chdir(ROOT)
    assert _reward(job.trainer.rewards[0]) is arithmetic.is_right
