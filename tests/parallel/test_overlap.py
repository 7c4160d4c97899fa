"""Parity and traffic of async tensor parallelism: chunked matmuls overlapped with collectives."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.lab.families import family
from tests.lab.live import StorageBytes
from tests.lab.parity import assert_parity, packed_batches, share
from tests.lab.plans import resolved
from tests.lab.pool import run_ranks
from tests.lab.shrink import COUNTING, LEAKING, PROVED, shrunk
from tests.lab.wire import register_wire, virtual_seconds
from weft.anatomy.build import build_on_meta
from weft.anatomy.transformers import read_anatomy
from weft.backends.hierarchical import register_backend
from weft.checkpoint.loading import materialize
from weft.checkpoint.model_config import read_config
from weft.comm.overlap import Overlap
from weft.comm.recorder import Recorder
from weft.errors import ModelError, PlanError
from weft.job import Model
from weft.parallel.choices import check_axes
from weft.parallel.parallelize import parallelize
from weft.parallel.runtime import runtime
from weft.parallel.tensor.async_tp import LazyGather, RegionBoundary, share_gather
from weft.parallel.tensor.boundaries import FIRST_OF_MLP
from weft.parallel.tensor.rules import DOWN
from weft.parallel.weights import TensorSplit
from weft.plan import Plan
from weft.topology.mesh import AXES, build_mesh, mesh_shape
from weft.training.forward_backward import forward_backward

FP32 = {"param_dtype": "fp32", "update": "fp32", "reduce_dtype": "fp32"}
FP64 = {"param_dtype": "fp64", "update": "fp64", "reduce_dtype": "fp64"}
# Name of the layout -> ranks, plan.parallel.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp": 2, "zero": 1}),
    "tp2 without sp": (2, {"tp": 2, "sp": False, "zero": 0}),
    "tp4": (4, {"tp": 4, "zero": 1}),
    "tp4 without sp": (4, {"tp": 4, "sp": False, "zero": 1}),
}
FAMILIES = ("llama", "gpt2", "phi3", "qwen3_moe", "gpt_oss", "olmo2", "gemma3_text", "deepseek_v3")
UNSUPPORTED = {("olmo2", "tp4"), ("phi3", "tp4"), ("olmo2", "tp4 without sp"), ("phi3", "tp4 without sp")}
CASES = [(name, layout) for name in FAMILIES for layout in LAYOUTS if (name, layout) not in UNSUPPORTED]
COMBINATIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero 3": (4, {"parallel": {"tp": 2, "zero": 3}}),
    "without sp, Ulysses": (4, {"parallel": {"tp": 2, "sp": False, "cp": 2, "cp_ulysses": 2, "zero": 1}}),
    "a split backward": (4, {"parallel": {"tp": 2, "pp": 2, "zero": 1}, "pipeline": {"schedule": "zb-h1"}}),
    "a split backward, shared kv heads": (8, {"parallel": {"tp": 4, "pp": 2}, "pipeline": {"schedule": "zb-h1"}}),
    "recompute": (2, {"parallel": {"tp": 2, "zero": 2}, "memory": {"recompute": ["attention", "activation", "norm"]}}),
    "offload": (2, {"parallel": {"tp": 2, "sp": False}, "memory": {"offload": ["attention", "mlp"]}}),
}


def plan_of(chunks: int | str, tables: dict[str, Any]) -> Plan:
    return Plan.model_validate({"precision": FP32, **tables, "comm": {"overlap_chunks": chunks}})


@pytest.mark.must("parity: overlap of tp in chunks", case="llama-tp2")
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_families(name: str, layout: str) -> None:
    ranks, parallel = LAYOUTS[layout]
    plan = plan_of(2 if ranks == 2 else 4, {"parallel": parallel})
    assert_parity(Model(config=family(name)), plan, ranks, micro_batch=2)


@pytest.mark.parametrize("name", PROVED["tp"])
def test_every_family(name: str) -> None:
    plan = plan_of(3, {"parallel": {"tp": 2, "zero": 1}})
    assert_parity(Model(config=shrunk(name)), plan, 2, 4, 4 if name in (*LEAKING, *COUNTING) else None)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_float64(name: str, layout: str) -> None:
    ranks, parallel = LAYOUTS[layout]
    if (name, ranks) == ("llama", 4):
        parallel = {**parallel, "tp": 2}  # see EXACT in test_axes.py
    plan = plan_of(3, {"parallel": parallel, "precision": FP64})
    assert_parity(Model(config=family(name)), plan, ranks, micro_batch=1)


@pytest.mark.must("composition: overlap of tp in chunks", case="recompute-llama")
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_with_other_techniques(combination: str, name: str) -> None:
    ranks, tables = COMBINATIONS[combination]
    micro_batch = 1 if "pipeline" in tables else 2
    assert_parity(Model(config=family(name)), plan_of(2, tables), ranks, micro_batch)


# Traffic and saved activations


def traffic(rank: int, ranks: int, name: str, plan: Plan) -> tuple[dict[str, int], int, int]:
    """Collectives of the tp axis in one micro-batch by operation, bytes saved for backward, and number of chunked layers."""
    plan = resolved(plan, ranks)
    mesh = build_mesh(plan, "cpu", ranks)
    source = Model(config=family(name))
    model: Any = parallelize(build_on_meta(read_config(source), torch.float32), plan, mesh)
    materialize(model, source, torch.device("cpu"))
    model.train()
    [batch] = share(packed_batches(96, rows=2)[0], 0, 1, 2)
    with StorageBytes().track(model) as live:
        before = live.current
        logits = model(input_ids=batch.input_ids, use_cache=False).logits
        saved = live.current - before
    logits.sum().backward()
    with Recorder() as recorder:
        forward_backward(model, [batch], 1.0)
    sent = Counter(message.operation for message in recorder.messages if message.axis == "tp")
    chunked_layers = len(runtime(model).tensor_split.chunked)
    return dict(sent), saved, chunked_layers


def test_collectives_and_saved_bytes_of_llama() -> None:
    """Two blocks with two regions each: chunked gathers and reductions, and one more gather of each input in backward."""
    tables = {"parallel": {"tp": 2}}
    (plain, saved, no_layers), *_ = run_ranks(2, traffic, "llama", plan_of(1, tables))
    (chunked, saved_chunked, layers), *_ = run_ranks(2, traffic, "llama", plan_of(4, tables))
    (automatic, saved_auto, no_auto_layers), *_ = run_ranks(2, traffic, "llama", plan_of("auto", tables))
    regions = 4
    assert chunked["all_gather"] - plain["all_gather"] == regions * (2 * 3 + 1)
    # Backward reduce-scatters in chunks; forward replaces the reduce-scatter by all-to-alls of chunks.
    assert chunked["reduce_scatter"] - plain["reduce_scatter"] == regions * (3 - 1)
    assert chunked["all_to_all"] - plain.get("all_to_all", 0) == regions * 4
    assert (no_layers, layers) == (0, 2 * 7)
    region_bytes = 2 * 16 * 32 * 4  # the gathered input of a region: rows x tokens x hidden x bytes
    assert saved - saved_chunked == regions * region_bytes // 2
    assert (automatic, saved_auto, no_auto_layers) == (plain, saved, 0)  # in shared memory there is nothing to hide


def test_latent_attention_overlaps_only_its_output() -> None:
    (_, _, layers), *_ = run_ranks(2, traffic, "deepseek_v3", plan_of(2, {"parallel": {"tp": 2}}))
    assert layers == 2 + 3  # the output projection of each attention; the dense MLP of the first block


def emulated_seconds(rank: int, ranks: int, plan: Plan) -> tuple[float, float, float]:
    """Emulated seconds of a micro-batch in total, of its matmuls, and of its transfers."""
    plan = resolved(plan, ranks)
    backends = {
        name: "fake" if size == 1 else register_backend() for name, size in zip(AXES, mesh_shape(plan), strict=True)
    }
    backends["tp"] = register_wire()
    mesh = init_device_mesh("cpu", mesh_shape(plan), mesh_dim_names=AXES, backend_override=backends)  # type: ignore[arg-type]
    wire: Any = mesh.get_group("tp")
    source = Model(config={**family("llama"), "hidden_size": 64, "intermediate_size": 192, "head_dim": 16})
    model = parallelize(build_on_meta(read_config(source), torch.float32), plan, mesh)
    materialize(model, source, torch.device("cpu"))
    [batch] = share(packed_batches(96, 2, 64)[0], 0, 1, 2)
    with virtual_seconds(wire, 1.0, 0.0, 40.0) as clock:
        forward_backward(model, [batch], 1.0)
        return clock.time, clock.computed, sum(transfer.ended - transfer.began for transfer in wire.transfers)


def test_overlap_hides_most_communication_on_an_emulated_wire() -> None:
    """Most traffic of the regions is hidden, although it is larger; embedding, head and loss do not change."""
    tables = {"parallel": {"tp": 2, "zero": 0}}
    for plain, chunked in zip(
        run_ranks(2, emulated_seconds, plan_of(1, tables)),
        run_ranks(2, emulated_seconds, plan_of(8, tables)),
        strict=True,
    ):
        assert plain[0] == pytest.approx(plain[1] + plain[2])
        assert chunked[1] == pytest.approx(plain[1])
        assert chunked[2] > plain[2]
        visible = chunked[0] - chunked[1]
        assert visible < 0.4 * plain[2]


# Regions with other operations on their input


class Region(nn.Module):
    """MLP with another operation on its input."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(4, 6), nn.Linear(4, 6, bias=False)
        self.use = use

    def forward(self, hidden: Tensor) -> Tensor:
        if self.use == "shape":
            assert hidden.shape == (8, 3, 4)
            assert hidden.dtype == torch.float64
            assert hidden.requires_grad
        if self.use == "mean":
            hidden = hidden - hidden.mean(-1, keepdim=True)
        if self.use == "view":
            return self.up_proj(hidden.view(-1, 4)).view(8, 3, 6)
        if self.use == "in place":
            hidden += 1
        out = self.gate_proj(hidden).tanh() * self.up_proj(hidden)
        return out + hidden.sum(-1, keepdim=True) if self.use == "both" else out


def use_region(rank: int, ranks: int, use: str) -> tuple[list[Any], list[str]]:
    """Output and gradients of a region after a `LazyGather` on each rank, and its collectives."""
    group = dist.new_group(backend="gloo")
    torch.manual_seed(0)
    region, parts = Region(use).double(), torch.randn(2, 4, 3, 4, dtype=torch.float64)
    assert share_gather(region, None, "mlp", FIRST_OF_MLP, DOWN, TensorSplit())
    x = parts[rank].clone().requires_grad_()
    gathered = RegionBoundary(Overlap(group, 2), sp=True, dim=0, queue=None, split=TensorSplit()).enter(x)
    assert isinstance(gathered, LazyGather)
    with Recorder() as recorder:
        out = region(gathered)
    out.square().sum().backward()
    weights = [parameter.grad for parameter in region.parameters() if parameter.grad is not None]
    return [out.detach(), x.grad, *weights], [message.operation for message in recorder.messages]


@pytest.mark.parametrize(("use", "gathers"), [("shape", 2), ("mean", 1), ("view", 1), ("both", 3)])
def test_any_operation_on_the_input_of_a_region_is_correct(use: str, gathers: int) -> None:
    torch.manual_seed(0)
    region, parts = Region(use).double(), torch.randn(2, 4, 3, 4, dtype=torch.float64)
    full = parts.flatten(0, 1).requires_grad_()
    out = region(full)
    (2 * out.square().sum()).backward()  # both ranks have the full output
    for rank, (found, sent) in enumerate(run_ranks(2, use_region, use)):
        assert sent == ["all_gather"] * gathers
        assert full.grad is not None
        weights = [parameter.grad / 2 for parameter in region.parameters() if parameter.grad is not None]
        for value, expected in zip(found, [out, full.grad.chunk(2)[rank], *weights], strict=True):
            torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=1e-12)


def write_into_input(rank: int, ranks: int) -> None:
    with pytest.raises(ModelError, match="changes the hidden states of a region in place"):
        use_region(rank, ranks, "in place")


def test_a_region_that_writes_into_its_input_is_refused() -> None:
    run_ranks(2, write_into_input)


def test_wrapped_layers_are_not_changed() -> None:
    region = Region("shape")
    forward = region.up_proj.forward
    region.up_proj.forward = lambda x: 2 * forward(x)  # type: ignore[method-assign]
    assert not share_gather(region, None, "mlp", FIRST_OF_MLP, DOWN, TensorSplit())
    assert "forward" not in vars(region.gate_proj)


@pytest.mark.must("refusal: overlap of tp in chunks")
@pytest.mark.parametrize(("parallel", "rows"), [({"tp": 2}, 8), ({"tp": 2, "sp": False}, 16), ({"tp": 2, "cp": 2}, 4)])
def test_more_chunks_than_rows_are_refused_at_start(parallel: dict[str, Any], rows: int) -> None:
    model = build_on_meta(read_config(Model(config=family("llama"))), torch.float32)
    ranks = parallel["tp"] * parallel.get("cp", 1)
    for chunks in (rows, rows + 1):
        plan = resolved(plan_of(chunks, {"parallel": parallel}), ranks)
        if chunks == rows:
            check_axes(model, read_anatomy(model), plan, seq_len=16)
            continue
        with pytest.raises(PlanError, match=f"{chunks} chunks of {rows} rows"):
            check_axes(model, read_anatomy(model), plan, seq_len=16)
