"""Planner and dry run of jobs with adapters."""

import sys
from typing import Any

import pytest
import torch
from torch import nn

from tests.lab.adapters import job_for
from tests.lab.families import family
from tests.lab.parity import plan_for
from weft.adapters.model import build_model, check_targets
from weft.errors import JobError
from weft.job import Adapter, Data, Job, Model
from weft.parallel.fsdp import model_state_bytes
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


def test_the_search_and_the_dry_run_of_qlora_are_refused() -> None:
    machine = choose_cluster(None, "H100", 1, 2)
    with pytest.raises(JobError, match=r"a search of plans for adapter\.kind = 'lora'"):
        propose(job_of("lora"), machine.cluster)
    with pytest.raises(JobError, match=r"a dry run with adapter\.kind = 'qlora'"):
        trace(job_of("qlora", zero=2), 2, [0])


def test_experts_in_one_tensor_are_refused_by_name() -> None:
    config = family("qwen3_moe")
    job = Job(model=Model(config=config), adapter=Adapter(kind="lora", targets=("q_proj", "experts.down_proj")))
    with pytest.raises(JobError, match="is the weight of all experts of a layer") as caught:
        check_model(job.model_copy(update={"plan": job.plan.resolve(1)}))
    assert "k_proj, o_proj, q_proj, v_proj" in str(caught.value)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_experts_that_peft_would_wrap_are_refused(kind: Any) -> None:
    job = Job(model=Model(config=family("glm4_moe")), adapter=Adapter(kind=kind))
    with pytest.raises(JobError) as caught:
        check_model(job.model_copy(update={"plan": job.plan.resolve(1)}))
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
        check_targets(model, Adapter(kind="lora"))


@pytest.mark.parametrize(("kind", "package"), [("lora", "peft"), ("qlora", "torchao")])
def test_a_missing_package_is_named(kind: Any, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [package, *(name for name in sys.modules if name.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(JobError, match=f"{package} cannot be imported") as caught:
        build_model(job_of(kind), torch.float32)
    assert "pip install" in str(caught.value.fix)
