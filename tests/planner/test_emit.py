"""Settings of other libraries for a plan: accepted by the library itself where it is installed, and complete.

`peer_options.json` has the keys of NeMo AutoModel's configuration classes, and the options of the argument parser of
Megatron-LM, which is in its repository and not in the package megatron-core.
"""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from weft.errors import PlanError
from weft.job import Job
from weft.planner.emit import TARGETS, TITAN_SCHEDULES, emit

KNOWN = json.loads((Path(__file__).parent / "peer_options.json").read_text())
AUTOMODEL, MEGATRON = KNOWN["nemo-automodel 0.7.0"], KNOWN["Megatron-LM core_v0.16.1"]
HAS_AUTOMODEL = importlib.util.find_spec("nemo_automodel") is not None
PLANS: dict[str, dict[str, Any]] = {
    "ddp": {"parallel": {"zero": 0}},
    "zero 2": {"parallel": {"zero": 2, "dp_replicate": 2}, "memory": {"recompute": ["block"]}},
    "zero 3": {"parallel": {"zero": 3, "tp": 2, "cp": 2}, "memory": {"optimizer_device": "host"}},
    "pipeline": {"parallel": {"zero": 3, "tp": 2, "pp": 2, "ep": 2}, "pipeline": {"schedule": "interleaved"}},
}
BASE = {"model": {"config": "config.json"}, "data": {"source": "python", "seq_len": 2048}}


def settings(target: str, world_size: int = 8, **tables: Any) -> str:
    train = {"global_batch_size": 64, "micro_batch_size": 2}
    job = Job.parse({**BASE, "train": train, "plan": {**tables, "precision": {"param_dtype": "bf16"}}})
    return emit(job, target, world_size, 1, 32)


def arguments(text: str) -> dict[str, str]:
    """Values by argument; "" for a flag."""
    words = [line.removesuffix("\\").strip() for line in text.strip().splitlines()]
    assert all(word.startswith("--") for word in words)
    return {name[2:]: value for name, _, value in (word.partition(" ") for word in words)}


@pytest.mark.must("format: plan for another framework")
def test_accelerate_reads_its_configuration(tmp_path: Path) -> None:
    text = settings("accelerate", parallel={"zero": 3, "tp": 2, "cp": 2}, memory={"recompute": ["block"]})
    (tmp_path / "config.yaml").write_text(text)
    found = load_config_from_file(str(tmp_path / "config.yaml"))
    assert (found.num_processes, found.num_machines, found.mixed_precision) == (8, 1, "bf16")
    assert found.fsdp_config["fsdp_version"] == 2
    assert found.fsdp_config["fsdp_reshard_after_forward"] is True
    assert found.fsdp_config["fsdp_activation_checkpointing"] is True
    sizes = {key: value for key, value in found.parallelism_config.items() if key.endswith("_size")}
    axes = {"dp_replicate": 1, "dp_shard": 2, "tp": 2, "cp": 2}
    assert sizes == {f"parallelism_config_{axis}_size": size for axis, size in axes.items()}


def test_accelerate_knows_each_key(tmp_path: Path) -> None:
    import accelerate.commands.launch as launch

    known = Path(launch.__file__).read_text()
    text = settings("accelerate", parallel={"zero": 3, "tp": 2})
    keys = re.findall(r"^  (\w+):", text, flags=re.MULTILINE)
    assert len(keys) >= 8
    assert [key for key in keys if f'"--{key}"' not in known] == []


@pytest.mark.must("format: plan for another framework")
def test_torchtitan_and_megatron() -> None:
    plan = {"parallel": {"zero": 3, "tp": 2, "pp": 2, "ep": 2}, "pipeline": {"schedule": "interleaved"}}
    titan = arguments(settings("torchtitan", **plan))
    degrees = {axis: titan[f"parallelism.{axis}_parallel_degree"] for axis in ("tensor", "pipeline", "expert")}
    assert degrees == {"tensor": "2", "pipeline": "2", "expert": "2"}
    assert titan["parallelism.pipeline_parallel_schedule"] == "Interleaved1F1B"
    assert titan["parallelism.pipeline_parallel_layers_per_stage"] == "9"  # 32 blocks and two ends in four stages
    assert (titan["training.local_batch_size"], titan["training.global_batch_size"]) == ("32", "64")
    megatron = arguments(settings("megatron", **plan))
    assert (megatron["tensor-model-parallel-size"], megatron["pipeline-model-parallel-size"]) == ("2", "2")
    assert megatron["num-layers-per-virtual-pipeline-stage"] == "8"
    assert megatron["data-parallel-sharding-strategy"] == "optim_grads_params"
    assert {"sequence-parallel", "bf16", "use-megatron-fsdp"} <= megatron.keys()


@pytest.mark.parametrize("name", [*PLANS, "zero 1"])
def test_megatron_knows_each_argument(name: str) -> None:
    plans = {**PLANS, "zero 1": {"parallel": {"zero": 1, "dp_replicate": 2}, "memory": {"optimizer_device": "host"}}}
    found = arguments(settings("megatron", **plans[name]))
    for option, value in found.items():
        assert f"--{option}" in MEGATRON["options" if value else "flags"]
    # what Megatron-LM checks after parsing
    assert ("use-megatron-fsdp" in found) == (found.get("ckpt-format") == "fsdp_dtensor")
    assert ("optimizer-cpu-offload" in found) == ("use-precision-aware-optimizer" in found)
    assert "use-precision-aware-optimizer" not in found or "use-distributed-optimizer" in found


@pytest.mark.parametrize("name", PLANS)
def test_automodel_knows_each_key(name: str) -> None:
    recipe = yaml.safe_load(settings("automodel", **PLANS[name]))
    distributed = recipe["distributed"]
    assert recipe.keys() == {"step_scheduler", "distributed"}
    assert recipe["step_scheduler"].keys() <= set(AUTOMODEL["step_scheduler"])
    assert distributed.keys() <= set(AUTOMODEL[f"distributed {distributed['strategy']}"])
    for table in ("pipeline", "mp_policy", "offload_policy"):
        assert distributed.get(table, {}).keys() <= set(AUTOMODEL[table])
    if HAS_AUTOMODEL:
        from nemo_automodel.recipes._dist_utils import parse_distributed_section

        parsed = parse_distributed_section(distributed)
        assert parsed["tp_size"] == distributed.get("tp_size", 1)
        assert (
            type(parsed["strategy_config"]).__name__
            == {"fsdp2": "FSDP2Config", "ddp": "DDPConfig"}[distributed["strategy"]]
        )


@pytest.mark.must("format: plan for another framework")
def test_automodel() -> None:
    recipe = yaml.safe_load(settings("automodel", **PLANS["pipeline"]))
    assert recipe["step_scheduler"] == {"global_batch_size": 64, "local_batch_size": 32}
    assert recipe["distributed"] == {
        "strategy": "fsdp2",
        "dp_size": 2,
        "dp_replicate_size": 1,
        "tp_size": 2,
        "cp_size": 1,
        "ep_size": 2,
        "pp_size": 2,
        "sequence_parallel": True,
        "reshard_after_forward": True,
        "activation_checkpointing": False,
        "mp_policy": {"param_dtype": "bfloat16", "reduce_dtype": "float32"},
        "pipeline": {
            "pp_schedule": "Interleaved1F1B",
            "pp_microbatch_size": 2,
            "layers_per_stage": 8,
            "pp_seq_len": 2048,
        },
    }
    distributed = yaml.safe_load(settings("automodel", **PLANS["zero 2"]))["distributed"]
    assert (distributed["reshard_after_forward"], distributed["activation_checkpointing"]) == (False, True)
    assert (distributed["dp_size"], distributed["dp_replicate_size"]) == (8, 2)
    assert yaml.safe_load(settings("automodel", **PLANS["zero 3"]))["distributed"]["offload_policy"]
    assert yaml.safe_load(settings("automodel", **PLANS["ddp"]))["distributed"] == {
        "strategy": "ddp",
        "activation_checkpointing": False,
        "autocast_dtype": "bfloat16",
    }


def test_schedules_are_those_of_torch() -> None:
    from torch.distributed.pipelining.schedules import get_schedule_class

    assert [get_schedule_class(name).__name__.removeprefix("Schedule") for name in TITAN_SCHEDULES.values()] == [
        *TITAN_SCHEDULES.values()
    ]


@pytest.mark.parametrize(
    ("target", "tables", "key"),
    [
        ("megatron", {"parallel": {"zero": 0}, "memory": {"optimizer_device": "host"}}, "memory.optimizer_device"),
        ("automodel", {"parallel": {"zero": 1}}, "parallel.zero"),
        ("automodel", {"parallel": {"zero": 0, "tp": 2}}, "parallel.zero"),
        ("automodel", {"parallel": {"zero": 3, "dp_replicate": 8}}, "parallel.dp_replicate"),
        ("automodel", {"parallel": {"pp": 2}, "pipeline": {"schedule": "zb-h1"}}, "pipeline.schedule"),
        ("automodel", {"parallel": {"cp": 2, "cp_ulysses": 2}}, "parallel.cp_ulysses"),
        ("automodel", {"parallel": {"zero": 0}, "memory": {"optimizer_device": "host"}}, "memory.optimizer_device"),
        (
            "automodel",
            {"parallel": {"pp": 8}, "pipeline": {"virtual_stages": 3, "schedule": "interleaved"}},
            "pipeline.virtual_stages",
        ),
        ("torchtitan", {"parallel": {"pp": 2}, "pipeline": {"stage_blocks": [15, 17]}}, "pipeline.stage_blocks"),
        ("accelerate", {"parallel": {"pp": 2}}, "parallel.pp"),
        ("accelerate", {"parallel": {"zero": 1}}, "parallel.zero"),
        ("accelerate", {"parallel": {"zero": 0}, "memory": {"recompute": ["block"]}}, "memory.recompute"),
        ("accelerate", {"parallel": {"zero": 0}, "memory": {"optimizer_device": "host"}}, "memory.optimizer_device"),
        ("torchtitan", {"parallel": {"zero": 1}}, "parallel.zero"),
        ("torchtitan", {"parallel": {"zero": 3}, "memory": {"recompute": ["block"]}}, "memory.recompute"),
        ("megatron", {"parallel": {"pp": 2}, "pipeline": {"schedule": "zb-h1"}}, "pipeline.schedule"),
        ("megatron", {"parallel": {"cp": 2, "cp_ulysses": 2}}, "parallel.cp_ulysses"),
        *((target, {"comm": {"compression": "int8"}}, "comm.compression") for target in TARGETS),
    ],
)
def test_what_a_library_cannot_express_is_refused(target: str, tables: dict[str, Any], key: str) -> None:
    with pytest.raises(PlanError, match=rf"plan\.{key} = .* for {target}"):
        settings(target, **tables)
