"""Exports and token caches on an S3 server that fails: what plain libraries read there, and killed commands."""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.data.chats import save_tokenizer
from tests.lab.commands import start_weft, weft
from tests.lab.families import family
from tests.lab.object_store import ObjectStore
from weft.checkpoint.remote_export import MARK
from weft.data import prepare
from weft.job import Data
from weft.object_store import StoreFolder

URL = "s3://bucket/models/mine"
STRANGER = f"""
import fsspec, json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
fsspec.url_to_fs("{URL}")[0].get("{URL}", sys.argv[1], recursive=True)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
AutoTokenizer.from_pretrained(sys.argv[1])
torch.save(model.state_dict(), sys.argv[1] + ".pt")
assert not [name for name in sys.modules if name.split(".")[0] == "weft"]
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Folder of a run that has ended."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**family("llama")))
    (tmp_path / "run").mkdir()
    model.save_pretrained(save_tokenizer(tmp_path / "run/export"))
    return tmp_path / "run"


@pytest.mark.slow("a new process imports Transformers")
def test_plain_libraries_load_an_export_from_a_store_that_has_failed(
    run: Path, s3: ObjectStore, tmp_path: Path
) -> None:
    s3.plant(0.25, "slow down", "lost answer", "truncated", "corrupted", seed=1)
    done = weft("export", run, URL, "--dtype", "bf16")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == URL
    assert sum(count for kind, count in s3.planted().items() if kind) > 2
    s3.plant(0.0)
    subprocess.run([sys.executable, "-c", STRANGER, str(tmp_path / "got")], check=True)
    assert weft("export", run, tmp_path / "local", "--dtype", "bf16").returncode == 0
    expected = {path.name: path.read_bytes() for path in (tmp_path / "local").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "got").iterdir()} == expected
    loaded = torch.load(f"{tmp_path / 'got'}.pt")
    for name, weight in load_file(run / "export/model.safetensors").items():
        assert torch.equal(loaded[name], weight.bfloat16()), name
    for target in (URL, "s3://bucket/models"):
        done = weft("export", run, target)
        assert done.returncode == 2
        assert f"{target} has other files" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["got", "got.pt", "local", "run"]


@pytest.mark.slow("commands are killed")
def test_a_killed_export_is_never_seen_in_part_and_continues(run: Path, s3: ObjectStore, tmp_path: Path) -> None:
    store, rng, kills, seen = StoreFolder(URL), random.Random(0), 0, set()
    while True:
        s3.plant(0.3, "slow down", "lost answer", seed=kills)
        command = start_weft("export", str(run), URL)
        if kills < 6:
            while not store.names() and command.poll() is None:
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 0.2))
            kills += command.poll() is None
            command.kill()
        else:
            assert command.wait() == 0, command.output
        s3.plant(0.0)
        names = store.names()
        seen.add(len(names))
        if "config.json" in names:
            assert {path.name for path in (run / "export").iterdir()} <= {*names, "generation_config.json"}
        if command.poll() == 0:
            break
    assert MARK not in names
    assert len(seen) > 1
    assert not list(tmp_path.glob(".export-to-store*"))
    (tmp_path / "got").mkdir()
    for path in (run / "export").iterdir():
        assert store.receive(path.name, tmp_path / "got" / path.name) is None
    assert load_file(tmp_path / "got/model.safetensors").keys() == load_file(run / "export/model.safetensors").keys()


@pytest.mark.slow("the library of S3 pauses between its own repetitions")
def test_tokens_are_copied_over_a_store_that_fails(s3: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("A line of a text that is cut into rows. " * 200)
    table = Data(source="text", path=str(tmp_path / "text.txt"), seq_len=16, vocab_size=280, remote_cache=URL)
    s3.plant(0.25, "slow down", "lost answer", "truncated", "corrupted", seed=2)
    lines: list[str] = []
    found = [
        prepare(table.model_copy(update={"cache": str(tmp_path / name)}), model_folder=None, log=lines.append)
        for name in ("first", "second")
    ]
    assert sum(count for kind, count in s3.planted().items() if kind) > 2
    assert [line.split()[0] for line in lines if line.startswith(("training", "tokenizing"))] == [
        "training",
        "tokenizing",
    ]
    assert sum(line.startswith(f"copied from {URL}/tok") for line in lines) == 2
    assert found[0].identity == found[1].identity
