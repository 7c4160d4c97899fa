"""Cutting a model into stages: which blocks each has, and one model a rank that runs as any of its stages.

A rank keeps the model as its authors wrote it, with the names of all parameters, but without the blocks and ends of other
ranks: in their place stand modules without weights, which pass hidden states on. To run one stage, every block and end
outside of it is passed over in this way, the last block before it gives what the stage before has sent, and what comes to
the first block behind it is the stage's output. So everything that a model does around its blocks (masks, rotary
embeddings, scaled embeddings, capped logits) stays in place, and has no effect where it does not belong.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from weft.anatomy.roles import Anatomy
from weft.anatomy.transformers import EXPERTS, document_masks
from weft.checkpoint.huggingface import build_on_meta
from weft.errors import ModelError, PlanError
from weft.parallel.pipeline.schedules import SCHEDULES
from weft.parallel.pipeline.taint import BlockChain, CrossingError, trace_block_io
from weft.plan import Pipeline, Plan

WHERE = "plan.parallel.pp"
PROBE_SHAPE = (1, 4)  # rows and tokens of the forward that shows how blocks are called


# How many blocks


def split_blocks(num_blocks: int, num_stages: int, settings: Pipeline) -> list[range]:
    """The blocks of each stage: by given numbers, else so that the largest cost of a stage is the smallest.

    Among such cuts the one with the smallest sum of squared costs is taken. O(num_blocks^2 num_stages).

    Raises:
        PlanError: a stage would be empty, or the given numbers do not fit.
    """
    if num_stages > num_blocks:
        raise _too_many_stages(num_blocks, num_stages, settings.stages_a_rank)
    counts, costs = settings.stage_blocks, settings.block_costs or (1.0,) * num_blocks
    if counts and (len(counts) != num_stages or sum(counts) != num_blocks):
        raise PlanError(
            f"stage_blocks names {sum(counts)} blocks in {len(counts)} stages",
            where="plan.pipeline.stage_blocks",
            rule=f"there are {num_blocks} blocks, and pp x virtual_stages = {num_stages} stages",
            fix=f"give {num_stages} numbers whose sum is {num_blocks}, or none",
        )
    if len(costs) != num_blocks:
        raise PlanError(
            f"block_costs has {len(costs)} numbers",
            where="plan.pipeline.block_costs",
            rule=f"there are {num_blocks} blocks",
            fix=f"give {num_blocks} numbers, or none",
        )
    if not counts:
        counts = _cheapest_cut(costs, num_stages, settings.embedding_cost, settings.head_cost)
    borders = [sum(counts[:stage]) for stage in range(num_stages + 1)]
    return [range(low, high) for low, high in pairwise(borders)]


def check_ranks(num_blocks: int, plan: Plan) -> None:
    """Refuse a number of pp ranks that blocks are too few for, whatever the number of stages a rank.

    Raises:
        PlanError: with a number that is small enough, or another schedule.
    """
    settings = plan.pipeline
    kind = SCHEDULES.get(settings.schedule)
    fewest, most = kind.virtual_stages if kind else (1, None)
    if plan.parallel.pp * fewest > num_blocks:
        each = max(fewest, settings.stages_a_rank) if most is None else fewest
        raise _too_many_stages(num_blocks, plan.parallel.pp * fewest, each)


def _too_many_stages(num_blocks: int, num_stages: int, stages_a_rank: int) -> PlanError:
    most = num_blocks // stages_a_rank
    fewer = (
        'set plan.pipeline.schedule to "1f1b", which needs fewer stages'
        if num_blocks > 1
        else "set plan.parallel.pp = 1"
    )
    return PlanError(
        f"{num_blocks} blocks cannot fill {num_stages} stages",
        where=f"{WHERE}, plan.pipeline.virtual_stages",
        rule="every stage has at least one block",
        fix=f"set plan.parallel.pp to {most} or less" if most > 1 else fewer,
    )


def _cheapest_cut(costs: tuple[float, ...], num_stages: int, embedding: float, head: float) -> tuple[int, ...]:
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    def cost_of(stage: int, low: int, high: int) -> float:
        return sums[high] - sums[low] + embedding * (stage == 0) + head * (stage == num_stages - 1)

    def best(combine: Callable[[float, float], float]) -> tuple[float, tuple[int, ...]]:
        """The cut of all blocks with the smallest combined cost, stage by stage."""
        cuts: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
        for stage in range(num_stages):
            left = num_stages - 1 - stage
            cuts = {
                high: min(
                    (combine(total, cost_of(stage, low, high)), (*counts, high - low))
                    for low, (total, counts) in cuts.items()
                    if low < high
                )
                for high in range(stage + 1, len(costs) - left + 1)
            }
        return cuts[len(costs)]

    largest, _ = best(max)
    limit = largest * (1 + 1e-9)
    return best(lambda total, cost: total + (cost**2 if cost <= limit else float("inf")))[1]


# What a model looks like between its blocks


def read_chain(model: PreTrainedModel, anatomy: Anatomy, dtype: torch.dtype) -> BlockChain:
    """Run a copy of a model on the meta device, see what travels from block to block, and try stages of it.

    Args:
        model: whole; it is not touched.
        anatomy: its roles.
        dtype: of the weights in forward.

    Raises:
        PlanError: a part of the model uses numbers of another that are not hidden states, or cannot run without it.
    """
    random = [key for key, value in model.config.get_text_config().to_dict().items() if "layerdrop" in key and value]
    if random:
        raise _uncuttable(anatomy, f"{random[0]} leaves out blocks at random")
    try:
        probe: Any = build_on_meta(model.config, dtype)
    except ModelError:
        raise _uncuttable(anatomy, "no copy of it can be built from its configuration") from None
    for name, module in probe.named_modules():
        if EXPERTS.fullmatch(name.rpartition(".")[2]) and not isinstance(module, nn.ModuleList):
            module.forward = lambda hidden, *args, **kwargs: hidden  # which are chosen has no answer here
    positions = torch.arange(PROBE_SHAPE[1]).remainder(2)[None]  # two documents: only then are there masks
    probe.forward = partial(
        probe.forward,
        input_ids=torch.zeros(PROBE_SHAPE, dtype=torch.int64, device="meta"),
        position_ids=positions.to("meta"),
        attention_mask=tree_map_only(Tensor, lambda mask: mask.to("meta"), document_masks(probe, positions)),
        use_cache=False,
        **({"output_router_logits": False} if getattr(model.config, "output_router_logits", False) else {}),
    )
    try:
        chain = trace_block_io(probe.train(), anatomy, PROBE_SHAPE)
        _rehearse(probe, anatomy, chain)
    except CrossingError as crossing:
        raise _uncuttable(anatomy, str(crossing)) from None
    except Exception as error:  # each family fails in its own way: whatever it says goes to the user
        raise _uncuttable(anatomy, f"its forward fails without numbers: {error}") from None
    return chain


def _rehearse(probe: Any, anatomy: Anatomy, chain: BlockChain) -> None:
    """Run a model on the meta device as its first block alone and as its last one, so that each part is passed over."""
    num_blocks = len(anatomy.blocks)
    stages = [range(1), range(1, num_blocks - 1), range(num_blocks - 1, num_blocks)]
    relay = cut_model(probe, anatomy, chain, stages, (0, 1, 2))[1]
    install_stage_switch(probe, anatomy, relay)
    for trains in (False, True):
        probe.train(trains)
        with torch.set_grad_enabled(trains):
            with relay.running(0, None):
                probe()
            with relay.running(2, relay.take_sent().detach().requires_grad_(trains)):
                probe()


def _uncuttable(anatomy: Anatomy, what: str) -> PlanError:
    return PlanError(
        f"{anatomy.family} cannot be cut into stages: {what}",
        where=f"{WHERE}, model_type {anatomy.family}",
        rule="hidden states, and nothing else, travel from block to block",
        fix="set plan.parallel.pp = 1",
    )


# A model that runs as one of its stages


@dataclass
class StageIO:
    """Which stage a model is running as, and what comes in and goes out."""

    stages: list[range]
    """Blocks of each stage of the whole model."""
    own: tuple[int, ...]
    """Stages of this rank."""
    chain: BlockChain
    first_trained: int
    """The first stage with a parameter that trains; the number of stages where none does."""
    active: int | None = None
    sequence_parts: int = 1
    """Ranks of tp that hold a part of each sequence between matrices."""
    received: Tensor | None = None
    sent: Tensor | None = None
    device: torch.device | None = None
    """Of the model."""

    def has_first(self) -> bool:
        return self.own[0] == 0

    def has_last(self) -> bool:
        return self.own[-1] == len(self.stages) - 1

    @contextmanager
    def running(self, stage: int, received: Tensor | None) -> Iterator[None]:
        """Inside, the model runs as one stage; `take_sent` is what it gives to the next one."""
        self.active, self.received, self.sent = stage, received, None
        try:
            yield
        finally:
            self.active = self.received = None

    def take_sent(self) -> Tensor:
        """The hidden states behind the stage that ran last; they are not kept."""
        assert self.sent is not None
        sent, self.sent = self.sent, None
        return sent

    def pass_block(self, number: int, hidden: Tensor) -> Tensor:
        """What a block outside of the stage gives."""
        blocks = self.stages[self.active or 0]
        if number == blocks.start - 1:
            assert self.received is not None
            return self.received.unflatten(2, self.chain.sizes)
        if number == blocks.stop:
            self.sent = hidden.flatten(2)
            # What a model does in place must not reach the next stage, and behind its last norm it knows whole sequences.
            rows, tokens, *sizes = hidden.shape
            return hidden.new_zeros(rows, tokens * self.sequence_parts, *sizes)
        return hidden


class PassThroughBlock(nn.Module):
    """In the place of a block of another stage."""

    def __init__(self, relay: StageIO, number: int, block: nn.Module):
        super().__init__()
        # Models ask their blocks which kind of attention they have.
        self.__dict__.update({key: v for key, v in vars(block).items() if isinstance(v, str | int | float | bool)})
        self.relay, self.number = relay, number

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = self.relay.pass_block(self.number, args[0] if args else kwargs["hidden_states"])
        place = self.relay.chain.places[self.number]
        return hidden if place is None else tuple(hidden if i == place[0] else None for i in range(place[1]))


class PassedEnd(nn.Module):
    """In the place of what another stage has before or behind its blocks: embedding, last norm, head."""

    def __init__(self, relay: StageIO, is_embedding: bool, makes_numbers: bool):
        super().__init__()
        self.relay, self.is_embedding, self.makes_numbers = relay, is_embedding, makes_numbers

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        received = self.relay.received
        if received is not None and self.is_embedding:  # of the right shape; its numbers are not used
            return torch.zeros_like(received)
        if received is not None and self.makes_numbers:  # positions, say, which are added
            return received.new_zeros(())
        return args[0] if args else next(iter(kwargs.values()))

    @property
    def weight(self) -> Tensor:
        """Models ask their ends where they are and in which format; there are no numbers."""
        return torch.empty(0, dtype=self.relay.chain.dtype, device=self.relay.device)


def cut_model(
    model: PreTrainedModel, anatomy: Anatomy, chain: BlockChain, stages: list[range], own: tuple[int, ...]
) -> tuple[Anatomy, StageIO]:
    """Take from a model what is not in the stages of this rank, in place.

    Call `install_stage_switch` when all hooks of the model are in place.

    Args:
        model: whole, on the meta device or not.
        anatomy: its roles.
        chain: from `read_chain`.
        stages: blocks of each stage.
        own: stages of this rank, first to last.

    Returns:
        The anatomy of what is left, with an empty name for an embedding or head that is elsewhere; and the relay.
    """
    relay = StageIO(stages, own, chain, _first_trained(model, anatomy, chain, stages))
    kept = {number for stage in own for number in stages[stage]}
    for number, block in enumerate(anatomy.blocks):
        if number not in kept:
            _put(model, block.name, PassThroughBlock(relay, number, model.get_submodule(block.name)))
    ends = [(chain.first, relay.has_first()), (chain.last, relay.has_last())]
    for name in (name for names, is_here in ends if not is_here for name in names):
        _put(model, name, _passed_end(relay, anatomy, name, model.get_submodule(name)))
    left = replace(
        anatomy,
        blocks=tuple(block for number, block in enumerate(anatomy.blocks) if number in kept),
        embedding=anatomy.embedding if relay.has_first() else "",
        final_norm=anatomy.final_norm if relay.has_last() else None,
        head=anatomy.head if relay.has_last() else "",
        tied=anatomy.tied and relay.has_first() and relay.has_last(),
    )
    return left, relay


def stage_modules(anatomy: Anatomy, chain: BlockChain, stages: list[range], stage: int) -> list[str]:
    """Names of the modules with weights of one stage: its blocks, and the ends of the model that it has.

    Args:
        anatomy: of the whole model.
        chain: from `read_chain`.
        stages: blocks of each stage.
        stage: number of the stage.
    """
    first = chain.first if stage == 0 else ()
    last = chain.last if stage == len(stages) - 1 else ()
    return [*first, *(anatomy.blocks[number].name for number in stages[stage]), *last]


def _first_trained(model: nn.Module, anatomy: Anatomy, chain: BlockChain, stages: list[range]) -> int:
    for stage in range(len(stages)):
        for name in stage_modules(anatomy, chain, stages, stage):
            if any(parameter.requires_grad for parameter in model.get_submodule(name).parameters()):
                return stage
    return len(stages)


def install_stage_switch(model: PreTrainedModel, anatomy: Anatomy, relay: StageIO) -> None:
    """Let each forward of a cut model be that of the stage that its relay names; the last step of splitting a model.

    Args:
        model: cut.
        anatomy: of the whole model.
        relay: of `cut_model`.
    """
    numbers = [number for stage in relay.own for number in relay.stages[stage]]
    choices: list[tuple[dict[str, Any], str, nn.Module, nn.Module, Callable[[range], bool]]] = []

    def choose(name: str, passed: nn.Module, runs: Callable[[range], bool]) -> None:
        parent, _, last = name.rpartition(".")
        present = model.get_submodule(name)
        choices.append((model.get_submodule(parent)._modules, last, present, passed, runs))

    for number in numbers:
        name = anatomy.blocks[number].name
        choose(name, PassThroughBlock(relay, number, model.get_submodule(name)), partial(_holds, number))
    if relay.has_first():
        for name in relay.chain.first:
            choose(name, _passed_end(relay, anatomy, name, model.get_submodule(name)), lambda blocks: blocks.start == 0)
    if relay.has_last():
        stop = len(anatomy.blocks)
        for name in relay.chain.last:
            choose(
                name, _passed_end(relay, anatomy, name, model.get_submodule(name)), lambda blocks: blocks.stop == stop
            )

    def enter(*_: object) -> None:
        if relay.active is None:
            raise ModelError(
                "a model that is cut into stages was called",
                rule="a pipeline is run by its schedule",
                fix="use weft.train.step.forward_backward or evaluate, or set plan.parallel.pp = 1",
            )
        blocks = relay.stages[relay.active]
        relay.device = next(model.parameters()).device
        for table, key, present, passed, runs in choices:
            table[key] = present if runs(blocks) else passed

    def leave(*_: object) -> None:
        for table, key, present, *_rest in choices:
            table[key] = present

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)


def _holds(number: int, blocks: range) -> bool:
    return number in blocks


def _passed_end(relay: StageIO, anatomy: Anatomy, name: str, module: nn.Module) -> PassedEnd:
    is_embedding = name == anatomy.embedding
    return PassedEnd(relay, is_embedding, isinstance(module, nn.Embedding) and not is_embedding)


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    model.get_submodule(parent)._modules[last] = module
