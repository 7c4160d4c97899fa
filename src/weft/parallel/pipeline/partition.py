"""Partitioning of a model into pipeline stages: blocks per stage, and one model per rank that runs as any of its stages.

A rank keeps the original model with all parameter names, but without the blocks and ends (embedding, last norm, head) of other
ranks. These are replaced by modules without weights that pass hidden states on. To run one stage, all blocks and ends outside
of it are bypassed in this way: the last block before the stage returns the received hidden states, and the input of the first
block after the stage is the output of the stage. Everything that a model does around its blocks (masks, rotary embeddings,
scaled embeddings, capped logits) still runs, and has no effect on stages that do not need it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from weft.anatomy.build import build_on_meta
from weft.anatomy.roles import Anatomy, standard_name
from weft.anatomy.transformers import EXPERTS, document_masks
from weft.errors import ModelError, PlanError
from weft.parallel.pipeline.taint import BlockChain, TaintError, trace_block_io

PROBE_SHAPE = (1, 4)  # rows and tokens of the forward that traces how blocks are called


def trace_block_chain(model: PreTrainedModel, anatomy: Anatomy, dtype: torch.dtype) -> BlockChain:
    """Trace how a model calls its blocks, on a copy on the meta device, and test-run stages of the copy.

    Args:
        model: full model; it is not changed.
        anatomy: anatomy of the model.
        dtype: dtype of the weights in forward.

    Raises:
        PlanError: a part of the model uses values of another part that are not hidden states, or cannot run without it.
    """
    random = [key for key, value in model.config.get_text_config().to_dict().items() if "layerdrop" in key and value]
    if random:
        raise _cannot_partition(anatomy, f"{random[0]} skips blocks at random")
    try:
        probe: Any = build_on_meta(model.config, dtype)
    except ModelError:
        raise _cannot_partition(anatomy, "it cannot be built from its configuration alone") from None
    for name, module in probe.named_modules():
        if EXPERTS.fullmatch(standard_name(model.config.get_text_config(), name)) and not isinstance(
            module, nn.ModuleList
        ):
            module.forward = lambda hidden, *args, **kwargs: (
                hidden
            )  # routing depends on values, which meta tensors lack
    positions = torch.arange(PROBE_SHAPE[1]).remainder(2)[None]  # two documents, because one needs no mask
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
        _trial_run(probe, anatomy, chain)
    except TaintError as error:
        raise _cannot_partition(anatomy, str(error)) from None
    except Exception as error:  # each family fails in a different way, and its message goes to the user
        raise _cannot_partition(anatomy, f"its forward fails on the meta device: {error}") from None
    return chain


def _trial_run(probe: Any, anatomy: Anatomy, chain: BlockChain) -> None:
    """Run the probe as its first block alone and as its last block alone, so that each part is bypassed once."""
    num_blocks = len(anatomy.blocks)
    stages = [range(1), range(1, num_blocks - 1), range(num_blocks - 1, num_blocks)]
    stage_io = partition_model(probe, anatomy, chain, stages, (0, 1, 2))[1]
    install_stage_switch(probe, anatomy, stage_io)
    for trains in (False, True):
        probe.train(trains)
        with torch.set_grad_enabled(trains):
            with stage_io.running(0, None):
                probe()
            with stage_io.running(2, stage_io.take_sent().detach().requires_grad_(trains)):
                probe()


def _cannot_partition(anatomy: Anatomy, what: str) -> PlanError:
    return PlanError(
        f"{anatomy.family} cannot be cut into stages: {what}",
        where=f"plan.parallel.pp, model_type {anatomy.family}",
        rule="only hidden states pass from block to block",
        fix="set plan.parallel.pp = 1",
    )


# Model that runs as one of its stages


@dataclass
class StageIO:
    """Active stage of a partitioned model, with its received and sent hidden states."""

    stages: list[range]
    """Blocks of each stage of the full model."""
    own: tuple[int, ...]
    """Stages of this rank."""
    chain: BlockChain
    first_trained: int
    """Index of the first stage with a parameter that trains; the number of stages if no parameter trains."""
    active: int | None = None
    sequence_parts: int = 1
    """Number of tp ranks that share each sequence between matrices (sequence parallelism)."""
    received: Tensor | None = None
    sent: Tensor | None = None
    device: torch.device | None = None
    """Device of the model."""

    def has_first(self) -> bool:
        return self.own[0] == 0

    def has_last(self) -> bool:
        return self.own[-1] == len(self.stages) - 1

    @contextmanager
    def running(self, stage: int, received: Tensor | None) -> Iterator[None]:
        """Context in which the model runs as one stage; `take_sent` returns the output of the stage."""
        self.active, self.received, self.sent = stage, received, None
        try:
            yield
        finally:
            self.active = self.received = None

    def take_sent(self) -> Tensor:
        """Remove and return the hidden states after the stage that ran last."""
        assert self.sent is not None
        sent, self.sent = self.sent, None
        return sent

    def pass_block(self, index: int, hidden: Tensor) -> Tensor:
        """Output of a block outside the active stage."""
        blocks = self.stages[self.active or 0]
        if index == blocks.start - 1:
            assert self.received is not None
            return self.received.unflatten(2, self.chain.sizes)
        if index == blocks.stop:
            self.sent = hidden.flatten(2)
            # Zeros, so that in-place operations do not reach the next stage; full length, as expected after the last norm.
            rows, tokens, *sizes = hidden.shape
            return hidden.new_zeros(rows, tokens * self.sequence_parts, *sizes)
        return hidden


class PassThroughBlock(nn.Module):
    """Placeholder for a block outside the active stage."""

    def __init__(self, stage_io: StageIO, block_index: int, block: nn.Module):
        super().__init__()
        # Models read the attention type from their blocks.
        self.__dict__.update({key: v for key, v in vars(block).items() if isinstance(v, str | int | float | bool)})
        self.stage_io, self.block_index = stage_io, block_index

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = self.stage_io.pass_block(self.block_index, args[0] if args else kwargs["hidden_states"])
        position = self.stage_io.chain.hidden_positions[self.block_index]
        return hidden if position is None else tuple(hidden if i == position[0] else None for i in range(position[1]))


class PassThroughEnd(nn.Module):
    """Placeholder for a module before or after the blocks that runs on another stage: embedding, last norm, head."""

    def __init__(self, stage_io: StageIO, is_embedding: bool, is_added: bool):
        super().__init__()
        self.stage_io, self.is_embedding, self.is_added = stage_io, is_embedding, is_added

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        received = self.stage_io.received
        if received is not None and self.is_embedding:  # only the shape is used
            return torch.zeros_like(received)
        if received is not None and self.is_added:  # for example position embeddings
            return received.new_zeros(())
        return args[0] if args else next(iter(kwargs.values()))

    @property
    def weight(self) -> Tensor:
        """Empty weight: models read the device and dtype of their ends from it."""
        return torch.empty(0, dtype=self.stage_io.chain.dtype, device=self.stage_io.device)


def partition_model(
    model: PreTrainedModel, anatomy: Anatomy, chain: BlockChain, stages: list[range], own: tuple[int, ...]
) -> tuple[Anatomy, StageIO]:
    """Remove everything outside the stages of this rank from a model, in place.

    Call `install_stage_switch` after all hooks of the model are registered.

    Args:
        model: full model, on the meta device or on a real one.
        anatomy: anatomy of the model.
        chain: result of `trace_block_chain`.
        stages: blocks of each stage.
        own: stages of this rank, in ascending order.

    Returns:
        The anatomy of the remaining model, with an empty name for an embedding or head on another rank; and the `StageIO`.
    """
    stage_io = StageIO(stages, own, chain, _first_trained(model, anatomy, chain, stages))
    kept = {index for stage in own for index in stages[stage]}
    for index, block in enumerate(anatomy.blocks):
        if index not in kept:
            _replace_module(model, block.name, PassThroughBlock(stage_io, index, model.get_submodule(block.name)))
    ends = [(chain.first, stage_io.has_first()), (chain.last, stage_io.has_last())]
    for name in (name for names, is_here in ends if not is_here for name in names):
        _replace_module(model, name, _pass_through_end(stage_io, anatomy, name, model.get_submodule(name)))
    remaining = replace(
        anatomy,
        blocks=tuple(block for index, block in enumerate(anatomy.blocks) if index in kept),
        tower_blocks=(),
        embedding=anatomy.embedding if stage_io.has_first() else "",
        final_norm=anatomy.final_norm if stage_io.has_last() else None,
        head=anatomy.head if stage_io.has_last() else "",
        tied=anatomy.tied and stage_io.has_first() and stage_io.has_last(),
    )
    return remaining, stage_io


def stage_modules(anatomy: Anatomy, chain: BlockChain, stages: list[range], stage: int) -> list[str]:
    """Names of the modules with weights of one stage: its blocks, and the embedding, last norm or head that belong to it.

    Args:
        anatomy: anatomy of the full model.
        chain: result of `trace_block_chain`.
        stages: blocks of each stage.
        stage: index of the stage.
    """
    first = chain.first if stage == 0 else ()
    last = chain.last if stage == len(stages) - 1 else ()
    return [*first, *(anatomy.blocks[index].name for index in stages[stage]), *last]


def _first_trained(model: nn.Module, anatomy: Anatomy, chain: BlockChain, stages: list[range]) -> int:
    for stage in range(len(stages)):
        for name in stage_modules(anatomy, chain, stages, stage):
            if any(parameter.requires_grad for parameter in model.get_submodule(name).parameters()):
                return stage
    return len(stages)


def install_stage_switch(model: PreTrainedModel, anatomy: Anatomy, stage_io: StageIO) -> None:
    """Make each forward of a partitioned model run its active stage; the last step of `parallelize`.

    Args:
        model: partitioned model.
        anatomy: anatomy of the full model.
        stage_io: result of `partition_model`.
    """
    indices = [index for stage in stage_io.own for index in stage_io.stages[stage]]
    choices: list[tuple[dict[str, Any], str, nn.Module, nn.Module, Callable[[range], bool]]] = []

    def choose(name: str, placeholder: nn.Module, runs: Callable[[range], bool]) -> None:
        parent, _, last = name.rpartition(".")
        present = model.get_submodule(name)
        choices.append((model.get_submodule(parent)._modules, last, present, placeholder, runs))

    for index in indices:
        name = anatomy.blocks[index].name
        choose(name, PassThroughBlock(stage_io, index, model.get_submodule(name)), partial(_holds, index))
    if stage_io.has_first():
        for name in stage_io.chain.first:
            choose(
                name,
                _pass_through_end(stage_io, anatomy, name, model.get_submodule(name)),
                lambda blocks: blocks.start == 0,
            )
    if stage_io.has_last():
        stop = len(anatomy.blocks)
        for name in stage_io.chain.last:
            choose(
                name,
                _pass_through_end(stage_io, anatomy, name, model.get_submodule(name)),
                lambda blocks: blocks.stop == stop,
            )

    def enter(*_: object) -> None:
        if stage_io.active is None:
            raise ModelError(
                "a model that is partitioned into pipeline stages was called directly",
                rule="the pipeline schedule runs the stages",
                fix="use weft.training.step.forward_backward or evaluate, or set plan.parallel.pp = 1",
            )
        blocks = stage_io.stages[stage_io.active]
        stage_io.device = next(model.parameters()).device
        for table, key, present, placeholder, runs in choices:
            table[key] = present if runs(blocks) else placeholder

    def leave(*_: object) -> None:
        for table, key, present, *_rest in choices:
            table[key] = present

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)


def _holds(index: int, blocks: range) -> bool:
    return index in blocks


def _pass_through_end(stage_io: StageIO, anatomy: Anatomy, name: str, module: nn.Module) -> PassThroughEnd:
    is_embedding = name == anatomy.embedding
    return PassThroughEnd(stage_io, is_embedding, isinstance(module, nn.Embedding) and not is_embedding)


def _replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    model.get_submodule(parent)._modules[last] = module
