"""Settings of other libraries for a plan: accepted by the library itself where it is installed, and complete."""

import re
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from weft.errors import PlanError
from weft.job import Job
from weft.planner.emit import TARGETS, emit

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


@pytest.mark.parametrize(
    ("target", "tables", "key"),
    [
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
