"""`--plan auto`: the planner chooses the plan of an unmodified script, within what the script means."""

import os
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, PretrainedConfig

from tests.integrations.scripts_in_pool import SCRIPTS, plain, script_on_rank, under
from tests.integrations.test_command import weft_run
from tests.integrations.test_trainer import BATCH, assert_same_logs, assert_same_weights, log_of
from tests.integrations.test_trl import rows_of
from tests.lab.plans import resolved
from tests.lab.pool import RankError, run_ranks
from weft.errors import PlanError
from weft.integrations.auto_plan import AutoPlan, row_length
from weft.integrations.optimizer import refuse_not_elementwise
from weft.integrations.trainer import check_trainer
from weft.job import Job, read_plan
from weft.plan import Plan, Precision
from weft.planner.costmodel.hardware import GIB, ClusterSpec, DeviceSpec, cluster_of, find_device
from weft.planner.costmodel.local_device import local_device
from weft.planner.costmodel.peak_memory import LayerActivations
from weft.planner.search.for_script import ScriptModel, ScriptPlan, plan_script

MEMORY = {"large": 2**20, "zero 0": 3000, "zero 3": 2000, "zero 3 with recompute": 1550, "tp 2": 1300, "nothing": 300}
"""KiB of a device for states and activations of the model of trainer_lm.py, so that the planner chooses this plan."""


def device_with(kib: float) -> DeviceSpec:
    """Device of this host, with 1.5 GiB for the framework and a number of KiB for a model."""
    return replace(local_device(2), memory=(1.5 * GIB + kib * 1024) / 0.92)


def _auto_script(rank: int, ranks: int, name: str, arguments: list[str], logs: Path, kib: float) -> str:
    printed = StringIO()
    device = device_with(kib)
    with (
        mock.patch("weft.integrations.auto_plan.local_device", return_value=device),
        mock.patch("weft.integrations.auto_plan.count_activations", return_value=None),
        redirect_stdout(printed),
    ):
        script_on_rank(rank, ranks, name, arguments, AutoPlan(logs))  # type: ignore[arg-type]
    return next((line for line in printed.getvalue().splitlines() if line.startswith("weft: plan auto")), "")


def auto(logs: Path, memory: str, name: str, *arguments: Any) -> str:
    """Run a script under the plan that the planner chooses on two ranks of the pool; returns the printed line."""
    lines = run_ranks(2, _auto_script, name, list(map(str, arguments)), logs, MEMORY[memory], timeout=120)
    assert not any(lines[1:])
    return str(lines[0])


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    plain("trainer_lm.py", folder, "--batch", BATCH)
    return folder


def test_the_command_chooses_a_plan_that_a_file_repeats(reference: Path, tmp_path: Path) -> None:
    done = weft_run(tmp_path, "--plan", "auto", SCRIPTS / "trainer_lm.py", "out", "--batch", BATCH // 2)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("weft: plan auto")]
    assert len(lines) == 1
    assert "zero 0" in lines[0]
    assert lines[0].endswith("global batch 8 rows; written to weft-logs/plan.toml")
    assert_same_logs(log_of(tmp_path / "out"), log_of(reference))
    plan = read_plan(tmp_path / "weft-logs" / "plan.toml")
    assert plan.parallel.zero == 0
    under(plan, 2, "trainer_lm.py", tmp_path / "again", "--batch", BATCH // 2)
    assert log_of(tmp_path / "again") == log_of(tmp_path / "out")


@pytest.mark.must("parity: automatic plan of a script", case="zero 3 with recompute")
@pytest.mark.parametrize("memory", ["zero 3", "zero 3 with recompute", "tp 2"])
def test_memory_decides_and_the_script_equals_one_process(memory: str, reference: Path, tmp_path: Path) -> None:
    batch = BATCH if memory == "tp 2" else BATCH // 2
    line = auto(tmp_path, memory, "trainer_lm.py", tmp_path / "out", "--batch", batch, "--loss-only")
    plan = read_plan(tmp_path / "plan.toml")
    if memory == "tp 2":
        assert "2 ranks share rows" in line
        assert "global batch 8 rows instead of 16" in line
        assert plan.parallel.tp * plan.parallel.cp * plan.parallel.pp == 2
    else:
        assert "with one data rank per process" in line
        assert (plan.parallel.zero, plan.parallel.dp_replicate * plan.parallel.dp_shard) == (3, 2)
        assert plan.memory.recompute == (("block",) if "recompute" in memory else ())
    assert "rows of 24 tokens (longest of the first 64 rows)" in line
    expected = [
        {key: row[key] for key in row if "accuracy" not in key and "rows" not in key} for row in log_of(reference)
    ]
    assert_same_logs(log_of(tmp_path / "out"), expected)
    assert_same_weights(tmp_path / "out" / "final", reference / "final")


def test_a_checkpoint_resumes_under_auto_and_under_a_file(reference: Path, tmp_path: Path) -> None:
    first = tmp_path / "first"
    auto(tmp_path, "zero 3", "trainer_lm.py", first, "--batch", BATCH // 2)
    resume = "--batch", BATCH // 2, "--resume", first / "checkpoint-2"
    under(read_plan(tmp_path / "plan.toml"), 2, "trainer_lm.py", tmp_path / "file", *resume)
    auto(tmp_path, "zero 0", "trainer_lm.py", tmp_path / "auto", *resume)
    for again in ("file", "auto"):
        assert_same_logs(log_of(tmp_path / again), log_of(reference))
        assert_same_weights(tmp_path / again / "final", reference / "final")


def test_a_script_that_fits_nowhere_is_refused_on_every_rank(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"no plan fits on 2 CPU(.|\n)*fix: +use more devices"):
        auto(tmp_path, "nothing", "trainer_lm.py", tmp_path / "out", "--batch", 2)


@pytest.mark.parametrize("way", ["model_init", "second trainer", "stream", "own optimizer"])
def test_ways_to_use_a_trainer_equal_one_process(way: str, tmp_path: Path) -> None:
    plain("trainer_ways.py", way, tmp_path / "plain", BATCH)
    memory = "large" if way == "stream" else "zero 3"
    line = auto(tmp_path, memory, "trainer_ways.py", way, tmp_path / "weft", BATCH // 2)
    assert ("max_position_embeddings" if way == "stream" else "longest of the first") in line
    assert_same_logs(log_of(tmp_path / "weft"), log_of(tmp_path / "plain"))


def test_an_optimizer_that_needs_full_matrices_gets_no_shards(tmp_path: Path) -> None:
    auto(tmp_path, "zero 0", "trainer_ways.py", "adafactor", tmp_path / "out", 2)
    assert read_plan(tmp_path / "plan.toml").parallel.zero == 0


@pytest.mark.parametrize("memory", ["zero 0", "zero 3"])
def test_a_loop_with_an_accelerator_equals_one_process(memory: str, tmp_path: Path) -> None:
    plain("accelerate_loop.py", tmp_path / "plain", BATCH)
    line = auto(tmp_path, memory, "accelerate_loop.py", tmp_path / "weft", BATCH // 2)
    assert f"global batch {2 * BATCH} rows" in line
    assert str(read_plan(tmp_path / "plan.toml").parallel.zero) == memory[-1]
    assert_same_weights(tmp_path / "weft" / "final", tmp_path / "plain" / "final")


def test_a_loop_with_an_accelerator_keeps_its_number_of_data_ranks(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="because the script has read their number"):
        auto(tmp_path, "tp 2", "accelerate_loop.py", tmp_path / "weft", BATCH)


@pytest.mark.parametrize("kind", ["sft", "sft lora", "dpo"])
def test_trainers_of_trl_equal_one_process(kind: str, tmp_path: Path) -> None:
    name, *options = kind.split()
    plain("trl_script.py", name, tmp_path / "plain", BATCH, *options)
    line = auto(tmp_path, "large", "trl_script.py", name, tmp_path / "weft", BATCH // 2, *options)
    assert "rows of 64 tokens (max_length)" in line
    assert ("2 sequences per row" in line) == (kind == "dpo")
    found, expected = rows_of(tmp_path / "weft"), rows_of(tmp_path / "plain")
    assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in expected], rel=1e-5)


# The planner, without ranks


def script_model(model: Any, trained: float = 1.0, **changes: Any) -> ScriptModel:
    total = sum(parameter.numel() for parameter in model.parameters())
    settings: dict[str, Any] = {
        "precision": Precision(param_dtype="bf16"),
        "micro_batch": 2,
        "accumulation": 4,
        "tokens": 2048,
        "check": lambda plan: None,
    }
    return ScriptModel(model, total, int(total * trained), **{**settings, **changes})


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    """8B, without memory."""
    sizes: dict[str, Any] = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
    with torch.device("meta"):
        return LlamaForCausalLM(
            LlamaConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, **sizes)
        ).bfloat16()


def on(device: str, devices: int) -> ClusterSpec:
    return cluster_of(find_device(device), devices)


def no_count(*_: Any) -> None:
    """Let the formulas stand."""


def chosen(script: ScriptModel, cluster: ClusterSpec) -> tuple[ScriptPlan, Plan]:
    found = plan_script(script, cluster, no_count)
    return found, resolved(found.plan, cluster.num_devices)


def test_more_devices_need_fewer_techniques(llama: LlamaForCausalLM) -> None:
    two, eight = (chosen(script_model(llama), on("H100", devices))[1] for devices in (2, 8))
    assert (two.parallel.zero, two.memory.optimizer_device) == (3, "host")
    assert (eight.parallel.zero, eight.memory.optimizer_device, eight.memory.recompute) == (2, "device", ())
    assert {two.parallel.data_ranks, eight.parallel.data_ranks} == {2, 8}


def test_activations_are_counted_where_memory_is_scarce(llama: LlamaForCausalLM) -> None:
    calls: list[tuple[Job, str, bool]] = []

    def count(*given: Any) -> LayerActivations:
        calls.append(given)
        return LayerActivations({"none": 400e3, "full": 8192.0}, 1.8e6)  # twice those of the formula

    narrow, roomy = script_model(llama), script_model(llama, micro_batch=1)
    assert plan_script(narrow, on("H100", 8), no_count).plan.memory.recompute == ()
    found = plan_script(narrow, on("H100", 8), count)
    assert found.plan.memory.recompute == ("block",)
    assert "with activations of dry runs" in found.reason
    (job, device_type, with_tp), *more = calls
    assert (job.data.seq_len, job.plan.precision.param_dtype, device_type, with_tp) == (2048, "bf16", "cuda", False)
    assert not more
    assert "by formula" in plan_script(roomy, on("H200", 8), count).reason
    assert len(calls) == 1


def test_frozen_weights_need_less_memory_and_references_more(llama: LlamaForCausalLM) -> None:
    assert chosen(script_model(llama, trained=0.01, micro_batch=1), on("H100", 8))[1].parallel.zero == 0
    without, beside = (chosen(script_model(llama, references=n), on("H100", 8))[1] for n in (0, 8_000_000_000))
    assert (without.parallel.zero, beside.parallel.zero) == (2, 3)


def test_recompute_of_the_script_is_kept(llama: LlamaForCausalLM) -> None:
    plan = chosen(script_model(llama, recomputes=True, micro_batch=1), on("H100", 8))[1]
    assert (plan.memory.recompute, plan.memory.recompute_interval) == (("block",), 1)


def test_long_rows_are_shared_only_if_nothing_else_fits(llama: LlamaForCausalLM) -> None:
    long = {"tokens": 131072, "micro_batch": 1}
    found, plan = chosen(script_model(llama, **long), on("H100", 8))
    assert found.data_ranks == plan.parallel.data_ranks < 8
    assert "no plan with more data ranks fits" in found.reason
    with pytest.raises(PlanError, match="with one data rank per process"):
        plan_script(script_model(llama, one_data_rank_each=True, **long), on("H100", 8), no_count)


def test_rules_of_the_trainer_limit_the_candidates(llama: LlamaForCausalLM) -> None:
    own = type("OnlineDPOTrainer", (), {})
    long = script_model(llama, tokens=131072, micro_batch=1, check=lambda plan: check_trainer(own, plan))
    with pytest.raises(PlanError, match="no plan fits on 8 H100"):
        plan_script(long, on("H100", 8), no_count)

    def full(plan: Plan) -> None:
        refuse_not_elementwise("Adafactor", plan.parallel.zero > 0 or plan.parallel.tp > 1)

    short = script_model(llama, trained=0.01, check=full)
    assert chosen(short, on("B200", 8))[1].parallel.zero == 0


def test_a_model_that_a_device_cannot_hold_is_refused(llama: LlamaForCausalLM) -> None:
    with pytest.raises(PlanError, match=r"needs 29\.92 GiB in fp32, and 29\.44 GiB of a V100"):
        plan_script(script_model(llama), on("V100", 64), no_count)


@pytest.mark.parametrize(("gib", "zero"), [(24, 0), (11, 1), (6, 2), (4, 3)])
def test_an_encoder_gets_the_lowest_stage_by_bytes(gib: float, zero: int) -> None:
    with torch.device("meta"):
        model = BertForMaskedLM(
            BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
        )
    cluster = ClusterSpec(replace(find_device("A100-40"), memory=gib * GIB), 1, 8)
    found, plan = chosen(script_model(model), cluster)
    assert plan.parallel.zero == zero
    assert "BertForMaskedLM is no causal language model" in found.reason


def test_a_module_without_room_is_refused() -> None:
    with torch.device("meta"):
        model = torch.nn.Linear(32768, 32768)
    cluster = ClusterSpec(replace(find_device("A100-40"), memory=4.5 * GIB), 1, 2)
    with pytest.raises(PlanError, match=r"the states of Linear with 1,073,774,592 parameters do not fit on 2 A100"):
        plan_script(script_model(model), cluster, no_count)


LIMITS: dict[str, tuple[dict[str, Any], tuple[int, str]]] = {
    "limit of TRL": ({"arguments": SimpleNamespace(max_length=512)}, (512, "max_length")),
    "completions": (
        {"arguments": SimpleNamespace(max_length=None, max_completion_length=256)},
        (512, "max_completion_length, and as much for the prompt"),
    ),
    "rows": ({"dataset": [{"input_ids": [1] * n} for n in (3, 9, 4)]}, (9, "longest of the first 3 rows")),
    "rows of text": ({"dataset": [{"text": "a"}]}, (2048, "a guess")),
    "tokenizer": ({"tokenizer": SimpleNamespace(model_max_length=128)}, (128, "model_max_length of the tokenizer")),
    "configuration": (
        {"config": LlamaConfig(max_position_embeddings=64), "tokenizer": SimpleNamespace(model_max_length=10**30)},
        (64, "max_position_embeddings of the model"),
    ),
    "nothing": ({"config": PretrainedConfig()}, (2048, "a guess")),
}


@pytest.mark.parametrize("name", LIMITS)
def test_the_length_of_rows_has_a_source(name: str) -> None:
    given, expected = LIMITS[name]
    assert row_length(**{"arguments": None, "dataset": None, "tokenizer": None, "config": None, **given}) == expected


def test_an_unknown_accelerator_gets_the_rates_of_a_similar_one() -> None:
    unknown = SimpleNamespace(
        type="cuda", name="Wonder 9000", total_memory_bytes=24 * GIB, supports=lambda feature: True
    )
    with mock.patch("weft.planner.costmodel.local_device.detect", return_value=unknown):
        device = local_device(4, "A100-80")
    assert (device.name, device.memory, device.per_host) == ("Wonder 9000", 24 * GIB, 4)
    assert device.peak == find_device("A100-80").peak
    assert local_device(2).memory == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
