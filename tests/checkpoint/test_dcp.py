"""Reader of torch.distributed.checkpoint folders: bitwise equal tensors, and no execution of malicious pickles."""

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

from tests.lab.checkpoints import tensors_of, train_and_save
from tests.lab.families import family
from tests.lab.parity import packed_batches, plan_for
from tests.lab.pool import run_ranks
from weft.checkpoint import dcp
from weft.checkpoint.convert import to_checkpoint, to_huggingface
from weft.checkpoint.folders import folder_of
from weft.checkpoint.manifest import read_manifest
from weft.checkpoint.model_config import read_config
from weft.checkpoint.pickled import RejectedError, read_pickle
from weft.checkpoint.plain_model import build_plain
from weft.checkpoint.shard_file import SAFETENSORS_DTYPES
from weft.errors import CheckpointError
from weft.job import Job, Model
from weft.plan import Plan, Precision

UNEVEN = {"vocab_size": 97, "tie_word_embeddings": True}  # two ranks hold 49 and 48 rows


def save_tensors(folder: Path, **tensors: Any) -> None:
    torch_dcp.save(tensors, checkpoint_id=folder, no_dist=True)


@pytest.mark.must("format: DCP folder, read")
def test_every_dtype_and_memory_layout_is_read(tmp_path: Path) -> None:
    torch.manual_seed(1)
    bits = torch.randint(0, 256, (4096,), dtype=torch.uint8)
    tensors = {str(format): bits.view(format)[:24].view(4, 6) for format in SAFETENSORS_DTYPES if format != torch.bool}
    tensors |= {
        "bool": bits[:8] > 100,
        "transposed": torch.randn(5, 3).t(),
        "a part": torch.randn(10, 10)[2:5, 1:9:3],
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3.5),
        "every.dot": torch.randn(2, 3, 4, 5).permute(3, 1, 0, 2),
    }
    save_tensors(tmp_path / "dcp", **tensors)
    folder = dcp.DcpFolder(tmp_path / "dcp")
    assert folder.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        found = folder.read(name)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
        raw = [value.contiguous().reshape(-1).view(torch.uint8).tolist() for value in (found, tensor)]
        assert raw[0] == raw[1], name


def save_trained(rank: int, world_size: int, source: Model, folder: Path, steps: int) -> dict[str, torch.Tensor]:
    """Train plain Transformers under FSDP2 and save with DCP; returns full weights and moments gathered independently."""
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


def test_fsdp2_weights_and_optimizer_state_are_converted(tmp_path: Path) -> None:
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

    run_ranks(2, train_and_save, source, plan_for("fp32", zero=3), tmp_path / "run", (2, 2), tmp_path / "step-00000002")
    again = tensors_of(folder_of(tmp_path / "run", 2))  # loaded by training, and saved again
    assert again.keys() == found.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in found.items())

    plain: Any = AutoModelForCausalLM.from_pretrained(to_huggingface(tmp_path / "dcp", tmp_path / "hf", job=job))
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, expected.get(f"weights/{name}", expected["weights/model.embed_tokens.weight"])), name
    assert not list(tmp_path.glob(".*"))


def test_weights_without_optimizer_are_converted_to_another_dtype(tmp_path: Path) -> None:
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


def add_tensor(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "teacher.weight": torch.ones(2)}


def add_object(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "epoch": 3}


def remove_weight(state: dict[str, Any]) -> dict[str, Any]:
    return {"model": {name: value for name, value in state["model"].items() if name != "model.norm.weight"}}


def change_shape(state: dict[str, Any]) -> dict[str, Any]:
    return {"model": {**state["model"], "model.norm.weight": torch.ones(31)}}


def untie_head(state: dict[str, Any]) -> dict[str, Any]:
    return {"model": {**state["model"], "lm_head.weight": state["model"]["lm_head.weight"] + 1}}


def number_states(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "optimizer": {"state": {"0": {"exp_avg": torch.ones(2)}}}}


def drop_states(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "optimizer": {"state": {"model.norm.weight": {"exp_avg": torch.ones(32)}}}}


def save_sgd_momentum(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "optimizer": {"state": {"model.norm.weight": {"momentum_buffer": torch.ones(32)}}}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (add_tensor, "1 entries belong neither to the model nor to its optimizer: teacher.weight"),
        (add_object, "epoch"),
        (remove_weight, "weights/model.norm.weight is missing"),
        (change_shape, "weights/model.norm.weight has the shape (31,)"),
        (untie_head, "model.lm_head.weight and model.model.embed_tokens.weight differ"),
        (number_states, "optimizer.state.0.exp_avg"),
        (drop_states, "of model.norm.weight is missing"),
        (save_sgd_momentum, "optimizer.state.model.norm.weight.momentum_buffer"),
    ],
)
def test_an_entry_that_does_not_match_the_model_is_refused_by_name(
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
        with pytest.raises(CheckpointError, match="does not name its model"):
            convert(tmp_path / "dcp", tmp_path / "to")


# Damage


def edit(folder: Path, change: Callable[[Metadata], Any]) -> None:
    """Replace the pickled metadata by the result of a function, or by the object it modified."""
    file = folder / dcp.METADATA
    metadata = pickle.loads(file.read_bytes())
    file.write_bytes(pickle.dumps(change(metadata) or metadata))


def chunk_of(metadata: Metadata) -> Any:
    return metadata.state_dict_metadata["x"].chunks[0]


def move(metadata: Metadata, **changes: Any) -> None:
    """Change the storage location of the tensor."""
    for index, location in metadata.storage_data.items():
        metadata.storage_data[index] = replace(location, **changes)


def grow(metadata: Metadata, *shape: int) -> None:
    """Change the shape of the tensor in the metadata."""
    metadata.state_dict_metadata["x"].size = chunk_of(metadata).sizes = torch.Size(shape)


def overlap(metadata: Metadata) -> None:
    entry = metadata.state_dict_metadata["x"]
    half = type(entry.chunks[0])(offsets=torch.Size([0, 0]), sizes=torch.Size([2, 6]))
    entry.chunks = [half, half]


def shift_chunk(metadata: Metadata) -> None:
    chunk_of(metadata).offsets = torch.Size([1, 0])
    metadata.storage_data[MetadataIndex("x", torch.Size([1, 0]))] = next(iter(metadata.storage_data.values()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: move(m, relative_path="../secret.distcp"), "'../secret.distcp' is no valid file name"),
        (lambda m: move(m, relative_path="/etc/passwd"), "'/etc/passwd' is no valid file name"),
        (lambda m: move(m, relative_path="__0_1.distcp"), "__0_1.distcp is missing"),
        (lambda m: move(m, relative_path="__9_9.distcp"), "__9_9.distcp is missing"),  # a symbolic link
        (lambda m: move(m, offset=10**9), "ends before byte"),
        (lambda m: move(m, offset=-5), "ends before byte"),
        (lambda m: move(m, length=10**18), "ends before byte"),
        (lambda m: move(m, transform_descriptors=["zstd"]), "transformed"),
        (lambda m: move(m, length="1"), "not a file name and two integers"),
        (lambda m: grow(m, 2**20, 2**20), "too few for a chunk of x"),
        (lambda m: grow(m, 2**62, 2**62), "too few for a chunk of x"),
        (lambda m: grow(m, 2**70), "expected a tuple of sizes"),
        (lambda m: grow(m, -4, 6), "expected a tuple of sizes"),
        (overlap, "overlap"),
        (shift_chunk, "do not make up a tensor of shape"),
        (lambda m: m.state_dict_metadata["x"].chunks.clear(), "do not make up a tensor of shape"),
        (lambda m: m.storage_data.clear(), "is missing"),
        (lambda m: [m], "found list, expected"),
        (lambda m: setattr(m, "state_dict_metadata", {"x": 7}), "found int, expected"),
        (lambda m: setattr(m, "state_dict_metadata", {7: m.state_dict_metadata["x"]}), "a name is not a string"),
        (lambda m: setattr(m.state_dict_metadata["x"], "properties", ()), "found tuple, expected"),
    ],
)
def test_inconsistent_metadata_is_refused(change: Callable[[Metadata], Any], words: str, tmp_path: Path) -> None:
    folder = tmp_path / "dcp"
    save_tensors(folder, x=torch.randn(4, 6))
    (tmp_path / "secret.distcp").write_bytes((folder / "__0_0.distcp").read_bytes())
    (folder / "__9_9.distcp").symlink_to(tmp_path / "secret.distcp")
    dcp.DcpFolder(folder)
    edit(folder, change)
    with pytest.raises(CheckpointError) as caught:
        dcp.DcpFolder(folder)
    assert words in str(caught.value)


def test_a_tensor_that_differs_from_the_metadata_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "dcp"
    save_tensors(folder, x=torch.randn(4, 6))
    edit(folder, lambda metadata: grow(metadata, 6, 4))
    with pytest.raises(CheckpointError, match="of shape"):
        dcp.DcpFolder(folder).read("x")


def test_a_view_is_read_and_a_truncated_storage_is_refused() -> None:
    """torch.save saves the full storage of a view."""
    saved, x = io.BytesIO(), torch.arange(24.0).view(4, 6)
    torch.save(x[1:, ::2], saved)
    assert torch.equal(dcp.read_tensor(saved.getvalue(), torch.float32, (3, 3)), x[1:, ::2])
    cut = io.BytesIO()
    with zipfile.ZipFile(saved) as before, zipfile.ZipFile(cut, "w") as after:
        for entry in before.infolist():
            raw = before.read(entry)
            after.writestr(entry.filename, raw[:-8] if entry.filename.endswith("data/0") else raw)
    with pytest.raises(RejectedError, match="its storage has 22 elements, but its strides reach index 22"):
        dcp.read_tensor(cut.getvalue(), torch.float32, (3, 3))


def test_truncation_and_flipped_bytes_are_an_error_or_harmless(tmp_path: Path) -> None:
    """For any damage, the result is a CheckpointError or the tensor as it was saved."""
    folder, x = tmp_path / "dcp", torch.randn(4, 6)
    save_tensors(folder, x=x)
    refused = 0
    for name in (dcp.METADATA, "__0_0.distcp"):
        raw = (folder / name).read_bytes()
        for offset in range(0, len(raw), 3):
            flipped = bytearray(raw)
            flipped[offset] ^= 0xFF
            for damaged in (bytes(flipped), raw[:offset]):
                (folder / name).write_bytes(damaged)
                try:
                    opened = dcp.DcpFolder(folder)
                    found = [opened.read(key) for key in opened.tensors if key == "x"]
                except CheckpointError:
                    refused += 1
                else:
                    assert all(torch.equal(value, x) for value in found), (name, offset)
        (folder / name).write_bytes(raw)
    assert refused > 500


# Malicious pickles


class Touch:
    """Object whose pickle creates a file when it is loaded."""

    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.canary}",)


def malicious_pickles(canary: Path) -> dict[str, bytes]:
    """Malicious pickles that pickle.load would execute."""
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
def test_a_malicious_metadata_pickle_is_not_executed(kind: str, tmp_path: Path) -> None:
    canary, folder = tmp_path / "canary", tmp_path / "dcp"
    program = malicious_pickles(canary)[kind]
    pickle.loads(program)
    assert canary.exists()  # the pickle does execute with pickle.load
    canary.unlink()
    save_tensors(folder, x=torch.ones(2))
    (folder / dcp.METADATA).write_bytes(program)
    with pytest.raises(CheckpointError, match="is refused"):
        dcp.DcpFolder(folder)
    assert not canary.exists()


@pytest.mark.parametrize("kind", ["reduce", "getattr"])
def test_a_malicious_tensor_pickle_is_not_executed(kind: str, tmp_path: Path) -> None:
    canary, folder = tmp_path / "canary", tmp_path / "dcp"
    save_tensors(folder, x=torch.ones(2, 3))
    file, rebuilt = folder / "__0_0.distcp", io.BytesIO()
    with zipfile.ZipFile(file) as before, zipfile.ZipFile(rebuilt, "w") as after:
        for entry in before.infolist():
            program = entry.filename.endswith("data.pkl")
            after.writestr(entry.filename, malicious_pickles(canary)[kind] if program else before.read(entry))
    file.write_bytes(rebuilt.getvalue())
    edit(folder, lambda metadata: move(metadata, length=len(rebuilt.getvalue())))
    with pytest.raises(CheckpointError, match="its pickle names"):
        dcp.DcpFolder(folder).read("x")
    assert not canary.exists()


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (b"", "has no end|is damaged"),
        (b"\x80\x04.", "is damaged"),
        (b"\x80\x04]]e.", "is damaged"),
        (b"\x80\x04Nh\x07.", "is damaged"),
        (b"\x80\x04K\x01K\x02\x85R.", "calls a value that is not a class or function"),
        (b"\x80\x04K\x01}b.", "state of a value that is not an object"),
        (b"\x80\x04}" + b")" + b"\x85" * 100_000 + b"Ns.", "has a key that is not"),
        (b"\x80\x04\x82\x01.", "instruction EXT1"),
        (b"\x80\x04\x96" + (2**40).to_bytes(8, "little") + b".", "is damaged|instruction"),
    ],
)
def test_a_damaged_pickle_is_refused(program: bytes, words: str) -> None:
    with pytest.raises(RejectedError, match=words):
        read_pickle(program, dcp.METADATA_NAMES)


def test_allowed_objects_become_stubs() -> None:
    """The reader creates a stub instead of the object."""
    stub = read_pickle(pickle.dumps(torch.Size([2, 3])), dcp.METADATA_NAMES)
    assert (stub.name, stub.arguments) == ("torch.Size", ((2, 3),))
    assert not {
        name for name in dcp.METADATA_NAMES | dcp.TENSOR_NAMES if name.split(".")[0] in ("os", "builtins", "sys")
    }


def test_a_folder_without_metadata_is_refused(tmp_path: Path) -> None:
    save_tensors(tmp_path / "dcp", x=torch.ones(2))
    (tmp_path / "dcp" / dcp.METADATA).unlink()
    with pytest.raises(CheckpointError, match="nothing to convert"):
        to_checkpoint(tmp_path / "dcp", tmp_path / "to")
    shutil.rmtree(tmp_path / "dcp")
    with pytest.raises(CheckpointError, match="there is no folder"):
        to_checkpoint(tmp_path / "dcp", tmp_path / "to")
