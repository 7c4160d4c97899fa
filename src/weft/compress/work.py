"""Compression of the matrices of a model: rounding and zeros, block by block, and the folder of what becomes of them."""

import copy
import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.quantizers.base import MODULES_TO_PATCH_FOR_QUANTIZATION

from weft.anatomy.roles import Anatomy
from weft.checkpoint.export_files import write_config
from weft.compress.blocks import Hessians, calibrate_blocks, check_tokens
from weft.compress.folder import WeightWriter
from weft.compress.formats import EMBEDDING_FORMAT, arguments_of, format_of, pack, quantization_config
from weft.compress.gptq import SHRINKS, WHOLE_RANGE, Grid, compensate, fit_grid
from weft.compress.ranks import Ranks
from weft.compress.recipe import Recipe
from weft.compress.rows import need_rows
from weft.compress.smaller import not_streamed
from weft.compress.source import Source
from weft.compute.fake_quantize import LEVELS, to_level
from weft.errors import ModelError
from weft.parallel.precision.quantized_layers import expert_weights, quantized_layers
from weft.precision.dtypes import DTYPES


def change_weights(
    source: Path, out: Path, recipe: Recipe, rows: Sequence[Tensor] | None, log: Callable[[str], None], ranks: Ranks
) -> dict[str, float]:
    """Write a configuration and other weights into a new folder. Returns the error of each layer. Collective; rank 0 writes."""
    if ranks.leads:
        out.mkdir()
    dtype = None if recipe.dtype == "stored" else DTYPES[recipe.dtype]
    with Source(source, dtype) as model:
        writer = WeightWriter(out, discards=not ranks.leads)
        work = _Work(model, recipe, writer, log, ranks)
        work.check(rows)
        work.run(rows)
        writer.finish()
    if not ranks.leads:
        return work.errors
    write_config(model.config, out, source, dtype)
    table = json.loads((out / "config.json").read_text(encoding="utf-8"))
    if work.recipe.weights != "none" or work.recipe.embedding != "none":
        tied_head = work.anatomy.head if work.anatomy.tied else ""
        table["quantization_config"] = quantization_config(
            work.recipe, work.group_size, work.skipped, work.anatomy.embedding, tied_head
        )
        if work.dequantizes:
            table["quantization_config"]["dequantize"] = True
    (out / "config.json").write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    return work.errors


class _Changed(NamedTuple):
    """Compressed matrix."""

    matrix: Tensor
    scale: Tensor
    """[out, groups], in the dtype of the matrix; unused without a format."""
    zero: Tensor
    error: Tensor


class _Work:
    """Compression of one model: reads each weight once, and writes what becomes of it."""

    def __init__(self, source: Source, recipe: Recipe, writer: WeightWriter, log: Callable[[str], None], ranks: Ranks):
        self.source, self.recipe, self.writer, self.log, self.ranks = source, recipe, writer, log, ranks
        self.model, self.anatomy = model, anatomy = source.model, source.anatomy
        linear = {
            f"{name}.weight": layer
            for name, layer in quantized_layers(model, anatomy).items()
            if not _is_skipped(name, recipe)
            # The format has several tensors for a weight, whose names begin like that of a layer.
            and all(key.endswith(".weight") for key in source.as_stored(f"{name}.weight", layer.weight))
        }
        self.experts = {
            name: weight for name, weight in expert_weights(model, anatomy).items() if not _is_skipped(name, recipe)
        }
        """Weights of all experts of a layer to compress [experts, out, in], by full name."""
        self.matrices = {**{name: layer.weight for name, layer in linear.items()}, **self.experts}
        """Weights to compress, [out, in] or those of experts, by full name."""
        self.skipped = [
            name
            for name, layer in model.named_modules()
            if isinstance(layer, nn.Linear) and f"{name}.weight" not in linear
        ]
        self.needs_dense = recipe.weights != "none" and (
            any(name in self.matrices for name in source.merged) or _initializes_weights(model, anatomy)
        )
        """True if Transformers has no layers in few bits for the family: for its experts, or its own initialization."""
        self.dequantizes = self.needs_dense or (recipe.weights == "int4" and not recipe.symmetric)
        """True if Transformers is to load all layers as they compute. Its layers in few bits have no packed zero points."""
        if recipe.embedding != "none" and self.dequantizes:  # it reads all layers of such a folder in one format
            log(f"{anatomy.embedding} stays as it is: all layers are stored in one format")
            self.recipe = recipe = recipe.model_copy(update={"embedding": "none"})
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
        recipe, widths = self.recipe, {weight.shape[-1] for weight in self.matrices.values()}
        if recipe.weights != "int4" or recipe.group_size:
            return recipe.group_size
        return next((size for size in (128, 64, 32) if all(width % size == 0 for width in widths)), 32)

    def check(self, rows: Sequence[Tensor] | None) -> None:
        """Check that the model and the calibration rows fit the recipe."""
        if not self.matrices:
            raise ModelError(
                f"{self.anatomy.family} has no linear layer to compress",
                where="recipe.skip",
                rule="layers of the class nn.Linear in blocks are compressed",
                fix="remove patterns from skip, or drop blocks, such as drop=0.3; or choose a model of another family",
            )
        multiple = max(self.group_size, 4 if self.recipe.sparsity != "none" else 1)
        odd = next((name for name, weight in self.matrices.items() if weight.shape[-1] % multiple), None)
        if odd is not None:
            part = "experts.*" if odd in self.experts else odd.removesuffix(".weight").rpartition(".")[2]
            raise ModelError(
                f"{odd.removesuffix('.weight')} has {self.matrices[odd].shape[-1]} input channels",
                where=f"recipe, {self.anatomy.family}",
                rule=f"groups of {multiple} consecutive weights do not go over the end of a row",
                fix=("choose a smaller group_size, or " if self.group_size > 32 else "")
                + f'set skip = [".*{part}"] in a recipe file',
            )
        if not self.source.is_streamed:
            raise not_streamed(self.source, "weights are rounded", "compress a model of another family")
        self._check_stored()
        if self.recipe.calibrates:
            check_tokens(sum(map(len, need_rows(rows))), [weight.shape[-1] for weight in self.matrices.values()])

    def _check_stored(self) -> None:
        """Check that Transformers loads weights that are not stored as one matrix."""
        all_experts = expert_weights(self.model, self.anatomy)
        replaced = MODULES_TO_PATCH_FOR_QUANTIZATION.keys() & {type(module).__name__ for module in self.model.modules()}
        if replaced and self.recipe.weights != "none":
            raise ModelError(
                f"the experts of {self.anatomy.family}",
                where=f"recipe, {self.anatomy.family}",
                rule="Transformers has other layers in their place when a folder has weights in few bits",
                fix='choose drop=0.3, or 2:4 with skip = [".*experts.*"] in a recipe file',
            )
        stacked = [
            name
            for name, weight in all_experts.items()
            if any(stored.ndim != 2 for stored in self.source.as_stored(name, weight[..., :1]).values())
        ]
        if self.experts.keys() & stacked:
            raise ModelError(
                f"{stacked[0]} is stored as one tensor of {all_experts[stacked[0]].ndim} dimensions",
                where=f"recipe, {self.anatomy.family}",
                rule="the format has a matrix for each expert, as most families store them",
                fix='set skip = [".*experts.*"] in a recipe file',
            )
        left_out = [name for name in self.source.merged if name not in self.matrices]
        if left_out and self.recipe.weights in ("int8", "int4"):
            raise ModelError(
                f"{left_out[0]} is stored as several tensors, and stays as it is",
                where=f"recipe, {self.anatomy.family}",
                rule=f"beside layers in {self.recipe.weights}, Transformers loads such weights only in the same format",
                fix='choose weights = "fp8", or, of experts, remove the pattern from skip that matches them',
            )
        if self.needs_dense and (not self.recipe.symmetric or self.recipe.inputs != "none"):
            key, fix = ("inputs", '"none"') if self.recipe.symmetric else ("symmetric", "true")
            raise ModelError(
                f"{key} = {getattr(self.recipe, key)!r} for {self.anatomy.family}",
                where=f"recipe.{key}",
                rule="Transformers loads experts, and families that initialize layers while they are loaded, in symmetric "
                "formats, and computes with inputs that are not rounded",
                fix=f"set {key} = {fix}",
            )

    def run(self, rows: Sequence[Tensor] | None) -> None:
        """Compress all blocks, and copy all other weights."""
        if self.recipe.calibrates and rows is not None:
            batches: Sequence[Tensor] = self.ranks.batches(rows)
            calibrate_blocks(self.model, self.anatomy, self.source.load, batches, self._change, ranks=self.ranks)
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
                self.writer.write(self.source.as_stored(name, tensor))

    def _change(self, prefix: str, block: nn.Module, hessians: Hessians) -> None:
        """Compress the matrices of a block, which the ranks divide, and write them."""
        weights = {name: p for name, p in block.named_parameters() if f"{prefix}.{name}" in self.matrices}
        matrices = {
            (name, index): matrix
            for name, parameter in weights.items()
            for index, matrix in enumerate(parameter.data.view(-1, *parameter.shape[-2:]))
        }
        changed = {
            key: self._compress(matrix, hessians.get(key))
            if turn % self.ranks.count == self.ranks.rank
            else self._no_result(matrix)
            for turn, (key, matrix) in enumerate(matrices.items())
        }
        for turn, result in enumerate(changed.values()):
            for tensor in result:
                self.ranks.send(tensor, turn % self.ranks.count)
        for name, parameter in weights.items():
            full, weight = f"{prefix}.{name}", parameter.data
            found = [result for (key, _), result in changed.items() if key == name]
            parameter.data = torch.stack([each.matrix for each in found]).view_as(weight)
            self.errors[full.removesuffix(".weight")] = sum(float(each.error) for each in found) / len(found)
            self.written.add(full)
            if self.recipe.weights == "none":
                self.writer.write(self.source.as_stored(full, parameter.data.to(self.source.read(full).dtype)))
                continue
            stored = self.source.as_stored(full, parameter.data)
            leading = weight.shape[:-1]
            scales = self.source.as_stored(full, torch.stack([each.scale for each in found]).view(*leading, -1))
            zeros = self.source.as_stored(full, torch.stack([each.zero for each in found]).view(*leading, -1))
            arguments = arguments_of(self.recipe.weights, self.group_size, self.recipe.symmetric)
            for key, values in stored.items():
                tensors = pack(
                    key.removesuffix(".weight"), values, scales[key], zeros[key], arguments, format_of(self.recipe)
                )
                self.writer.write(tensors)
        self.log(f"{prefix}: {self._error_of(prefix):.2e} of the outputs' energy")

    def _no_result(self, matrix: Tensor) -> _Changed:
        """Memory for a compressed matrix."""
        groups = matrix.shape[1] // self.group_size if self.group_size else 1
        return _Changed(
            torch.empty_like(matrix),
            torch.empty(len(matrix), groups, dtype=matrix.dtype),
            torch.empty(len(matrix), groups),
            torch.empty(()),
        )

    def _compress(self, matrix: Tensor, hessian: Tensor | None) -> _Changed:
        """Compress a matrix [out, in]."""
        result, size = self._no_result(matrix), self.group_size or matrix.shape[1]
        grid = None if self.recipe.weights == "none" else self._grid_of(matrix, hessian)
        new, error = compensate(matrix.float(), hessian, grid, size, prune=self.recipe.sparsity != "none")
        result.matrix.copy_(new)
        result.error.fill_(error)
        if grid is not None:
            result.scale.copy_(grid.scale)
            result.zero.copy_(grid.zero)
        return result

    def _grid_of(self, matrix: Tensor, hessian: Tensor | None) -> Grid:
        """Values that a matrix can have."""
        kind, size = self.recipe.weights, self.group_size or matrix.shape[1]
        rounding = partial(to_level, kind=kind)
        # Without inputs, clipped integers cost more loss than finer levels save. Levels of fp8 are not evenly spaced.
        fits = hessian is not None or (kind == "fp8" and self.recipe.method != "full_range")
        return fit_grid(
            matrix.float(),
            size,
            LEVELS[kind],
            symmetric=self.recipe.symmetric,
            importance=None if hessian is None else hessian.diagonal(),
            shrinks=SHRINKS if fits else WHOLE_RANGE,
            dtype=matrix.dtype,
            to_level=rounding,
        )

    def _error_of(self, prefix: str) -> float:
        errors = [error for name, error in self.errors.items() if name.startswith(f"{prefix}.")]
        return sum(errors) / max(1, len(errors))

    def _write_embedding(self, weight: Tensor) -> None:
        anatomy = self.anatomy
        grid = fit_grid(
            weight.float(), weight.shape[1], LEVELS["int8"], symmetric=True, shrinks=WHOLE_RANGE, dtype=weight.dtype
        )
        rounded = grid.nearest_of_all(weight.float()).to(weight.dtype)
        scale = grid.scale.to(weight.dtype)
        tensors = pack(anatomy.embedding, rounded, scale, grid.zero, arguments_of("int8", 0, True), EMBEDDING_FORMAT)
        if anatomy.tied:  # the output layer shares the weight, and has its own name for the scale
            tensors[f"{anatomy.head}.weight_scale"] = tensors[f"{anatomy.embedding}.weight_scale"].clone()
        self.writer.write(tensors)


def _initializes_weights(model: Any, anatomy: Anatomy) -> bool:
    """True if a family initializes the weights of linear layers from modules around them.

    It then does so while they are loaded, and Transformers fails on layers in few bits, which have no such weights.
    """
    block = copy.deepcopy(model.get_submodule(anatomy.blocks[0].name))
    for layer in block.modules():
        if isinstance(layer, nn.Linear):
            del layer.weight
    try:
        for module in block.modules():
            model._init_weights(module)
    except AttributeError:
        return True
    return False


def _is_skipped(name: str, recipe: Recipe) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in recipe.skip)
