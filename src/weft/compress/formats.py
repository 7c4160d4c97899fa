"""Stored formats of compressed weights: those of the library compressed-tensors, which does the packing."""

import math
from typing import Any

import torch
from torch import Tensor

from weft.compress.recipe import Recipe

FORMATS = {"int4": "pack-quantized", "int8": "pack-quantized", "fp8": "naive-quantized"}
WITH_ZERO_POINTS = {**FORMATS, "int8": "naive-quantized"}
"""Formats of layers with zero points: Transformers does not find packed ones, so that int4 is unpacked when it is loaded."""
FORMATS_WITH_INPUTS = {**FORMATS, "int8": "int-quantized", "fp8": "float-quantized"}
"""Formats of layers whose inputs are rounded too, as servers expect them."""
BOUNDS = {"int8": 0.3, "fp8": 0.6, "int4": 0.9}
"""Largest relative difference of logits that a format explains. Small random models of all families, with rounded inputs and
without calibration, differ by up to 0.07, 0.32 and 0.20; logits of zero by 1, those of another model by more. Zeros of 2:4 have
no bound: without training, they cost much. A weight of zeros, or of twice the values, differs by 1; calibration sets all
of a weight to zero whose inputs are always zero."""
EMBEDDING_FORMAT = "naive-quantized"
"""Keeps the name `weight`, so that an output layer can share it."""


def arguments_of(weights: str, group_size: int, symmetric: bool) -> Any:
    """QuantizationArgs of compressed-tensors.

    Args:
        weights: int8, int4 or fp8.
        group_size: input channels that share a scale; 0: all.
        symmetric: without zero points.
    """
    from compressed_tensors.quantization import QuantizationArgs

    return QuantizationArgs(
        num_bits=4 if weights == "int4" else 8,
        type="float" if weights == "fp8" else "int",
        symmetric=symmetric,
        strategy="group" if group_size else "channel",
        group_size=group_size or None,
    )


def format_of(recipe: Recipe) -> str:
    """Format of linear layers."""
    formats = FORMATS if recipe.symmetric else WITH_ZERO_POINTS
    return (formats if recipe.inputs == "none" else FORMATS_WITH_INPUTS)[recipe.weights]


def error_bounds(recipe: Recipe) -> tuple[float, float]:
    """Largest relative differences of the logits and of a weight that the formats of a recipe explain."""
    if not recipe.changes_weights:  # a pruned model is another one
        return math.inf, math.inf
    kinds = {recipe.weights, recipe.inputs, recipe.embedding} - {"none"}
    of_logits = math.inf if recipe.sparsity != "none" else max(BOUNDS[kind] for kind in kinds)
    return of_logits, math.inf if recipe.calibrates else 0.95 if recipe.weights == "int4" else 0.5


def _arguments_of_inputs(inputs: str) -> Any:
    """QuantizationArgs of inputs with a scale for each token; None for "none"."""
    from compressed_tensors.quantization import QuantizationArgs

    kind = "float" if inputs == "fp8" else "int"
    return (
        None
        if inputs == "none"
        else QuantizationArgs(num_bits=8, type=kind, symmetric=True, strategy="token", dynamic=True)
    )


def pack(name: str, weight: Tensor, scale: Tensor, zero: Tensor, arguments: Any, form: str) -> dict[str, Tensor]:
    """Stored tensors of a layer, by full name.

    Args:
        name: full name of the layer.
        weight: [out, in], with values of the grid.
        scale: [out, groups], distance of neighbouring values.
        zero: [out, groups], level of zero.
        arguments: result of `arguments_of`.
        form: format of compressed-tensors.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    compressor: Any = BaseCompressor.get_value_from_registry(form)
    tensors = {"weight": weight, "weight_scale": scale}
    if not arguments.symmetric:
        tensors["weight_zero_point"] = zero.to(torch.int8)
    packed: dict[str, Tensor] = compressor.compress(tensors, scheme)
    return {f"{name}.{key}": value.contiguous() for key, value in packed.items()}


def quantization_config(
    recipe: Recipe, group_size: int, skipped: list[str], embedding_name: str, tied_head: str
) -> dict[str, Any]:
    """Table `quantization_config` of config.json.

    Args:
        group_size: group size of linear layers.
        skipped: full names of linear layers that are not quantized.
        embedding_name: name of the embedding of tokens; others, of positions, are left as they are.
        tied_head: name of an output layer with the weights of the embedding; "" without one.
    """
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme

    groups: dict[str, Any] = {}
    if recipe.embedding != "none":
        embedding = arguments_of("int8", 0, True)
        targets = [embedding_name, *([tied_head] if tied_head else [])]
        groups["embedding"] = QuantizationScheme(targets=targets, weights=embedding, format=EMBEDDING_FORMAT)
    if recipe.weights != "none":
        linear = arguments_of(recipe.weights, group_size, recipe.symmetric)
        groups["linear"] = QuantizationScheme(
            targets=["Linear"],
            weights=linear,
            input_activations=_arguments_of_inputs(recipe.inputs),
            format=format_of(recipe),
        )
    forms = {str(group.format) for group in groups.values()}
    config = QuantizationConfig(
        config_groups=groups,
        format=forms.pop() if len(forms) == 1 else "mixed-precision",
        quantization_status="compressed",
        ignore=skipped,
    )
    table: dict[str, Any] = config.model_dump(mode="json")
    return table
