"""With a key, only checkpoints that were signed with the key are loaded."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.checkpoint.test_manifest import write
from weft.checkpoint.key import read_key
from weft.checkpoint.manifest import NAME, read_manifest, write_manifest
from weft.cli import app
from weft.errors import CheckpointError

KEY, OTHER = bytes(range(32)), bytes(32)


def key_file(folder: Path, text: str = KEY.hex(), mode: int = 0o600) -> str:
    path = folder / "key"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def signed(folder: Path, key: bytes | None) -> Path:
    """Checkpoint folder whose manifest is signed with a key."""
    write_manifest(read_manifest(write(folder)), folder, key)
    return folder


@pytest.mark.must("format: token file and key file")
def test_a_key_file_is_read(tmp_path: Path) -> None:
    assert read_key("") is None
    assert read_key(key_file(tmp_path, KEY.hex().upper() + "\n")) == KEY


@pytest.mark.parametrize(
    ("text", "mode", "what"),
    [
        (KEY.hex(), 0o640, "the key file has mode 640"),
        ("", 0o600, "the key file holds no key"),
        ("ab" * 31, 0o600, "the key file holds no key"),
        ("xy" * 32, 0o600, "the key file holds no key"),
    ],
)
def test_an_invalid_or_accessible_key_file_is_refused(text: str, mode: int, what: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=what) as caught:
        read_key(key_file(tmp_path, text, mode))
    assert not text or text not in str(caught.value)


def test_a_missing_key_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        read_key(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("written", "read", "what"),
    [
        (None, KEY, "it was written without the key"),
        (KEY, None, "it was written with a key"),
        (OTHER, KEY, "its bytes do not match the digest in its last line under this key"),
    ],
)
def test_a_manifest_with_another_key_is_refused(
    written: bytes | None, read: bytes | None, what: str, tmp_path: Path
) -> None:
    folder = signed(tmp_path / "step-00000003", written)
    assert read_manifest(folder, written).position.step == 3
    with pytest.raises(CheckpointError, match=what):
        read_manifest(folder, read)


def test_an_edited_signed_manifest_is_refused(tmp_path: Path) -> None:
    folder = signed(tmp_path / "step-00000003", KEY)
    raw = (folder / NAME).read_bytes()
    (folder / NAME).write_bytes(raw.replace(b'"world_size": 1', b'"world_size": 2'))
    with pytest.raises(CheckpointError, match="do not match"):
        read_manifest(folder, KEY)


def test_commands_accept_a_key_file(tmp_path: Path) -> None:
    folder, path = signed(tmp_path / "step-00000003", KEY), key_file(tmp_path)
    run = CliRunner().invoke
    for command in (["verify", str(folder)], ["ls", "--verify", str(tmp_path)], ["diff", str(folder), str(folder)]):
        with_key = run(app, ["checkpoint", *command, "--key-file", path])
        without = run(app, ["checkpoint", *command])
        assert "damaged" not in with_key.output
        assert with_key.exit_code == 0
        assert with_key.output != without.output
        assert without.exit_code != 0 or "unknown" in without.output
