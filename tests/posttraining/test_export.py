"""Folders of models that jobs with a trainer write: files around the weights, and the configuration."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, GenerationConfig

from tests.lab.exports import GENERATION, differences, publish
from tests.lab.pool import run_ranks
from tests.posttraining.conftest import ROWS
from tests.posttraining.test_run import LAYOUTS, job_of, train_on_rank
from weft.posttraining.export import export_model
from weft.posttraining.job import TrainerJob


@pytest.fixture
def source(small_model: Path, tmp_path: Path) -> Path:
    """The small model, with files around it."""
    folder = tmp_path / "model"
    shutil.copytree(small_model, folder)
    template = (folder / "chat_template.jinja").read_text()
    publish(folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


def job(source: Path, rows: Path, out: Path, **adapter: Any) -> TrainerJob:
    made = job_of("dpo", source, rows, out, LAYOUTS["zero 3"][1], max_steps=1)
    out.mkdir()
    made = made.model_copy(update={"adapter": made.adapter.model_copy(update=adapter)})
    (out / "job.toml").write_text(made.to_toml())
    return made


def test_a_saved_model_differs_from_its_source_in_what_training_changed(
    source: Path, write_rows: Callable[[list[Any]], Path], tmp_path: Path
) -> None:
    run_ranks(2, train_on_rank, job(source, write_rows(ROWS["dpo"]), tmp_path / "run"), None, timeout=120)
    files, keys = differences(source, tmp_path / "run" / "export")
    assert (files - {"tokenizer_config.json"}, keys) == ({"model.safetensors", "generation_config.json"}, set())
    # TRL has given the tokens of the tokenizer to the settings of generation; the others are those of the source.
    found, tokenizer = (kind.from_pretrained(tmp_path / "run" / "export") for kind in (GenerationConfig, AutoTokenizer))
    assert found.pad_token_id == tokenizer.pad_token_id
    kept = GENERATION.keys() - {"pad_token_id", "eos_token_id"}
    assert {key: getattr(found, key) for key in kept} == {key: GENERATION[key] for key in kept}
    export_model(tmp_path / "run", tmp_path / "bf16", merge=False, dtype="bf16")
    files, keys = differences(tmp_path / "run" / "export", tmp_path / "bf16")
    assert (files, keys) == ({"config.json", "model.safetensors"}, {"torch_dtype"})
