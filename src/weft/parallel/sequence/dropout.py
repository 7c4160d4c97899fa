"""Layout-invariant dropout: the dropped elements depend only on row, token, feature, layer and step.

A stateful generator cannot do that: ranks that hold different parts of a tensor would draw different numbers for it. The
`nn.Dropout` modules of the model are replaced by `LayoutInvariantDropout`, and attention with dropout is computed by
`context_attention`. Both hash the global index of each element (`weft.compute.dropout`). A row is identified by a hash of its
tokens, so that the batch needs no extra information. If the attention of a model does not go through Transformers'
AttentionInterface and only data parallelism splits the batch, the attention keeps its own dropout.

Encoders, encoder-decoders and models of images or diffusion keep their dropout, as do language models beside encoders under cp.
Ranks of a tp or cp group draw the same random numbers then (`share_generator`).
"""

import zlib
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from weft.compute.dropout import dropout, layer_seed, mix
from weft.errors import ModelError
from weft.parallel.sequence.context_grid import own_positions
from weft.topology.mesh import CONTEXT_AXES, ranks_along

if TYPE_CHECKING:
    from weft.parallel.build import Build

STEPS_PER_SEED = 2**24  # more than the steps of a job, so that each pair of seed and step has its own dropout seed


@dataclass
class DropoutContext:
    """Seed, rows and tokens of the current forward on this rank; updated before each forward."""

    tp_rank: int
    tp_ranks: int
    full_rows: bool
    """True if tokens and features are not split. Dropout of a tensor of unknown shape is then left to PyTorch."""
    seed: int | None = None
    """Seed of the step; None: the number of the forward is the seed."""
    forwards: int = 0
    rows: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """Identifier of each row, int64 [B]."""
    positions: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """Natural positions of the tokens of this cp rank, int64 [S / cp]; sequence parallelism splits them further."""
    hashed_seed: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
    """Seed of this forward in 32 bits, in host memory. A tensor, because integers are constants of compiled blocks."""

    def begin_forward(self) -> None:
        """Set the seed of the forward that begins."""
        self.forwards += 1
        seed = self.forwards if self.seed is None else self.seed
        low, high = seed % 2**32, seed // 2**32
        self.hashed_seed = torch.tensor((low * 0x9E3779B1 + high * 0x85EBCA6B) % 2**32, device="cpu")

    def attention_arguments(self, name: str, heads: int) -> dict[str, Any]:
        """Arguments of `weft.parallel.sequence.context.attend` for the dropout of an attention module.

        Args:
            name: name of the module.
            heads: query heads of this rank.
        """
        seed = layer_seed(int(self.hashed_seed), _layer_id(name))
        return {"seed": seed, "rows": self.rows, "first_head": self.tp_rank * heads}


class LayoutInvariantDropout(nn.Module):
    """Replacement of `nn.Dropout` for tensors [B, S, H] that drops the same elements in every layout."""

    def __init__(self, p: float, layer_id: int, context: DropoutContext, split_features: bool = False):
        super().__init__()
        self.p, self.context, self.split_features = p, context, split_features
        self.layer_id = torch.tensor(layer_id, device="cpu")  # a tensor, so that compiled blocks share their code

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        context, positions = self.context, self.context.positions
        if x.ndim == 3 and x.shape[1] * context.tp_ranks == len(positions) and x.shape[1] < len(positions):
            positions = positions.chunk(context.tp_ranks)[context.tp_rank]  # sequence parallelism
        if x.shape[:-1] != (len(context.rows), len(positions)):
            if context.full_rows:
                return F.dropout(x, self.p)
            raise ModelError(
                f"dropout of a tensor of shape {tuple(x.shape)}",
                rule=f"dropout supports tensors of shape [{len(context.rows)}, {len(positions)}, features] when rows are split",
                fix="set this dropout to 0 in the configuration of the model",
            )
        first = context.tp_rank * x.shape[-1] if self.split_features else 0
        return dropout(x, context.hashed_seed, self.layer_id, context.rows, positions, first, self.p)


def has_attention_dropout(model: PreTrainedModel) -> bool:
    """True if the configuration sets a dropout rate for attention probabilities."""
    config = model.config.get_text_config()
    return any(float(getattr(config, name, 0) or 0) > 0 for name in ("attention_dropout", "attn_pdrop"))


def replace_dropout(
    model: Any, mesh: DeviceMesh, multiple: int = 1, split_inputs: Collection[nn.Module] = ()
) -> DropoutContext | None:
    """Replace every `nn.Dropout` of a model by layout-invariant dropout, in place.

    Args:
        model: model after tensor parallelism.
        mesh: device mesh with the axes of `weft.topology.mesh`.
        multiple: length to whose multiples rows are padded (`weft.parallel.sequence.rows.row_multiple`).
        split_inputs: dropout modules whose input features are split over tp.

    Returns:
        Context of all its dropouts, also of attention; None for a model without dropout.
    """
    dropouts = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Dropout) and module.p > 0
    }
    if not dropouts and not has_attention_dropout(model):
        return None
    context = DropoutContext(
        mesh.get_local_rank("tp"), ranks_along(mesh, "tp"), ranks_along(mesh, *CONTEXT_AXES, "tp") == 1
    )
    for name, module in dropouts.items():
        parent, _, last = name.rpartition(".")
        is_split = module in split_inputs
        own = LayoutInvariantDropout(module.p, _layer_id(name), context, is_split)
        setattr(model.get_submodule(parent), last, own)

    def update(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        context.begin_forward()
        tokens = args[0] if args else kwargs.get("input_ids")
        if tokens is not None:
            context.rows = hash_rows(tokens)
            padded = tokens.shape[1] + -tokens.shape[1] % multiple
            context.positions = own_positions(padded, mesh, tokens.device)

    model.register_forward_pre_hook(update, with_kwargs=True)
    return context


def share_generator(model: nn.Module, group: dist.ProcessGroup, device_type: str) -> None:
    """Let all ranks of a group draw the same random numbers in a forward of a model, in place.

    Dropout of whole activations is then the same, also that of functions, and whole blocks are left out alike (LayerDrop).
    Heads and hidden units of different ranks are dropped by the same numbers. After a forward, the generators continue as if
    it had drawn one number, which is the seed of the first rank.

    Args:
        model: model after tensor or context parallelism.
        group: ranks of tp or cp, which have the same rows.
        device_type: device of the model.
    """
    forwards = ExitStack()
    devices = [] if device_type == "cpu" else [torch.get_device_module(device_type).current_device()]

    def enter(module: nn.Module, _: Any) -> None:
        if not module.training:
            return
        seed = torch.randint(2**62, (), device=device_type)
        dist.broadcast(seed, group=group, group_src=0)
        forwards.enter_context(torch.random.fork_rng(devices, device_type=device_type))
        torch.manual_seed(int(seed))

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(lambda *_: forwards.close(), always_call=True)


def _layer_id(name: str) -> int:
    """Identifier of a module by name, the same on every rank whichever part of the model it holds."""
    return zlib.crc32(name.encode())


def hash_rows(tokens: Tensor) -> Tensor:
    """32-bit hash of each full row of tokens [B, S], int64 [B]."""
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    return mix(mix(tokens ^ mix(positions)).sum(1) & 0xFFFFFFFF)


def place_dropout(build: "Build") -> None:
    """Step of `parallelize`: dropout that depends on row and token, or the same random numbers on ranks that share rows.

    It needs to know the modules whose input features tensor parallelism has split.
    """
    build.begin("place_dropout", "split_tensors", "divide_heads")
    model, mesh, is_decoder = build.model, build.mesh, build.full_anatomy.is_decoder
    by_heads = bool(build.choices.head_stacks)
    if by_heads or (build.plan.parallel.tp > 1 and not is_decoder):
        share_generator(model, mesh.get_group("cp_ulysses" if by_heads else "tp"), mesh.device_type)
    elif is_decoder:
        split_inputs = build.runtime.tensor_split.split_inputs
        build.runtime.dropout = replace_dropout(model, mesh, build.choices.row_multiple, split_inputs)
