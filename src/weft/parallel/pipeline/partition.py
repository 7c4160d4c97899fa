"""Partitioning of a model into pipeline stages: blocks per stage, and one model per rank that runs as any of its stages.

A rank keeps the original model with all parameter names, but without the blocks and ends (embedding, norms, head) of other
ranks. These are replaced by modules without weights that pass hidden states on. To run one stage, all blocks and ends outside
of it are bypassed in this way: the blocks of the stage get the values of earlier stages in place of their arguments, and what
later blocks would get is the message to the next stage: hidden states, and with several stacks of blocks also the output of an
encoder or the input of a decoder. Everything that a model does around its blocks (masks, rotary embeddings, scaled embeddings,
capped logits) still runs, and has no effect on stages that do not need it.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from weft.anatomy.roles import Anatomy, Block
from weft.errors import ModelError, PlanError
from weft.parallel.model_checks import layer_drop
from weft.parallel.pipeline.probe import Shapes, build_probe, trace_model
from weft.parallel.pipeline.taint import BlockChain, TaintError, hidden_of, replace_tensors, tensors_of


def trace_block_chain(model: PreTrainedModel, anatomy: Anatomy, dtype: torch.dtype) -> tuple[BlockChain, Shapes]:
    """Trace how a model calls its blocks, on a copy on the meta device, and test-run stages of the copy.

    Args:
        model: full model; it is not changed.
        anatomy: anatomy of the model.
        dtype: dtype of the weights in forward.

    Returns:
        The chain, and the shapes of its values.

    Raises:
        PlanError: a part of the model uses values of another part that a stage cannot receive, or cannot run without it.
    """
    if key := layer_drop(model.config.to_dict()):
        raise _cannot_partition(anatomy, f"{key} skips blocks at random")
    try:
        probe = build_probe(model, dtype)
        chain, shapes = trace_model(probe, anatomy)
        _trial_run(probe, anatomy, chain)
    except TaintError as error:
        raise _cannot_partition(anatomy, str(error)) from None
    except Exception as error:  # each family fails in a different way, and its message goes to the user
        raise _cannot_partition(anatomy, f"its forward fails on the meta device: {error}") from None
    return chain, shapes


def _trial_run(probe: Any, anatomy: Anatomy, chain: BlockChain) -> None:
    """Run the probe as its first block alone and as its last block alone, so that each part is bypassed once."""
    num_blocks = len(anatomy.chained_blocks)
    stages = [range(1), range(1, num_blocks - 1), range(num_blocks - 1, num_blocks)]
    stages = [stage for stage in stages if stage]
    stage_io = partition_model(probe, anatomy, chain, stages, tuple(range(len(stages))))[1]
    install_stage_switch(probe, anatomy, stage_io)
    for trains in (False, True):
        probe.train(trains)
        received: list[Tensor] = []
        with torch.set_grad_enabled(trains):
            for stage in range(len(stages)):
                with stage_io.running(stage, received):
                    probe()
                received = [tensor.detach().requires_grad_(trains) for tensor in stage_io.take_sent()]


def _cannot_partition(anatomy: Anatomy, what: str) -> PlanError:
    return PlanError(
        f"{anatomy.family} cannot be cut into stages: {what}",
        where=f"plan.parallel.pp, model_type {anatomy.family}",
        rule="stages exchange the floating-point arguments of blocks: hidden states, outputs of an encoder",
        fix="set plan.parallel.pp = 1",
    )


# Model that runs as one of its stages


@dataclass
class StageIO:
    """Active stage of a partitioned model, with the values that it receives and sends."""

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
    received: dict[int, Tensor] = field(default_factory=dict)
    """Values of earlier stages, by their indices in the chain."""
    captured: dict[int, Tensor] = field(default_factory=dict)
    """Values of the active stage that later blocks would get."""
    sent: tuple[int, ...] = ()
    """Values in the message of the active stage."""
    device: torch.device | None = None
    """Device of the model."""
    ends: dict[str, "PassThroughEnd"] = field(default_factory=dict)
    """Placeholders of all modules with weights outside of blocks, by name."""

    def has_first(self) -> bool:
        return self.own[0] == 0

    def has_last(self) -> bool:
        return self.own[-1] == len(self.stages) - 1

    def message_into(self, stage: int) -> tuple[int, ...]:
        """Values in a message to a stage from the stage before it; none for the first stage."""
        return self.chain.into(self.stages[stage].start) if 0 < stage < len(self.stages) else ()

    @contextmanager
    def running(self, stage: int, received: Sequence[Tensor]) -> Iterator[None]:
        """Context in which the model runs as one stage; `take_sent` returns the message of the stage after it."""
        self.active, self.captured = stage, {}
        self.received = dict(zip(self.message_into(stage), received, strict=True))
        self.sent = self.message_into(stage + 1)
        try:
            yield
        finally:
            self.active = None

    def take_sent(self) -> list[Tensor]:
        """Remove and return the message of the stage that ran last."""
        values = self.received | self.captured
        self.received, self.captured = {}, {}
        return [values[index] for index in self.sent]

    def received_hidden(self) -> Tensor:
        """Hidden states that the first block of the active stage receives."""
        assert self.active is not None
        inputs = self.chain.inputs[self.stages[self.active].start]
        return self.received[next(value for path, value in inputs if path in ((0,), ("hidden_states",)))]

    def inject(
        self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of a block of the active stage, with the values of earlier stages."""
        received = ((path, self.received[value]) for path, value in self.chain.inputs[index] if value in self.received)
        return replace_tensors(args, kwargs, received)

    def pass_block(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Output of a block outside the active stage."""
        hidden, blocks = hidden_of(args, kwargs), self.stages[self.active or 0]
        if index < blocks.stop:
            return hidden
        places = {value: path for path, value in self.chain.inputs[index] if value in self.sent}
        missing = places.keys() - self.received.keys() - self.captured.keys()
        if missing:
            given = dict(tensors_of(args, kwargs))
            self.captured |= {value: given[places[value]] for value in missing}
        if index > blocks.stop and not any(value is hidden for value in self.captured.values()):
            return hidden
        # Zeros, so that in-place operations do not reach the next stage; full length, as expected after the last norm.
        rows, tokens, *sizes = hidden.shape
        return hidden.new_zeros(rows, tokens * self.sequence_parts if index == blocks.stop else tokens, *sizes)


class PassThroughBlock(nn.Module):
    """Placeholder for a block outside the active stage."""

    def __init__(self, stage_io: StageIO, block_index: int, block: nn.Module):
        super().__init__()
        # Models read the attention type from their blocks.
        self.__dict__.update({key: v for key, v in vars(block).items() if isinstance(v, str | int | float | bool)})
        self.stage_io, self.block_index = stage_io, block_index

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = self.stage_io.pass_block(self.block_index, args, kwargs)
        position = self.stage_io.chain.hidden_positions[self.block_index]
        return hidden if position is None else tuple(hidden if i == position[0] else None for i in range(position[1]))


class PassThroughEnd(nn.Module):
    """Placeholder for a module outside of the blocks that runs on another stage: embedding, norm, head.

    It returns NaN of the shape that the module would return: it shows in the loss if a stage uses it. The ends of a model with
    one stack of blocks may be split over tp and sequences: their placeholders return what has the shape of hidden states.
    """

    def __init__(self, stage_io: StageIO, anatomy: Anatomy, name: str, module: nn.Module):
        super().__init__()
        has_roles = not anatomy.encoder_blocks and anatomy.has_roles
        self.stage_io, self.is_embedding = stage_io, has_roles and name == anatomy.embedding
        self.is_added = has_roles and isinstance(module, nn.Embedding) and not self.is_embedding
        self.keeps_shape = has_roles and name in (anatomy.final_norm, anatomy.head)
        self.is_last = name in stage_io.chain.last
        self.__dict__["original"] = module  # not a child, because its weights are none of the model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        stage_io = self.stage_io
        if self.is_embedding and stage_io.sequence_parts > 1:  # its output is shorter than its argument
            return torch.zeros_like(stage_io.received_hidden().flatten(2))
        if self.is_added and stage_io.sequence_parts > 1:  # for example position embeddings
            return stage_io.received_hidden().new_zeros(())
        if self.keeps_shape:
            return args[0] if args else next(iter(kwargs.values()))
        original, dtype = self.original, stage_io.chain.values[0].dtype
        own = next(original.parameters()).dtype

        def shape_of(like: Tensor) -> Tensor:
            kept = own if like.is_floating_point() else like.dtype
            return torch.empty_strided(like.shape, like.stride(), dtype=kept, device="meta")

        to_meta = partial(tree_map_only, Tensor, shape_of)
        with torch.no_grad():
            output = original(*to_meta(args), **to_meta(kwargs))

        def fill(like: Tensor) -> Tensor:
            kept, value = (dtype, float("nan")) if like.is_floating_point() else (like.dtype, 0)
            if self.is_last:  # for example logits, without memory
                return torch.full((), value, dtype=kept, device=stage_io.device).expand(like.shape)
            return torch.full(like.shape, value, dtype=kept, device=stage_io.device)

        return tree_map_only(Tensor, fill, output)

    def show_weights(self, dtype: torch.dtype, device: torch.device | None) -> None:
        """Have weights of zeros during a forward: models read the dtype, the device and the shape of their parts from them."""
        for name, weight in self.original.named_parameters(recurse=False):
            zeros = torch.zeros((), dtype=dtype, device=device).expand(weight.shape)
            self._parameters[name] = nn.Parameter(zeros, requires_grad=False)

    def hide_weights(self) -> None:
        """Have no weights, as `model.parameters()` shall not list them."""
        self._parameters.clear()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # for example the stride of a convolution
            return getattr(self.__dict__["original"], name)


def on_meta(module: nn.Module) -> nn.Module:
    """Copy of a module whose weights and buffers have no memory."""
    memo: dict[int, Any] = {id(x): torch.empty_like(x, device="meta") for x in module.buffers()}
    for weight in module.parameters():
        memo[id(weight)] = nn.Parameter(torch.empty_like(weight, device="meta"), weight.requires_grad)
    return copy.deepcopy(module, memo)


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
    for index, block in enumerate(anatomy.chained_blocks):
        if index not in kept:
            _replace_module(model, block.name, PassThroughBlock(stage_io, index, model.get_submodule(block.name)))
    here = {name for stage in own for name in stage_modules(anatomy, chain, stages, stage)}
    for name in chain.outside():
        stage_io.ends[name] = PassThroughEnd(stage_io, anatomy, name, on_meta(model.get_submodule(name)))
        if name not in here:
            _replace_module(model, name, stage_io.ends[name])

    def remaining(blocks: tuple[Block, ...]) -> tuple[Block, ...]:
        return tuple(block for block in blocks if block.name in here)

    return replace(
        anatomy,
        blocks=remaining(anatomy.blocks),
        encoder_blocks=remaining(anatomy.encoder_blocks),
        tower_blocks=(),
        embedding=anatomy.embedding if stage_io.has_first() else "",
        final_norm=anatomy.final_norm if stage_io.has_last() else None,
        head=anatomy.head if stage_io.has_last() else "",
        tied=anatomy.tied and stage_io.has_first() and stage_io.has_last(),
    ), stage_io


def stage_modules(anatomy: Anatomy, chain: BlockChain, stages: list[range], stage: int) -> list[str]:
    """Names of the modules with weights of one stage: its blocks, and the embedding, last norm or head that belong to it.

    Args:
        anatomy: anatomy of the full model.
        chain: result of `trace_block_chain`.
        stages: blocks of each stage.
        stage: index of the stage.
    """
    first = chain.first if stage == 0 else ()
    between = [name for name, block in chain.between if block in stages[stage]]
    last = chain.last if stage == len(stages) - 1 else ()
    return [*first, *(anatomy.chained_blocks[index].name for index in stages[stage]), *between, *last]


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
    choices: list[tuple[dict[str, Any], str, nn.Module, nn.Module, int]] = []

    def choose(name: str, placeholder: nn.Module, stage: int) -> None:
        parent, _, last = name.rpartition(".")
        present = model.get_submodule(name)
        choices.append((model.get_submodule(parent)._modules, last, present, placeholder, stage))

    for stage in stage_io.own:
        for index in stage_io.stages[stage]:
            name = anatomy.chained_blocks[index].name
            block = model.get_submodule(name)
            choose(name, PassThroughBlock(stage_io, index, block), stage)
            inject = partial(stage_io.inject, index)
            block.register_forward_pre_hook(  # before those of FSDP2, which cast arguments
                lambda _, args, kwargs, inject=inject: inject(args, kwargs), prepend=True, with_kwargs=True
            )
        for name in stage_modules(anatomy, stage_io.chain, stage_io.stages, stage):
            if name in stage_io.ends:
                choose(name, stage_io.ends[name], stage)

    def enter(*_: object) -> None:
        if stage_io.active is None:
            raise ModelError(
                "a model that is partitioned into pipeline stages was called directly",
                rule="the pipeline schedule runs the stages",
                fix="use train_step or evaluate of weft.training.step, or set plan.parallel.pp = 1",
            )
        stage_io.device = next(model.parameters()).device
        for table, key, present, placeholder, stage in choices:
            table[key] = present if stage_io.active == stage else placeholder
        for end in stage_io.ends.values():
            end.show_weights(stage_io.chain.values[0].dtype, stage_io.device)

    def leave(*_: object) -> None:
        for end in stage_io.ends.values():
            end.hide_weights()
        for table, key, present, *_rest in choices:
            table[key] = present

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)


def _replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    model.get_submodule(parent)._modules[last] = module
