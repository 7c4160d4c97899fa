"""Generated hostile files, given to every reader: an error of Weft, or valid contents, and limited memory."""

import copy
import json
import resource
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from weft.checkpoint.layouts import Layout, Parts
from weft.checkpoint.manifest import NAME, FileEntry, Manifest, Position, read_manifest, verify_folder, write_manifest
from weft.checkpoint.restore import Reader
from weft.checkpoint.weight_files import INDEX, check_weight_files
from weft.data.sealed import read_sealed
from weft.errors import WeftError
from weft.job import Job
from weft.precision.scaling import LossScale

FEW, MANY = 60, 500
"""Files per kind in `make test`, and in the sweep."""
MOST_BYTES = 2**28  # limit of memory added to this process by reading

ODD = st.sampled_from(
    [0, -1, 1, 2**31, 2**63, 10**30, 1e308, float("inf"), float("nan"), "", "\0", "../x", "a" * 300, "é"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | ODD | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
CHANGES = st.lists(
    st.tuples(st.integers(0, 10**6), VALUES, st.sampled_from(["put", "drop", "add"])), min_size=1, max_size=3
)


def locations(table: Any) -> Iterator[tuple[Any, Any]]:
    """Container and key of every value of nested tables."""
    keys = list(table) if isinstance(table, dict) else range(len(table)) if isinstance(table, list) else ()
    for key in keys:
        yield table, key
        yield from locations(table[key])


def change(table: dict[str, Any], changes: list[tuple[int, Any, str]]) -> dict[str, Any]:
    """Copy of nested tables with changed, removed or added values."""
    changed = copy.deepcopy(table)
    for index, value, how in changes:
        if not (found := list(locations(changed))):
            break
        holder, key = found[index % len(found)]
        if how == "drop":
            del holder[key]
        elif how == "add" and isinstance(holder, dict):
            holder[f"{key}x"] = value
        else:
            holder[key] = value
    return changed


def try_to_read(read: Callable[[], object]) -> None:
    """Read; a refusal (WeftError) is accepted, any other error fails the test."""
    with suppress(WeftError):
        read()


def good_checkpoint(folder: Path) -> dict[str, Any]:
    """Write a valid checkpoint; return its manifest as a table."""
    shard = folder / "shard-00000.safetensors"
    slices = {f"weights/b@{row},0": torch.full((1, 4), float(row)) for row in range(3)}
    save_file({"weights/a": torch.arange(12.0).view(3, 4), **slices}, shard)
    data = shard.read_bytes()
    parts = Parts(np.zeros(3, np.int64), np.array([(0, 0), (1, 0), (2, 0)]), np.array([(1, 4)] * 3))
    manifest = Manifest(
        position=Position(step=3, next_batch=3, loss_scale=LossScale()),
        world_size=1,
        job={"plan": {"parallel": {"tp": 1}}},
        versions={"torch": "2"},
        files={shard.name: FileEntry(bytes=len(data), blake3=blake3(data).hexdigest())},
        tensors={
            "weights/a": {"dtype": "F32", "shape": [3, 4], "file": 0},
            "weights/b": {"dtype": "F32", "shape": [3, 4], "layout": 0},
        },
        layouts=(Layout.of(parts),),
    )
    write_manifest(manifest, folder)
    table = json.loads((folder / NAME).read_bytes())
    del table["blake3"]
    return dict(table)


def sign(folder: Path, table: dict[str, Any]) -> None:
    """Write a manifest with a correct digest."""
    body = (json.dumps(table)[:-1] + ",\n").encode()
    (folder / NAME).write_bytes(body + f'"blake3": "{blake3(body).hexdigest()}"}}\n'.encode())


def read_all(folder: Path) -> None:
    manifest = verify_folder(folder)
    with Reader(folder, manifest) as reader:
        for name in manifest.tensors:
            reader.read(name)


def hostile_manifest(folder: Path, changes: list[tuple[int, Any, str]], noise: bytes) -> None:
    sign(folder, change(good_checkpoint(folder), changes))
    try_to_read(lambda: read_all(folder))


def hostile_old_manifest(folder: Path, changes: list[tuple[int, Any, str]], noise: bytes) -> None:
    """A changed manifest of version 2."""
    table = good_checkpoint(folder)
    del table["layouts"], table["tensors"]["weights/b"]
    part = {"file": "shard-00000.safetensors", "key": "weights/a", "offset": [0, 0], "shape": [3, 4]}
    table |= {"version": 2, "tensors": {"weights/a": {"dtype": "F32", "shape": [3, 4], "parts": [part]}}}
    sign(folder, table)
    read_all(folder)
    sign(folder, change(table, changes))
    try_to_read(lambda: read_all(folder))


def hostile_header(folder: Path, changes: list[tuple[int, Any, str]], noise: bytes) -> None:
    """A changed safetensors header, with a manifest that has its digest."""
    table, shard = good_checkpoint(folder), folder / "shard-00000.safetensors"
    data = shard.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.dumps(change(json.loads(data[8 : 8 + size]), changes)).encode()
    length = len(header) if len(noise) % 2 else int.from_bytes(noise[:8].ljust(8, b"\1"), "little")
    shard.write_bytes(length.to_bytes(8, "little") + header + data[8 + size :])
    data = shard.read_bytes()
    table["files"][shard.name] = {"bytes": len(data), "blake3": blake3(data).hexdigest()}
    sign(folder, table)
    try_to_read(lambda: read_all(folder))


def hostile_index(folder: Path, changes: list[tuple[int, Any, str]], noise: bytes) -> None:
    good = {"metadata": {"total_size": 48}, "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model-1.safetensors").touch()
    (folder / INDEX).write_text(json.dumps(change(good, changes)))
    try_to_read(lambda: check_weight_files(folder))


def hostile_job(folder: Path, changes: list[tuple[int, Any, str]], noise: bytes) -> None:
    path = folder / "job.toml"
    try:
        path.write_text(tomli_w.dumps(change(Job().model_dump(mode="json", exclude_none=True), changes)))
    except (
        TypeError,
        ValueError,
        AttributeError,
    ):  # not expressible in TOML, such as NUL or a value that is not a table
        path.write_bytes(noise)
    try_to_read(lambda: Job.load(path))


def noise_for_all(folder: Path, changes: list[tuple[int, Any, str]], noise: bytes) -> None:
    """Random bytes as every kind of file."""
    for name in (NAME, INDEX, "job.toml", "sealed.json"):
        (folder / name).write_bytes(noise)
    for read in (read_manifest, check_weight_files):
        with pytest.raises(WeftError):
            read(folder)
    try_to_read(lambda: Job.load(folder / "job.toml"))
    with pytest.raises(ValueError):  # noqa: PT011 - the only error of read_sealed
        read_sealed(folder / "sealed.json")


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(
            FEW,
            marks=pytest.mark.must(
                "fault: A manifest, shard header, weight index or job file was changed, with its digests made to fit"
            ),
        ),
        MANY,
    ],
)
@pytest.mark.parametrize(
    "attack", [hostile_manifest, hostile_old_manifest, hostile_header, hostile_index, hostile_job, noise_for_all]
)
def test_a_file_is_read_or_refused(attack: Callable[..., None], count: int) -> None:
    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(changes=CHANGES, noise=st.binary(max_size=200))
    def every_file(changes: list[tuple[int, Any, str]], noise: bytes) -> None:
        with TemporaryDirectory() as name:
            folder = Path(name) / "step-00000003"
            folder.mkdir()
            attack(folder, changes, noise)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    every_file()
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MOST_BYTES
