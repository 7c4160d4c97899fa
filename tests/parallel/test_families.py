"""Parity of every supported family on every axis, and refusals of unsupported families at start."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from tests.lab.parity import assert_parity, plan_for
from tests.lab.plans import resolved
from tests.lab.pool import run_ranks
from tests.lab.shrink import BIASED, CANCELLING, COUNTING, LEAKING, PROVED, shrunk
from weft.anatomy.build import build_on_meta
from weft.anatomy.transformers import read_anatomy
from weft.checkpoint.loading import materialize
from weft.checkpoint.model_config import read_config
from weft.checkpoint.plain_model import build_plain
from weft.errors import ModelError, PlanError
from weft.job import Model
from weft.parallel.choices import check_axes
from weft.parallel.parallelize import parallelize
from weft.precision.dtypes import DTYPES
from weft.topology.mesh import build_mesh

AXES: dict[str, dict[str, int]] = {
    "tp": {"tp": 2, "zero": 1},
    "tp without sp": {"tp": 2, "sp": False, "zero": 1},
    "cp": {"cp": 2, "zero": 1},
    "ep": {"ep": 2, "zero": 1},
    "pp": {"pp": 2, "zero": 1},
}
# Family, changes of the configuration, axis, text of the refusal.
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("bart", {}, "cp", "attends to an encoder"),
    ("whisper", {}, "cp", "attends to an encoder"),
    ("gpt2", {"add_cross_attention": True}, "cp", "attends to an encoder"),
    ("longcat_flash", {}, "cp", "list of attentions"),
    ("hrm_text", {}, "cp", "outside of the decoder's blocks"),
    ("gemma3", {}, "cp", "a ring of context parallelism"),
    ("gemma4_text", {}, "tp", "hidden_size_per_layer_input"),
    ("gemma4", {"text_config": {"hidden_size_per_layer_input": 0}}, "tp", "reads the weight of its embedding"),
    ("bitnet", {}, "tp", "attn_sub_norm"),
    ("doge", {}, "cp", "masks from values"),
    ("moshi", {}, "cp", "sliding window"),
    ("gemma3n_text", {}, "pp", "layers.2 uses values of model.layers.0"),  # keys and values
    # Token indices for a later block, which are integers, so that no gradient shows the dependency.
    ("glm_moe_dsa", {"indexer_types": ["full", "shared"]}, "pp", "layers.1 uses choices of model.layers.0"),
    ("hy_v4", {}, "pp", "layers.1 uses choices of model.layers.0"),
    ("inkling2_text", {}, "pp", "after the blocks uses values of the part before"),
    ("zaya", {}, "pp", "has weights outside its submodules"),
    ("git", {}, "pp", "each once"),
    ("rwkv", {}, "pp", "no attribute 'attention'"),  # in evaluation, it rescales the weights of all its blocks
    ("jetmoe", {}, "pp", "fails on the meta device"),
    ("opt", {"layerdrop": 0.1}, "pp", "at random"),
]


@pytest.mark.parametrize(("axis", "name"), [(axis, name) for axis, names in PROVED.items() for name in names])
def test_parity(axis: str, name: str) -> None:
    rows = 2 if axis == "pp" else 4  # two micro-batches of a pipeline
    plan = plan_for("fp32", **AXES[axis])
    is_alone = name in LEAKING or (axis == "tp" and name in COUNTING)
    rounding = 1 / 2 if name in CANCELLING else 1 / 12
    assert_parity(Model(config=shrunk(name)), plan, 2, rows, rows if is_alone else None, rounding=rounding)


def test_inputs_of_every_layer_cross_the_borders_of_stages() -> None:
    """Each layer of Gemma-3n gets a slice of features that are made before the first one, beside four streams."""
    config = shrunk("gemma3n_text") | {"num_kv_shared_layers": 0}
    assert_parity(Model(config=config), plan_for("fp32", **AXES["pp"]), 2, 2)


@pytest.mark.parametrize("name", ["glm", "glm4"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_packed_matrices_of_an_mlp(name: str, ranks: int) -> None:
    """Packed weights hold one projection after the other, as in Phi-3."""
    assert_parity(Model(config=shrunk(name)), plan_for("fp32", tp=ranks, zero=1), world_size=ranks, micro_batch=4)


def test_rows_of_one_document_have_a_mask_of_full_rows() -> None:
    """Without a mask of documents, Falcon makes its own, of the tokens that it embeds: those of a rank under sp."""
    assert_parity(Model(config=shrunk("falcon")), plan_for("fp32", tp=2, zero=1), 2, 4, 4)


REPLICATED: list[tuple[str, dict[str, Any]]] = [
    # Subtracts the halves of its heads from each other: results of divided heads would be wrong from 4 KV heads on.
    ("diffllama", {"num_key_value_heads": 4}),
    ("cohere", {"use_qk_norm": True}),  # its norms have weights of their own for each head
    ("bloom", {}),  # adds the residual stream inside of its attention and of its MLP
]


@pytest.mark.parametrize("sp", [True, False])
@pytest.mark.parametrize(("name", "settings"), REPLICATED)
def test_attention_with_weights_of_unknown_roles_is_whole_on_each_rank(
    name: str, settings: dict[str, Any], sp: bool
) -> None:
    source, plan = Model(config=shrunk(name) | settings), plan_for("fp32", tp=2, sp=sp, zero=1)
    assert_parity(source, plan, 2, 4, 4 if name in LEAKING else None)


@pytest.mark.parametrize("settings", [{"cp": 2}, {}])
def test_whole_attention_is_refused_beside_an_attention_of_weft(settings: dict[str, Any]) -> None:
    plan = resolved(plan_for("fp32", tp=2, zero=1, **settings), 4)
    config = shrunk("gpt_neox") | ({} if settings else {"attention_dropout": 0.1})
    model = build_on_meta(read_config(Model(config=config)), DTYPES["fp32"])
    with pytest.raises(PlanError, match="query_key_value"):
        check_axes(model, read_anatomy(model), plan)


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
    plan = resolved(plan_for("fp32", **AXES[axis]), 2)
    model = build_on_meta(read_config(Model(config=shrunk(name) | settings)), DTYPES["fp32"])
    with pytest.raises(PlanError, match=word):
        check_axes(model, read_anatomy(model), plan)


def call_with(rank: int, world_size: int, arguments: dict[str, Any]) -> str:
    source, plan = Model(config=shrunk("llama")), plan_for("fp32", **AXES["tp"])
    mesh = build_mesh(resolved(plan, world_size), "cpu", world_size)
    model = parallelize(build_on_meta(read_config(source), DTYPES["fp32"]), plan, mesh)
    materialize(model, source, torch.device("cpu"))
    with pytest.raises(ModelError) as refusal:
        model(input_ids=torch.arange(8)[None], **arguments)
    return str(refusal.value)


def test_generation_arguments_are_refused_for_split_rows() -> None:
    for name, value in {"logits_to_keep": 1, "past_key_values": DynamicCache()}.items():
        assert all(name in text for text in run_ranks(2, call_with, {name: value}))
