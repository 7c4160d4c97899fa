"""Refusal of corrupt checkpoints: flipped bits, missing and planted files, and forged manifests."""

import json
import os
import pickle
import random
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3

from tests.lab.checkpoints import tensors_of, train_and_save
from tests.lab.families import family
from tests.lab.parity import plan_for
from tests.lab.pool import run_ranks
from weft.checkpoint.folders import list_checkpoints
from weft.checkpoint.layouts import slice_key
from weft.checkpoint.manifest import NAME, file_name, read_manifest, verify_folder
from weft.checkpoint.restore import Reader, first_valid_checkpoint
from weft.errors import CheckpointError
from weft.job import Model

SOURCE = Model(config=family("llama"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with the checkpoints of steps 1 and 2, written by two ranks."""
    folder = tmp_path_factory.mktemp("run")
    for steps in ((0, 1), (0, 2)):
        run_ranks(2, train_and_save, SOURCE, plan_for("fp32", zero=3), folder, steps, None)
    return folder


@pytest.fixture
def newest(run: Path) -> Any:
    """Newest checkpoint, which a test may corrupt; restored afterwards."""
    folder = list_checkpoints(run)[0]
    saved = {path: path.read_bytes() for path in folder.iterdir()}
    yield folder
    shutil.rmtree(folder)
    folder.mkdir()
    for path, content in saved.items():
        path.write_bytes(content)


def choose_of(rank: int, world_size: int, run: Path) -> tuple[str, list[str]]:
    """Checkpoint chosen by --resume auto, and the messages about skipped ones."""
    messages: list[str] = []
    found = first_valid_checkpoint(list_checkpoints(run), messages.append)
    return (found[0].name if found else "", messages)


def flip_and_choose(rank: int, world_size: int, run: Path, count: int, seed: int) -> int:
    """Flip single bits of the newest checkpoint; return how often it was skipped in favor of the previous one."""
    rng, folder, skipped = random.Random(seed), list_checkpoints(run)[0], 0
    for _ in range(count):
        path = rng.choice(sorted(folder.iterdir()))
        offset, bit = rng.randrange(path.stat().st_size), 1 << rng.randrange(8)
        flip(path, offset, bit)
        chosen, messages = choose_of(rank, world_size, run)
        skipped += chosen == "step-00000001" and "step-00000002 is skipped" in messages[0]
        flip(path, offset, bit)
    assert choose_of(rank, world_size, run) == ("step-00000002", [])
    return skipped


def flip(path: Path, offset: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ bit]))


@pytest.mark.parametrize(
    "flips",
    [
        pytest.param(
            100,
            marks=pytest.mark.must("fault: A bit of a checkpoint flips; a file is missing, truncated or planted"),
        ),
        1000,
    ],
)
def test_every_flipped_bit_is_detected_and_the_previous_checkpoint_is_used(flips: int, run: Path) -> None:
    assert run_ranks(1, flip_and_choose, run, flips, 0, timeout=300) == [flips]


def resign(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest and update its digest."""
    fields = json.loads((folder / NAME).read_text())
    del fields["blake3"]
    change(fields)
    text = json.dumps(fields)[:-1] + ",\n"
    digest = blake3(text.encode()).hexdigest()
    (folder / NAME).write_text(text + f'"blake3": "{digest}"}}\n')


def test_a_manifest_with_an_updated_digest_is_read(newest: Path) -> None:
    """Without this, the tests below could pass for another reason."""
    resign(newest, lambda fields: None)
    verify_folder(newest)


def missing_shard(folder: Path) -> str:
    (folder / "shard-00001.safetensors").unlink()
    return "shard-00001.safetensors is missing"


def truncated_shard(folder: Path) -> str:
    os.truncate(folder / "shard-00000.safetensors", 1000)
    return "has 1000 bytes"


def truncated_manifest(folder: Path) -> str:
    os.truncate(folder / NAME, 500)
    return "do not match the digest"


def empty_manifest(folder: Path) -> str:
    os.truncate(folder / NAME, 0)
    return "do not match the digest"


def no_manifest(folder: Path) -> str:
    (folder / NAME).unlink()
    return "there is no checkpoint in"


class Payload:
    """Object that runs a command when it is unpickled."""

    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.canary}",)


def planted_pickle(folder: Path) -> str:
    (folder / ".metadata").write_bytes(pickle.dumps(Payload(folder.parent / "canary")))
    return ".metadata is not part of the checkpoint"


def pickle_instead_of_a_shard(folder: Path) -> str:
    """The manifest has the digest of the pickle."""
    shard = folder / "shard-00000.safetensors"
    content = pickle.dumps(Payload(folder.parent / "canary")).ljust(shard.stat().st_size, b"\0")
    shard.write_bytes(content)

    def agree(fields: dict[str, Any]) -> None:
        digest = blake3(content).hexdigest()
        fields["files"][shard.name] = {"bytes": len(content), "blake3": digest}

    resign(folder, agree)
    return "differs from the manifest"


def path_escape(folder: Path) -> str:
    outside = folder.parent / "outside.safetensors"
    shutil.copy(folder / "shard-00000.safetensors", outside)

    def escape(fields: dict[str, Any]) -> None:
        fields["files"]["../outside.safetensors"] = fields["files"].pop("shard-00000.safetensors")

    resign(folder, escape)
    return "'../outside.safetensors'"


def link_to_another_file(folder: Path) -> str:
    shard = folder / "shard-00000.safetensors"
    outside = folder.parent / "outside.safetensors"
    shard.rename(outside)
    shard.symlink_to(outside)
    return "shard-00000.safetensors is missing"


def huge_shape(folder: Path) -> str:
    """A shape of 2**60 elements wherever the manifest has the shape."""
    name = "weights/lm_head.weight"

    def grow(fields: dict[str, Any]) -> None:
        entry = fields["tensors"][name]
        entry["shape"] = [2**30, 2**30]
        fields["layouts"][entry["layout"]]["shapes"] = [[[2**30, 0, 1]], [[2**30, 0, 1]]]

    resign(folder, grow)
    return "bytes of files"


def huge_shape_in_the_header(folder: Path) -> str:
    """A shape of 2**60 elements in the manifest and in the safetensors header, with updated digests."""
    shard = folder / "shard-00000.safetensors"
    name = "weights/lm_head.weight"
    content = shard.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    key = next(key for key in header if key.startswith(name))
    header[key]["shape"] = [2**30, 2**30]
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + content[8 + length :]
    shard.write_bytes(content)

    def agree(fields: dict[str, Any]) -> None:
        digest = blake3(content).hexdigest()
        fields["files"][shard.name] = {"bytes": len(content), "blake3": digest}
        entry = fields["tensors"][name]
        entry["shape"] = [2**30, 2**30]
        entry |= {"layout": None, "file": 0}

    resign(folder, agree)
    return "bytes of files"


def overlapping_parts(folder: Path) -> str:
    """The right number of elements, but one half twice."""

    def overlap(fields: dict[str, Any]) -> None:
        layout = fields["layouts"][fields["tensors"]["weights/lm_head.weight"]["layout"]]
        layout["offsets"] = [[[first, 0, 2]] for ((first, *_), *_) in layout["offsets"]]

    resign(folder, overlap)
    return "overlap"


def negative_offset(folder: Path) -> str:
    def move(fields: dict[str, Any]) -> None:
        layout = fields["layouts"][fields["tensors"]["weights/lm_head.weight"]["layout"]]
        layout["offsets"][0] = [[8, -16, 2]]

    resign(folder, move)
    return "a run of 2 numbers from 8 by -16 is refused"


def endless_run(folder: Path) -> str:
    def extend(fields: dict[str, Any]) -> None:
        fields["layouts"][0]["files"] = [[0, 0, 2**40]]

    resign(folder, extend)
    return f"a run of {2**40} numbers from 0 by 0 is refused"


def two_places(folder: Path) -> str:
    def move(fields: dict[str, Any]) -> None:
        fields["tensors"]["weights/lm_head.weight"]["file"] = 0

    resign(folder, move)
    return "weights/lm_head.weight has file 0 and layout"


def unknown_layout(folder: Path) -> str:
    def move(fields: dict[str, Any]) -> None:
        fields["tensors"]["weights/lm_head.weight"]["layout"] = len(fields["layouts"])

    resign(folder, move)
    return "weights/lm_head.weight has file None and layout"


def deep_json(folder: Path) -> str:
    text = '{"a": ' + "[" * 200_000
    digest = blake3(text.encode()).hexdigest()
    (folder / NAME).write_text(text + f'"blake3": "{digest}"}}\n')
    return "the manifest is refused"


CORRUPTIONS = (
    missing_shard,
    truncated_shard,
    truncated_manifest,
    empty_manifest,
    no_manifest,
    planted_pickle,
    pickle_instead_of_a_shard,
    path_escape,
    link_to_another_file,
    huge_shape,
    huge_shape_in_the_header,
    overlapping_parts,
    negative_offset,
    endless_run,
    two_places,
    unknown_layout,
    deep_json,
)


def read_head(folder: Path) -> None:
    manifest = verify_folder(folder)
    with Reader(folder, manifest) as reader:  # digests match, so an error is in the contents of the manifest
        reader.read("weights/lm_head.weight")


@pytest.mark.parametrize("corrupt", CORRUPTIONS)
def test_a_corrupt_checkpoint_is_refused(corrupt: Callable[[Path], str], newest: Path) -> None:
    expected = corrupt(newest)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError) as refusal:
        read_head(newest)
    assert expected in str(refusal.value)
    assert not (newest.parent / "canary").exists()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18  # KiB: 256 MiB
    (newest.parent / "outside.safetensors").unlink(missing_ok=True)


def test_a_manifest_of_version_2_is_read(newest: Path) -> None:
    """It lists each slice of each tensor."""
    before = tensors_of(newest)

    def list_slices(fields: dict[str, Any]) -> None:
        manifest = read_manifest(newest)
        for name, entry in manifest.tensors.items():
            shape = list(entry.shape)
            fields["tensors"][name] = {"dtype": entry.dtype, "shape": shape, "parts": []}
            for file, start, size in zip(*map(np.ndarray.tolist, manifest.parts(name)), strict=True):
                part = {"file": file_name(file), "key": slice_key(name, start, size, shape)}
                fields["tensors"][name]["parts"].append({**part, "offset": start, "shape": size})
        fields["version"] = 2
        del fields["layouts"]

    resign(newest, list_slices)
    assert json.loads((newest / NAME).read_text())["version"] == 2
    after = tensors_of(newest)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_auto_takes_the_newest_intact_checkpoint(newest: Path) -> None:
    missing_shard(newest)
    chosen, messages = run_ranks(2, choose_of, newest.parent)[1]
    assert chosen == "step-00000001"
    assert messages == ["step-00000002 is skipped: shard-00001.safetensors is missing"]


@pytest.mark.must("format: checkpoint, manifest.json and shards")
def test_shards_are_readable_by_safetensors(run: Path) -> None:
    """Each shard is an ordinary safetensors file."""
    from safetensors.torch import load_file

    folder = list_checkpoints(run)[0]
    found = {name for path in folder.glob("*.safetensors") for name in load_file(path)}
    with Reader(folder, manifest := read_manifest(folder)) as reader:
        parts = {
            slice_key(name, start, size, entry.shape)
            for name, entry in manifest.tensors.items()
            for start, size in zip(*reader.parts(name)[1:], strict=True)
        }
    assert found == parts
    assert len(tensors_of(folder)) > 50
