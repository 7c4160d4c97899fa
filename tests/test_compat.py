"""Private parts of torch that Weft uses: each test fails where a version of torch changes one, and says what it is for."""

import ast
import importlib
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import _registry
from torch.nn.attention.varlen import varlen_attn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from tests.lab.pool import run_ranks
from weft.compat import (
    add_pending,
    add_to_accumulated_gradients,
    all_fsdp_param_groups,
    call_after_backward,
    call_before_post_hooks,
    end_fsdp_backward,
    extend_fake_backend,
    find_hook,
    finished_work,
    flash_implementation,
    flash_implementations,
    fsdp_param_groups,
    fsdp_use,
    has_amx,
    has_cpu_backend,
    is_in_backward,
    is_registered,
    issued_by_group,
    onednn_accepts,
    set_fsdp_use,
    step_hooks,
    varlen_operators,
)

SOURCE = Path(__file__).parent.parent / "src" / "weft"
PRIVATE_IMPORTS = {
    ("torch._subclasses.fake_tensor", "FakeTensor"): "dry runs: tensors without memory",
    ("torch._subclasses.fake_tensor", "FakeTensorMode"): "dry runs",
    ("torch._subclasses.fake_tensor", "unset_fake_temporarily"): "dry runs: small real tensors inside of one",
    ("torch.distributed.fsdp._fully_shard._fsdp_collectives", "DefaultAllGather"): "timing: FSDP2 may replace it",
    ("torch.distributed.fsdp._fully_shard._fsdp_collectives", "DefaultAllocMixin"): "memory of custom collectives",
    ("torch.distributed.fsdp._fully_shard._fsdp_collectives", "DefaultReduceScatter"): "timing: FSDP2 may replace it",
    ("torch.distributed.fsdp._fully_shard._fsdp_common", "TrainingState"): "lanes: whether a unit of FSDP2 is in use",
    ("torch.distributed", "_symmetric_memory"): "tensor parallelism: fused matmuls of CUDA",
    ("torch.distributed.pipelining.stage", "_PipelineStageBase"): "pipeline: a stage that moves its own tensors",
    ("torch.distributed.pipelining.schedules", "_Action"): "pipeline: a cell of a schedule",
    ("torch.distributed.pipelining.schedules", "_PipelineScheduleRuntime"): "pipeline: runs any schedule",
    ("torch.distributed.tensor._utils", "compute_local_shape_and_global_offset"): "checkpoints: the box of a shard",
    ("torch.testing._internal.distributed", "fake_pg"): "axes with one rank: a process group that sends nothing",
    ("torch.testing._internal.distributed.fake_pg", "FakeStore"): "dry runs: a process group that sends nothing",
    ("torch.utils._python_dispatch", "TorchDispatchMode"): "counting of operators and collectives",
    ("torch.utils._python_dispatch", "_disable_current_modes"): "collectives of a recorder that it does not count",
    ("torch.utils._python_dispatch", "is_in_torch_dispatch_mode"): "lanes: a mode belongs to one thread",
    ("torch.utils._pytree", "tree_leaves"): "tensors in nested arguments",
    ("torch.utils._pytree", "tree_map"): "tensors in nested arguments",
    ("torch.utils._pytree", "tree_map_only"): "tensors in nested arguments",
}
"""Private names that modules of Weft import, and what they are for."""


class Mark:
    """Hook that changes nothing."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Leave the arguments unchanged."""


def test_objects_of_weft_travel_with_a_module_as_forward_pre_hooks() -> None:
    module, mark = nn.Linear(2, 2), Mark()
    assert find_hook(module, Mark) is None, "a module without hooks has none"
    module.register_forward_pre_hook(lambda *_: None)
    module.register_forward_pre_hook(mark)
    assert find_hook(module, Mark) is mark, (
        "nn.Module._forward_pre_hooks no longer maps to the registered hooks: weft.runtime(model) needs another way"
    )
    assert isinstance(module(nn.Parameter(module.weight.new_zeros(1, 2))), Tensor)


def test_step_hooks_of_an_optimizer_are_found() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    assert step_hooks(optimizer) == [], "an optimizer without hooks has none"
    hooks: list[Any] = [lambda *_: None for _ in range(4)]
    handles = [optimizer.register_step_pre_hook(hooks[0]), optimizer.register_step_post_hook(hooks[1])]
    handles.append(register_optimizer_step_pre_hook(hooks[2]))
    handles.append(register_optimizer_step_post_hook(hooks[3]))
    found = step_hooks(optimizer)
    for handle in handles:
        handle.remove()
    assert found == hooks, "torch.optim.Optimizer keeps its hooks elsewhere: an update could hide clipping from them"


def test_a_function_is_called_before_the_step_hooks_of_an_optimizer() -> None:
    parameter, calls = nn.Parameter(torch.ones(1)), list[str]()
    parameter.grad = torch.ones(1)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    optimizer.register_step_post_hook(lambda *_: calls.append("hook"))
    handle = call_before_post_hooks(optimizer, lambda: calls.append(f"weight {parameter.item():g}"))
    optimizer.step()
    handle.remove()
    optimizer.step()
    assert calls == ["weight 0", "hook", "hook"], "a step hook would not see the gradients of an update by a kernel"


def test_a_function_is_called_at_the_end_of_the_backward_that_queued_it() -> None:
    events: list[str] = []
    x = torch.ones(2, requires_grad=True)

    def hook(name: str) -> Any:
        def call(gradient: Tensor) -> None:
            events.append(f"{name}, in backward: {is_in_backward()}")
            if name == "first":
                call_after_backward(lambda: events.append("end"))

        return call

    y = x * 2
    z = y * 3
    z.register_hook(hook("first"))
    y.register_hook(hook("second"))
    z.sum().backward()
    assert events == ["first, in backward: True", "second, in backward: True", "end"], (
        "the engine no longer calls queued callbacks at the end of a backward: gradient reduction would not be awaited"
    )
    assert not is_in_backward()


def use_fsdp(rank: int, world_size: int) -> None:
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 2, bias=False))
    mesh = init_device_mesh("cpu", (world_size,))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for unit in (model[0], model):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    groups = [fsdp_param_groups(unit) for unit in (model[0], model)]
    shapes = [[tuple(p.sharded_param.shape) for group in own for p in group.fsdp_params] for own in groups]
    assert shapes == [[(3, 2)], [(2, 3)]], "a unit of FSDP2 has other parameters than those of its module"
    model.set_is_last_backward(False)
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        add_to_accumulated_gradients(model)
    assert len(all_fsdp_param_groups(model)) == 2, "the root unit no longer knows the units of the model"
    assert model[0].weight.grad is None or not hasattr(model[0].weight.grad, "placements")
    model.set_is_last_backward(True)
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    end_fsdp_backward(model)
    for parameter in model.parameters():
        gradient = parameter.grad
        assert gradient is not None, "the end of backward no longer reduces the accumulated gradients"
        assert gradient.dtype == torch.float32
        assert gradient.to_local().numel() == parameter.to_local().numel()
    expected = 2 * model[1].weight.full_tensor().sum(0)[:, None].expand(3, 2)
    torch.testing.assert_close(model[0].weight.grad.full_tensor(), expected, rtol=0.02, atol=0.02)


def suspend_fsdp(rank: int, world_size: int) -> None:
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 2, bias=False))
    for unit in (model[0], model):
        fully_shard(unit, mesh=init_device_mesh("cpu", (world_size,)), reshard_after_forward=True)
    expected = model(torch.ones(1, 2)).detach()
    idle, seen, kept = fsdp_use(model), [], dict[int, Any]()

    def interrupt(module: nn.Module, args: Any) -> None:
        use = fsdp_use(model)
        set_fsdp_use(model, idle, use, kept)
        seen.append((use.root is not None, len(kept), all_fsdp_param_groups(model)[1].reshard_after_backward))
        set_fsdp_use(model, use, idle, kept)
        assert not kept
        assert all(group.reshard_after_backward for group in all_fsdp_param_groups(model))

    model[0].register_forward_pre_hook(interrupt)
    assert torch.equal(model(torch.ones(1, 2)).detach(), expected)
    assert seen == [(True, 2, False)], "a forward of FSDP2 can no longer be suspended for another one"


def test_a_forward_of_fsdp_can_be_suspended() -> None:
    run_ranks(2, suspend_fsdp)


def test_gradients_of_fsdp_units_are_accumulated_and_reduced_on_demand() -> None:
    run_ranks(2, use_fsdp)


def test_backends_and_finished_collectives() -> None:
    assert not is_registered("weft-test")
    dist.Backend.register_backend("weft-test", lambda *_: None, devices=["cpu"])
    assert is_registered("weft-test"), "torch no longer lists registered backends: Weft would register its own twice"
    work = finished_work([torch.ones(1)])
    assert work.wait(), "a collective that is complete cannot be awaited: shared memory would need another handle"


def fake_devices(rank: int, ranks: int) -> list[str]:
    extend_fake_backend("meta")
    extend_fake_backend("meta")
    group = dist.new_group(backend="fake")
    for device in ("cpu", "meta"):
        dist.all_reduce(torch.ones(2, device=device), group=group)
    return dist.Backend.backend_capability["fake"]


def count_issued(rank: int, ranks: int) -> tuple[dict[str, int], int]:
    """Collectives issued by two groups, and those that have not started; a group of one rank is not counted."""
    group = dist.new_group(backend="gloo", group_desc="three")
    alone = dist.new_group([rank], backend="fake", use_local_synchronization=True)
    device = torch.device("cpu")
    before = {progress.name: progress.issued for progress in issued_by_group(device)}
    for _ in range(3):
        dist.all_reduce(torch.ones(2), group=group)
    dist.all_reduce(torch.ones(2))
    dist.all_reduce(torch.ones(2), group=alone)
    found = issued_by_group(device)
    named = {progress.name: progress.issued - before[progress.name] for progress in found}
    own, end = [progress for progress in found if progress.name == group.group_name], time.monotonic() + 20
    while add_pending(own, device)[0].pending and time.monotonic() < end:
        time.sleep(0.01)  # a thread of gloo notes the end of a collective
    not_started = own[0].issued - add_pending(own, device)[0].started
    return {
        about: named[of.group_name] for about, of in (("default_pg", dist.group.WORLD), ("three", group))
    }, not_started


def test_groups_count_the_collectives_that_they_have_issued() -> None:
    found = run_ranks(2, count_issued)
    assert found == [({"default_pg": 1, "three": 3}, 0)] * 2, (
        "hangs on accelerators would not name the rank that is behind"
    )


def pending(rank: int, ranks: int) -> tuple[str, int, int]:
    """Pending collective of a group that rank 1 joins later."""
    group = dist.new_group(backend="gloo", group_desc="late")
    store, device = group.get_group_store(), torch.device("cpu")
    if rank == 0:
        work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
    (found,) = [
        progress for progress in add_pending(issued_by_group(device), device) if progress.name == group.group_name
    ]
    store.set(f"read/{rank}", "")
    store.wait(["read/0", "read/1"])
    if rank == 1:
        work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
    work.wait()
    return found.pending, found.issued, found.started


def test_the_flight_recorder_has_collectives_that_are_not_complete() -> None:
    """The recorder of gloo does not know when a collective starts; that of NCCL does."""
    assert run_ranks(2, pending) == [("gloo:all_reduce", 1, 0), ("", 0, 0)], (
        "the flight recorder of torch has changed: a rank that waits for its accelerator would not be told from a busy one"
    )


def test_the_fake_backend_serves_other_types_of_devices() -> None:
    (devices,) = run_ranks(1, fake_devices)
    assert {"cpu", "cuda"} <= set(devices), "torch has another list of the devices of a backend"
    assert devices.count("meta") == 1, "axes with one rank have no process group on an npu"


def test_attention_of_variable_length_is_seen_as_two_operators() -> None:
    names = [str(operator) for operator in varlen_operators()]
    assert names == ["torch_attn._varlen_attn", "torch_attn._varlen_attn_backward"]
    q, k, v = (torch.empty(8, 2, 16, dtype=torch.bfloat16, device="meta") for _ in range(3))
    borders, seen = torch.empty(3, dtype=torch.int32, device="meta"), []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.overloadpacket)
            return func(*args, **(kwargs or {}))

    with Seen():
        varlen_attn(q, k, v, borders, borders, 4, 4, window_size=(-1, 0))
    assert varlen_operators()[0] in seen


class ActiveFlash:
    """Handle of an implementation of the flash operators that has no kernels."""

    def remove(self) -> None:
        """Nothing is registered."""


def test_an_implementation_of_the_flash_operators_is_restored() -> None:
    register = torch.nn.attention.register_flash_attention_impl
    current = torch.nn.attention.current_flash_attention_impl
    assert {"FA3", "FA4"} <= set(flash_implementations()), (
        "torch no longer lists implementations of its flash operators"
    )
    with mock.patch.dict(_registry._FLASH_ATTENTION_IMPLS):
        for name in ("one", "two"):
            register(name, register_fn=ActiveFlash)
        with flash_implementation("one"):
            with flash_implementation("two"):
                assert current() == "two"
            with pytest.raises(ValueError, match="three"), flash_implementation("three"):
                pass
            assert current() == "one", "an implementation that was active before is not active again"
            with flash_implementation(""):
                assert current() is None
        assert current() is None


def test_without_a_way_back_there_are_no_implementations(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("restore_flash_attention_impl", "current_flash_attention_impl", "list_flash_attention_impls"):
        monkeypatch.delattr(torch.nn.attention, name)
    assert flash_implementations() == []
    with flash_implementation(""):
        pass


def test_the_processor_answers() -> None:
    assert isinstance(has_amx(), bool), "torch.cpu no longer tells whether the processor has AMX"
    assert all(isinstance(onednn_accepts(dtype), bool) for dtype in (torch.bfloat16, torch.float16))


def private_imports() -> set[tuple[str, str]]:
    """Module and name of each import from a private module of torch, or of a private name."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "torch":
                for alias in node.names:
                    if any(part.startswith("_") for part in [*node.module.split("."), alias.name]):
                        found.add((node.module, alias.name))
    return found


def test_private_imports_are_listed() -> None:
    assert private_imports() == set(PRIVATE_IMPORTS)


@pytest.mark.parametrize(("module", "name"), PRIVATE_IMPORTS)
def test_private_imports_exist(module: str, name: str) -> None:
    found = importlib.import_module(module)
    assert hasattr(found, name), f"{module}.{name} is gone, which Weft needs for {PRIVATE_IMPORTS[module, name]}"


def test_private_attributes_are_used_in_compat_alone() -> None:
    """Attributes such as `torch.x._y`, apart from documented operators."""
    found = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                root: ast.expr = node
                while isinstance(root, ast.Attribute):
                    root = root.value
                is_documented = node.attr.startswith("_foreach_") or ast.unparse(node).startswith("torch.ops.aten.")
                if isinstance(root, ast.Name) and root.id in ("torch", "dist") and not is_documented:
                    found.append(f"{path.relative_to(SOURCE)}: {ast.unparse(node)}")
    assert [use for use in found if not use.startswith("compat.py")] == []


def cpu_backend(rank: int, ranks: int) -> bool:
    return has_cpu_backend(dist.group.WORLD)


def test_process_groups_say_whether_they_send_tensors_in_host_memory() -> None:
    assert run_ranks(1, cpu_backend) == [True], "weft.init refuses a group that cannot send small messages"
    assert hasattr(dist.ProcessGroup, "_get_backend"), "torch has no backend of a process group by device"
