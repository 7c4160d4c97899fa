"""Planner and dry run of jobs with adapters."""

import re
import sys
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.lab.adapters import job_for
from tests.lab.families import family
from tests.lab.parity import plan_for
from tests.lab.plans import resolved_job
from weft.adapters.model import add_adapters, build_model
from weft.anatomy.transformers import read_anatomy
from weft.errors import JobError, ModelError
from weft.job import Adapter, Data, Job, Model
from weft.parallel.data.state_size import model_state_bytes
from weft.parallel.experts.adapters import apply_expert_adapters
from weft.planner.costmodel.cluster_file import choose_cluster
from weft.planner.dryrun.trace import trace
from weft.planner.search.propose import propose
from weft.training.job_checks import check_model

LLAMA = family("llama")


def job_of(kind: str, **parallel: int) -> Job:
    job = job_for(LLAMA, plan_for("fp32", **parallel), Adapter(kind=kind, r=4))  # type: ignore[arg-type]
    return job.model_copy(update={"data": Data(seq_len=32)})


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_the_dry_run_counts_optimizer_states_of_adapters_only(zero: int) -> None:
    job = job_of("dora", zero=zero)
    model = build_model(job, torch.float32)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    (found,) = trace(job, 2, [0])
    state, predicted = found.count.state_bytes, model_state_bytes(trained, found.plan, frozen=(frozen, 0))
    counters = 4 * sum(p.requires_grad for p in model.parameters())  # AdamW's step, one for each tensor
    assert state["parameters"] == pytest.approx(predicted["parameters"], rel=0.01)
    assert state["optimizer"] == predicted["optimizer"] + counters
    assert predicted["optimizer"] == 2 * 4 * trained / (1 if zero == 0 else 2)


def test_the_search_of_plans_for_adapters_is_refused() -> None:
    machine = choose_cluster(None, "H100", 1, 2)
    with pytest.raises(JobError, match=r"a search of plans for adapter\.kind = 'lora'"):
        propose(job_of("lora"), machine.cluster)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"targets": ("q_proj", "down_proj")}, "'down_proj' is the weight of all experts of a layer"),
        ({"targets": ("experts.up_proj",)}, "'experts.up_proj' matches no weight of experts"),
        ({"targets": ("experts.down_proj",), "kind": "dora"}, "adapter.kind = 'dora' with the target"),
        ({"targets": ("experts.down_proj",), "dropout": 0.1}, "adapter.dropout = 0.1 with the target"),
    ],
)
def test_targets_that_are_no_weights_of_experts_are_refused(changes: dict[str, Any], message: str) -> None:
    job = Job(model=Model(config=family("qwen3_moe")), adapter=Adapter(**{"kind": "lora", **changes}))
    with pytest.raises(JobError, match=re.escape(message)) as caught:
        check_model(resolved_job(job, 1))
    assert "experts.down_proj" in str(caught.value.fix) or "or remove the target" in str(caught.value.fix)


def test_a_target_that_peft_takes_for_that_of_experts_is_refused() -> None:
    targets = ("q_proj", "shared_experts.down_proj", "experts.gate_up_proj")
    job = Job(model=Model(config=family("glm4_moe")), adapter=Adapter(kind="lora", targets=targets))
    with pytest.raises(JobError, match=r"PEFT gives .*\.shared_experts\.down_proj no adapter"):
        check_model(resolved_job(job, 1))


@pytest.mark.parametrize("zero", [0, 3])
def test_the_dry_run_counts_adapters_of_experts(zero: int) -> None:
    adapter = Adapter(kind="lora", r=4, targets=("experts.gate_up_proj", "experts.down_proj"))
    job = job_for(family("qwen3_moe"), plan_for("fp32", zero=zero, ep=2), adapter)
    trained = sum(p.numel() for p in build_model(job, torch.float32).parameters() if p.requires_grad)
    (found,) = trace(job.model_copy(update={"data": Data(seq_len=32)}), 2, [0])
    predicted = model_state_bytes(trained, found.plan)["optimizer"]
    assert found.count.state_bytes["optimizer"] == pytest.approx(predicted, rel=0.02)
    assert predicted == 2 * 4 * trained / (1 if zero == 0 else 2)


@pytest.mark.parametrize("name", ["lm_head.weight", "q_proj.weight"])
def test_adapters_on_other_parameters_are_refused(name: str) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA))
    adapted: Any = peft.get_peft_model(model, peft.LoraConfig(target_parameters=[name], target_modules=[]))
    with pytest.raises(ModelError, match="an adapter of PEFT on the parameter weight"):
        apply_expert_adapters(adapted.get_base_model(), read_anatomy(adapted.get_base_model()), None)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_experts_that_peft_would_wrap_are_refused(kind: Any) -> None:
    job = Job(model=Model(config=family("glm4_moe")), adapter=Adapter(kind=kind))
    with pytest.raises(JobError) as caught:
        check_model(resolved_job(job, 1))
    assert "q_proj" in str(caught.value.fix)


def test_a_model_without_linear_layers_is_refused() -> None:
    job = Job(model=Model(config={"model_type": "llama", **LLAMA}), adapter=Adapter(kind="lora"))
    model: Any = build_model(job.model_copy(update={"adapter": Adapter()}), torch.float32)
    for block in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(block.self_attn, name, nn.Identity())
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(block.mlp, name, nn.Identity())
    with pytest.raises(JobError, match="without linear layers in its blocks"):
        add_adapters(model, Adapter(kind="lora"))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ["peft", *(name for name in sys.modules if name.startswith("peft."))]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(JobError, match="peft cannot be imported") as caught:
        build_model(job_of("lora"), torch.float32)
    assert "pip install" in str(caught.value.fix)
