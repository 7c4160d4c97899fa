"""Folders of torch.distributed.checkpoint: real ones arrive bit by bit, and what is planted in them is not executed."""

import io
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from tests.lab.checkpoints import keep, tensors_of
from tests.lab.families import family
from tests.lab.parity import packed_batches, plan_for
from tests.lab.pool import run_ranks
from weft.checkpoint import dcp
from weft.checkpoint.convert import to_checkpoint, to_huggingface
from weft.checkpoint.folders import folder_of
from weft.checkpoint.huggingface import build_plain
from weft.checkpoint.manifest import read_manifest
from weft.checkpoint.model_config import read_config
from weft.checkpoint.pickled import Refused, read_pickle
from weft.checkpoint.shard_file import FORMATS
from weft.errors import CheckpointError
from weft.job import Job, Model
from weft.plan import Plan, Precision

UNEVEN = {"vocab_size": 97, "tie_word_embeddings": True}  # two ranks hold 49 and 48 rows


def save_tensors(folder: Path, **tensors: Any) -> None:
    torch_dcp.save(tensors, checkpoint_id=folder, no_dist=True)


def test_every_format_and_layout_of_memory(tmp_path: Path) -> None:
    torch.manual_seed(1)
    bits = torch.randint(0, 256, (4096,), dtype=torch.uint8)
    tensors = {str(format): bits.view(format)[:24].view(4, 6) for format in FORMATS if format != torch.bool}
    tensors |= {
        "bool": bits[:8] > 100,
        "transposed": torch.randn(5, 3).t(),
        "a part": torch.randn(10, 10)[2:5, 1:9:3],
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3.5),
        "every.dot": torch.randn(2, 3, 4, 5).permute(3, 1, 0, 2),
    }
    save_tensors(tmp_path / "dcp", **tensors)
    folder = dcp.Folder(tmp_path / "dcp")
    assert folder.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        found = folder.read(name)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
        raw = [value.contiguous().reshape(-1).view(torch.uint8).tolist() for value in (found, tensor)]
        assert raw[0] == raw[1], name


def save_trained(rank: int, world_size: int, source: Model, folder: Path, steps: int) -> dict[str, torch.Tensor]:
    """Train plain Transformers under FSDP2 and save as its users do; whole weights and moments, by another way."""
    model: Any = build_plain(source, read_config(source), torch.float32)
    mesh = init_device_mesh("cpu", (world_size,))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in packed_batches(97)[:steps]:
        model(input_ids=batch.input_ids.long()).logits.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, state = get_state_dict(model, optimizer)
    torch_dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    whole = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank:
        return {}
    found = {f"weights/{name}": value for name, value in whole[0].items() if name != "lm_head.weight"}
    for name, kinds in whole[1]["state"].items():
        found |= {f"{kind}/{name}": value for kind, value in kinds.items()}
    return found


def test_fsdp2_arrives_with_its_optimizer(tmp_path: Path) -> None:
    source = Model(config={**family("llama"), **UNEVEN}, init_seed=3)
    expected = run_ranks(2, save_trained, source, tmp_path / "dcp", 2)[0]
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == 2
    job = Job(model=source)
    found = tensors_of(to_checkpoint(tmp_path / "dcp", tmp_path / "step-00000002", job=job))
    buffers = {f"buffers/{name}" for name, _ in build_plain(source, read_config(source), torch.float32).named_buffers()}
    assert found.keys() == expected.keys() | buffers
    assert "exp_avg_sq/model.embed_tokens.weight" in found
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    manifest = read_manifest(tmp_path / "step-00000002")
    assert (manifest.position.step, manifest.position.next_batch, manifest.world_size) == (2, 0, 1)

    run_ranks(2, keep, source, plan_for("fp32", zero=3), tmp_path / "run", (2, 2), tmp_path / "step-00000002")
    again = tensors_of(folder_of(tmp_path / "run", 2))  # what training takes up, and writes
    assert again.keys() == found.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in found.items())

    plain: Any = AutoModelForCausalLM.from_pretrained(to_huggingface(tmp_path / "dcp", tmp_path / "hf", job=job))
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, expected.get(f"weights/{name}", expected["weights/model.embed_tokens.weight"])), name
    assert not list(tmp_path.glob(".*"))


def test_bare_weights_in_another_format(tmp_path: Path) -> None:
    source = Model(config=family("qwen3_moe"))
    model = build_plain(source, read_config(source), torch.bfloat16)
    torch_dcp.save(model.state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    job = Job(model=source, plan=Plan(precision=Precision(update="fp32")))
    found = tensors_of(to_checkpoint(tmp_path / "dcp", tmp_path / "fp32", job=job))
    for name, weight in model.named_parameters():
        assert torch.equal(found[f"weights/{name}"], weight.float()), name
    plain = AutoModelForCausalLM.from_pretrained(
        to_huggingface(tmp_path / "dcp", tmp_path / "hf", job=job), dtype="auto"
    )
    for name, weight in plain.named_parameters():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, model.get_parameter(name)), name


def strange(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "teacher.weight": torch.ones(2)}


def an_object(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "epoch": 3}


def one_missing(state: dict[str, Any]) -> dict[str, Any]:
    return {"model": {name: value for name, value in state["model"].items() if name != "model.norm.weight"}}


def another_shape(state: dict[str, Any]) -> dict[str, Any]:
    return {"model": {**state["model"], "model.norm.weight": torch.ones(31)}}


def another_head(state: dict[str, Any]) -> dict[str, Any]:
    return {"model": {**state["model"], "lm_head.weight": state["model"]["lm_head.weight"] + 1}}


def numbered(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "optimizer": {"state": {"0": {"exp_avg": torch.ones(2)}}}}


def half_an_optimizer(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "optimizer": {"state": {"model.norm.weight": {"exp_avg": torch.ones(32)}}}}


def momentum(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "optimizer": {"state": {"model.norm.weight": {"momentum_buffer": torch.ones(32)}}}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (strange, "1 entries have no place in a model and its optimizer: teacher.weight"),
        (an_object, "epoch"),
        (one_missing, "weights/model.norm.weight is missing"),
        (another_shape, "weights/model.norm.weight has the shape (31,)"),
        (another_head, "model.lm_head.weight and model.model.embed_tokens.weight differ"),
        (numbered, "optimizer.state.0.exp_avg"),
        (half_an_optimizer, "of model.norm.weight is missing"),
        (momentum, "optimizer.state.model.norm.weight.momentum_buffer"),
    ],
)
def test_what_is_not_of_the_model_is_named(
    change: Callable[[dict[str, Any]], dict[str, Any]], words: str, tmp_path: Path
) -> None:
    source = Model(config={**family("llama"), **UNEVEN})
    model = build_plain(source, read_config(source), torch.float32)
    save_tensors(tmp_path / "dcp", **change({"model": dict(model.state_dict())}))
    with pytest.raises(CheckpointError) as caught:
        to_checkpoint(tmp_path / "dcp", tmp_path / "to", job=Job(model=source))
    assert words in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["dcp"]


def test_a_dcp_folder_needs_a_job(tmp_path: Path) -> None:
    save_tensors(tmp_path / "dcp", x=torch.ones(2))
    for convert in (to_checkpoint, to_huggingface):
        with pytest.raises(CheckpointError, match="does not say which model"):
            convert(tmp_path / "dcp", tmp_path / "to")


# Damage


def edit(folder: Path, change: Callable[[Metadata], Any]) -> None:
    """Let metadata be what a function makes of it; pickled, as its writer does."""
    file = folder / dcp.METADATA
    metadata = pickle.loads(file.read_bytes())
    file.write_bytes(pickle.dumps(change(metadata) or metadata))


def chunk_of(metadata: Metadata) -> Any:
    return metadata.state_dict_metadata["x"].chunks[0]


def move(metadata: Metadata, **changes: Any) -> None:
    """Change where the tensor lies."""
    for index, place in metadata.storage_data.items():
        metadata.storage_data[index] = replace(place, **changes)


def grow(metadata: Metadata, *shape: int) -> None:
    """Let the tensor be larger than its file."""
    metadata.state_dict_metadata["x"].size = chunk_of(metadata).sizes = torch.Size(shape)


def overlap(metadata: Metadata) -> None:
    entry = metadata.state_dict_metadata["x"]
    half = type(entry.chunks[0])(offsets=torch.Size([0, 0]), sizes=torch.Size([2, 6]))
    entry.chunks = [half, half]


def elsewhere(metadata: Metadata) -> None:
    chunk_of(metadata).offsets = torch.Size([1, 0])
    metadata.storage_data[MetadataIndex("x", torch.Size([1, 0]))] = next(iter(metadata.storage_data.values()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: move(m, relative_path="../secret.distcp"), "a file named '../secret.distcp'"),
        (lambda m: move(m, relative_path="/etc/passwd"), "a file named '/etc/passwd'"),
        (lambda m: move(m, relative_path="__0_1.distcp"), "__0_1.distcp is missing"),
        (lambda m: move(m, relative_path="__9_9.distcp"), "__9_9.distcp is missing"),  # a symbolic link
        (lambda m: move(m, offset=10**9), "ends before byte"),
        (lambda m: move(m, offset=-5), "ends before byte"),
        (lambda m: move(m, length=10**18), "ends before byte"),
        (lambda m: move(m, transform_descriptors=["zstd"]), "transformed"),
        (lambda m: move(m, length="1"), "not a file and two numbers"),
        (lambda m: grow(m, 2**20, 2**20), "too few for a chunk of x"),
        (lambda m: grow(m, 2**62, 2**62), "too few for a chunk of x"),
        (lambda m: grow(m, 2**70), "stands where a size should"),
        (lambda m: grow(m, -4, 6), "stands where a size should"),
        (overlap, "overlap"),
        (elsewhere, "do not make up a tensor of shape"),
        (lambda m: m.state_dict_metadata["x"].chunks.clear(), "do not make up a tensor of shape"),
        (lambda m: m.storage_data.clear(), "there is no"),
        (lambda m: [m], "list stands where"),
        (lambda m: setattr(m, "state_dict_metadata", {"x": 7}), "int stands where"),
        (lambda m: setattr(m, "state_dict_metadata", {7: m.state_dict_metadata["x"]}), "a name that is no text"),
        (lambda m: setattr(m.state_dict_metadata["x"], "properties", ()), "tuple stands where"),
    ],
)
def test_metadata_that_lies_is_refused(change: Callable[[Metadata], Any], words: str, tmp_path: Path) -> None:
    folder = tmp_path / "dcp"
    save_tensors(folder, x=torch.randn(4, 6))
    (tmp_path / "secret.distcp").write_bytes((folder / "__0_0.distcp").read_bytes())
    (folder / "__9_9.distcp").symlink_to(tmp_path / "secret.distcp")
    dcp.Folder(folder)
    edit(folder, change)
    with pytest.raises(CheckpointError) as caught:
        dcp.Folder(folder)
    assert words in str(caught.value)


def test_a_tensor_that_is_not_what_metadata_says(tmp_path: Path) -> None:
    folder = tmp_path / "dcp"
    save_tensors(folder, x=torch.randn(4, 6))
    edit(folder, lambda metadata: grow(metadata, 6, 4))
    with pytest.raises(CheckpointError, match="of shape"):
        dcp.Folder(folder).read("x")


def test_a_view_and_numbers_that_are_missing() -> None:
    """torch.save keeps the whole storage of a view."""
    saved, x = io.BytesIO(), torch.arange(24.0).view(4, 6)
    torch.save(x[1:, ::2], saved)
    assert torch.equal(dcp.read_tensor(saved.getvalue(), torch.float32, (3, 3)), x[1:, ::2])
    cut = io.BytesIO()
    with zipfile.ZipFile(saved) as before, zipfile.ZipFile(cut, "w") as after:
        for entry in before.infolist():
            raw = before.read(entry)
            after.writestr(entry.filename, raw[:-8] if entry.filename.endswith("data/0") else raw)
    with pytest.raises(Refused, match="it has 22 numbers, number 22 is wanted"):
        dcp.read_tensor(cut.getvalue(), torch.float32, (3, 3))


def test_every_cut_and_every_flipped_byte_is_an_error_or_harmless(tmp_path: Path) -> None:
    """Whatever happens to the bytes: an error of ours, or the tensor as it was saved."""
    folder, x = tmp_path / "dcp", torch.randn(4, 6)
    save_tensors(folder, x=x)
    refused = 0
    for name in (dcp.METADATA, "__0_0.distcp"):
        raw = (folder / name).read_bytes()
        for place in range(0, len(raw), 3):
            flipped = bytearray(raw)
            flipped[place] ^= 0xFF
            for damaged in (bytes(flipped), raw[:place]):
                (folder / name).write_bytes(damaged)
                try:
                    opened = dcp.Folder(folder)
                    found = [opened.read(key) for key in opened.tensors if key == "x"]
                except CheckpointError:
                    refused += 1
                else:
                    assert all(torch.equal(value, x) for value in found), (name, place)
        (folder / name).write_bytes(raw)
    assert refused > 500


# What is planted


class Touch:
    """An object whose pickle creates a file where it is loaded."""

    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.canary}",)


def planted(canary: Path) -> dict[str, bytes]:
    """Programs that a naive reader runs."""
    command = f"touch {canary}".encode()
    text = b"\x8c" + bytes([len(command)]) + command
    code = b"__import__('os').system('" + command + b"')"
    name = os.system.__module__.encode()
    return {
        "reduce": pickle.dumps(Touch(canary)),
        "in metadata": pickle.dumps(Metadata({"x": Touch(canary)})),  # type: ignore[dict-item]
        "old protocol": pickle.dumps(Touch(canary), protocol=0),
        "inst": b"(S'touch " + os.fsencode(canary) + b"'\ni" + name + b"\nsystem\n.",
        "obj": b"\x80\x02(c" + name + b"\nsystem\n" + text + b"o.",
        "getattr": b"\x80\x04cbuiltins\ngetattr\ncbuiltins\n__import__\n\x8c\x02os\x85R\x8c\x06system\x86R"
        + text
        + b"\x85R.",
        "two texts": b"\x80\x04\x8c\x02os\x8c\x06system\x93" + text + b"\x85R.",
        "eval": b"\x80\x04cbuiltins\neval\nX" + len(code).to_bytes(4, "little") + code + b"\x85R.",
    }


@pytest.mark.parametrize(
    "kind", ["reduce", "in metadata", "old protocol", "inst", "obj", "getattr", "two texts", "eval"]
)
def test_a_planted_program_is_not_run(kind: str, tmp_path: Path) -> None:
    canary, folder = tmp_path / "canary", tmp_path / "dcp"
    program = planted(canary)[kind]
    pickle.loads(program)
    assert canary.exists()  # the program is one
    canary.unlink()
    save_tensors(folder, x=torch.ones(2))
    (folder / dcp.METADATA).write_bytes(program)
    with pytest.raises(CheckpointError, match="is refused"):
        dcp.Folder(folder)
    assert not canary.exists()


@pytest.mark.parametrize("kind", ["reduce", "getattr"])
def test_a_program_beside_the_numbers_is_not_run(kind: str, tmp_path: Path) -> None:
    canary, folder = tmp_path / "canary", tmp_path / "dcp"
    save_tensors(folder, x=torch.ones(2, 3))
    file, rebuilt = folder / "__0_0.distcp", io.BytesIO()
    with zipfile.ZipFile(file) as before, zipfile.ZipFile(rebuilt, "w") as after:
        for entry in before.infolist():
            program = entry.filename.endswith("data.pkl")
            after.writestr(entry.filename, planted(canary)[kind] if program else before.read(entry))
    file.write_bytes(rebuilt.getvalue())
    edit(folder, lambda metadata: move(metadata, length=len(rebuilt.getvalue())))
    with pytest.raises(CheckpointError, match="it names"):
        dcp.Folder(folder).read("x")
    assert not canary.exists()


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (b"", "has no end|is damaged"),
        (b"\x80\x04.", "is damaged"),
        (b"\x80\x04]]e.", "is damaged"),
        (b"\x80\x04Nh\x07.", "is damaged"),
        (b"\x80\x04K\x01K\x02\x85R.", "calls what is no name"),
        (b"\x80\x04K\x01}b.", "state of what is no object"),
        (b"\x80\x04}" + b")" + b"\x85" * 100_000 + b"Ns.", "a key of it"),
        (b"\x80\x04\x82\x01.", "instruction EXT1"),
        (b"\x80\x04\x96" + (2**40).to_bytes(8, "little") + b".", "is damaged|instruction"),
    ],
)
def test_a_damaged_pickle(program: bytes, words: str) -> None:
    with pytest.raises(Refused, match=words):
        read_pickle(program, dcp.METADATA_NAMES)


def test_nothing_allowed_is_more_than_a_name() -> None:
    """The machine makes nothing of what it is told to make."""
    made = read_pickle(pickle.dumps(torch.Size([2, 3])), dcp.METADATA_NAMES)
    assert (made.name, made.arguments) == ("torch.Size", ((2, 3),))
    assert not {
        name for name in dcp.METADATA_NAMES | dcp.TENSOR_NAMES if name.split(".")[0] in ("os", "builtins", "sys")
    }


def test_a_folder_without_metadata(tmp_path: Path) -> None:
    save_tensors(tmp_path / "dcp", x=torch.ones(2))
    (tmp_path / "dcp" / dcp.METADATA).unlink()
    with pytest.raises(CheckpointError, match="nothing to convert"):
        to_checkpoint(tmp_path / "dcp", tmp_path / "to")
    shutil.rmtree(tmp_path / "dcp")
    with pytest.raises(CheckpointError, match="there is no folder"):
        to_checkpoint(tmp_path / "dcp", tmp_path / "to")
