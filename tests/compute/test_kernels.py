"""The table of fused operators: variants of families, parity with the untouched model, refusals, recompute, meta weights."""

from collections.abc import Iterator
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from tests.lab.families import COMMON, FAMILIES
from weft.anatomy.build import build_on_meta
from weft.anatomy.transformers import read_anatomy
from weft.compute import kernels
from weft.compute.kernels import KernelRow, choose_kernels, find_kernels, replace_forwards
from weft.device.cpu import Cpu
from weft.errors import PlanError
from weft.memory.offload import build_offload
from weft.memory.output_recompute import is_cheap
from weft.memory.recompute import apply_recompute
from weft.plan import Memory
from weft.precision.roles import compute_in_float32

VARIANTS = {
    "llama": ("weight after the cast, eps 1e-06", "silu"),
    "qwen3": ("weight after the cast, eps 1e-06", "silu"),
    "gemma2": ("1 + weight before the cast, eps 1e-06", "gelu_tanh"),
    "gemma3_text": ("1 + weight before the cast, eps 1e-06", "gelu_tanh"),
    "phi3": ("weight after the cast, eps 1e-05", "silu, packed"),
    "glm": ("weight after the cast, eps 1.5625e-07", "silu, packed"),
    "olmo2": ("weight before the cast, eps 1e-05", "silu"),
    "nanochat": ("no weight, eps 1e-06", None),
    "deepseek_v3": ("weight after the cast, eps 1e-06", "silu"),
    "qwen3_moe": ("weight after the cast, eps 1e-06", None),
}


def build(family: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **FAMILIES.get(family, COMMON)), dtype=dtype)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.add_(torch.randn_like(parameter) * 0.3)
    return model


def replace_all(model: nn.Module) -> list[KernelRow]:
    """Replace every operator on CPU, where the operators run their references."""
    anatomy = read_anatomy(model)  # type: ignore[arg-type]
    forwards = [op for op, operator in kernels.OPERATORS.items() if isinstance(operator, kernels.ForwardOperator)]
    rows = [row for op in forwards for row in find_kernels(model, anatomy, op, "triton")]
    replace_forwards(model, rows)
    return rows


def run(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    tokens = torch.arange(24).view(2, 12) * 7 % 90
    logits = model(input_ids=tokens, use_cache=False).logits
    (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_equal_runs(model: Any, original: Any, tolerance: float) -> None:
    (logits, gradients), (expected, expected_gradients) = run(model), run(original)
    assert gradients.keys() == expected_gradients.keys()
    assert_near(logits, expected, tolerance)
    for name, gradient in gradients.items():
        assert_near(gradient, expected_gradients[name], tolerance, name)


def assert_near(a: Tensor, b: Tensor, tolerance: float, name: str = "logits") -> None:
    assert (a - b).abs().max() <= tolerance * b.abs().max(), name


@pytest.mark.parametrize("family", VARIANTS)
def test_fused_operators_equal_the_untouched_model(family: str) -> None:
    model = build(family)
    original = deepcopy(model)
    rows = replace_all(model)
    norms, gate = VARIANTS[family]
    assert [row.variant for row in rows if row.op == "rms_norm"] == [norms]
    assert [row.variant for row in rows if row.op == "gated_activation"] == [gate] * (gate is not None)
    assert_equal_runs(model, original, 1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma2", "olmo2", "phi3"])
def test_logits_in_bfloat16_differ_by_few_roundings(family: str) -> None:
    model = build(family, torch.bfloat16)
    original = deepcopy(model)
    replace_all(model)
    logits, expected = (each(input_ids=torch.arange(24).view(2, 12)).logits for each in (model, original))
    assert logits.dtype == expected.dtype
    assert (logits != expected).float().mean() < 0.01


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_float64_equals_the_untouched_model(family: str) -> None:
    model = build(family, torch.float64)
    original = deepcopy(model)
    replace_all(model)
    assert_equal_runs(model, original, 1e-12)


def test_modules_that_agree_with_no_variant_keep_their_code() -> None:
    model = build("llama")

    class Scaled(type(model.model.layers[0].mlp)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * 1.001)

    class CenteredNorm(type(model.model.norm)):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor) -> Tensor:
            return super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))

    class DetachedNorm(type(model.model.norm)):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor) -> Tensor:
            return super().forward(hidden_states.detach()) + hidden_states * 0

    model.model.layers[0].mlp.__class__ = Scaled
    model.model.norm.__class__ = CenteredNorm
    model.model.layers[0].input_layernorm.__class__ = DetachedNorm
    model.model.layers[1].mlp.forward = lambda x: x
    rows = replace_all(model)
    left = {name: row.reason for row in rows for name in row.modules if row.reason}
    assert set(left) == {"model.layers.0.mlp", "model.layers.1.mlp", "model.norm", "model.layers.0.input_layernorm"}
    assert "no variant" in left["model.layers.0.mlp"]
    assert "replaced its forward" in left["model.layers.1.mlp"]
    assert "forward" not in vars(model.model.norm)


def test_layer_norm_keeps_its_code() -> None:
    (row,) = replace_all(build("gpt2"))
    assert (row.implementation, row.variant) == ("reference", "")
    assert "module of torch" in row.reason


def test_auto_leaves_the_model_alone_onCpu() -> None:
    model = build("llama")
    rows = choose_kernels(model, read_anatomy(model), "auto", "cpu")
    assert [(row.op, row.implementation, len(row.modules)) for row in rows] == [
        ("rms_norm", "reference", 5),
        ("gated_activation", "reference", 2),
        ("adamw", "reference", 0),
    ]
    assert "run on cuda, not on cpu" in rows[0].reason
    assert not any("forward" in vars(module) for module in model.modules())


def test_auto_replaces_experts_of_16_bits_on_a_cpu() -> None:
    model = build("qwen3_moe")
    original = deepcopy(model)
    rows = choose_kernels(model, read_anatomy(model), "auto", "cpu")
    (row,) = [row for row in rows if row.op == "experts"]
    assert (row.implementation, len(row.modules)) == ("grouped", 2)
    replace_forwards(model, rows)
    tokens = torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, original(tokens).logits)
    for dtype, calls in ((torch.float32, 0), (torch.bfloat16, 2 * 3 * 2)):
        with torch.profiler.profile() as profile:
            model.to(dtype)(tokens).logits.sum().backward()
        counts = {event.key: event.count for event in profile.key_averages()}
        assert counts.get("weft::grouped_mm", 0) == calls


def test_auto_takes_triton_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "has_triton", lambda: True)
    model = build_on_meta(AutoConfig.for_model("llama", **COMMON), torch.bfloat16)
    rows = choose_kernels(model, read_anatomy(model), {"gated_activation": "reference"}, "cuda")
    assert [(row.op, row.implementation, row.reason) for row in rows] == [
        ("rms_norm", "triton", ""),
        ("gated_activation", "reference", "the plan asks for it"),
        ("adamw", "triton", ""),
    ]


@pytest.mark.parametrize(
    ("chosen", "what", "fix"),
    [
        ("fast", "kernels = 'fast'", "write 'auto'"),
        ({"rms_nrm": "auto"}, "operator 'rms_nrm'", "write 'rms_norm'"),
        ({"rms_norm": "tritn"}, "rms_norm = 'tritn'", "write 'triton'"),
        ({"rms_norm": "triton"}, "rms_norm = 'triton' on cpu", "leave plan.compute.kernels.rms_norm out"),
    ],
)
def test_names_that_do_not_apply_are_refused(chosen: Any, what: str, fix: str) -> None:
    model = build("llama")
    with pytest.raises(PlanError) as error:
        choose_kernels(model, read_anatomy(model), chosen, "cpu")
    assert what in str(error.value)
    assert fix in str(error.value)


def test_operator_that_no_module_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "has_triton", lambda: True)
    model = build("gpt2")
    for op, rule in (("rms_norm", "LayerNorm: a module of torch"), ("gated_activation", "no such module")):
        with pytest.raises(PlanError, match=rule):
            choose_kernels(model, read_anatomy(model), {op: "triton"}, "cuda")


def test_a_stage_replaces_the_modules_that_it_has() -> None:
    model = build("llama")
    rows = find_kernels(model, read_anatomy(model), "gated_activation", "triton")
    model.model.layers[0] = nn.Identity()
    replace_forwards(model, rows)
    replaced = [name for name, module in model.named_modules() if "forward" in vars(module)]
    assert (replaced, len(rows[0].modules)) == (["model.layers.1.mlp"], 2)


def test_weights_that_are_made_later_are_used() -> None:
    original = build("olmo2")
    model = build_on_meta(original.config, torch.float32)
    replace_all(model)
    model.to_empty(device="cpu")
    model.load_state_dict(original.state_dict())
    for name, buffer in original.named_buffers():
        model.get_buffer(name).copy_(buffer)
    model.train(original.training)
    assert_equal_runs(model, original, 1e-5)


@pytest.mark.parametrize("roles", [("block",), ("norm", "activation"), ("attention", "mlp")])
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_recompute_gives_the_same_bits(family: str, roles: tuple[str, ...]) -> None:
    model = build(family).train()
    replace_all(model)
    original, anatomy, memory = deepcopy(model), read_anatomy(model), Memory(recompute=roles)
    own = {block.name for block in anatomy.blocks}
    apply_recompute(model, anatomy, own, memory, lambda module: nullcontext, build_offload(memory, Cpu()))
    assert_equal_runs(model, original, 0)


class Calls(TorchDispatchMode):
    """Count the operators of Weft."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "weft":
            self.names.append(func._schema.name.removeprefix("weft::"))
        return func(*args, **(kwargs or {}))


def test_output_recompute_recomputes_fused_operators_once() -> None:
    model = build("llama").train()
    replace_all(model)
    anatomy, memory = read_anatomy(model), Memory(recompute=("norm", "activation"))
    apply_recompute(
        *(model, anatomy, {block.name for block in anatomy.blocks}, memory),
        *(lambda module: nullcontext, build_offload(memory, Cpu())),
    )
    with Calls() as calls:
        run(model)
    counts = {name: calls.names.count(name) for name in set(calls.names)}
    assert counts == {
        "rms_norm": 9,
        "rms_norm_backward": 5,
        "gated_activation": 4,
        "gated_activation_backward": 2,
    }


def test_float32_modules_compose_with_fused_norms() -> None:
    model = build("llama", torch.bfloat16)
    original, anatomy = deepcopy(model), read_anatomy(model)
    replace_all(model)
    for each in (model, original):
        compute_in_float32(each, anatomy, ("norm",))
    x = torch.randn(3, 5, 32).bfloat16()
    assert torch.equal(model.model.norm(x), original.model.norm(x))


def operators() -> Iterator[Any]:
    for name in ("rms_norm", "gated_activation", "packed_gated_activation"):
        yield getattr(torch.ops.weft, name).default


def test_fused_operators_are_cheap_to_recompute() -> None:
    assert all(is_cheap(operator) for operator in operators())


def test_a_fake_model_runs_forward_and_backward() -> None:
    model = build_on_meta(AutoConfig.for_model("llama", **COMMON), torch.bfloat16)
    replace_all(model)
    with FakeTensorMode(allow_non_fake_inputs=True), Calls() as calls:
        model.to_empty(device="cpu")
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
        model(input_ids=torch.zeros(2, 8, dtype=torch.int64)).logits.sum().backward()
    assert calls.names.count("rms_norm_backward") == 5
    assert calls.names.count("gated_activation_backward") == 2
    assert all(parameter.grad is not None for parameter in model.parameters())
