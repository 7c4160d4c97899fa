"""Variants of norms, gated MLPs and experts, found by running a module's own forward beside those of an operator."""

import inspect
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.anatomy.roles import standard_name
from weft.compute.experts import experts_forward
from weft.compute.gated_activation import ACTIVATIONS, gated_activation, packed_gated_activation
from weft.compute.rms_norm import rms_norm

Forward = Callable[..., Tensor]


@dataclass(frozen=True)
class Variant:
    """Variant of an operator that agrees with the forward of a module."""

    label: str
    forward: Forward
    """Called with the module and its input; reads the weights when it is called."""


def projections(module: nn.Module, config: Any) -> dict[str, str]:
    """Name of the child for each role of a gated MLP; empty for another module."""
    roles = {standard_name(config, name): name for name, _ in module.named_children()}
    for wanted in (("gate_up_proj", "down_proj"), ("gate_proj", "up_proj", "down_proj")):
        if all(role in roles for role in wanted):
            return {role: roles[role] for role in wanted}
    return {}


def find_norm(module: nn.Module, config: Any) -> Variant | str:
    if reason := _unusual(module):
        return reason
    if type(module).__module__.startswith("torch.nn."):
        return "a module of torch, which is one kernel already"
    weights = dict(module.named_parameters(recurse=False))
    if set(weights) - {"weight"} or any(module.buffers()) or any(True for _ in module.children()):
        return "it has other tensors than a weight"
    width = weights["weight"].shape[0] if weights else 128
    own = partial(_probe_norm, module, type(module).forward)
    small = {value for value in vars(module).values() if isinstance(value, float) and 0 < value < 0.01}
    for eps in sorted(small):
        for label, offset, cast_first in NORMS if weights else NORMS[1:2]:
            run = partial(_run_norm, eps=eps, offset=offset, cast_first=cast_first)
            if _agrees(own, partial(_probe_norm, module, run), _norm_inputs(width, bool(weights))):
                return Variant(f"{label if weights else 'no weight'}, eps {eps:g}", run)
    return "its forward agrees with no variant of RMSNorm"


NORMS = (
    ("weight after the cast", 0.0, True),
    ("weight before the cast", 0.0, False),
    ("1 + weight before the cast", 1.0, False),
)
"""Variants of RMSNorm: label, offset of the weight, and whether the normalized values are cast first."""


def _run_norm(
    module: nn.Module, *args: Tensor, eps: float, offset: float, cast_first: bool, **kwargs: Tensor
) -> Tensor:
    (x,) = (*args, *kwargs.values())
    if x.dtype == torch.float64:  # of which each family rounds other parts to float32
        return type(module).forward(module, x)
    return rms_norm(x, getattr(module, "weight", None), eps, offset, cast_first)


def _probe_norm(module: nn.Module, forward: Forward, x: Tensor, weight: Tensor | None) -> Tensor:
    return _run_copy(module, forward, x, {} if weight is None else {"weight": weight}, {})


def _norm_inputs(width: int, has_weight: bool) -> Iterator[tuple[Tensor | None, ...]]:
    """Rows of different sizes, one so small that eps matters, and a weight, in all pairs of dtypes that occur."""
    generator = torch.Generator("cpu").manual_seed(0)
    size = torch.tensor([1.0, 1e-3, 20.0, 0.1]).repeat(max(2, 2048 // width))[:, None]
    x = torch.randn(len(size), width, generator=generator, device="cpu") * size
    weight = torch.rand(width, generator=generator, device="cpu") + 0.5
    for of_x, of_weight in DTYPE_PAIRS if has_weight else DTYPE_PAIRS[:3]:
        yield x.to(of_x), weight.to(of_weight) if has_weight else None


DTYPE_PAIRS = (
    *((dtype, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
)


def find_gated_mlp(module: nn.Module, config: Any) -> Variant | str:
    if reason := _unusual(module):
        return reason
    names = projections(module, config)
    others = [child for name, child in module.named_children() if name not in names.values()]
    if any(module.parameters(recurse=False)) or any(True for child in others for _ in child.parameters()):
        return "it has other weights than those of its projections"
    if any(child._forward_hooks or child._forward_pre_hooks for child in others):
        return "its activation function has hooks"
    run = _run_packed_mlp if "gate_up_proj" in names else _run_gated_mlp
    for activation in ACTIVATIONS:
        forward = partial(run, names=tuple(names.values()), activation=activation)
        own = partial(_probe_mlp, module, names, type(module).forward)
        if _agrees(own, partial(_probe_mlp, module, names, forward), _mlp_inputs()):
            packed = ", packed" if "gate_up_proj" in names else ""
            return Variant(f"{activation}{packed}", forward)
    return "its forward agrees with no variant of a gated activation"


def _run_gated_mlp(module: nn.Module, *args: Any, names: tuple[str, ...], activation: str, **kwargs: Any) -> Any:
    (x,) = (*args, *kwargs.values())
    gate, up, down = (getattr(module, name) for name in names)
    return down(gated_activation(gate(x), up(x), activation))


def _run_packed_mlp(module: nn.Module, *args: Any, names: tuple[str, ...], activation: str, **kwargs: Any) -> Any:
    (x,) = (*args, *kwargs.values())
    gate_up, down = (getattr(module, name) for name in names)
    return down(packed_gated_activation(gate_up(x), activation))


def _probe_mlp(module: nn.Module, names: dict[str, str], forward: Forward, x: Tensor) -> Tensor:
    """Run a forward on a copy of an MLP with small projections."""
    generator = torch.Generator("cpu").manual_seed(1)
    small: dict[str, nn.Module] = {}
    for role, name in names.items():
        rows, columns = {"gate_up_proj": (2 * HIDDEN, WIDTH), "down_proj": (WIDTH, HIDDEN)}.get(role, (HIDDEN, WIDTH))
        small[name] = nn.Linear(columns, rows, bias=False, device="meta")
        weight = torch.randn(rows, columns, generator=generator, device="cpu").to(x.dtype)
        small[name]._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
    return _run_copy(module, forward, x, {}, small)


WIDTH, HIDDEN = 16, 24  # sizes of the small projections


def _mlp_inputs(
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16),
) -> Iterator[tuple[Tensor, ...]]:
    x = torch.randn(4, 32, WIDTH, generator=torch.Generator("cpu").manual_seed(0), device="cpu") * 0.5
    for dtype in dtypes:
        yield (x.to(dtype),)


def find_experts(module: nn.Module, config: Any) -> Variant | str:
    kind: Any = module
    if not hasattr(kind, "is_transposed") or not hasattr(kind, "_apply_gate"):
        return "it does not use the ExpertsInterface of Transformers"
    if not kind.has_gate or kind.has_bias or getattr(kind, "has_post_expert_norm", False):
        return "its experts are not gated, or have biases or norms"
    if {name for name, _ in module.named_parameters()} != {"gate_up_proj", "down_proj"}:
        return "it has other weights than gate_up_proj and down_proj"
    small = copy(kind)
    vars(small)["num_experts"] = 4
    own, other = (partial(_probe_experts, small, forward) for forward in (type(module).forward, _run_experts))
    if not _agrees(own, other, _mlp_inputs((torch.float32, torch.bfloat16))):
        return "its forward does not agree with that of grouped matmuls"
    return Variant("one pass to gather, one to combine", _run_experts)


def _run_experts(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    if hidden_states.dtype == torch.float64:  # which grouped matmuls do not take
        return type(module).forward(module, hidden_states, top_k_index, top_k_weights)
    return experts_forward(module, hidden_states, top_k_index, top_k_weights)


@cache
def in_16_bits(variant: Variant) -> Variant:
    """Variant of experts for inputs of 16 bits alone; others are computed by the module's own code."""

    def forward(module: nn.Module, hidden_states: Tensor, *args: Tensor, **kwargs: Tensor) -> Tensor:
        is_half = hidden_states.dtype in (torch.bfloat16, torch.float16)
        return (variant.forward if is_half else type(module).forward)(module, hidden_states, *args, **kwargs)

    return Variant(f"{variant.label}; in 16 bits", forward)


def _probe_experts(module: Any, forward: Forward, x: Tensor) -> Tensor:
    """Run a forward on a copy of an experts module with four small experts."""
    generator = torch.Generator("cpu").manual_seed(1)
    x = x.flatten(0, -2)
    weights: dict[str, Any] = {}
    for name, rows, columns in (("gate_up_proj", 2 * HIDDEN, WIDTH), ("down_proj", WIDTH, HIDDEN)):
        weight = torch.randn(4, rows, columns, generator=generator, device="cpu").to(x.dtype)
        weights[name] = nn.Parameter(weight.mT.contiguous() if module.is_transposed else weight, requires_grad=False)
    index = torch.rand(len(x), 4, generator=generator, device="cpu").argsort(1)[:, :2]
    shares = torch.rand(len(x), 2, generator=generator, device="cpu").to(x.dtype)

    def run(probe: nn.Module, x: Tensor) -> Tensor:
        return forward(probe, x, index, shares)

    return _run_copy(module, run, x, weights, {})


# Numeric probe


def _unusual(module: nn.Module) -> str:
    """Reason why the forward of a module cannot be called with one tensor; "" if it can."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    if len(parameters) != 1 or parameters[0].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        return "its forward takes other arguments than one tensor"
    return ""


def _run_copy(
    module: nn.Module, forward: Forward, x: Tensor, parameters: dict[str, Any], children: dict[str, nn.Module]
) -> Tensor:
    """Run a forward on a shallow copy of a module with other parameters and children."""
    probe = copy(module)
    state = vars(probe)
    state["_parameters"], state["_modules"] = parameters, state["_modules"] | children
    state["training"] = True  # what is random in training agrees with nothing
    return forward(probe, x)


def _agrees(own: Forward, other: Forward, inputs: Iterator[tuple[Tensor | None, ...]]) -> bool:
    """True if two functions compute the same: in float32 outputs and gradients, in 16 bits all roundings but a few.

    Two orders of rounding differ in about a quarter of the elements.
    """
    try:
        with torch.enable_grad(), torch.device("cpu"):
            for values in inputs:
                tensors = [value.requires_grad_() for value in values if value is not None]
                outputs = own(*values), other(*values)
                if outputs[0].dtype != outputs[1].dtype or outputs[0].shape != outputs[1].shape:
                    return False
                if any(tensor.dtype != torch.float32 for tensor in tensors):
                    if (outputs[0] != outputs[1]).float().mean() > 0.01:
                        return False
                    continue
                given = torch.linspace(-1, 1, outputs[0].numel()).view_as(outputs[0])
                results = [(output, *torch.autograd.grad(output, tensors, given)) for output in outputs]
                if not all(_is_near(a, b) for a, b in zip(*results, strict=True)):
                    return False
    except Exception:  # the code of any library
        return False
    return True


def _is_near(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= 1e-5 * b.abs().max()) and torch.allclose(a, b, rtol=1e-3, atol=1e-6)
