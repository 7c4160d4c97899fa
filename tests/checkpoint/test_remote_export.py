"""Exports to object stores: what is refused, and how an interrupted one continues, on file systems of fsspec."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from weft import object_store
from weft.checkpoint import remote_export
from weft.checkpoint.remote_export import LAST, MARK, local_folder
from weft.errors import CheckpointError, JobError, UnreadableError
from weft.object_store import StoreFolder

FILES = {"config.json": "{}", "model.safetensors": "weights", "tokenizer.json": "[]", "templates/one.jinja": "x"}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "FIRST_PAUSE", 0.001)
    for module in (object_store, remote_export):
        monkeypatch.setattr(module, "SEND_SECONDS", 0.01)


def export(url: str, run: Path, files: dict[str, str] = FILES) -> None:
    """Write an export to a URL, which is a Path without one of its slashes, as on a command line."""
    run.mkdir(exist_ok=True)
    with local_folder(Path(url), run) as folder:
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)


def content(store: Path) -> dict[str, str]:
    return {path.relative_to(store).as_posix(): path.read_text() for path in store.rglob("*") if path.is_file()}


def test_the_files_of_an_export_are_copied_and_nothing_else_is_left(tmp_path: Path) -> None:
    (tmp_path / "store/mine").mkdir(parents=True)
    (tmp_path / "store/mine/.weft-0123456789abcdef").touch()  # of a command that was killed while it tried the store
    export(f"file://{tmp_path}/store/mine", tmp_path / "run")
    assert content(tmp_path / "store/mine") == FILES
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "store"]


def test_a_folder_is_written_as_before(tmp_path: Path) -> None:
    export(str(tmp_path / "mine"), tmp_path / "run")
    assert content(tmp_path / "mine") == FILES
    with pytest.raises(CheckpointError, match="exists"):
        export(str(tmp_path / "mine"), tmp_path / "run")


@pytest.mark.must("fault: An object store fails while an export is copied to it")
@pytest.mark.parametrize("failing", FILES)
def test_an_interrupted_export_shows_no_configuration_and_continues(failing: str, tmp_path: Path) -> None:
    url, store = f"file://{tmp_path}/store/mine", tmp_path / "store/mine"
    sent, send = [], StoreFolder.send

    def send_until(self: StoreFolder, path: Path, name: str, *arguments: Any) -> None:
        if name == failing:
            raise TimeoutError("no answer")
        send(self, path, name, *arguments)
        sent.append(name)

    with mock.patch.object(StoreFolder, "send", send_until), pytest.raises(UnreadableError, match="no answer"):
        export(url, tmp_path / "run")
    assert sent[0] == MARK
    assert "config.json" not in content(store)
    with pytest.raises(CheckpointError, match="has other files"):
        export(url, tmp_path / "run", {**FILES, "config.json": '{"of": "another"}'})
    assert content(store).items() <= {**FILES, MARK: (store / MARK).read_text()}.items()
    written = {name: (store / name).stat().st_mtime_ns for name in sent}
    export(url, tmp_path / "run")
    assert content(store) == FILES
    assert all((store / name).stat().st_mtime_ns == written[name] for name in sent if name != MARK)


def test_damage_of_an_interrupted_export_is_repaired(tmp_path: Path) -> None:
    url, store = f"file://{tmp_path}/store/mine", tmp_path / "store/mine"
    remove = StoreFolder.remove_file

    def remove_probes(self: StoreFolder, name: str) -> None:
        if name == MARK:
            raise OSError("killed")
        remove(self, name)

    with mock.patch.object(StoreFolder, "remove_file", remove_probes), pytest.raises(UnreadableError):
        export(url, tmp_path / "run")
    (store / "model.safetensors").write_text("weight?")
    (store / "tokenizer.json").unlink()
    export(url, tmp_path / "run")
    assert content(store) == FILES


@pytest.mark.parametrize("mark", [None, "{", '{"files": {"../x": {"bytes": 1, "blake3": "' + 64 * "0" + '"}}}'])
def test_other_files_are_refused_before_anything_is_written(mark: str | None, tmp_path: Path) -> None:
    store = tmp_path / "store/mine"
    store.mkdir(parents=True)
    (store / "config.json").write_text("of somebody")
    if mark is not None:
        (store / MARK).write_text(mark)
    before, begun = content(store), []
    with (
        pytest.raises(CheckpointError, match=f"{store} has other files"),
        local_folder(Path(f"file://{store}"), tmp_path) as folder,
    ):
        begun.append(folder)
    assert not begun
    assert content(store) == before
    with pytest.raises(JobError, match="Protocol not known"):
        export("nowhere://bucket/mine", tmp_path / "run")


def test_readers_see_a_configuration_after_its_weights(tmp_path: Path) -> None:
    sent, send = [], StoreFolder.send

    def record(self: StoreFolder, path: Path, name: str, *arguments: Any) -> None:
        sent.append(name)
        send(self, path, name, *arguments)

    names = ["config.json", "model.safetensors.index.json", "a.safetensors", "z.safetensors", "weights/.metadata"]
    with mock.patch.object(StoreFolder, "send", record):
        export(f"memory://{tmp_path}/mine", tmp_path / "run", dict.fromkeys(names, "x"))
    assert sent[0] == MARK
    assert [Path(name).name for name in sent[3:]] == [name for name in LAST if name in {Path(n).name for n in names}]
