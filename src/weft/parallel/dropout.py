"""Dropout that is the same for every layout: what is dropped depends on row, token, feature, layer and step alone.

A generator with a state cannot do that: ranks that hold other parts of the same tensors draw other numbers. The modules
`nn.Dropout` of the model are replaced by `PlacedDropout`, and attention with dropout goes through `context_attention`; both
hash places (`weft.compute.dropout`). A row is known by its tokens, so that nothing has to be told about the batch. Where the
attention of a model has no door, and only data parallelism splits the rows, its own dropout stays.
"""

import zlib
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from weft.anatomy.roles import Anatomy
from weft.compute.dropout import dropout_keep, mix
from weft.errors import ModelError
from weft.parallel.context import own_positions
from weft.topology.mesh import CONTEXT_AXES, ranks_along


@dataclass
class Place:
    """What this rank is working on; set before each forward."""

    tp_rank: int
    tp_ranks: int
    whole_rows: bool
    """Whether rows and features are not split: then any dropout works, though not the same for every layout."""
    seed: int | None = None
    """Of the step; None: every forward has another one."""
    forwards: int = 0
    rows: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """A number for each row, int64 [B]."""
    tokens: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """Natural positions of this rank's tokens, before tp splits them further, int64 [S / cp]."""

    def seed_of(self, layer: int) -> int:
        """Another seed for each dropout of the model."""
        seed = self.forwards if self.seed is None else self.seed
        return int(mix(torch.tensor((seed * 0x9E3779B1 + layer) % 2**32)))

    def of_attention(self, attention: Any) -> dict[str, Any]:
        """What `weft.parallel.context.attend` is told about its dropout."""
        return {"seed": self.seed_of(attention.number), "rows": self.rows, "first_head": attention.first_head}


class PlacedDropout(nn.Module):
    """`nn.Dropout` for [B, S, H], by place."""

    def __init__(self, p: float, number: int, place: Place):
        super().__init__()
        self.p, self.number, self.place = p, number, place

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        tokens = self.place.tokens
        if x.ndim == 3 and x.shape[1] * self.place.tp_ranks == len(tokens) and x.shape[1] < len(tokens):
            tokens = tokens.chunk(self.place.tp_ranks)[self.place.tp_rank]  # sequence parallelism
        if x.shape[:-1] != (len(self.place.rows), len(tokens)):
            if self.place.whole_rows:
                return F.dropout(x, self.p)
            raise ModelError(
                f"dropout of a tensor of shape {tuple(x.shape)}",
                rule=f"it is known what is dropped of [{len(self.place.rows)}, {len(tokens)}, features]",
                fix="set this dropout of the model's configuration to 0",
            )
        features = torch.arange(x.shape[-1], device=x.device)
        keep = dropout_keep(self.place.seed_of(self.number), self.place.rows, tokens, features, rate=self.p)
        return x * keep.to(x.dtype)


def has_attention_dropout(model: PreTrainedModel) -> bool:
    """Whether the configuration asks for dropout of attention probabilities."""
    config = model.config.get_text_config()
    return any(float(getattr(config, name, 0) or 0) > 0 for name in ("attention_dropout", "attn_pdrop"))


def place_dropout(model: Any, anatomy: Anatomy, mesh: DeviceMesh, multiple: int = 1) -> None:
    """Replace every dropout of a model by one that knows its place, in place; nothing happens without dropout.

    Args:
        model: split over tp.
        anatomy: its roles.
        mesh: with the axes of `weft.topology.mesh`.
        multiple: number of tokens that rows are padded to a multiple of (`weft.parallel.sequence_sharding.row_multiple`).
    """
    dropouts = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Dropout) and module.p > 0
    }
    if not dropouts and not has_attention_dropout(model):
        return
    place = Place(mesh.get_local_rank("tp"), ranks_along(mesh, "tp"), ranks_along(mesh, *CONTEXT_AXES, "tp") == 1)
    for name, module in dropouts.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, PlacedDropout(module.p, _number(name), place))
    heads = model.config.get_text_config().num_attention_heads // place.tp_ranks
    names = [name for block in anatomy.blocks for name in block.attention]
    for name in names:
        attention: Any = model.get_submodule(name)
        attention.place, attention.number, attention.first_head = place, _number(name), place.tp_rank * heads
    model.dropout_place = place

    def look(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        place.forwards += 1
        tokens = args[0] if args else kwargs.get("input_ids")
        if tokens is not None:
            place.rows = row_numbers(tokens)
            padded = tokens.shape[1] + -tokens.shape[1] % multiple
            place.tokens = own_positions(padded, mesh).to(tokens.device)

    model.register_forward_pre_hook(look, with_kwargs=True)


def _number(name: str) -> int:
    """One for each module of the whole model, whichever of them are here."""
    return zlib.crc32(name.encode())


def set_dropout_seed(model: Any, seed: int) -> None:
    """Let the coming forwards drop by this seed, whatever the number of micro-batches; one number for each step."""
    if hasattr(model, "dropout_place"):
        model.dropout_place.seed = seed


def row_numbers(tokens: Tensor) -> Tensor:
    """32 bits for each whole row of tokens [B, S], int64 [B]."""
    places = torch.arange(tokens.shape[1], device=tokens.device)
    return mix(mix(tokens ^ mix(places)).sum(1) & 0xFFFFFFFF)
