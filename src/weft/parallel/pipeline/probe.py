"""Trial forward of a model on the meta device: how its blocks are called, and the shapes of what stages send to each other."""

from fractions import Fraction
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from weft.anatomy.build import implementations
from weft.anatomy.classes import vision_config
from weft.anatomy.roles import Anatomy, standard_name
from weft.anatomy.transformers import EXPERTS, document_masks
from weft.data import AnyBatch, MicroBatch
from weft.data.images import image_shape
from weft.parallel.pipeline.taint import BlockChain, TaintError, trace_block_io

Sizes = dict[str, int]
"""Sizes of a micro-batch: rows; tokens per row; target tokens per row of an encoder-decoder model."""


class Dim(NamedTuple):
    """Size of a dim of a value that stages exchange: a factor times some sizes of the micro-batch."""

    factor: Fraction
    sizes: tuple[str, ...] = ()

    def of(self, sizes: Sizes) -> int:
        return int(self.factor * prod(sizes[name] for name in self.sizes))


Shapes = tuple[tuple[Dim, ...], ...]
"""Per value of a chain."""


def sizes_of(batch: AnyBatch, sequence_ranks: int) -> Sizes:
    """Sizes of a micro-batch on one of the ranks that share its sequences."""
    if isinstance(batch, MicroBatch):
        rows, tokens = batch.input_ids.shape
        return {"rows": rows, "tokens": tokens // sequence_ranks}
    named = {"tokens": "input_ids", "target_tokens": "decoder_input_ids"}
    found = {size: batch.inputs[name].shape[1] for size, name in named.items() if name in batch.inputs}
    return {"rows": batch.rows} | found


def build_probe(model: PreTrainedModel, dtype: torch.dtype) -> Any:
    """Copy of a model on the meta device in training mode, without routing, which depends on values.

    Raises:
        TaintError: the class of the model cannot be built from its configuration alone.
    """
    try:
        with torch.device("meta"):
            probe: Any = type(model)._from_config(model.config, dtype=dtype, **implementations(dtype))
    except Exception:  # each class fails in a different way
        raise TaintError("it cannot be built from its configuration alone") from None
    config = model.config.get_text_config()
    for name, module in probe.named_modules():
        if EXPERTS.fullmatch(standard_name(config, name)) and not isinstance(module, nn.ModuleList):
            module.forward = lambda hidden, *args, **kwargs: hidden
    return probe.train()


def probe_sizes(model: PreTrainedModel) -> Sizes:
    """Sizes of the first trial; `trace_model` varies them."""
    tokens = {"tokens": 4} if model.main_input_name == "input_ids" else {}
    targets = {"target_tokens": 6} if model.config.is_encoder_decoder else {}
    return {"rows": 1} | tokens | targets


def probe_inputs(probe: Any, anatomy: Anatomy, sizes: Sizes) -> dict[str, Any]:
    """Arguments of a trial forward, on the meta device."""
    config, rows = probe.config, sizes["rows"]

    def ids(name: str) -> Tensor:
        return torch.zeros(rows, sizes[name], dtype=torch.int64, device="meta")

    if anatomy.is_decoder:
        positions = (
            torch.arange(sizes["tokens"]).remainder(2).repeat(rows, 1)
        )  # two documents, because one needs no mask
        masks = tree_map_only(Tensor, lambda mask: mask.to("meta"), document_masks(probe, positions))
        given = {"input_ids": ids("tokens"), "position_ids": positions.to("meta"), "attention_mask": masks}
        routed = getattr(config, "output_router_logits", False)
        return {**given, "use_cache": False, **({"output_router_logits": False} if routed else {})}
    found: dict[str, Any] = {}
    if config.is_encoder_decoder:  # with the mask that Transformers makes only by looking at values
        targets = ids("target_tokens")
        mask = torch.ones(rows, 1, *[sizes["target_tokens"]] * 2, dtype=torch.bool, device="meta")
        found = {"decoder_input_ids": targets, "decoder_attention_mask": mask, "use_cache": False}
    if probe.main_input_name == "input_ids":
        return {"input_ids": ids("tokens"), **found}
    if probe.main_input_name == "input_features" and hasattr(config, "num_mel_bins"):  # Whisper: 30 s of sound
        frames = 2 * config.max_source_positions
        return {"input_features": torch.zeros(rows, config.num_mel_bins, frames, device="meta"), **found}
    if probe.main_input_name == "pixel_values" and hasattr(vision_config(config), "image_size"):
        return {"pixel_values": torch.zeros(rows, *image_shape(config), device="meta"), **found}
    raise TaintError(f"the shape of its {probe.main_input_name} does not follow from its configuration")


def trace_model(probe: Any, anatomy: Anatomy) -> tuple[BlockChain, Shapes]:
    """Trace the chain of blocks, and how the shapes of values depend on the sizes of a micro-batch. `probe()` runs it then.

    Raises:
        TaintError: see `trace_block_io`; or a shape does not grow in proportion to the sizes.
    """

    def trace(sizes: Sizes) -> BlockChain:
        probe.forward = partial(type(probe).forward, probe, **probe_inputs(probe, anatomy, sizes))
        return trace_block_io(probe, anatomy)

    sizes = probe_sizes(probe)
    chain = trace(sizes)
    only_hidden = len(chain.values) == len(anatomy.chained_blocks)
    if only_hidden and all(value.shape[:2] == tuple(sizes.values()) for value in chain.values):
        return chain, tuple(
            (*(Dim(Fraction(1), (name,)) for name in sizes), *(Dim(Fraction(size)) for size in value.shape[2:]))
            for value in chain.values
        )
    larger = {name: trace(sizes | {name: 2 * size}) for name, size in sizes.items()}
    shapes = []
    for index, value in enumerate(chain.values):
        dims = []
        for dim, size in enumerate(value.shape):
            ratios = {name: Fraction(other.values[index].shape[dim], size) for name, other in larger.items()}
            if set(ratios.values()) - {1, 2}:
                raise TaintError(f"a value between its blocks has {size} elements for {sizes}, and not in proportion")
            names = tuple(name for name, ratio in ratios.items() if ratio == 2)
            dims.append(Dim(Fraction(size, prod(sizes[name] for name in names)), names))
        shapes.append(tuple(dims))
    return chain, tuple(shapes)
