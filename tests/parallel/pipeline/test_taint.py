"""A model whose parts share more than hidden states cannot be partitioned, even if no gradient shows it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.anatomy.roles import Anatomy, Block
from weft.parallel.pipeline.taint import TaintError, Value, replace_tensors, tensors_of, trace_block_io

SHAPE = (1, 4)


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.state, self.chosen = torch.zeros(*SHAPE, 8), torch.zeros(*SHAPE, 1)

    def forward(self, hidden: Tensor, extra: Tensor | None = None) -> Tensor:
        hidden = hidden + self.linear(hidden)
        self.state.copy_(hidden.detach())
        self.chosen = hidden.argmax(-1, True)
        return hidden if extra is None else hidden * extra


class Plain(nn.Module):
    """Three blocks between an embedding and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(16, 8), nn.LayerNorm(8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList(Mixer() for _ in range(3))

    def forward(self) -> Tensor:
        hidden = self.embed(torch.zeros(SHAPE, dtype=torch.int64, device="meta"))
        mask = torch.ones_like(hidden) + hidden.new_zeros(())  # only shapes are used, no values
        for block in self.blocks:
            hidden = block(hidden, mask)
        return self.head(self.norm(hidden))


class LateSkip(Plain):
    def forward(self) -> Tensor:
        first = hidden = self.embed(torch.zeros(SHAPE, dtype=torch.int64, device="meta"))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden + first)


class Choices(Plain):
    """A later block gets integers of an earlier block."""

    def forward(self) -> Tensor:
        hidden = self.embed(torch.zeros(SHAPE, dtype=torch.int64, device="meta"))
        hidden = self.blocks[1](self.blocks[0](hidden))
        return self.head(self.blocks[2](hidden, self.blocks[0].chosen))


class MaskOfValues(Plain):
    def forward(self) -> Tensor:
        hidden = self.embed(torch.zeros(SHAPE, dtype=torch.int64, device="meta"))
        with torch.no_grad():
            mask = hidden > 0
        for block in self.blocks:
            hidden = block(hidden, mask)
        return self.head(hidden)


class State(Plain):
    """Blocks write into views of a tensor that is read after the blocks."""

    def forward(self) -> Tensor:
        hidden = self.embed(torch.zeros(SHAPE, dtype=torch.int64, device="meta"))
        state = torch.zeros(3, *SHAPE, 8, device="meta")
        self.blocks[0].state = state[0]
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden) + state.sum()


class SharedWeight(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].linear.weight = self.blocks[0].linear.weight


class WeightOfAnother(Plain):
    """The second block uses a detached weight of the first block, which has neither a name nor a gradient there."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_forward_pre_hook(lambda _, args: (args[0] @ self.blocks[0].linear.weight.detach(),))


class Twice(Plain):
    def forward(self) -> Tensor:
        hidden = self.embed(torch.zeros(SHAPE, dtype=torch.int64, device="meta"))
        for block in (*self.blocks, self.blocks[0]):
            hidden = block(hidden)
        return self.head(hidden)


class EmbedsAgain(Plain):
    def forward(self) -> Tensor:
        tokens = torch.zeros(SHAPE, dtype=torch.int64, device="meta")
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden + self.embed(tokens))


class PartOfAnEnd(Plain):
    """A module runs without the module around it, whose placeholder would run it on another device."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Wrapped()

    def forward(self) -> Tensor:
        hidden = self.embed(torch.zeros(SHAPE, dtype=torch.int64, device="meta"))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm.inner(hidden))


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.ones(8)), nn.LayerNorm(8)


class WeightAround(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))


def run(kind: Callable[[], nn.Module]) -> Any:
    with torch.device("meta"):
        model = kind()
    blocks = tuple(Block(f"blocks.{i}", (), (), (), (), (), (), ()) for i in range(3))
    return trace_block_io(model, Anatomy("toy", "embed", blocks, "norm", "head", True, 0, 0, 16, None))


def test_chain_of_a_plain_model() -> None:
    chain = run(Plain)
    assert chain.first == ("embed",)
    assert chain.last == ("norm", "head")
    assert chain.hidden_positions == (None,) * 3
    assert chain.values == tuple(Value(part, (*SHAPE, 8), torch.float32) for part in (0, 2, 4))
    assert chain.inputs == ((((0,), 0),), (((0,), 1),), (((0,), 2),))
    assert [chain.into(block) for block in range(1, 3)] == [(1,), (2,)]


class Between(Plain):
    """An operation between two blocks, on the hidden states."""

    def forward(self) -> Tensor:
        hidden = self.embed(torch.zeros(SHAPE, dtype=torch.int64, device="meta"))
        hidden = self.blocks[1](self.blocks[0](hidden) * 2)
        return self.head(self.blocks[2](hidden))


class Skip(Plain):
    """A later block also gets values of the embedding and of the first block, in a tuple."""

    def forward(self) -> Tensor:
        first = self.embed(torch.zeros(SHAPE, dtype=torch.int64, device="meta"))
        second = self.blocks[0](first)
        return self.head(self.norm(self.blocks[2](hidden_states=self.blocks[1](second), pair=(second, first))))


class InPlace(nn.Module):
    """It returns its argument, changed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden += self.linear(hidden)
        return hidden


class ChangedArguments(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(InPlace() for _ in range(3))

    def forward(self) -> Tensor:
        hidden = self.embed(torch.zeros(SHAPE, dtype=torch.int64, device="meta"))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


class Pair(nn.Module):
    def forward(self, hidden_states: Tensor, pair: tuple[Tensor, Tensor]) -> Tensor:
        return hidden_states + pair[0] * pair[1]


def skip() -> nn.Module:
    model = Skip()
    model.blocks[2] = Pair()
    return model


def test_operations_between_blocks_run_in_the_stage_before() -> None:
    chain = run(Between)
    assert [value.part for value in chain.values] == [0, 2, 4]
    assert [chain.into(block) for block in range(1, 3)] == [(1,), (2,)]


def test_values_of_earlier_parts_cross_all_borders_until_their_block() -> None:
    chain = run(skip)
    assert [value.part for value in chain.values] == [0, 2, 4]
    assert chain.inputs[2] == ((("hidden_states",), 2), (("pair", 0), 1), (("pair", 1), 0))
    assert [chain.into(block) for block in range(1, 3)] == [(0, 1), (0, 1, 2)]


def test_changed_arguments_are_new_values() -> None:
    with torch.no_grad():
        chain = run(ChangedArguments)
    assert [value.part for value in chain.values] == [0, 2, 4]


def test_tensors_are_replaced_where_they_are_found() -> None:
    args, kwargs = (torch.zeros(1), (torch.zeros(2), None)), {"names": [torch.zeros(3)], "flag": True}
    found = dict(tensors_of(args, kwargs))
    assert list(found) == [(0,), (1, 0), ("names", 0)]
    new = {path: tensor + 1 for path, tensor in found.items()}
    args, kwargs = replace_tensors(args, kwargs, list(new.items())[1:])
    assert dict(tensors_of(args, kwargs)) == {(0,): found[0,], **dict(list(new.items())[1:])}
    assert args[1][1] is None
    assert kwargs["flag"] is True


CROSSINGS = [
    (LateSkip, "after the blocks uses values of the part before blocks.0"),
    (Choices, "blocks.2 uses choices of blocks.0"),
    (MaskOfValues, "blocks.0 uses choices of the part before blocks.0"),
    (State, "after the blocks uses values of blocks.0"),
    (SharedWeight, "blocks.2 uses blocks.0.linear.weight of blocks.0"),
    (WeightOfAnother, "uses blocks.0.linear.weight of blocks.0"),
    (Twice, "each once"),
    (EmbedsAgain, "after the blocks uses values of the part before blocks.0"),
    (PartOfAnEnd, "norm.inner runs without the module around it"),
    (WeightAround, "the model has weights outside its submodules"),
]


@pytest.mark.parametrize(("kind", "reason"), CROSSINGS, ids=lambda value: getattr(value, "__name__", ""))
def test_other_dependencies_between_parts_are_refused(kind: Callable[[], nn.Module], reason: str) -> None:
    with pytest.raises(TaintError, match=reason):
        run(kind)
