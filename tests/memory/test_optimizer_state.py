"""Optimizer state offload leaves updates bit-equal; states are on the device only during the update of their chunk."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.lab.bits import assert_same_bits
from tests.lab.families import family
from tests.lab.live import StorageBytes
from tests.lab.pool import RankError, run_ranks
from weft.device.detect import detect
from weft.errors import PlanError
from weft.memory.chunked_step import chunked_step
from weft.memory.optimizer_state import OffloadedStates, StatePlacement
from weft.memory.pool import Pool, mapped_files
from weft.optimizers.one_bit_adam import OneBitAdam
from weft.plan import Memory, Parallel, Plan, Precision

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "amsgrad": lambda parameters: torch.optim.AdamW(parameters, amsgrad=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
    "Muon": torch.optim.Muon,
}


def parameters_of(count: int, *shape: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for _ in range(count)]


def set_gradients(step: int, *sides: list[nn.Parameter], without: int | None = None) -> None:
    generator = torch.Generator().manual_seed(step)
    for index, twins in enumerate(zip(*sides, strict=True)):
        gradient = torch.randn(twins[0].shape, generator=generator)
        for parameter in twins:
            parameter.grad = None if index == without else gradient.clone()


def offload_to_disk(optimizer: torch.optim.Optimizer, folder: Path, **settings: Any) -> OffloadedStates:
    return OffloadedStates(optimizer, detect(), Pool(mapped_files(folder)), **settings)


@pytest.mark.parametrize("budget", [None, 5 * 32 * 16 * 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fifty_steps_are_bit_equal(name: str, budget: int | None, tmp_path: Path) -> None:
    """Weights and states are bit-equal; between steps, states within the budget are offloaded."""
    plain, moved = parameters_of(8, 32, 16), parameters_of(8, 32, 16)
    expected, found = OPTIMIZERS[name](plain), OPTIMIZERS[name](moved)
    offload = offload_to_disk(found, tmp_path, **({} if budget is None else {"budget": budget}))
    for step in range(50):
        set_gradients(step, plain, moved, without=step % 11)
        expected.step()
        chunked_step(found, chunk_bytes=2 * 32 * 16 * 4)
    for one, other in zip(plain, moved, strict=True):
        assert torch.equal(one, other)
        for key, value in expected.state[one].items():
            assert torch.equal(found.state[other][key], value)
    states = [value for state in found.state.values() for value in state.values() if value.ndim]
    offloaded = [value for value in states if value.untyped_storage().is_shared()]
    assert not offload.fetched
    if budget is None:
        assert len(offloaded) == len(states)
    else:
        assert 0 < sum(value.nbytes for value in offloaded) <= budget


def test_plain_step_is_bit_equal(tmp_path: Path) -> None:
    """A training loop that calls `optimizer.step()` without chunks."""
    plain, moved = parameters_of(3, 8, 4), parameters_of(3, 8, 4)
    expected, found = torch.optim.AdamW(plain), torch.optim.AdamW(moved)
    offload_to_disk(found, tmp_path)
    for step in range(3):
        set_gradients(step, plain, moved)
        expected.step()
        found.step()
    assert all(torch.equal(one, other) for one, other in zip(plain, moved, strict=True))


def test_a_state_that_is_made_later_is_offloaded_too(tmp_path: Path) -> None:
    """The momentum that 1-bit Adam carries over at its freeze."""
    weight = torch.nn.Parameter(torch.randn(64, 8))
    optimizer = OneBitAdam([{"params": [weight]}], 1e-3, (0.9, 0.95), 1e-8, freeze_steps=2)
    offload = offload_to_disk(optimizer, tmp_path)
    for _ in range(4):
        weight.grad = torch.randn_like(weight)
        optimizer.begin_step()
        optimizer.step()
    offload.finish()
    assert set(offload.offloaded[weight]) == {"exp_avg", "exp_avg_sq", "carried"}
    assert all(optimizer.state[weight][name] is held for name, held in offload.offloaded[weight].items())


def test_at_most_an_eighth_of_the_states_is_on_the_device(tmp_path: Path) -> None:
    parameters = parameters_of(48, 64, 64)
    optimizer = torch.optim.AdamW(parameters, fused=True)
    offload_to_disk(optimizer, tmp_path)
    states = 2 * sum(parameter.nbytes for parameter in parameters)
    for step in range(3):
        set_gradients(step, parameters)
        with StorageBytes().track(parameters, optimizer.state) as live:
            before = live.current
            chunked_step(optimizer, chunk_bytes=states // 2 // 24)
        assert live.current <= before  # gradients are freed
        if step:
            assert 0 < live.peak - before <= states / 8


# In training

LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "zero 0": (2, {"zero": 0}),
    "zero 1": (2, {"zero": 1}),
    "zero 2": (2, {"zero": 2}),
    "zero 3 on 4": (4, {"zero": 3}),
    "tp 2, zero 3": (4, {"tp": 2, "zero": 3}),
    "cp 2": (2, {"cp": 2, "zero": 2}),
    "pp 2": (2, {"pp": 2, "zero": 1}),
    "ep 2": (2, {"ep": 2, "zero": 3}),
}


@pytest.mark.parametrize("weights", ["whole", "split_even"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_is_bit_equal_in_any_layout(layout: str, weights: str, tmp_path: Path) -> None:
    ranks, parallel = LAYOUTS[layout]
    config = family("qwen3_moe" if "ep" in layout else "qwen3")
    whole, precision = (Precision(param_dtype="bf16", weights=kind) for kind in ("whole", weights))  # type: ignore[arg-type]
    plan = Plan(parallel=Parallel(**parallel), precision=whole)  # type: ignore[arg-type]
    memory = Memory(optimizer_device="disk", offload_dir=str(tmp_path), recompute=("norm",))
    other = plan.model_copy(update={"memory": memory, "precision": precision})
    assert_same_bits(config, ranks, 1, plan, other)


# Refusals


def build(rank: int, world_size: int, memory: Memory) -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.randn(1000, 100)) for _ in range(3)])
    StatePlacement(optimizer, Plan(memory=memory), detect())


def test_full_disk_is_refused_before_the_first_step(tmp_path: Path) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(tmp_path)], check=False).returncode:
        pytest.skip("this sandbox cannot mount a tmpfs")
    try:
        run_ranks(1, build, Memory(optimizer_device="disk", offload_dir=str(tmp_path)))  # 2.4 MB
        with pytest.raises(RankError, match=r"has no space for the optimizer states: rank \d: No space left"):
            run_ranks(2, build, Memory(optimizer_device="disk", offload_dir=str(tmp_path)))
        run_ranks(2, build, Memory(optimizer_device="disk", offload_dir=str(tmp_path), optimizer_bytes=(800_000,)))
        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_budget_below_one_state_is_refused(tmp_path: Path) -> None:
    memory = Memory(optimizer_device="disk", offload_dir=str(tmp_path), optimizer_bytes=(1000,))
    with pytest.raises(
        RankError, match=r"1000 bytes cannot hold the states of any parameter of rank 0: .* 800000 bytes"
    ):
        run_ranks(1, build, memory)


def small_budget_of_rank_1(rank: int, ranks: int, folder: str) -> str:
    plan = Plan(memory=Memory(optimizer_device="disk", offload_dir=folder, optimizer_bytes=(800_000, 500_000)))
    optimizer = torch.optim.AdamW([nn.Parameter(torch.randn(1000, 100))])
    with pytest.raises(PlanError) as refused:
        StatePlacement(optimizer, plan, detect(), stage_rank=rank)
    return str(refused.value)


def test_a_budget_that_is_too_small_on_one_rank_is_refused_on_all(tmp_path: Path) -> None:
    """500,000 bytes hold the parameter, and not its two states."""
    first, second = run_ranks(2, small_budget_of_rank_1, str(tmp_path))
    assert first == second
    assert first.startswith("500000 bytes cannot hold the states of any parameter of rank 1")


LIMITED = """
import resource, sys, torch
from pathlib import Path
from torch import nn
from weft.device.detect import detect
from weft.memory.optimizer_state import OffloadedStates
from weft.memory.pool import Pool, mapped_files
from weft.memory.chunked_step import chunked_step

torch.set_num_threads(1)
first = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], fused=True)
first.param_groups[0]["params"][0].grad = torch.zeros(1)
first.step()  # imports modules, which takes memory
parameters = [nn.Parameter(torch.zeros(2**20)) for _ in range(64)]  # 256 MiB, and 512 MiB of states
optimizer = torch.optim.AdamW(parameters, fused=True)
if sys.argv[1] == "disk":
    OffloadedStates(optimizer, detect(), Pool(mapped_files(Path(sys.argv[2]))))
used = int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmData"))) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used + 2**20 * 480,) * 2)  # gradients fit, the states do not
for step in range(3):
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    chunked_step(optimizer)
print(parameters[-1][0].item())
"""


@pytest.mark.slow("writes and reads more than a process may hold")
def test_states_larger_than_the_process_memory_limit(tmp_path: Path) -> None:
    def run(tier: str) -> subprocess.CompletedProcess[str]:
        # Return large blocks to the system as soon as they are freed.
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
        command = [sys.executable, "-c", LIMITED, tier, str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, env=environment)

    refused, done = run("device"), run("disk")
    assert refused.returncode != 0
    assert "memory" in refused.stderr.lower()
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(-3e-3, rel=1e-3)
