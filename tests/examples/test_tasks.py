"""Examples of tasks: each job of examples/ trains a few steps with its own data, and its export answers."""

import json
from pathlib import Path

import pytest
from examples.shapes import processor, records

from tests.lab.runs import train_in_the_pool
from weft.job import Job

ROOT = Path(__file__).parents[2]
JOBS = ("digits-vit", "digits-dit", "dates-t5", "shapes", "python-bert")


@pytest.mark.parametrize("name", JOBS)
def test_example_trains(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    settings = ["train.steps=2", "train.evaluate_every=0", "train.evaluate_rows=8", "optimizer.warmup_steps=1"]
    settings += [f"out={tmp_path / 'run'}", f"data.cache={tmp_path / 'cache'}"]
    if name == "shapes":
        processor().save_pretrained(tmp_path / "processor")
        write_records(tmp_path / "records.parquet")
        settings += [f"data.tokenizer={tmp_path / 'processor'}", f"data.path={tmp_path / 'records.parquet'}"]
    out, _ = train_in_the_pool(Job.load(ROOT / "examples" / f"{name}.toml", settings), 2)
    facts = json.loads((out / "run.json").read_text())
    assert facts["sample"]
    assert (facts["accuracy"] is None) == (name == "digits-dit")
    assert (out / "sample.png").is_file() == (name == "digits-dit")


def write_records(path: Path) -> None:
    """The records of examples/shapes.py, fewer of them."""
    from datasets import Dataset, Features, Image, Value

    features = Features({"image": Image(), "prompt": Value("string"), "answer": Value("string")})
    Dataset.from_list(records(200), features=features).to_parquet(path)
