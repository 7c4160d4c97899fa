"""Effects of the table plan.compute on the third step of a run of `weft train`, beside a run without the setting."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.compute.interpreter import needs_triton
from tests.lab.families import family
from tests.lab.jobs import write_job
from tests.lab.pool import close_pools
from tests.lab.runs import ObservedRun, observe
from tests.lab.step_trace import BACKWARD, FORWARD, UPDATE, StepFacts, StepTrace
from weft.compute import adamw
from weft.compute.kernels import OPERATORS
from weft.errors import PlanError
from weft.job import Job
from weft.plan import Kernels

ROWS, SEQ_LEN, BLOCKS = 4, 48, 2
LLAMA = {**family("llama"), "vocab_size": 300}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
WIDTHS = {"hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 8}
EXPERTS = {**family("glm4_moe"), "vocab_size": 300, **HEADS, **WIDTHS}
"""Small, for Triton's interpreter; one block with a dense MLP, one with experts and a shared expert."""


def run(folder: Path, config: dict[str, Any], precision: dict[str, Any], **compute: Any) -> ObservedRun:
    """Train on rows with several short documents."""
    trace = StepTrace()
    (folder / "short").mkdir(exist_ok=True)
    for index in range(600):
        (folder / "short" / f"{index}.txt").write_text(f"Number {index} jumps.")
    plan = {"compute": compute, "precision": {"param_dtype": "bf16", **precision}}
    data = {"path": str(folder / "short"), "seq_len": SEQ_LEN}
    job = write_job(folder, model={"config": config}, data=data, train={"steps": 3}, plan=plan)
    return observe(Job.load(job), 1, fault=trace.install, probe=trace.facts)


def attentions(facts: StepFacts) -> dict[str, int]:
    """Attentions of full rows and of shorter sequences in one operator, masks, and softmaxes in the model's own code."""
    fused = facts.find("_scaled_dot_product_flash_attention_for_cpu", FORWARD)
    full = [call for call in fused if call.inputs[0].shape[2] == SEQ_LEN]
    masks = [operand for call in fused for operand in call.inputs if operand.shape == (ROWS, 1, SEQ_LEN, SEQ_LEN)]
    softmaxes = facts.find("_softmax", FORWARD)
    return {"rows": len(full), "documents": len(fused) - len(full), "masks": len(masks), "softmaxes": len(softmaxes)}


@pytest.mark.effect("plan.compute.attention", "operators of attention: of documents, of rows with masks, or softmaxes")
def test_attention_is_the_named_one(tmp_path: Path) -> None:
    auto, sdpa, eager = (
        attentions(run(tmp_path, LLAMA, {}, attention=name).facts[0]) for name in ("auto", "sdpa", "eager")
    )
    assert auto.pop("documents") > 2 * BLOCKS
    assert auto == {"rows": 0, "masks": 0, "softmaxes": 0}
    assert sdpa == {"rows": BLOCKS, "documents": 0, "masks": BLOCKS, "softmaxes": 0}
    assert eager == {"rows": 0, "documents": 0, "masks": 0, "softmaxes": BLOCKS}


@pytest.mark.effect(
    "plan.compute.kernels.attention", "operators of SDPA: flash of the CPU, or softmaxes between matmuls"
)
@pytest.mark.effect("plan.compute.kernels.attention", "kernels of CUDA on CPU: refused before the ranks start")
def test_the_attention_kernel_is_the_named_one(tmp_path: Path) -> None:
    flash, matmuls = (
        run(tmp_path, LLAMA, {}, attention="sdpa", kernels={"attention": name}).facts[0] for name in ("flash", "math")
    )
    assert attentions(flash)["rows"] == BLOCKS
    assert flash.find("_safe_softmax") == []
    assert attentions(matmuls)["rows"] == 0
    assert len(matmuls.find("_safe_softmax", FORWARD)) == BLOCKS
    for name in ("efficient", "cudnn", "FA3", "FA4"):
        with pytest.raises(PlanError, match=f"attention = '{name}' on cpu"):
            run(tmp_path, LLAMA, {}, kernels={"attention": name})


def test_attention_without_a_backward_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="backward of FlexAttention on cuda alone"):
        run(tmp_path, LLAMA, {}, attention="flex")


@pytest.fixture
def triton_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ranks that take Triton's kernels as on a GPU: torch computes those of forward, Triton's interpreter that of AdamW."""
    import triton.experimental.gluon  # imported by the interpreter, and wants functions that are not interpreted
    import triton.language
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    for operator in OPERATORS.values():
        monkeypatch.setitem(operator.refusal, "triton", lambda device_type: "")
    for module in (adamw, triton.language, triton.language.standard):
        for name, function in list(vars(module).items()):
            if isinstance(function, JITFunction):
                monkeypatch.setattr(module, name, InterpretedFunction(function.fn))
    monkeypatch.setattr(adamw, "PROGRAMS", 1)  # the interpreter takes time for each
    close_pools()  # ranks are forked with these changes
    yield
    close_pools()


def fused_calls(facts: StepFacts) -> dict[str, list[int]]:
    """Calls of the fused operators of a model in forward and in backward."""
    names = {"rms_norm": "rms_norm", "gated_activation": "gated_activation", "experts": "unpermute"}
    return {
        kernel: [len(facts.find(name, FORWARD)), len(facts.find(f"{name}_backward", BACKWARD))]
        for kernel, name in names.items()
    }


@pytest.mark.effect(
    "plan.compute.kernels.linear_cross_entropy", "gradients of logits that backward computes: none, or one"
)
@pytest.mark.effect(
    "plan.compute.kernels.rms_norm", "calls of the fused operator in a step, on CPU as if it were a GPU"
)
@pytest.mark.effect("plan.compute.kernels.gated_activation", "calls of the fused operator, on CPU as if it were a GPU")
@pytest.mark.effect("plan.compute.kernels.experts", "calls of the fused operator in a step, on CPU as if it were a GPU")
@pytest.mark.effect(
    "plan.compute.kernels.adamw",
    "updates by torch: none where Triton's interpreter updates split weights and int8 states",
)
@needs_triton
@pytest.mark.usefixtures("triton_on_cpu")
def test_kernels_are_the_named_ones(tmp_path: Path) -> None:
    precision = {"weights": "split_even", "optimizer_state_dtype": "int8"}
    others = dict.fromkeys(Kernels.model_fields, "reference")
    first, second = (
        run(tmp_path, EXPERTS, precision, kernels=others | named).facts[0]
        for named in (
            {"rms_norm": "triton", "experts": "triton", "adamw": "triton"},
            {"gated_activation": "triton", "linear_cross_entropy": "chunked"},
        )
    )
    norms = 4 * BLOCKS + 1
    assert fused_calls(first) == {"rms_norm": [norms, norms], "gated_activation": [0, 0], "experts": [1, 1]}
    assert fused_calls(second) == {"rms_norm": [0, 0], "gated_activation": [2, 2], "experts": [0, 0]}
    assert [len(facts.find("_log_softmax_backward_data", BACKWARD)) for facts in (first, second)] == [1, 0]
    assert first.find("_fused_adamw_", UPDATE) == []
    assert second.find("_fused_adamw_", UPDATE) != []
    assert first.updates == second.updates == {3.0}


@pytest.mark.effect("plan.compute.kernels.experts", "grouped: matmuls of experts by few sizes, in 16 bits on CPU")
@pytest.mark.must("the operator of experts on a CPU")
def test_experts_of_16_bits_are_computed_by_few_sizes(tmp_path: Path) -> None:
    plain, half, full = (
        run(tmp_path, EXPERTS, precision, **kernels).facts[0]
        for precision, kernels in (({}, {"kernels": {"experts": "reference"}}), ({}, {}), ({"param_dtype": "fp32"}, {}))
    )
    products = {"gate_up and down": 2, "their gradients": 4}
    for facts, calls in ((plain, 0), (half, 1), (full, 0)):
        found = [len(facts.find("grouped_mm", phase)) for phase in (FORWARD, BACKWARD)]
        assert found == [calls * number for number in products.values()]
    assert [len(facts.find("_grouped_mm", FORWARD)) for facts in (plain, half, full)] == [2, 0, 2]


@pytest.mark.effect("plan.compute.kernels.rms_norm", "triton on CPU: refused before the ranks start")
@pytest.mark.effect("plan.compute.kernels.gated_activation", "triton on CPU: refused before the ranks start")
@pytest.mark.effect("plan.compute.kernels.experts", "triton on CPU: refused before the ranks start")
@pytest.mark.effect("plan.compute.kernels.adamw", "triton on CPU: refused before the ranks start")
def test_kernels_of_another_device_are_refused(tmp_path: Path) -> None:
    for operator in OPERATORS:
        with pytest.raises(PlanError, match=f"{operator} = 'triton' on cpu"):
            run(tmp_path, LLAMA, {}, kernels={operator: "triton"})
