"""Plans of tasks without formulas: candidates are dry-run, and priced by rooflines and links."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from tests.lab.families import family
from tests.lab.jobs import write_job
from tests.lab.task_jobs import task_job
from weft.adapters.model import build_model
from weft.anatomy.transformers import read_any_anatomy
from weft.cli import app
from weft.errors import JobError
from weft.job import Distillation, Job
from weft.plan import Plan
from weft.planner.costmodel import roofline
from weft.planner.costmodel.hardware import DEVICES, ClusterSpec
from weft.planner.costmodel.operator_roofline import roofline_seconds
from weft.planner.costmodel.operators import Operation, TensorSpec
from weft.planner.dryrun.trace import trace
from weft.planner.search.by_dry_run import (
    candidates,
    plan_with_prediction,
    propose_by_dry_run,
    same_but,
    why_no_formulas,
)

H100 = DEVICES["H100"]


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> TensorSpec:
    return TensorSpec(shape, tuple(1 for _ in shape), dtype)


def test_operators_take_the_time_of_their_rooflines() -> None:
    mm = Operation("aten.mm.default", (tensor(4096, 8192), tensor(8192, 1024)))
    assert roofline_seconds(mm, H100) == roofline.matmul(H100, 4096, 1024, 8192)
    biased = Operation("aten.addmm.default", (tensor(1024), tensor(4096, 8192), tensor(8192, 1024)))
    assert roofline_seconds(biased, H100) == roofline_seconds(mm, H100)
    wide = Operation("aten.mm.default", tuple(tensor(*size, dtype=torch.float32) for size in ((512, 512), (512, 512))))
    assert roofline_seconds(wide, H100) == roofline.matmul(H100, 512, 512, 512, "fp32")
    heads = [tensor(2, 16, 1024, 64)] * 3
    forward = Operation("aten._scaled_dot_product_flash_attention.default", tuple(heads))
    backward = Operation("aten._scaled_dot_product_flash_attention_backward.default", (heads[0], *heads, heads[0]))
    flops = 4 * 2 * 16 * 1024 * 1024 * 64
    assert roofline_seconds(forward, H100) == roofline.flash_attention(H100, flops, 64, 1024)
    assert roofline_seconds(backward, H100) == roofline.flash_attention(H100, 2.5 * flops, 64, 1024)
    patches = Operation("aten.convolution.default", (tensor(8, 4, 128, 128), tensor(4096, 4, 2, 2), tensor(4096)))
    assert roofline_seconds(patches, H100) == roofline.matmul(H100, 8 * 64 * 64, 4096, 16)
    add = Operation("aten.add.Tensor", (tensor(2**20, 64), tensor(2**20, 64)))
    assert roofline_seconds(add, H100) == roofline.stream(H100, 3 * 2 * 2**26)


@pytest.mark.slow("six dry runs, each in a process of its own")
def test_the_fastest_plan_has_the_counts_of_its_dry_run(tmp_path: Path) -> None:
    job = task_job("image classification", tmp_path, train={"global_batch_size": 8, "micro_batch_size": 4})
    found = propose_by_dry_run(job, ClusterSpec(H100, 1, 2), 1.0, 0.9, 3)
    times = [one.time.seconds for one in found.best]
    assert times == sorted(times)
    assert len(times) == 3
    first = found.best[0]
    assert (first.plan.parallel.zero, first.plan.memory.recompute) == (0, ())  # all of it fits
    assert not found.refused
    (counted,) = trace(job.model_copy(update={"plan": first.plan}), 2, [0], "cuda")
    assert first.traces[0].count.peak == counted.count.peak
    plan = plan_with_prediction(found, first)
    assert plan.prediction is not None
    assert plan.prediction.tokens_per_second == pytest.approx(8 / times[0])
    dumped = plan.model_dump(exclude_none=True)
    assert Plan.model_validate(dumped).model_dump(exclude_none=True) == dumped


def test_candidates_differ_in_one_thing(tmp_path: Path) -> None:
    job = task_job("masked", tmp_path, train={"global_batch_size": 4})
    plans = candidates(job, ClusterSpec(H100, 1, 8))
    assert all(plan.parallel.data_ranks <= 4 for plan in plans)
    assert {plan.parallel.tp for plan in plans} == {1, 2, 4, 8}
    assert {plan.parallel.zero for plan in plans if plan.parallel.data_ranks == 1} == {0}
    first = plans[0]
    assert sum(same_but(plan, first, "zero", "dp_shard", "dp_replicate") for plan in plans) == 4


def test_a_model_that_fits_nowhere_is_refused(tmp_path: Path) -> None:
    small = ClusterSpec(replace(H100, memory=2**10), 1, 2)
    with pytest.raises(JobError, match=r"no plan of a model of .* fits on 2 H100") as caught:
        propose_by_dry_run(task_job("masked", tmp_path), small, 1.0, 0.9, 3)
    assert "model states alone take" in str(caught.value)


def test_plan_that_does_not_fit_with_recompute_is_not_tried_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = task_job("masked", tmp_path)
    states = 16 * read_any_anatomy(build_model(job, torch.float32), needs_roles=False).parameters
    small = ClusterSpec(replace(H100, memory=0.8 * states), 1, 1)
    with pytest.raises(JobError, match="fits on 1 H100") as caught:
        propose_by_dry_run(job, small, 1.0, 1.0, 3)
    assert capsys.readouterr().err == "weft: dry run of dp 1, zero 0, recompute block\n"
    assert "dp 1, zero 0: does not fit with recompute of blocks either" in str(caught.value)


def test_options_of_other_searches_are_refused(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(task_job("masked", tmp_path).to_toml())
    result = CliRunner().invoke(app, ["plan", str(job), "--device", "H100", "--emit", "megatron"])
    assert result.exit_code
    assert "--emit with task.kind = 'masked'" in str(result.exception)


def test_a_distillation_is_planned_with_its_teacher(tmp_path: Path) -> None:
    folder = tmp_path / "teacher"
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**family("llama"))).save_pretrained(folder)
    job = Job.load(
        write_job(
            tmp_path,
            model={"config": family("llama")},
            train={"loss": "weft:distillation"},
            distillation={"teacher": str(folder)},
        )
    )
    alone = job.model_copy(
        update={"train": job.train.model_copy(update={"loss": "cross_entropy"}), "distillation": Distillation()}
    )
    assert why_no_formulas(alone) == ""
    assert why_no_formulas(job) == "train.loss = 'weft:distillation'"
    cluster = ClusterSpec(H100, 1, 1)
    found = propose_by_dry_run(job, cluster, 1.0, 0.9, 1)
    (counted,) = trace(alone.model_copy(update={"plan": found.best[0].plan}), 1, [0], "cuda")
    weights = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder).parameters())
    assert found.best[0].traces[0].count.peak > counted.count.peak + 2 * weights  # at least in 16 bits
    assert found.targets == job.train.global_batch_size * job.data.seq_len
    result = CliRunner().invoke(app, ["plan", str(tmp_path / "job.toml"), "--device", "H100", "--emit", "megatron"])
    assert "--emit with train.loss = 'weft:distillation'" in str(result.exception)
