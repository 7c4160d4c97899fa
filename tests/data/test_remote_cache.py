"""Copies of the token cache on a store: what is copied, damaged, interrupted and unreachable."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.data.chats import PLAIN, chats, save_tokenizer, write_jsonl
from weft import object_store
from weft.data import Prepared, prepare
from weft.data import remote_cache as remote_cache_module
from weft.data.store import read_store
from weft.errors import DataError, JobError
from weft.job import Data, Task
from weft.object_store import StoreFolder

MADE = ("tokenizing", "training a tokenizer", "reading the records")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "FIRST_PAUSE", 0.001)
    for module in (object_store, remote_cache_module):
        monkeypatch.setattr(module, "START_SECONDS", 0.02)


@pytest.fixture
def text(tmp_path: Path) -> dict[str, Any]:
    """Data table of a text, with a store."""
    (tmp_path / "text.txt").write_text("A line of a text that is cut into rows. " * 200)
    return {"source": "text", "path": str(tmp_path / "text.txt"), "seq_len": 16, "vocab_size": 280}


def prepare_on(machine: Path, data: dict[str, Any], **task: Any) -> tuple[Prepared, list[str]]:
    """Prepare data on a machine of which this is the cache; lines on the screen."""
    lines: list[str] = []
    remote = {"remote_cache": f"file://{machine.parent}/store", **data}
    table = Data(cache=str(machine), **remote)
    return prepare(table, model_folder=None, log=lines.append, task=Task(**task)), lines


def made(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith(MADE)]


def test_text_is_tokenized_by_the_first_machine_alone(text: dict[str, Any], tmp_path: Path) -> None:
    first, lines = prepare_on(tmp_path / "first", text)
    assert len(made(lines)) == 2
    assert sum(line.startswith("copying ") for line in lines) == 2
    second, lines = prepare_on(tmp_path / "second", text)
    assert not made(lines)
    assert not [line for line in lines if line.startswith("copying ")]
    assert first.identity == second.identity
    folder = Path(second.train[0].tokens).parent
    assert folder.parent == tmp_path / "second"
    read_store(folder)
    _, again = prepare_on(tmp_path / "second", text)
    assert not [line for line in again if "cop" in line]


def test_chats_and_records_are_copied_too(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path / "tokenizer", PLAIN)
    write_jsonl(tmp_path / "chats.jsonl", chats(20))
    write_jsonl(tmp_path / "labels.jsonl", [{"text": f"text {i}", "label": i % 2} for i in range(20)])
    chat = {"source": "jsonl", "format": "chat", "path": str(tmp_path / "chats.jsonl"), "tokenizer": str(tokenizer)}
    records = {"source": "jsonl", "path": str(tmp_path / "labels.jsonl"), "vocab_size": 280}
    for data, task in (({**chat, "held_out": 0.2}, {}), (records, {"kind": "classification"})):
        first, lines = prepare_on(tmp_path / "first", data, **task)
        assert made(lines)
        second, lines = prepare_on(tmp_path / "second", data, **task)
        assert not made(lines)
        assert first.identity == second.identity


@pytest.mark.must("fault: A copy of the token cache on an object store is damaged or incomplete")
@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing", "list"])
def test_a_damaged_copy_is_not_used_and_is_replaced(damage: str, text: dict[str, Any], tmp_path: Path) -> None:
    first, _ = prepare_on(tmp_path / "first", text)
    folder = next((tmp_path / "store").glob("tokens-*/"))
    path = folder.with_suffix(".json") if damage == "list" else folder / "tokens-00000.npy"
    content = path.read_bytes()
    path.write_bytes(content[:-1] if damage in ("truncated", "list") else content[:-1] + bytes([content[-1] ^ 1]))
    if damage == "missing":
        path.unlink()
    second, lines = prepare_on(tmp_path / "second", text)
    assert [line for line in lines if f"{folder.name} is damaged, and made anew: " in line]
    assert [line.split()[0] for line in made(lines)] == ["tokenizing"]
    assert first.identity == second.identity
    read_store(Path(second.train[0].tokens).parent)
    assert path.read_bytes() == content
    assert not made(prepare_on(tmp_path / "third", text)[1])


@pytest.mark.parametrize("name", ["tokens-00000.npy", "manifest.json", "list"])
def test_an_interrupted_copy_is_not_used_and_continues(name: str, text: dict[str, Any], tmp_path: Path) -> None:
    put = StoreFolder.send

    def send(self: StoreFolder, path: Path, target: str, *args: Any) -> None:
        if target.startswith("tokens-") and (target.endswith(name) or (name == "list" and "/" not in target)):
            raise KeyboardInterrupt
        put(self, path, target, *args)

    with mock.patch.object(StoreFolder, "send", send), pytest.raises(KeyboardInterrupt):
        prepare_on(tmp_path / "first", text)
    store = tmp_path / "store"
    assert not list(store.glob("tokens-*.json"))
    written = {path: path.stat().st_mtime_ns for path in store.glob("tokens-*/*")}
    _, lines = prepare_on(tmp_path / "second", text)
    assert [line.split()[0] for line in made(lines)] == ["tokenizing"]
    assert all(path.stat().st_mtime_ns == time for path, time in written.items())
    assert not made(prepare_on(tmp_path / "third", text)[1])


@pytest.mark.parametrize(
    ("failing", "expected"),
    [
        ("ls", "store is not used: the store cannot be used: no answer"),
        ("cat_file", " is not used: the store cannot be used: no answer"),
        ("get_file", " is not used: the store cannot be used: no answer"),
        ("put_file", "store: no answer"),
    ],
)
def test_a_store_that_fails_costs_lines_and_the_tokens_are_made_here(
    failing: str, expected: str, text: dict[str, Any], tmp_path: Path
) -> None:
    if failing == "get_file":  # there is something to get
        prepare_on(tmp_path / "first", text)
    with mock.patch(f"fsspec.implementations.local.LocalFileSystem.{failing}", side_effect=TimeoutError("no answer")):
        _, lines = prepare_on(tmp_path / "machine", text)
    assert (
        len([line for line in lines if expected in line])
        == {"ls": 1, "cat_file": 2, "get_file": 2, "put_file": 2}[failing]
    )
    assert len(made(lines)) == 2
    assert not made(prepare_on(tmp_path / "machine", text)[1])


def test_a_list_of_files_outside_of_its_folder_is_refused(text: dict[str, Any], tmp_path: Path) -> None:
    prepare_on(tmp_path / "first", text)
    listed = next((tmp_path / "store").glob("tokens-*.json"))
    listed.write_text(listed.read_text().replace("tokens-00000.npy", "../../../stolen"))
    _, lines = prepare_on(tmp_path / "second", text)
    assert [line for line in lines if "is damaged, and made anew" in line]
    assert not list(tmp_path.rglob("stolen"))


def test_values_that_are_no_url_of_a_store_are_refused(text: dict[str, Any], tmp_path: Path) -> None:
    for url, message in (("cache", "is no URL"), ("nowhere://bucket/cache", "Protocol not known")):
        with pytest.raises(JobError, match=message):
            prepare_on(tmp_path / "first", {**text, "remote_cache": url})
    with pytest.raises(DataError, match="no file"):
        prepare_on(tmp_path / "first", {**text, "path": str(tmp_path / "nothing.txt")})
