"""Parity of every supported family on every axis, and refusals of unsupported families at start."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from tests.lab.parity import assert_parity, plan_for
from tests.lab.pool import run_ranks
from tests.lab.shrink import BIASED, LEAKING, PROVED, shrunk
from weft.anatomy.build import build_on_meta
from weft.anatomy.transformers import read_anatomy
from weft.checkpoint.huggingface import build_plain, materialize
from weft.checkpoint.model_config import read_config
from weft.errors import ModelError, PlanError
from weft.job import Model
from weft.parallel.parallelize import check_axes, parallelize
from weft.precision.dtypes import DTYPES
from weft.topology.mesh import build_mesh

# Rounding differs by 2e-5 if a pipeline runs other numbers of rows at once than the reference.
ROUNDING = ("gemma4_unified", "gemma4_unified_text")
AXES: dict[str, dict[str, int]] = {
    "tp": {"tp": 2, "zero": 1},
    "cp": {"cp": 2, "zero": 1},
    "ep": {"ep": 2, "zero": 1},
    "pp": {"pp": 2, "zero": 1},
}
# Family, changes of the configuration, axis, text of the refusal.
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("bart", {}, "tp", "attends to an encoder"),
    ("whisper", {}, "cp", "attends to an encoder"),
    ("gpt2", {"add_cross_attention": True}, "tp", "attends to an encoder"),
    ("longcat_flash", {}, "cp", "list of attentions"),
    ("hrm_text", {}, "cp", "outside of the decoder's blocks"),
    ("gemma3", {}, "cp", "outside of the decoder's blocks"),
    ("gemma4_text", {}, "tp", "per_layer_model_projection"),
    ("xglm", {}, "tp", "embed_positions"),
    # Subtracts the halves of its heads from each other: without the refusal, results are wrong from 4 KV heads on.
    ("diffllama", {"num_key_value_heads": 4}, "tp", "lambda_q1"),
    ("bitnet", {}, "tp", "attn_sub_norm"),
    ("cohere", {"use_qk_norm": True}, "tp", "q_norm"),
    ("mimo_v2_flash", {}, "tp", "another number of KV heads"),
    ("dots3_note_text", {}, "tp", "differs between layers"),
    ("doge", {}, "cp", "masks from values"),
    ("moshi", {}, "cp", "sliding window"),
    ("gemma3n_text", {}, "pp", "layers.0 uses values of the part before"),  # per-layer inputs
    # Token indices for a later block, which are integers, so that no gradient shows the dependency.
    ("glm_moe_dsa", {"indexer_types": ["full", "shared"]}, "pp", "layers.1 uses values of model.layers.0"),
    ("hy_v4", {}, "pp", "layers.1 uses values of model.layers.0"),
    ("inkling2_text", {}, "pp", "the part before model.layers.1 uses values"),
    ("zaya", {}, "pp", "has weights outside its submodules"),
    ("git", {}, "pp", "each once"),
    ("rwkv", {}, "pp", "no attribute 'attention'"),  # in evaluation, it rescales the weights of all its blocks
    ("jetmoe", {}, "pp", "fails on the meta device"),
    ("emu3", {}, "pp", "cannot be built from its configuration alone"),
    ("opt", {"layerdrop": 0.1}, "pp", "at random"),
]


@pytest.mark.sweep
@pytest.mark.parametrize(("axis", "name"), [(axis, name) for axis, names in PROVED.items() for name in names])
def test_parity(axis: str, name: str) -> None:
    rows = 2 if axis == "pp" else 4  # two micro-batches of a pipeline
    plan = plan_for("fp32", **AXES[axis])
    assert_parity(Model(config=shrunk(name)), plan, 2, rows, rows if name in (*LEAKING, *ROUNDING) else None)


@pytest.mark.parametrize("name", ["glm", "glm4"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_packed_matrices_of_an_mlp(name: str, ranks: int) -> None:
    """Packed weights hold one projection after the other, as in Phi-3."""
    assert_parity(Model(config=shrunk(name)), plan_for("fp32", tp=ranks, zero=1), world_size=ranks, micro_batch=4)


@pytest.mark.sweep
@pytest.mark.parametrize("name", BIASED)
def test_parity_from_random_biases(name: str, tmp_path: Path) -> None:
    dtype = "fp64" if name == "ctrl" else "fp32"  # CTRL rounds more; XGLM has no float64
    fresh = Model(config=shrunk(name))
    model = build_plain(fresh, read_config(fresh), DTYPES[dtype])
    with torch.no_grad():
        for vector in (parameter for parameter in model.parameters() if parameter.ndim == 1):
            vector += 0.1 * torch.randn_like(vector)
    model.save_pretrained(tmp_path)
    plan = plan_for(dtype, **AXES["pp"])
    assert_parity(Model(path=str(tmp_path)), plan, 2, 2, rows_at_once=2)  # some gradients are zero except for rounding


@pytest.mark.parametrize(("name", "settings", "axis", "word"), REFUSED)
def test_refused_at_start(name: str, settings: dict[str, Any], axis: str, word: str) -> None:
    plan = plan_for("fp32", **AXES[axis]).resolve(2)
    model = build_on_meta(read_config(Model(config=shrunk(name) | settings)), DTYPES["fp32"])
    with pytest.raises(PlanError, match=word):
        check_axes(model, read_anatomy(model), plan)


def call_with(rank: int, world_size: int, arguments: dict[str, Any]) -> str:
    source, plan = Model(config=shrunk("llama")), plan_for("fp32", **AXES["tp"])
    mesh = build_mesh(plan.resolve(world_size), "cpu", world_size)
    model = parallelize(build_on_meta(read_config(source), DTYPES["fp32"]), plan, mesh)
    materialize(model, source, torch.device("cpu"))
    with pytest.raises(ModelError) as refusal:
        model(input_ids=torch.arange(8)[None], **arguments)
    return str(refusal.value)


def test_generation_arguments_are_refused_for_split_rows() -> None:
    for name, value in {"logits_to_keep": 1, "past_key_values": DynamicCache()}.items():
        assert all(name in text for text in run_ranks(2, call_with, {name: value}))
