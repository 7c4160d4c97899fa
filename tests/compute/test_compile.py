"""Compiled blocks: parity with the untouched model on every axis, few graphs, and refusals."""

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM

import weft
from tests.integrations.scripts_in_pool import script_on_rank
from tests.lab.families import family
from tests.lab.jobs import write_job
from tests.lab.parity import assert_parity, packed_batches, plan_for, run_plan
from tests.lab.plans import resolved
from tests.lab.pool import run_ranks
from tests.lab.runs import observe
from weft.anatomy.build import build_on_meta
from weft.anatomy.roles import Anatomy
from weft.anatomy.transformers import read_anatomy
from weft.checkpoint.model_config import read_config
from weft.comm.objects import broadcast_json
from weft.compute import kernels
from weft.compute.compile import CompiledRegions, compile_blocks
from weft.device.detect import detect
from weft.errors import PlanError
from weft.job import Job, Model
from weft.parallel.choices import check_axes, choose
from weft.parallel.operators import explain_operators
from weft.parallel.runtime import runtime
from weft.plan import Compute, Kernels, Memory, Parallel, Pipeline, Plan, Precision
from weft.training.session import Session

BLOCKS = Compute(compile="blocks")
# Family, ranks, parallelism, other settings of the plan.
CASES: dict[str, tuple[str, int, dict[str, int], dict[str, Any]]] = {
    "zero 0": ("llama", 1, {"zero": 0}, {}),
    "recompute": ("llama", 1, {"zero": 3}, {"memory": Memory(recompute=("block",))}),
    "offload": ("gpt2", 2, {"zero": 3}, {"memory": Memory(offload=("block",))}),
    "windows": ("gemma3_text", 2, {"zero": 3}, {}),
    "tp": ("llama", 2, {"tp": 2, "zero": 1}, {}),
    "cp": ("llama", 2, {"cp": 2, "zero": 3}, {}),
    "pp": ("llama", 2, {"pp": 2, "zero": 1}, {}),
    "ep": ("qwen3_moe", 2, {"ep": 2, "zero": 1}, {}),
    "shared experts": ("deepseek_v3", 2, {"ep": 2, "zero": 3}, {}),
}


def _forget(rank: int, world_size: int) -> None:
    """Begin without the graphs of other tests; from now on, too many graphs are an error and not a silent fallback."""
    torch._dynamo.reset()
    counters.clear()
    torch._dynamo.config.fail_on_recompile_limit_hit = True


def _count(rank: int, world_size: int) -> int:
    torch._dynamo.config.fail_on_recompile_limit_hit = False
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("name", CASES)
def test_parity(name: str) -> None:
    kind, ranks, parallel, settings = CASES[name]
    plan = plan_for("fp32", **parallel).model_copy(update={"compute": BLOCKS, **settings})
    run_ranks(ranks, _forget)
    assert_parity(Model(config=family(kind)), plan, ranks, micro_batch=2)
    assert run_ranks(ranks, _count)[0] > 0


# Blocks of one shape share their code, so that a deep model does not reach the limit of graphs and fall back silently.
DEEP: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "zero 3": ("llama", {"zero": 3}, {}),
    "tp": ("llama", {"tp": 2}, {}),
    "cp": ("llama", {"cp": 2}, {}),
    "ep": ("qwen3_moe", {"ep": 2}, {}),
    "shared experts": ("deepseek_v3", {"ep": 2}, {}),
    "fp8": ("llama", {}, {"precision": Precision(matmul="fp8", emulate_fp8=True, param_dtype="fp32")}),
    "routers and norms in float32": (
        "qwen3_moe",
        {},
        {"precision": Precision(param_dtype="bf16", fp32_modules=("router", "norm"))},
    ),
    "recompute and offload": ("llama", {}, {"memory": Memory(recompute=("block",), offload=("block",))}),
}


@pytest.mark.parametrize("name", DEEP)
def test_blocks_share_their_code(name: str) -> None:
    kind, parallel, settings = DEEP[name]
    config = {**family(kind), "num_hidden_layers": 10, "hidden_size": 64, "intermediate_size": 64}
    plan = Plan(parallel=Parallel(**parallel), compute=BLOCKS, **settings)  # type: ignore[arg-type]
    run_ranks(2, _forget)
    run_ranks(2, run_plan, Model(config=config), plan, packed_batches(96), 2, timeout=200)
    assert run_ranks(2, _count)[0] > 0


# The path of `weft train`: the first steps are measured in dispatch modes. Inside of most modes torch compiles nothing, and it
# forgets what it had compiled.


def _without_inductor(session: Session) -> None:
    """Compile to graphs that run eagerly, without the C++ compiler."""
    torch._dynamo.reset()
    compiled = runtime(session.model).compiled
    assert compiled is not None
    compiled.lower = lambda graph, inputs: graph.forward


def _compiled(session: Session) -> tuple[int, int]:
    compiled = runtime(session.model).compiled
    assert compiled is not None
    return compiled.graphs, compiled.forwards


RUNS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one rank, zero 0": (1, {"zero": 0}, {}),
    "zero 3": (2, {"zero": 3}, {}),
    "recompute": (2, {"zero": 2}, {"memory": {"recompute": ["block"]}}),
    "pp": (2, {"pp": 2}, {}),
    "tp": (2, {"tp": 2}, {}),
}


@pytest.mark.effect(
    "plan.compute.compile", "compiled regions in each step from the first on, as many as blocks x graphs"
)
@pytest.mark.parametrize("name", RUNS)
def test_blocks_are_compiled_in_every_step_of_a_run(name: str, tmp_path: Path) -> None:
    """Also after evaluations, checkpoints and a resume; with the losses of the run without compilation."""
    ranks, parallel, tables = RUNS[name]

    def job(compile: str, steps: int) -> Job:
        plan = {"parallel": parallel, "compute": {"compile": compile}, "precision": {"param_dtype": "fp32"}, **tables}
        train = {"steps": steps, "global_batch_size": 4, "micro_batch_size": 1, "evaluate_every": 2}
        options = [f"out={tmp_path / compile}"]
        constant = {"schedule": "constant", "warmup_steps": 0}  # the same for any number of steps
        return Job.load(
            write_job(tmp_path, train=train, optimizer=constant, checkpoint={"every": 3}, plan=plan), options
        )

    off = observe(job("off", 7), ranks)
    observe(job("blocks", 5), ranks, fault=_without_inductor)
    on = observe(job("blocks", 7), ranks, resume="auto", accept_changes=True, fault=_without_inductor, probe=_compiled)
    regions = [row.compiled_regions for row in on.metrics]
    assert regions[0] is not None
    assert regions[0] > 0
    assert regions == [regions[0]] * 7
    assert all(graphs > 0 and forwards >= 2 * regions[0] for graphs, forwards in on.facts)
    assert all("compiled regions ran" not in printed for printed in on.printed)
    assert on.losses == pytest.approx(off.losses, rel=1e-5)
    assert all(row.compiled_regions is None for row in off.metrics)


def _own_loop(rank: int, world_size: int, config: dict[str, Any], zero: int) -> list[int]:
    """Forwards of compiled regions after each step of a loop with an evaluation and a checkpoint between steps."""
    torch._dynamo.reset()
    weft.init()
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    plan = plan_for("fp32", zero=zero).model_copy(update={"compute": BLOCKS})
    run = weft.prepare(model, optimizer=lambda shards: torch.optim.AdamW(shards, lr=1e-3), plan=plan)
    assert run.runtime.compiled is not None
    run.runtime.compiled.lower = lambda graph, inputs: graph.forward
    ids, counts = torch.randint(90, (2, 16)), []
    with tempfile.TemporaryDirectory() as folder:
        path = broadcast_json(folder)
        for step in range(4):
            before = run.runtime.compiled.forwards
            with run.accumulate():
                run.backward(run.model(input_ids=ids, labels=ids).loss)
            run.step()
            counts.append(run.runtime.compiled.forwards - before)
            if step == 1:
                run.model.eval()
                with torch.no_grad():
                    run.model(input_ids=ids)
                run.model.train()
                run.save(f"{path}/step-2")
                run.finish()
                run.load(f"{path}/step-2")
    return counts


DROPOUT = {**family("gpt2"), "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}  # with another seed in each step


@pytest.mark.parametrize(
    ("ranks", "config", "zero"),
    [(1, family("llama"), 0), (2, family("llama"), 3), (1, DROPOUT, 0)],
    ids=["zero 0", "zero 3", "dropout"],
)
def test_blocks_are_compiled_in_every_step_of_an_own_loop(ranks: int, config: dict[str, Any], zero: int) -> None:
    for counts in run_ranks(ranks, _own_loop, config, zero):
        assert counts[0] > 0
        assert counts == [counts[0]] * 4


def _compiled_script(rank: int, ranks: int, folder: Path, plan: Plan) -> list[tuple[int, int]]:
    """Run a script of Trainer; return graphs and forwards of compiled regions of each model that it parallelized."""
    torch._dynamo.reset()
    made: list[CompiledRegions] = []

    def compile_cheaply(model: nn.Module, blocks: Iterable[str]) -> CompiledRegions:
        made.append(compile_blocks(model, blocks))
        made[-1].lower = lambda graph, inputs: graph.forward
        return made[-1]

    with mock.patch("weft.parallel.operators.compile_blocks", compile_cheaply):
        script_on_rank(rank, ranks, "trainer_lm.py", [str(folder)], plan)
    return [(regions.graphs, regions.forwards) for regions in made]


def test_blocks_are_compiled_in_an_unmodified_script(tmp_path: Path) -> None:
    plan = plan_for("fp32", zero=2).model_copy(update={"compute": BLOCKS})
    for regions in run_ranks(2, _compiled_script, tmp_path, plan):
        assert len(regions) == 1
        (graphs, forwards) = regions[0]
        assert graphs > 0
        assert forwards >= 3 * graphs


def compile_first_mlp(model: nn.Module, anatomy: Anatomy, plan: Plan, mesh: DeviceMesh) -> None:
    """Technique of a user: compile a part of the model."""
    torch._dynamo.reset()
    mlp = model.get_submodule(anatomy.blocks[0].mlp[0])
    regions = CompiledRegions(lambda graph, inputs: graph.forward)
    mlp.forward = torch.compile(mlp.forward, backend=regions)
    REGIONS.append(regions)


REGIONS: list[CompiledRegions] = []


def _compiled_by_user(session: Session) -> int:
    return REGIONS.pop().forwards


def test_compiled_code_of_a_user_runs_after_the_step_with_tracked_memory(tmp_path: Path) -> None:
    plan = {"techniques": [f"{__name__}:compile_first_mlp"], "precision": {"param_dtype": "fp32"}}
    train = {"steps": 6, "global_batch_size": 1, "micro_batch_size": 1}
    run = observe(Job.load(write_job(tmp_path, plan=plan, train=train)), 1, probe=_compiled_by_user)
    assert run.metrics[1].peak
    assert run.facts[0] >= 5  # all steps but the second


def _forget_compiled_code(session: Session) -> None:
    """Fall back to eager code, as torch does where it cannot compile."""
    _without_inductor(session)
    torch.compiler.set_stance("force_eager")


def _default_stance(session: Session) -> None:
    torch.compiler.set_stance("default")


def test_a_run_says_that_no_compiled_code_runs(tmp_path: Path) -> None:
    plan = {"compute": {"compile": "blocks"}, "precision": {"param_dtype": "fp32"}}
    job = Job.load(write_job(tmp_path, plan=plan))
    run = observe(job, 1, fault=_forget_compiled_code, probe=_default_stance)
    assert "step 1: 0 of 1 compiled regions ran" in run.printed[0]
    assert [row.compiled_regions for row in run.metrics] == [0, 0]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("zero", [0, 3])
def test_inductor_compiles_a_run(ranks: int, zero: int, tmp_path: Path) -> None:
    plan = {"parallel": {"zero": zero}, "compute": {"compile": "blocks"}, "precision": {"param_dtype": "fp32"}}
    run = observe(Job.load(write_job(tmp_path, plan=plan, train={"steps": 4})), ranks, probe=_compiled)
    assert len({row.compiled_regions for row in run.metrics}) == 1
    assert run.metrics[-1].compiled_regions
    assert run.facts[0][0] > 0


def test_norms_are_left_to_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "has_triton", lambda: True)
    model = build_on_meta(read_config(Model(config=family("llama"))), torch.float32)
    plan = resolved(Plan(compute=BLOCKS), 1)
    rows = {row.operator: row for row in explain_operators(model, choose(model, plan, "cuda", detect()), "cuda")}
    assert rows["rms_norm"].implementation == rows["gated_activation"].implementation == "compiled"
    assert rows["linear_cross_entropy"].implementation == "chunked"
    assert rows["adamw"].implementation == "triton"
    resolved(Plan(compute=Compute(compile="blocks", kernels=Kernels(adamw="triton"))), 1)  # outside of the blocks


def test_refusals() -> None:
    for settings, word in (
        ({"memory": Memory(recompute=("attention",)), "compute": BLOCKS}, "parts of blocks"),
        ({"memory": Memory(offload=("mlp",)), "compute": BLOCKS}, "parts of blocks"),
        ({"compute": Compute(compile="blocks", kernels=Kernels(rms_norm="triton"))}, "operators of blocks by name"),
        ({"compute": Compute(compile="blocks", kernels=Kernels(experts="grouped"))}, "operators of blocks by name"),
    ):
        with pytest.raises(PlanError, match=word):
            resolved(Plan(**settings), 1)
    model = build_on_meta(read_config(Model(config=family("llama"))), torch.float32)
    plan = resolved(plan_for("fp32", Pipeline(schedule="zb-h1"), pp=2).model_copy(update={"compute": BLOCKS}), 2)
    with pytest.raises(PlanError, match="zb-h1"):
        check_axes(model, read_anatomy(model), plan)
