"""Steps of `parallelize` for the precision of layers; the arithmetic is in weft.precision, compute and memory."""

from typing import TYPE_CHECKING

from weft.memory.weights import split_weights
from weft.parallel.precision.fp8_layers import apply_fp8, find_fp8_layers
from weft.parallel.precision.quantized_layers import apply_quantization
from weft.precision.fp16_backward import begin_fp16_backward_at
from weft.precision.roles import compute_in_float32

if TYPE_CHECKING:
    from weft.parallel.build import Build


def widen_modules(build: "Build") -> None:
    """Modules in float32, and the begin of a backward in fp16, at the head with its loss."""
    build.begin("widen_modules", "split_tensors", "move_loss")
    compute_in_float32(build.model, build.full_anatomy, build.plan.precision.fp32_modules)
    if build.plan.precision.backward == "fp16":
        begin_fp16_backward_at(build.model.get_submodule(build.full_anatomy.head))


def round_layers(build: "Build") -> None:
    """FP8 or rounded weights of the linear layers that all earlier steps and the user's techniques have left."""
    build.begin("round_layers", "split_tensors", "run_techniques")
    model, anatomy, plan = build.model, build.anatomy, build.plan
    if plan.precision.matmul != "forward":
        has_fp8_experts = "" in build.choices.fp8_experts.values()
        build.fp8_layers = find_fp8_layers(model, anatomy, plan, has_fp8_experts=has_fp8_experts)
        apply_fp8(model, build.fp8_layers, plan)
    else:
        build.fp8_layers = []
    if plan.precision.quantize != "none":
        apply_quantization(model, anatomy, plan, build.mesh)


def split_master_weights(build: "Build") -> None:
    """Master weights in two halves, before they are sharded."""
    build.begin("split_master_weights", "split_tensors", "run_techniques", "pack_frozen_weights")
    if build.plan.precision.weights != "whole":
        split_weights(build.model, even=build.plan.precision.weights == "split_even")
