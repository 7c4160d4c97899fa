"""Adapters of a job beside stock PEFT in one process: losses, all gradients of adapters, weights of three steps."""

from pathlib import Path
from typing import Any

import pytest

from tests.lab.adapters import (
    AdapterRecord,
    assert_adapter_parity,
    batches_for,
    job_for,
    reference,
    run_job,
    start_folder,
)
from tests.lab.families import family
from tests.lab.parity import plan_for
from tests.lab.pool import RankError, run_ranks
from weft.job import Adapter
from weft.plan import Comm, Memory, Pipeline

LLAMA: dict[str, Any] = family("llama")
Start = tuple[Path, AdapterRecord]


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Start]:
    """Folder of an adapter to start from, and the training by stock PEFT, for each kind."""
    found = {}
    for kind in ("lora", "dora"):
        folder = start_folder(tmp_path_factory.mktemp(kind), LLAMA, kind)
        found[kind] = folder, reference(LLAMA, folder, batches_for(LLAMA))
    return found


@pytest.mark.must("parity: LoRA and DoRA", case="{'zero': 3}-dora")
@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize(
    "parallel",
    [{"zero": 0}, {"zero": 2}, {"zero": 3}, {"tp": 2}, {"tp": 2, "sp": False, "zero": 3}, {"cp": 2}, {"pp": 2}],
    ids=str,
)
def test_adapters_equal_those_of_peft(starts: dict[str, Start], kind: Any, parallel: dict[str, Any]) -> None:
    folder, expected = starts[kind]
    pipeline = Pipeline(schedule="1f1b") if "pp" in parallel else None
    job = job_for(LLAMA, plan_for("fp32", pipeline, **parallel), Adapter(kind=kind, r=4, alpha=8, path=str(folder)))
    found = run_ranks(2, run_job, job, batches_for(LLAMA), 1, timeout=120)
    assert_adapter_parity(found, expected, pipeline="pp" in parallel)


def parity_of(
    tmp_path: Path,
    config: dict[str, Any],
    kind: Any,
    targets: Any,
    ranks: int,
    memory: Any = None,
    comm: Any = None,
    **parallel: Any,
) -> None:
    folder = start_folder(tmp_path / "adapter", config, kind, targets)
    adapter = Adapter(kind=kind, r=4, alpha=8, path=str(folder), targets=targets)
    plan = plan_for("fp32", Pipeline(schedule="1f1b") if "pp" in parallel else None, **parallel)
    job = job_for(config, plan.model_copy(update={"memory": memory or Memory(), "comm": comm or Comm()}), adapter)
    found = run_ranks(ranks, run_job, job, batches_for(config), 1)
    assert_adapter_parity(found, reference(config, folder, batches_for(config)), pipeline="pp" in parallel)


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("parallel", [{"ep": 2}, {"ep": 2, "zero": 3}, {"tp": 2}, {"tp": 2, "sp": False}], ids=str)
def test_adapters_of_the_attention_of_a_mixture_of_experts(tmp_path: Path, kind: Any, parallel: dict[str, Any]) -> None:
    parity_of(tmp_path, family("qwen3_moe"), kind, ["q_proj", "o_proj"], 2, **parallel)


EXPERTS = ["o_proj", "experts.gate_up_proj", "experts.down_proj"]
EXPERT_LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    *((2, {"zero": stage}) for stage in (0, 2, 3)),
    *((2, {"ep": 2, "zero": stage}) for stage in (0, 2, 3)),
    *((2, {"tp": 2}), (2, {"tp": 2, "sp": False}), (2, {"tp": 2, "ep": 2}), (2, {"cp": 2}), (2, {"pp": 2})),
    *((4, {"tp": 2, "zero": 3}), (4, {"ep": 2, "zero": 2}), (4, {"ep": 4}), (4, {"ep": 2, "tp": 2, "zero": 3})),
]


@pytest.mark.parametrize(("ranks", "parallel"), EXPERT_LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_adapters_of_experts(tmp_path: Path, name: str, ranks: int, parallel: dict[str, Any]) -> None:
    """Weights [experts, out, in]; [experts, in, out] with biases; shared experts, and a first block without experts."""
    parity_of(tmp_path, family(name), "lora", EXPERTS, ranks, **parallel)


@pytest.mark.parametrize("recompute", ["block", "mlp"])
def test_adapters_of_recomputed_experts(tmp_path: Path, recompute: Any) -> None:
    parity_of(tmp_path, family("qwen3_moe"), "lora", EXPERTS[1:], 2, Memory(recompute=(recompute,)), ep=2, zero=3)


@pytest.mark.must("refusal: LoRA and DoRA")
def test_adapters_of_experts_that_are_split_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"etp = 2 with an adapter on .*experts"):
        parity_of(tmp_path, family("qwen3_moe"), "lora", EXPERTS, 4, ep=2, etp=2, zero=0)


@pytest.mark.must("composition: LoRA and DoRA", case="{'zero': 0}")
@pytest.mark.parametrize("parallel", [{"zero": 0}, {"zero": 3, "expert_balance": "replicate"}], ids=str)
def test_adapters_of_joint_experts(tmp_path: Path, parallel: Any) -> None:
    memory, comm = Memory(recompute=("block",)), Comm(expert_overlap="joint")
    parity_of(tmp_path, family("qwen3_moe"), "lora", EXPERTS, 2, memory, comm, ep=2, **parallel)


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("name", ["gpt2", "phi3", "qwen3"])
def test_adapters_of_families_under_tensor_parallelism(tmp_path: Path, kind: Any, name: str) -> None:
    """Conv1D with biases, packed matrices, tied embeddings."""
    parity_of(tmp_path, family(name), kind, "all-linear", 2, tp=2)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapters_with_fewer_kv_heads_than_tp_ranks(tmp_path: Path, kind: Any) -> None:
    parity_of(tmp_path, {**LLAMA, "num_key_value_heads": 1}, kind, "all-linear", 2, tp=2)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapters_under_tp_and_zero_3_and_replicas(tmp_path: Path, kind: Any) -> None:
    parity_of(tmp_path, LLAMA, kind, "all-linear", 4, tp=2, zero=3)


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("parallel", [{"tp": 2}, {"tp": 2, "sp": False}, {"cp": 2}, {"zero": 3}], ids=str)
def test_dropout_of_adapters_is_equal_in_every_layout(
    starts: dict[str, Start], kind: Any, parallel: dict[str, Any]
) -> None:
    folder, without = starts[kind]
    adapter = Adapter(kind=kind, r=4, alpha=8, path=str(folder), dropout=0.3)
    (expected,) = run_ranks(1, run_job, job_for(LLAMA, plan_for("fp32", zero=0), adapter), batches_for(LLAMA), 2)
    found = run_ranks(2, run_job, job_for(LLAMA, plan_for("fp32", **parallel), adapter), batches_for(LLAMA), 1)
    assert_adapter_parity(found, expected)
    assert abs(expected.losses[0] - without.losses[0]) > 1e-4
