"""`compress`: write a smaller model, block by block."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from weft.checkpoint.huggingface import finish_folder
from weft.compress.blocks import BATCH_ROWS, Hessians, calibrate_blocks, check_tokens
from weft.compress.folder import WeightWriter, weight_files
from weft.compress.formats import (
    EMBEDDING_FORMAT,
    FORMATS,
    arguments_of,
    pack,
    quantization_config,
)
from weft.compress.gptq import Grid, compensate, fit_grid
from weft.compress.prune import prune
from weft.compress.recipe import Recipe
from weft.compress.smaller import not_streamed
from weft.compress.source import Source, new_folder
from weft.compute.fake_quantize import LEVELS, full_range_scales, to_level
from weft.errors import DataError, ModelError
from weft.parallel.quantized_layers import quantized_layers
from weft.precision.dtypes import DTYPES


@dataclass
class Compressed:
    """Sizes and errors of a compressed model."""

    bytes_before: int = 0
    bytes_after: int = 0
    """Bytes of the files with weights."""
    errors: dict[str, float] = field(default_factory=dict)
    """Squared error of the outputs of each linear layer on its calibration inputs, relative to that of zeros; without
    calibration, of its weights."""


def compress(
    source: Path, out: Path, recipe: Recipe, rows: Tensor | None = None, log: Callable[[str], None] = print
) -> Compressed:
    """Write a compressed copy of a model, block by block; the folder appears complete or not at all.

    Peak memory is the largest block, what is outside of blocks, and the hidden states of the calibration rows. A model whose
    weights are stored under other names than it has them is in memory as a whole.

    Args:
        source: Hugging Face folder of a causal language model, with weights that are not quantized.
        out: folder to write.
        recipe: what becomes of the weights.
        rows: token ids of calibration rows [rows, tokens], int64; None for a recipe that needs none.
        log: called with a line of progress.

    Raises:
        CheckpointError: weights are missing or damaged, or `out` exists.
        DataError: too few calibration rows.
        ModelError: the family or its sizes do not fit the recipe.
    """
    found = Compressed(sum(path.stat().st_size for path in weight_files(source)))
    with new_folder(out) as part:
        smaller = source
        if recipe.prunes:
            smaller = part / "pruned"
            prune(source, smaller, recipe, _need_rows(rows), log)
        if recipe.changes_weights:
            found.errors = _change_weights(smaller, part / "compressed", recipe, rows, log)
            finish_folder(part / "compressed", "config.json", smaller, out)
        else:
            smaller.rename(out)
    found.bytes_after = sum(path.stat().st_size for path in weight_files(out))
    return found


def _need_rows(rows: Tensor | None) -> Tensor:
    if rows is None or not rows.numel():
        raise DataError(
            "there are no calibration rows",
            where="calibration",
            rule="this recipe needs a text on which the model runs",
            fix='name a text with --calibrate; rounding without calibration is method = "nearest" in a recipe file',
        )
    return rows


def _change_weights(
    source: Path, out: Path, recipe: Recipe, rows: Tensor | None, log: Callable[[str], None]
) -> dict[str, float]:
    """Write a configuration and other weights into a new folder. Returns the error of each layer."""
    out.mkdir()
    dtype = None if recipe.dtype == "stored" else DTYPES[recipe.dtype]
    with Source(source, dtype) as model:
        writer = WeightWriter(out)
        work = _Work(model, recipe, writer, log)
        work.check(rows)
        work.run(rows)
        writer.finish()
    table = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if dtype is not None:
        table["dtype"] = str(dtype).removeprefix("torch.")
    if work.recipe.weights != "none" or work.recipe.embedding != "none":
        tied_head = work.anatomy.head if work.anatomy.tied else ""
        table["quantization_config"] = quantization_config(work.recipe, work.group_size, work.skipped, tied_head)
    (out / "config.json").write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    return work.errors


class _Work:
    """Compression of one model: reads each weight once, and writes what becomes of it."""

    def __init__(self, source: Source, recipe: Recipe, writer: WeightWriter, log: Callable[[str], None]):
        self.source, self.recipe, self.writer, self.log = source, recipe, writer, log
        self.model, self.anatomy = model, anatomy = source.model, source.anatomy
        self.layers = {
            name: layer for name, layer in quantized_layers(model, anatomy).items() if not _is_skipped(name, recipe)
        }
        """Linear layers to compress, by full name."""
        self.skipped = [
            name for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and name not in self.layers
        ]
        if recipe.embedding != "none" and dict(model.get_submodule(anatomy.embedding).named_buffers()):
            # compressed-tensors would expect its buffers (Gemma's scale) in the folder
            log(f"{anatomy.embedding} has buffers, and stays as it is")
            self.recipe = recipe = recipe.model_copy(update={"embedding": "none"})
        if anatomy.tied and recipe.embedding != "none":
            self.skipped.remove(anatomy.head)
        self.group_size = self._group_size()
        self.errors: dict[str, float] = {}
        self.written: set[str] = set()

    def _group_size(self) -> int:
        recipe, widths = self.recipe, {layer.in_features for layer in self.layers.values()}
        if recipe.weights != "int4" or recipe.group_size:
            return recipe.group_size
        return next((size for size in (128, 64, 32) if all(width % size == 0 for width in widths)), 32)

    def check(self, rows: Tensor | None) -> None:
        """Check that the model and the calibration rows fit the recipe."""
        if not self.layers:
            raise ModelError(
                f"{self.anatomy.family} has no linear layer to compress",
                where="recipe.skip",
                rule="linear layers of blocks are compressed",
                fix="remove patterns from skip",
            )
        multiple = max(self.group_size, 4 if self.recipe.sparsity != "none" else 1)
        odd = next((name for name, layer in self.layers.items() if layer.in_features % multiple), None)
        if odd is not None:
            raise ModelError(
                f"{odd} has {self.layers[odd].in_features} input channels",
                where=f"recipe, {self.anatomy.family}",
                rule=f"groups of {multiple} consecutive weights do not go over the end of a row",
                fix=f'choose a smaller group_size, or set skip = ["{odd.rpartition(".")[2]}"] in a recipe file'
                if self.group_size
                else 'set skip = [".*' + odd.rpartition(".")[2] + '"] in a recipe file',
            )
        if not self.source.is_streamed:
            raise not_streamed(self.source, "weights are rounded", "compress a dense model of another family")
        if self.recipe.calibrates:
            check_tokens(_need_rows(rows).numel(), self.layers.values())

    def run(self, rows: Tensor | None) -> None:
        """Compress all blocks, and copy all other weights."""
        if self.recipe.calibrates and rows is not None:
            batches: Sequence[Tensor] = rows.split(BATCH_ROWS)
            calibrate_blocks(self.model, self.anatomy, self.source.load, batches, self._change)
        elif self.recipe.weights != "none":
            for block in self.anatomy.blocks:
                module = self.model.get_submodule(block.name)
                self.source.load(block.name, module)
                self._change(block.name, module, {})
                module.to("meta")
        embedding = f"{self.anatomy.embedding}.weight"
        for name in self.source.names:
            if name in self.written:
                continue
            tensor = self.source.read(name)
            if name == embedding and self.recipe.embedding != "none":
                self._write_embedding(tensor)
            else:
                self.writer.write({name: tensor})

    def _change(self, prefix: str, block: nn.Module, hessians: Hessians) -> None:
        """Compress the linear layers of a block, and write all its weights."""
        recipe, dtype = self.recipe, next(block.parameters()).dtype
        for name, layer in block.named_modules():
            full = f"{prefix}.{name}"
            if full not in self.layers or not isinstance(layer, nn.Linear):
                continue
            weight, hessian = layer.weight.float(), hessians.get(name)
            grid = None if recipe.weights == "none" else self._grid_of(layer, hessian)
            changed, self.errors[full] = compensate(
                weight, hessian, grid, self.group_size or layer.in_features, prune=recipe.sparsity != "none"
            )
            layer.weight.data = changed.to(dtype)
            self.written.add(f"{full}.weight")
            if grid is None:
                self.writer.write({f"{full}.weight": layer.weight.data})
            else:
                arguments = arguments_of(recipe.weights, self.group_size, recipe.symmetric)
                stored = grid._replace(scale=grid.scale.to(dtype))
                self.writer.write(pack(full, layer.weight.data, stored, arguments, FORMATS[recipe.weights]))
        self.log(f"{prefix}: {self._error_of(prefix):.2e} of the outputs' energy")

    def _grid_of(self, layer: nn.Linear, hessian: Tensor | None) -> Grid:
        """Values that the weights of a layer can have."""
        kind, size = self.recipe.weights, self.group_size or layer.in_features
        rounding = partial(to_level, kind=kind)
        if self.recipe.method == "full_range":
            scales = full_range_scales(layer.weight, kind, size)
            return Grid(scales, torch.zeros_like(scales), *LEVELS[kind], rounding)
        return fit_grid(
            layer.weight.float(),
            size,
            LEVELS[kind],
            symmetric=self.recipe.symmetric,
            importance=None if hessian is None else hessian.diagonal(),
            dtype=layer.weight.dtype,
            to_level=rounding,
        )

    def _error_of(self, prefix: str) -> float:
        errors = [error for name, error in self.errors.items() if name.startswith(f"{prefix}.")]
        return sum(errors) / max(1, len(errors))

    def _write_embedding(self, weight: Tensor) -> None:
        anatomy = self.anatomy
        grid = fit_grid(weight.float(), weight.shape[1], LEVELS["int8"], symmetric=True, dtype=weight.dtype)
        rounded = grid.nearest_of_all(weight.float()).to(weight.dtype)
        stored = grid._replace(scale=grid.scale.to(weight.dtype))
        tensors = pack(anatomy.embedding, rounded, stored, arguments_of("int8", 0, True), EMBEDDING_FORMAT)
        if anatomy.tied:  # the output layer shares the weight, and has its own name for the scale
            tensors[f"{anatomy.head}.weight_scale"] = tensors[f"{anatomy.embedding}.weight_scale"].clone()
        self.writer.write(tensors)


def _is_skipped(name: str, recipe: Recipe) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in recipe.skip)
