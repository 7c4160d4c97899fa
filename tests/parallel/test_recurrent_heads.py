"""Heads of recurrent mixers are divided over the ranks of tp and cp: parity with one process, and what a rank computes."""

from typing import Any

import pytest
import torch

from tests.lab.parity import assert_parity, plan_for
from tests.lab.plans import resolved
from tests.lab.pool import run_ranks
from tests.lab.shrink import shrunk
from weft.anatomy.build import build_on_meta
from weft.anatomy.transformers import read_anatomy
from weft.checkpoint.model_config import read_config
from weft.errors import PlanError
from weft.job import Model
from weft.parallel.choices import check_axes
from weft.parallel.parallelize import parallelize
from weft.parallel.sequence.recurrent_heads import mixer_heads
from weft.topology.mesh import build_mesh

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": {},  # gated delta nets
    "falcon_h1": {},  # Mamba-2 beside attention; its heads share one group, and a buffer scales its projections
    "nemotron_h": {"n_groups": 4},  # Mamba-2 with a norm for each group, attention, MLPs and experts
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "conv", "full_attention"]},  # short convolutions
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2 sp": (2, {"tp": 2, "zero": 1}),
    "tp2": (2, {"tp": 2, "sp": False, "zero": 0}),
    "tp4": (4, {"tp": 4, "zero": 1}),
    "tp2 x dp2": (4, {"tp": 2, "zero": 3}),
    "cp2 ring": (2, {"cp": 2, "zero": 1}),
    "cp2 ulysses": (2, {"cp": 2, "cp_ulysses": 2, "zero": 0}),
    "cp4": (4, {"cp": 4, "cp_ulysses": 2, "zero": 3}),
    "cp2 x tp2 sp": (4, {"cp": 2, "tp": 2, "zero": 1}),
    "cp2 x tp2": (4, {"cp": 2, "tp": 2, "sp": False, "zero": 3}),
    "cp2 x pp2": (4, {"cp": 2, "pp": 2, "zero": 1}),
    "cp2 x dp2": (4, {"cp": 2, "zero": 2}),
}


def source(name: str) -> Model:
    return Model(config=shrunk(name) | FAMILIES[name])


@pytest.mark.must("parity: recurrent mixers", case="qwen3_next-cp2 ring")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_parity(name: str, layout: str) -> None:
    ranks, parallel = LAYOUTS[layout]
    rows = 2 if "pp" in parallel else 4
    # One document in each row: the untouched model does not reset states at documents either.
    assert_parity(source(name), plan_for("fp32", **parallel), ranks, rows, rows)


def sizes_of_mixer(rank: int, ranks: int, name: str, parallel: dict[str, int]) -> tuple[int, int, int]:
    plan = resolved(plan_for("fp32", **parallel), ranks)
    model = build_on_meta(read_config(source(name)), torch.float32)
    mixer: Any = model.get_submodule(read_anatomy(model).blocks[0].recurrence[0])
    parallelize(model, plan, build_mesh(plan, "cpu", ranks))
    stored = sum(getattr(p, "to_local", lambda p=p: p)().numel() for p in mixer.parameters())
    return stored, mixer.conv_dim, getattr(mixer, "num_heads", 0) or mixer.num_v_heads


@pytest.mark.parametrize("name", ["qwen3_next", "nemotron_h"])
def test_a_rank_of_tp_stores_and_computes_its_heads_only(name: str) -> None:
    model = build_on_meta(read_config(source(name)), torch.float32)
    mixer: Any = model.get_submodule(read_anatomy(model).blocks[0].recurrence[0])
    whole = sum(parameter.numel() for parameter in mixer.parameters())
    for stored, channels, heads in run_ranks(2, sizes_of_mixer, name, {"tp": 2, "zero": 0}):
        assert stored <= 0.51 * whole
        assert (channels, heads) == (mixer.conv_dim // 2, (getattr(mixer, "num_heads", 0) or mixer.num_v_heads) // 2)


@pytest.mark.must("refusal: recurrent mixers")
@pytest.mark.parametrize(
    ("family", "changes", "ranks"),
    [
        ("jamba", {}, 2),  # channels of Mamba-1 share what they make of all of them
        ("bamba", {}, 2),  # a norm over all heads
        ("nemotron_h", {"n_groups": 1}, 2),  # a norm over the heads of a group
        ("qwen3_next", {}, 3),
    ],
)
def test_other_mixers_are_whole_under_tp_and_refused_under_cp(family: str, changes: dict[str, Any], ranks: int) -> None:
    model = build_on_meta(read_config(Model(config=shrunk(family) | changes)), torch.float32)
    anatomy = read_anatomy(model)
    mixers = [name for block in anatomy.blocks for name in block.recurrence]
    assert all(mixer_heads(model.get_submodule(name), ranks) is None for name in mixers)
    with pytest.raises(PlanError, match="is recurrent along the sequence"):
        check_axes(model, anatomy, resolved(plan_for("fp32", cp=ranks, zero=1), ranks))


def test_parts_of_nemotron_h_have_roles_by_what_they_contain() -> None:
    config = shrunk("nemotron_h") | {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]}
    blocks = read_anatomy(build_on_meta(read_config(Model(config=config)), torch.float32)).blocks
    roles = [(len(b.recurrence), len(b.experts), len(b.attention), len(b.mlp)) for b in blocks]
    assert roles == [(1, 0, 0, 0), (0, 1, 0, 1), (0, 0, 1, 0), (0, 0, 0, 1)]
