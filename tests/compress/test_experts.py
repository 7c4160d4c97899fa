"""weft compress of models with experts: stored as a matrix for each, and loaded by plain Transformers as they compute."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.compress.fresh import FreshTransformers
from tests.compress.test_compress import quiet, refused, save, tensors_of, text, unpack
from weft.compress.blocks import calibrate_blocks
from weft.compress.recipe import Recipe, read_recipe
from weft.compress.run import compress
from weft.compress.source import Source
from weft.errors import ModelError

pytestmark = pytest.mark.together  # one process with plain Transformers

SIZES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen3_moe": {"moe_intermediate_size": 32},
    "deepseek_v3": {
        "moe_intermediate_size": 32,
        "head_dim": 8,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "v_head_dim": 16,
    },
    "olmoe": {},
    "gpt_neox": {},  # without experts: the output layer has another name in the folder
    "nanochat": {},  # the same, and its initialization reads weights of linear layers
}


def unpacked(folder: Path, out: Path) -> Any:
    """The model of the stored values, written as a plain folder and loaded by Transformers."""
    stored, dense = tensors_of(folder), {}
    table = json.loads((folder / "config.json").read_text())
    (group,) = (g for n, g in table.pop("quantization_config")["config_groups"].items() if n == "linear")
    for name, tensor in stored.items():
        module, _, kind = name.rpartition(".")
        scale = stored.get(f"{module}.weight_scale")
        if kind == "weight_packed":
            values = unpack(tensor, group["weights"]["num_bits"], stored[f"{module}.weight_shape"].tolist())
        elif kind not in ("weight_scale", "weight_shape"):
            values = tensor.float()
        else:
            continue
        if kind in ("weight", "weight_packed") and scale is not None:
            values = (values.unflatten(1, (scale.shape[1], -1)) * scale[..., None]).flatten(1)
            name = f"{module}.weight"
        dense[name] = values.contiguous()
    out.mkdir()
    save_file(dense, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(table))
    model, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return model.eval()


@pytest.mark.parametrize("recipe", ["int8", "int4", "fp8", "2:4"])
@pytest.mark.parametrize("name", SIZES)
def test_a_fresh_process_loads_the_rounded_experts(
    name: str, recipe: str, fresh: FreshTransformers, tmp_path: Path
) -> None:
    model = save(tmp_path / "model", name, **SIZES[name])
    found = compress(tmp_path / "model", tmp_path / "small", read_recipe(recipe), text(), quiet)
    logits = fresh.logits(tmp_path / "small", text(2), tmp_path)
    with torch.no_grad():
        before = model(text(2)).logits
        if recipe != "2:4":
            own = unpacked(tmp_path / "small", tmp_path / "dense")(text(2)).logits
            torch.testing.assert_close(logits, own, rtol=1e-5, atol=1e-5)
    assert (
        0 < float((logits - before).norm() / before.norm()) < {"int8": 0.1, "int4": 0.3, "fp8": 0.2, "2:4": 0.8}[recipe]
    )
    if name not in ("gpt_neox", "nanochat"):
        assert any(".experts." in layer for layer in found.errors)
        assert (
            recipe == "2:4" or found.bytes_after < {"int8": 0.6, "int4": 0.5, "fp8": 0.6}[recipe] * found.bytes_before
        )


def test_hessians_of_experts_are_of_the_tokens_that_chose_them(tmp_path: Path) -> None:
    save(tmp_path / "model", "mixtral", num_hidden_layers=1)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    inputs: list[Any] = []
    experts = model.model.layers[0].mlp.experts
    experts.register_forward_pre_hook(lambda module, args: inputs.append(args))
    with torch.no_grad():
        model(text(4))
    hidden, chosen = inputs[0][0], inputs[0][1]
    found: dict[tuple[str, int], Tensor] = {}
    with Source(tmp_path / "model") as source:
        calibrate_blocks(
            source.model,
            source.anatomy,
            source.load,
            [text(4)[:2], text(4)[2:]],
            lambda name, block, h: found.update(h),
        )
    assert {index for name, index in found if name == "mlp.experts.gate_up_proj"} == set(chosen.unique().tolist())
    for index in chosen.unique().tolist():
        rows = hidden[(chosen == index).any(1)]
        torch.testing.assert_close(found["mlp.experts.gate_up_proj", index], rows.T @ rows, rtol=1e-4, atol=1e-5)
        gate, up = (rows @ experts.gate_up_proj[index].T).chunk(2, dim=-1)
        units = torch.nn.functional.silu(gate) * up
        torch.testing.assert_close(found["mlp.experts.down_proj", index], units.T @ units, rtol=1e-4, atol=1e-6)


def test_compensation_lowers_the_error_of_experts(fresh: FreshTransformers, tmp_path: Path) -> None:
    model = save(tmp_path / "model", "mixtral")
    with torch.no_grad():
        before = model(text()).logits
    errors = []
    for method in ("gptq", "nearest"):
        recipe = Recipe(weights="int4", group_size=32, method=method, skip=(".*self_attn.*",))
        compress(tmp_path / "model", tmp_path / method, recipe, text(), quiet)
        errors.append(float((fresh.logits(tmp_path / method, text(), tmp_path) - before).norm()))
    assert errors[0] < errors[1]


def test_experts_that_are_skipped_stay_as_they_are(fresh: FreshTransformers, tmp_path: Path) -> None:
    save(tmp_path / "model", "mixtral")
    recipe = Recipe(weights="fp8", method="nearest", skip=(".*experts.*",))
    compress(tmp_path / "model", tmp_path / "small", recipe, None, quiet)
    before, after = tensors_of(tmp_path / "model"), tensors_of(tmp_path / "small")
    experts = [name for name in before if ".experts." in name]
    assert experts
    assert all(torch.equal(before[name], after[name]) for name in experts)
    assert torch.isfinite(fresh.logits(tmp_path / "small", text(2), tmp_path)).all()


def test_bad_input(tmp_path: Path) -> None:
    save(tmp_path / "model", "mixtral")
    save(tmp_path / "stacked", "gpt_oss")
    refused(
        ModelError,
        r"0.mlp.experts.down_proj is stored as several tensors, and stays",
        tmp_path / "model",
        Recipe(weights="int8", skip=(".*0.*down_proj",)),
    )
    refused(
        ModelError, "symmetric = False for mixtral", tmp_path / "model", Recipe(weights="int4", symmetric=False), text()
    )
    save(tmp_path / "several", "bailing_hybrid")
    refused(ModelError, "conv1d.weight is stored as several tensors", tmp_path / "several", read_recipe("int8"))
    refused(ModelError, "stored as one tensor of 3", tmp_path / "stacked", read_recipe("fp8"))
