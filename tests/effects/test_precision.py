"""Effects of the table plan.precision on the third step of a run of `weft train`, beside a run without the setting."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lab.families import family
from tests.lab.jobs import write_job
from tests.lab.runs import ObservedRun, observe
from tests.lab.step_trace import BACKWARD, FORWARD, StepFacts, StepTrace
from weft.errors import PlanError
from weft.job import Job

VOCABULARY, EXPERTS, HIDDEN, KEYS, TOKENS = 300, 4, 32, 16, 128
MOE = {**family("qwen3_moe"), "vocab_size": VOCABULARY, "moe_intermediate_size": 32}
WIDE = {**family("llama"), "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def run(folder: Path, precision: dict[str, Any], config: Any = MOE, ranks: int = 1, zero: int = 3) -> ObservedRun:
    trace = StepTrace()
    plan = {"precision": {"param_dtype": "bf16", **precision}, "parallel": {"zero": zero}}
    job = write_job(folder, model={"config": config}, train={"steps": 3}, plan=plan)
    return observe(Job.load(job), ranks, fault=trace.install, probe=trace.facts)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> StepFacts:
    """A run in bf16, with the defaults of all other settings."""
    return run(tmp_path_factory.mktemp("plain"), {}).facts[0]


def matmul_dtypes(facts: StepFacts, width: int, phase: str = FORWARD) -> set[torch.dtype]:
    """Dtypes of the matmuls that make rows of `width` elements from all tokens."""
    return {
        operand.dtype
        for call in facts.find("mm", phase)
        for operand in call.inputs
        if call.outputs[0].shape == (TOKENS, width)
    }


@pytest.mark.effect("plan.precision.param_dtype", "dtype of the matmuls of a step: bf16, and fp32 with fp32")
def test_matmuls_have_the_dtype_of_the_parameters(plain: StepFacts, tmp_path: Path) -> None:
    assert plain.dtypes("mm") == {BF16}
    assert run(tmp_path, {"param_dtype": "fp32"}).facts[0].dtypes("mm") == {FP32}


@pytest.mark.effect("plan.precision.update", "bytes of weights and of optimizer state by dtype: half as many in bf16")
@pytest.mark.effect(
    "plan.precision.fp32_modules", "dtypes of the matmuls of router and head, and of the weights of norms: fp32"
)
def test_weights_in_bf16_and_modules_in_float32(plain: StepFacts, tmp_path: Path) -> None:
    facts = run(tmp_path, {"update": "bf16", "fp32_modules": ["router", "norm", "head"]}).facts[0]
    (whole,) = plain.parameters.values()
    assert facts.parameters == {(BF16, "cpu"): whole // 2}
    assert plain.states.keys() == {(FP32, "cpu")}
    assert facts.states[BF16, "cpu"] == whole
    for width in (VOCABULARY, EXPERTS):
        assert matmul_dtypes(plain, width) == {BF16}
        assert matmul_dtypes(facts, width) == {FP32}
    assert matmul_dtypes(facts, KEYS) == {BF16}
    norms = [
        {operand.dtype for call in found.find("mul", FORWARD) for operand in call.inputs if operand.shape == (HIDDEN,)}
        for found in (plain, facts)
    ]
    assert norms == [{BF16}, {FP32}]


@pytest.mark.effect("plan.precision.backward", "dtype of the matmuls of backward: fp16 after a forward in bf16")
@pytest.mark.effect("plan.precision.loss_scale", "norm of the gradients of backward: the reported norm times the scale")
def test_scaled_backward_in_fp16(plain: StepFacts, tmp_path: Path) -> None:
    done = run(tmp_path, {"backward": "fp16", "loss_scale": "dynamic"})
    facts, norm = done.facts[0], done.metrics[2].grad_norm
    assert (plain.dtypes("mm", FORWARD), plain.dtypes("mm", BACKWARD)) == ({BF16}, {BF16})
    assert (facts.dtypes("mm", FORWARD), facts.dtypes("mm", BACKWARD)) == ({BF16}, {FP16})
    assert facts.scaled_norm == pytest.approx(2**16 * norm)


@pytest.mark.effect(
    "plan.precision.reduce_dtype", "bytes of the reduce-scatters: half of those of the all-gathers in fp32"
)
@pytest.mark.effect("plan.precision.loss_scale", "a number: norm of the gradients of backward of all ranks")
def test_gradients_are_reduced_in_bf16(tmp_path: Path) -> None:
    done = run(tmp_path, {"param_dtype": "fp32", "reduce_dtype": "bf16", "loss_scale": 512.0}, ranks=2, zero=2)
    sent = (done.metrics[2].comm or {})["dp_shard"]
    assert sent["all_gather_bytes"] == 2 * sent["reduce_scatter_bytes"] > 0
    assert sum(facts.scaled_norm**2 for facts in done.facts) ** 0.5 == pytest.approx(512 * done.metrics[2].grad_norm)


@pytest.mark.effect(
    "plan.precision.weights", "bytes of weights by dtype: planes of bf16 and int16; casts of weights in forward: none"
)
@pytest.mark.effect("plan.precision.optimizer_state_dtype", "bytes of optimizer state by dtype: codes of 8 bits")
def test_split_weights_and_states_of_8_bits(plain: StepFacts, tmp_path: Path) -> None:
    facts = run(tmp_path, {"weights": "split_even", "optimizer_state_dtype": "int8"}).facts[0]
    (whole,) = plain.parameters.values()
    assert facts.parameters[BF16, "cpu"] == facts.parameters[torch.int16, "cpu"] == whole // 2
    assert whole // 32 <= facts.parameters[torch.uint8, "cpu"] < 1.01 * whole / 32
    assert facts.parameters.keys() == {(BF16, "cpu"), (torch.int16, "cpu"), (torch.uint8, "cpu")}
    casts = [
        sum(call.inputs[0].dtype == FP32 and len(call.inputs[0].shape) == 1 for call in found.find("_to_copy", FORWARD))
        for found in (plain, facts)
    ]
    assert casts[0] > 20
    assert casts[1] == 0
    assert facts.states[torch.uint8, "cpu"] > 0.7 * plain.states[FP32, "cpu"] / 4
    assert sum(facts.states.values()) < 0.5 * plain.states[FP32, "cpu"]


@pytest.mark.effect(
    "plan.precision.matmul", "FP8 matmuls of a step: three for each linear layer and each matrix of experts"
)
@pytest.mark.effect(
    "plan.precision.emulate_fp8", "FP8 matmuls on a device without them: refused before ranks start without it"
)
def test_matmuls_in_fp8(plain: StepFacts, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="this device has no FP8 matmuls"):
        run(tmp_path, {"matmul": "fp8"})
    facts = run(tmp_path, {"matmul": "fp8", "emulate_fp8": True}).facts[0]
    layers, matrices = 2 * 4, 2 * 2  # q, k, v, o; gate_up, down
    for phase, matmuls in ((FORWARD, 1), (BACKWARD, 2)):
        assert len(facts.find("fp8_matmul", phase)) == matmuls * layers
        assert len(facts.find("fp8_grouped_matmul", phase)) == matmuls * matrices
        assert facts.find("grouped_mm", phase) == plain.find("fp8_matmul") == plain.find("fp8_grouped_matmul") == []
        assert len(plain.find("grouped_mm", phase)) == matmuls * matrices
    assert facts.dtypes("fp8_matmul", FORWARD) == {torch.float8_e4m3fn, FP32}  # scales are float32


@pytest.mark.effect("plan.precision.matmul", "fp8_block: scales of the operands of an FP8 matmul, one for 128 values")
def test_matmuls_in_fp8_with_scales_for_blocks(tmp_path: Path) -> None:
    facts = run(tmp_path, {"matmul": "fp8_block", "emulate_fp8": True}, WIDE).facts[0]
    shapes = {tuple(operand.shape for operand in call.inputs) for call in facts.find("fp8_matmul", FORWARD)}
    assert shapes == {((TOKENS, 128), (TOKENS, 1), (128, 128), (1, 1))}


@pytest.mark.effect(
    "plan.precision.quantize", "rounded weights of a step: those of all linear layers, in both directions"
)
@pytest.mark.effect("plan.precision.quantize_group_size", "weights that are rounded with one scale: 64")
@pytest.mark.effect("plan.precision.quantize_inputs", "rounded inputs of a step: those of all linear layers")
def test_weights_and_inputs_are_rounded_in_training(plain: StepFacts, tmp_path: Path) -> None:
    settings = {"quantize": "int4", "quantize_group_size": 64, "quantize_inputs": "int8"}
    facts = run(tmp_path, settings, WIDE).facts[0]
    assert plain.find("round") == []
    for phase in (FORWARD, BACKWARD):
        shapes = [call.inputs[0].shape for call in facts.find("round", phase)]
        assert shapes.count((4, TOKENS // 4, 128)) == 2 * 7
        assert shapes.count((128, 2, 64)) == 2 * 5
        assert shapes.count((64, 2, 64)) == 2 * 2  # k and v
        assert len(shapes) == 2 * 2 * 7
