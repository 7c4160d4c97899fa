"""Tiny job on a small text, for tests of complete commands."""

from pathlib import Path
from typing import Any

import tomli_w

from tests.lab.families import family


def write_job(folder: Path, **tables: dict[str, Any]) -> Path:
    """Write a job that trains a tiny Llama on a small text, with changes of its tables; return its path."""
    (folder / "text").mkdir(exist_ok=True)
    for index in range(20):
        (folder / "text" / f"{index}.txt").write_text(f"The quick brown fox number {index} jumps. " * 60)
    job: dict[str, Any] = {
        "model": {"config": {**family("llama"), "vocab_size": 300}},
        "data": {
            "source": "text",
            "path": str(folder / "text"),
            "vocab_size": 300,
            "seq_len": 32,
            "cache": str(folder / "cache"),
        },
        "train": {"steps": 2, "global_batch_size": 4},
        "plan": {"precision": {"param_dtype": "fp32"}},
        "out": str(folder / "run"),
    }
    for name, table in tables.items():
        job[name] = {**job.get(name, {}), **table}
    path = folder / "job.toml"
    path.write_text(tomli_w.dumps(job))
    return path
