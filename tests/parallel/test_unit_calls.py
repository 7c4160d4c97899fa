"""Ranks that run other blocks are refused with their names; weights that some ranks do not use train as in one process."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
)

import weft
from tests.lab.loops import Loop, check_loop, train_on_rank
from tests.lab.parity import plan_for
from tests.lab.plans import resolved
from tests.lab.pool import RankError, run_ranks
from weft.errors import ModelError, PlanError
from weft.parallel.data.unit_calls import UnitCalls
from weft.topology.mesh import build_mesh

HAS_UNUSED = hasattr(torch.distributed.fsdp.FSDPModule, "set_reduce_scatter_unused_params")  # torch 2.13


class Block(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.up, self.down = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8) for _ in range(4))

    def forward(self, x: Tensor, skipped: int) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index != skipped:
                x = block(x)
        return x


def skipping() -> nn.Module:
    torch.manual_seed(0)
    return Skipping()


def skipping_loss(model: Any, step: int, rank: int) -> Tensor:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
    return model(x, 1 + rank).square().mean()


SKIPPING = Loop(skipping, skipping_loss)


@pytest.mark.must("numbers of different blocks are never mixed", case="2")
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_ranks_that_skip_other_blocks_are_refused_with_both_names(zero: int) -> None:
    with pytest.raises(RankError, match=r"data rank 0 has run blocks\.2 where data rank 1 has run blocks\.1") as caught:
        run_ranks(2, train_on_rank, SKIPPING, plan_for("fp32", zero=zero))
    assert "zero = 0" in str(caught.value)


def skipping_in_replicas(model: Any, step: int, rank: int) -> Tensor:
    """Loss of ranks of which those with one part of the weights skip another block than those with the other part."""
    return skipping_loss(model, step, rank % 2)


def test_ranks_that_differ_along_the_second_axis_are_refused_with_both_names() -> None:
    loop = Loop(skipping, skipping_in_replicas)
    with pytest.raises(RankError, match=r"data rank 0 has run blocks\.2 where data rank 1 has run blocks\.1"):
        run_ranks(4, train_on_rank, loop, plan_for("fp32", zero=2, dp_replicate=2))


def refused_in_one_stage(rank: int, ranks: int) -> str:
    """Error of a rank where the data ranks of the first of two stages have called other units."""
    mesh = build_mesh(resolved(plan_for("fp32", zero=2, pp=2), ranks), "cpu", ranks)
    calls = UnitCalls(nn.Linear(2, 2), mesh)
    calls.names, first = ["blocks.0", "blocks.1"], mesh.get_local_rank("pp") == 0
    calls.calls = [mesh.get_local_rank("dp_shard")] if first else [0]
    calls.compare(torch.device("cpu"))
    try:
        calls.refuse_different()
    except ModelError as error:
        return error.what
    return ""


def test_all_stages_are_told_of_ranks_that_differ_in_one_of_them() -> None:
    assert run_ranks(4, refused_in_one_stage) == ["data rank 0 has run blocks.0 where data rank 1 has run blocks.1"] * 4


def test_ranks_may_skip_other_blocks_without_shards() -> None:
    check_loop(SKIPPING, plan_for("fp32", zero=0))


class Odd(nn.Module):
    """Parameters that are not contiguous, without elements, without dims, integer and unused."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(7, 8))
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))
        self.transposed = nn.Parameter(torch.randn(8, 5).t())
        self.empty, self.unused = nn.Parameter(torch.zeros(0, 4)), nn.Parameter(torch.ones(3, 2))
        self.scale, self.order = (
            nn.Parameter(torch.tensor(1.5)),
            nn.Parameter(torch.arange(8).flip(0), requires_grad=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x[:, self.order] @ self.transposed.t() * self.scale


def odd() -> nn.Module:
    torch.manual_seed(0)
    return Odd()


def odd_loss(model: Any, step: int, rank: int) -> Tensor:
    return model(torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean()


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_odd_parameters_train_as_in_one_process(zero: int) -> None:
    found = check_loop(Loop(odd, odd_loss), plan_for("fp32", zero=zero))
    assert torch.equal(found[0].weights["unused"], torch.ones(3, 2))  # no decay


def wav2vec2(rank: int, ranks: int, zero: int) -> str:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = Wav2Vec2ForCTC(Wav2Vec2Config(**sizes, layerdrop=0.1))
    try:
        weft.prepare(model, optimizer=torch.optim.AdamW, plan=plan_for("fp32", zero=zero))
    except PlanError as error:
        return str(error)
    return ""


def test_layer_drop_is_refused_by_name_where_ranks_share_blocks() -> None:
    for message in run_ranks(2, wav2vec2, 2):
        assert "layerdrop of the model's configuration under plan.parallel.zero = 2" in message
    assert run_ranks(2, wav2vec2, 0) == ["", ""]


def llava() -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    text = LlamaConfig(vocab_size=128, max_position_embeddings=128, **sizes)
    vision = CLIPVisionConfig(image_size=16, patch_size=8, projection_dim=32, **sizes)
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=127,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    )
    return LlavaForConditionalGeneration(config).train()


def rows(step: int, rank: int, images: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    ids = torch.randint(0, 120, (2, 12), generator=generator)
    if images == "none" or rank == 1:
        return {"input_ids": ids}
    ids[:, 2:6] = 127  # four patches
    return {"input_ids": ids, "pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}


def llava_loss(images: str, model: Any, step: int, rank: int) -> Tensor:
    given = rows(step, rank, images)
    logits = model(**given).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), given["input_ids"][:, 1:].flatten())


@pytest.mark.skipif(not HAS_UNUSED, reason="FSDP2 of torch 2.13 reduces zeros of unused weights")
@pytest.mark.parametrize("zero", [0, 2, 3])
@pytest.mark.parametrize("images", ["one rank", "none"])
def test_a_rank_without_images_may_skip_the_tower(images: str, zero: int) -> None:
    found = check_loop(Loop(llava, partial(llava_loss, images)), plan_for("fp32", zero=zero), tolerance=1e-5)
    name = next(name for name in found[0].weights if name.endswith("layers.0.mlp.fc1.weight"))
    before = dict(llava().named_parameters())[name]
    assert torch.equal(found[0].weights[name], before) == (images == "none")
