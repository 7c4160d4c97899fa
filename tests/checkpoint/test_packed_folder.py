"""Folders in 4 bits, written by bitsandbytes 0.50.2 on a CPU, with and without quantized scales: read, trained, refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.lab.adapters import run_job, start_folder
from tests.lab.jobs import write_job
from tests.lab.parity import SETTINGS, packed_batches
from tests.lab.pool import run_ranks
from tests.lab.runs import observe
from weft.checkpoint.model_config import read_config
from weft.checkpoint.packed_folder import unpacked
from weft.checkpoint.plain_model import build_plain, slices_of
from weft.checkpoint.stored_slices import SliceReader
from weft.checkpoint.weight_files import stored_tensors
from weft.errors import CheckpointError, ModelError, WeftError
from weft.job import Adapter, Job, Model
from weft.memory.nf4 import packed
from weft.plan import Plan

FOLDERS = Path(__file__).with_name("packed")
WEIGHT = "model.layers.0.self_attn.q_proj.weight"
STATE = f"{WEIGHT}.quant_state.bitsandbytes__nf4"
TABLE = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 64,
}


def decode(stored: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """The values of a weight, by the definition of the format."""
    state = json.loads(bytes(stored[f"{name}.quant_state.bitsandbytes__nf4"].tolist()))
    scales = stored[f"{name}.absmax"]
    if "nested_offset" in state:
        inner = stored[f"{name}.nested_quant_map"][scales.long()]
        scales = inner * stored[f"{name}.nested_absmax"].repeat_interleave(256)[: len(scales)] + state["nested_offset"]
    pairs = stored[name].flatten().long()
    numbers = stored[f"{name}.quant_map"][torch.stack([pairs // 16, pairs % 16], 1)]
    return (numbers.view(-1, 64) * scales[:, None]).view(state["shape"])


def plain_weights(folder: Path) -> dict[str, torch.Tensor]:
    stored = load_file(folder / "model.safetensors")
    names = [key.partition(".quant_state")[0] for key in stored if ".quant_state" in key]
    whole = {name: tensor.float() for name, tensor in stored.items() if not name.startswith(tuple(names))}
    return whole | {name: decode(stored, name) for name in names}


@pytest.mark.must("format: folder of bitsandbytes in 4 bits", case="nested")
@pytest.mark.parametrize("kind", ["plain", "nested"])
def test_slices_are_read_and_packed_again_without_a_change(kind: str) -> None:
    expected = plain_weights(FOLDERS / kind)
    config = read_config(Model(path=str(FOLDERS / kind)), in_4_bits=True)
    found = slices_of(FOLDERS / kind, config, lambda: AutoModelForCausalLM.from_config(config))
    assert found is not None
    with SliceReader(found[1]) as reader:
        for name, weight in expected.items():
            first = tuple(size // 4 for size in weight.shape)
            part = weight[tuple(slice(start, start + start) for start in first)]
            assert torch.equal(reader.read(name, weight.shape, first, first, torch.float32), part)
    stored = load_file(FOLDERS / kind / "model.safetensors")
    again = packed(expected[WEIGHT], torch.float32)
    assert torch.equal(again.codes.flatten(), stored[WEIGHT].flatten())
    assert torch.equal(again.unpack(), expected[WEIGHT])


@pytest.mark.parametrize("parallel", [{"zero": 0}, {"zero": 3}, {"tp": 1, "zero": 2}], ids=str)
@pytest.mark.parametrize("kind", ["plain", "nested"])
def test_training_is_that_of_the_unpacked_weights(kind: str, parallel: dict[str, Any], tmp_path: Path) -> None:
    """Bits of losses and adapters: beside a run on the same values in float32, which are not packed."""
    adapter = start_folder(tmp_path / "adapter", TABLE, "lora")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TABLE), dtype=torch.float32)
    model.load_state_dict(plain_weights(FOLDERS / kind))
    model.save_pretrained(tmp_path / "unpacked")
    records = []
    for folder, frozen in ((FOLDERS / kind, "nf4"), (tmp_path / "unpacked", "whole")):
        plan = {"parallel": parallel, "precision": {"param_dtype": "fp32", "frozen_weights": frozen}}
        job = Job(
            model=Model(path=str(folder)),
            plan=Plan.model_validate(plan),
            adapter=Adapter(kind="lora", r=4, alpha=8, path=str(adapter)),
            optimizer=SETTINGS,
        )
        records.append(run_ranks(2, run_job, job, packed_batches(32), 1)[0])
    assert records[0].losses == records[1].losses
    assert all(torch.equal(weight, records[1].weights[name]) for name, weight in records[0].weights.items())


def test_other_commands_and_adapters_refuse_the_folder(tmp_path: Path) -> None:
    source = Model(path=str(FOLDERS / "plain"))
    with pytest.raises(ModelError, match=r"quantized \(bitsandbytes\)") as caught:
        read_config(source)
    assert 'adapter.kind = "qlora"' in str(caught.value.fix)
    with pytest.raises(CheckpointError, match="is stored as U8"):
        build_plain(source, read_config(source, in_4_bits=True), torch.float32)
    for kind in ("none", "lora"):
        job = Job.load(write_job(tmp_path, adapter={"kind": kind}))
        job = Job.parse({**job.model_dump(exclude_none=True), "model": {"path": str(FOLDERS / "plain")}})
        with pytest.raises(WeftError, match=r'adapter\.kind = "qlora"'):
            observe(job, 1)
    assert not (tmp_path / "run").exists()


def with_state(**changes: Any) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(stored: dict[str, torch.Tensor]) -> None:
        state = json.loads(bytes(stored[STATE].tolist())) | changes
        stored[STATE] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    return change


def replaced(part: str, value: torch.Tensor | None) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(stored: dict[str, torch.Tensor]) -> None:
        stored.pop(f"{WEIGHT}{part}")
        if value is not None:
            stored[f"{WEIGHT}{part}"] = value

    return change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (with_state(shape=[64, 128]), "its sizes are"),
        (with_state(shape=[128, 32]), "its sizes are"),
        (with_state(shape=[4096]), "its sizes are"),
        (with_state(shape=[-64, -64]), "its shape is"),
        (with_state(shape="64"), "its shape is"),
        (with_state(blocksize=128), "its sizes are"),
        (with_state(quant_type="fp4"), "its sizes are"),
        (with_state(nested_blocksize=256), "its sizes are"),
        (with_state(shape=[2**40, 2**40]), "its sizes are"),
        (replaced(".absmax", None), "the folder has no"),
        (replaced(".absmax", torch.ones(63)), "its sizes are"),
        (replaced(".quant_map", torch.linspace(-1, 1, 16)), "its sizes are"),
        (replaced("", torch.zeros(2047, 1, dtype=torch.uint8)), "its sizes are"),
        (replaced("", torch.zeros(2048, 1, dtype=torch.int8)), "its sizes are"),
        (
            replaced(".quant_state.bitsandbytes__nf4", torch.full((5,), 123, dtype=torch.uint8)),
            "Expecting property name",
        ),
        (replaced(".quant_state.bitsandbytes__nf4", torch.zeros(9000, dtype=torch.uint8)), "its table is too long"),
    ],
)
def test_damaged_weights_are_named(change: Callable[[Any], None], problem: str, tmp_path: Path) -> None:
    shutil.copytree(FOLDERS / "plain", tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    change(stored)
    save_file(stored, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    config = read_config(Model(path=str(tmp_path / "model")), in_4_bits=True)
    with pytest.raises(CheckpointError, match=problem) as caught:
        slices_of(tmp_path / "model", config, lambda: AutoModelForCausalLM.from_config(config))
    assert WEIGHT in caught.value.what


@pytest.mark.parametrize(
    "change",
    [
        with_state(nested_offset="0"),
        with_state(nested_blocksize=64),
        replaced(".nested_absmax", torch.ones(2)),
        replaced(".nested_quant_map", torch.ones(16)),
        replaced(".nested_quant_map", None),
        replaced(".absmax", torch.ones(64)),
    ],
)
def test_damaged_scales_of_scales_are_named(change: Callable[[Any], None], tmp_path: Path) -> None:
    shutil.copytree(FOLDERS / "nested", tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    change(stored)
    save_file(stored, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"its sizes are|has no .*nested_quant_map"):
        unpacked(stored_tensors(tmp_path / "model", in_4_bits=True))
