"""Slices of weights that each rank reads from the files of a Hugging Face folder."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.lab.families import FAMILIES, family
from tests.lab.jobs import write_job
from tests.lab.parity import plan_for
from tests.lab.plans import resolved
from tests.lab.pool import RankError, run_ranks
from tests.lab.runs import observe
from tests.lab.shrink import shrunk
from weft.anatomy.build import build_as, build_on_meta
from weft.checkpoint import loading, stored_slices
from weft.checkpoint.huggingface import gather_weights
from weft.checkpoint.loading import materialize
from weft.checkpoint.model_config import read_config
from weft.checkpoint.plain_model import build_plain, find_slices
from weft.checkpoint.stored_slices import RowSpan, SliceReader, StoredLayout
from weft.data import Prepared
from weft.job import Job, Model
from weft.parallel.parallelize import parallelize
from weft.parallel.weights import to_local
from weft.topology.mesh import build_mesh
from weft.training.session import open_session

WHOLE = {
    "youtu": "the library sets the row of padding of its embedding to zero when it loads it",
}
"""Families that rank 0 loads as a whole, and why."""


def save(folder: Path, table: dict[str, Any], **shards: Any) -> Model:
    """Folder of a model with random numbers in all its weights."""
    torch.manual_seed(0)
    plain = build_as("causal", read_config(Model(config=table)), torch.float32)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.uniform_(-1, 1)
    plain.save_pretrained(folder, **shards)
    return Model(path=str(folder))


def assert_slices(source: Model) -> None:
    """Whole weights, and a part of each, are those that the library loads; so are the buffers."""
    config = read_config(source)
    plain = build_plain(source, config, torch.float32)
    found = find_slices(source, config, torch.float32, "causal")
    assert found is not None
    made, layout = found
    with SliceReader(layout) as reader:
        for name, value in plain.state_dict().items():
            shape = tuple(value.shape)
            assert torch.equal(reader.read(name, shape, (0,) * len(shape), shape, value.dtype), value), name
            offset = [length // 3 for length in shape]
            size = [length - start - (length - start) // 3 for start, length in zip(offset, shape, strict=True)]
            part = value[tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))]
            assert torch.equal(reader.read(name, shape, offset, size, value.dtype), part), name
    for name, buffer in plain.named_buffers():
        assert name in layout.spans or torch.equal(made.get_buffer(name), buffer), name


@pytest.mark.parametrize("name", FAMILIES)
def test_slices_are_those_of_the_loaded_model(name: str, tmp_path: Path) -> None:
    assert_slices(save(tmp_path, family(name), max_shard_size="20KB"))


@pytest.mark.parametrize("name", [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in FAMILIES])
def test_slices_of_every_family_of_the_library(name: str, tmp_path: Path) -> None:
    try:
        source = save(tmp_path, shrunk(name))
        build_plain(source, read_config(source), torch.float32)
    except Exception as error:
        pytest.skip(f"the library builds no small model, or does not load it again: {type(error).__name__}")
    if name in WHOLE:
        assert find_slices(source, read_config(source), torch.float32, "causal") is None
    else:
        assert_slices(source)


def mapped_bytes(file: Path) -> int:
    """Pages of a file that count as memory of this process: lines Rss of its maps."""
    maps = Path("/proc/self/smaps").read_text().splitlines()
    return sum(int(maps[n + 4].split()[1]) << 10 for n, line in enumerate(maps) if line.endswith(str(file)))


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs the maps of the process")
def test_pages_of_rows_that_a_rank_has_read_are_given_back(tmp_path: Path) -> None:
    """Each rank of tp reads some columns of all rows, and so touches the pages of the others."""
    weights = {f"w{n}": torch.rand(512, 1024) for n in range(8)}
    file, one = tmp_path / "model.safetensors", weights["w0"].nbytes
    save_file(weights, file)
    spans = {name: [RowSpan(name, 0, 0, 512)] for name in weights}
    with (
        mock.patch.object(stored_slices, "MAX_MAPPED", one),
        SliceReader(StoredLayout(spans, dict.fromkeys(weights, str(file)))) as reader,
    ):
        for name, weight in weights.items():
            part = reader.read(name, (512, 1024), (0, 128), (512, 128), torch.float32)
            assert torch.equal(part, weight[:, 128:256])
            assert one / 2 < mapped_bytes(file) < 2.5 * one


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Numbers that this rank reads as slices, and models that it loads as a whole."""
    counts, read = {"read": 0, "whole": 0}, SliceReader.read

    def count(reader: SliceReader, *arguments: Any) -> torch.Tensor:
        value = read(reader, *arguments)
        counts["read"] += value.numel()
        return value

    with (
        mock.patch.object(stored_slices.SliceReader, "read", count),
        mock.patch.object(loading, "build_plain", wraps=build_plain) as whole,
    ):
        yield counts
    counts["whole"] = whole.call_count


def load_on_ranks(
    rank: int, world_size: int, source: Model, parallel: dict[str, Any], damage: str = ""
) -> tuple[dict[str, torch.Tensor], dict[str, int], int]:
    """Full weights (rank 0); counts of this rank; numbers that it holds."""
    plan = resolved(plan_for("fp32", **parallel), world_size)
    model = build_on_meta(read_config(source), torch.float32)
    parallelize(model, plan, build_mesh(plan, "cpu", world_size))
    broken = mock.patch.object(stored_slices, "_matrix", side_effect=OSError(damage))
    with broken if damage and rank == 1 else nullcontext(), counted() as counts:
        materialize(model, source, torch.device("cpu"))
    held = sum(to_local(parameter).numel() for parameter in model.parameters())
    return gather_weights(model), counts, held


@pytest.mark.must("each rank reads its slices of a folder")
@pytest.mark.parametrize(
    ("name", "ranks", "parallel"),
    [
        ("llama", 3, {"zero": 3}),
        ("qwen3", 2, {"pp": 2, "zero": 0}),  # a tied head on the last stage
        ("qwen3_moe", 4, {"ep": 2, "tp": 2}),
        ("gpt_oss", 4, {"ep": 2, "zero": 3}),
        ("deepseek_v3", 2, {"zero": 2}),
    ],
)
def test_each_rank_reads_what_it_holds(name: str, ranks: int, parallel: dict[str, Any], tmp_path: Path) -> None:
    source = save(tmp_path, family(name), max_shard_size="20KB")
    plain = build_plain(source, read_config(source), torch.float32)
    results = run_ranks(ranks, load_on_ranks, source, parallel)
    for key, value in plain.state_dict().items():
        assert torch.equal(results[0][0][key], value), key
    buffers = sum(buffer.numel() for buffer in plain.buffers())
    for _, counts, held in results:
        assert counts["whole"] == 0
        assert held <= counts["read"] <= held + buffers


def test_rows_of_packed_matrices_are_read_in_full(tmp_path: Path) -> None:
    source = save(tmp_path, family("phi3"))
    plain = build_plain(source, read_config(source), torch.float32)
    weights, counts, held = run_ranks(2, load_on_ranks, source, {"tp": 2})[0]
    assert counts["whole"] == 0
    assert held < counts["read"] < plain.num_parameters()
    for key, value in plain.state_dict().items():
        assert torch.equal(weights[key], value), key


def test_a_file_that_one_rank_cannot_read_is_an_error_on_every_rank(tmp_path: Path) -> None:
    source = save(tmp_path, family("llama"))
    with pytest.raises(RankError, match=r"CheckpointError.*cannot be read: no such page"):
        run_ranks(2, load_on_ranks, source, {"zero": 3}, "no such page")


@pytest.mark.parametrize("difference", [0, 1])
def test_a_folder_with_a_head_beside_a_tied_embedding(difference: int, tmp_path: Path) -> None:
    """Head that equals the embedding, and one of its own, which unties the two."""
    source = save(tmp_path, family("qwen3"))
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    head = weights["model.embed_tokens.weight"].clone()
    save_file({**weights, "lm_head.weight": head + difference}, file, {"format": "pt"})
    assert_slices(source)


@pytest.mark.parametrize("kind", ["none", "lora", "dora"])
def test_a_run_reads_slices_unless_its_adapters_need_the_weights(kind: str, tmp_path: Path) -> None:
    source = save(tmp_path / "model", {**family("llama"), "vocab_size": 300})
    tables: dict[str, Any] = {"adapter": {"kind": kind}} if kind != "none" else {}
    job = Job.load(write_job(tmp_path, train={"steps": 1, "evaluate_every": 0}, **tables))
    run = observe(Job.parse({**job.model_dump(exclude_none=True), "model": {"path": source.path}}), 2)
    prepared = Prepared.from_json((run.folder / "prepared.json").read_text())
    found = run_ranks(2, open_on_ranks, Job.load(run.folder / "job.toml"), prepared)
    assert [counts["whole"] for counts in found] == [kind == "dora", 0]
    assert all((counts["read"] > 0) == (kind != "dora") for counts in found)


def open_on_ranks(rank: int, world_size: int, job: Job, prepared: Prepared) -> dict[str, int]:
    """Counts while this rank opens its session."""
    with mock.patch("weft.training.session.connect", return_value=(rank, world_size, rank)), counted() as counts:
        open_session(job, prepared)
    return counts
