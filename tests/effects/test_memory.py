"""Effects of the table plan.memory on the third step of a run of `weft train`, beside a run without the setting."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lab.families import family
from tests.lab.jobs import write_job
from tests.lab.npu import HAS_COMPILER
from tests.lab.pool import DEVICE_VARIABLE, close_pools
from tests.lab.runs import ObservedRun, observe
from tests.lab.step_trace import BACKWARD, FORWARD, StepFacts, StepTrace
from weft.device.cpu import NoStream
from weft.job import Job
from weft.memory.storages import local_part
from weft.parallel.runtime import runtime
from weft.training.session import Session

BLOCKS, STEPS = 4, 3
LLAMA = {**family("llama"), "vocab_size": 300, "num_hidden_layers": BLOCKS}
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


def job_of(folder: Path, memory: dict[str, Any], zero: int = 0, prefetch: int = 1) -> Job:
    folder.mkdir(exist_ok=True)
    plan = {"memory": memory, "parallel": {"zero": zero}, "comm": {"prefetch": prefetch}}
    return Job.load(write_job(folder, model={"config": LLAMA}, train={"steps": STEPS}, plan=plan))


def run(folder: Path, **memory: Any) -> ObservedRun:
    trace = StepTrace()
    return observe(job_of(folder, memory), 1, fault=trace.install, probe=trace.facts)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ObservedRun:
    return run(tmp_path_factory.mktemp("plain"))


def recomputed(done: ObservedRun) -> dict[str, int]:
    """Operators of forward that backward runs again: activation functions, norms, attentions, and matmuls."""
    facts: StepFacts = done.facts[0]
    counts = {name: len(facts.find(name, BACKWARD)) for name in ("silu", "rsqrt", ATTENTION)}
    # Backward has two matmuls for each one of forward in blocks.
    return counts | {"mm": len(facts.find("mm", BACKWARD)) - 2 * 7 * BLOCKS}


@pytest.mark.effect("plan.memory.recompute", "operators of forward that run in backward: all those of a block")
@pytest.mark.effect(
    "plan.memory.recompute_interval", "blocks whose operators run in backward: every third of four, two"
)
def test_every_third_block_is_recomputed(plain: ObservedRun, tmp_path: Path) -> None:
    assert recomputed(plain) == {"silu": 0, "rsqrt": 0, ATTENTION: 0, "mm": 0}
    facts = recomputed(run(tmp_path, recompute=["block"], recompute_interval=3))
    # The last matmul of a block makes its output, which no backward needs: the recompute stops before it.
    assert facts == {"silu": 2, "rsqrt": 4, ATTENTION: 2, "mm": 2 * 6}


@pytest.mark.effect("plan.memory.recompute", "attention, activation, norm: only their operators run in backward")
def test_parts_of_blocks_are_recomputed(tmp_path: Path) -> None:
    facts = recomputed(run(tmp_path, recompute=["attention", "activation", "norm"]))
    assert facts == {"silu": BLOCKS, "rsqrt": 2 * BLOCKS, ATTENTION: BLOCKS, "mm": 3 * BLOCKS}


@dataclass
class OffloadTrace(StepTrace):
    """Recorder of a step that also logs its fetches of activations, and the files that the process has mapped."""

    folder: Path = Path()
    """Folder of the files."""
    fetched: dict[int, int] = field(default_factory=dict)
    """Tensors that are fetched during the backward of each block, by its index."""

    def install(self, session: Session) -> None:
        """Log fetches, and the blocks whose backward begins. A fault."""
        super().install(session)
        offload = runtime(session.model).offload
        assert offload is not None
        offload.incoming = LoggedStream(self)
        for index, block in enumerate(session.anatomy.blocks):
            session.model.get_submodule(block.name).register_forward_hook(partial(self._watch, index))

    def _watch(self, index: int, module: Any, args: Any, output: Tensor) -> None:
        def begin_backward(gradient: Tensor) -> None:
            if self.recording.phase:
                self.fetched[index] = 0

        if output.requires_grad:
            output.register_hook(begin_backward)

    def log_fetch(self) -> None:
        if self.recording.phase:
            self.fetched[list(self.fetched)[-1]] += 1

    def facts(self, session: Session) -> tuple[StepFacts, dict[int, int], int]:  # type: ignore[override]
        """Facts of the step, fetched tensors, and mapped bytes. A probe."""
        return super().facts(session), self.fetched, mapped_bytes(self.folder)


class LoggedStream(NoStream):
    """Stream of a CPU that tells of each copy."""

    def __init__(self, trace: OffloadTrace):
        self.trace = trace

    def __enter__(self) -> "LoggedStream":
        self.trace.log_fetch()
        return self


def mapped_bytes(folder: Path) -> int:
    """Bytes of the unnamed files of a folder that this process has mapped."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, rest = line.partition(" ")
        if f" {folder}/.weft-" in rest:
            begin, end = (int(address, 16) for address in addresses.split("-"))
            total += end - begin
    return total


@pytest.mark.effect("plan.memory.optimizer_device", "disk: bytes in the pool of files: those of both moments of Adam")
@pytest.mark.effect("plan.memory.offload_to", "disk: bytes of unnamed files that the rank has mapped")
@pytest.mark.effect("plan.memory.offload_dir", "folder of the unnamed files that the rank has mapped")
@pytest.mark.effect(
    "plan.memory.offload_prefetch", "tensors fetched in the backward of the last block: those of 3 blocks"
)
def test_states_and_activations_on_a_disk(plain: ObservedRun, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    trace = OffloadTrace(folder=folder)
    offload = {"offload": ["block"], "offload_to": "disk", "offload_prefetch": 2}
    job = job_of(tmp_path, {"optimizer_device": "disk", "offload_dir": str(folder), **offload})
    done = observe(job, 1, fault=trace.install, probe=trace.facts)
    (facts, fetched, mapped), pools = done.facts[0], done.metrics[2].pools or {}
    assert plain.metrics[2].pools is None
    assert pools["optimizer"]["requested"] == 2 * facts.parameters[torch.float32, "cpu"]
    each = fetched[0], fetched[1], fetched[2], fetched[3]
    assert each == (0, 0, each[2], 3 * each[2])
    assert each[2] > 5
    files = pools["optimizer"]["held"] + pools["activations"]["held"]
    assert files <= mapped < 1.2 * files


def files_of_weights(session: Session) -> tuple[int, int, int, int]:
    """Bytes of weights, those of them that are in files, bytes of all files, and units that were read ahead. A probe."""
    on_disk = runtime(session.model).on_disk
    assert on_disk is not None
    files = [(block.data_ptr(), block.data_ptr() + block.numel()) for block in on_disk.pool.blocks]
    weights = [local_part(parameter) for parameter in session.model.parameters()]
    inside = [own.nbytes for own in weights if any(begin <= own.data_ptr() < end for begin, end in files)]
    return sum(own.nbytes for own in weights), sum(inside), on_disk.pool.live, on_disk.read


@pytest.mark.effect(
    "plan.memory.parameters_device", "disk: all weights are in files, whose bytes are those of weights and gradients"
)
@pytest.mark.effect("plan.comm.prefetch", "weights on disk: blocks that are read ahead, twice as many for 2")
def test_weights_and_gradients_on_a_disk(tmp_path: Path) -> None:
    counts = []
    for ahead in (1, 2):
        memory = {"parameters_device": "disk", "offload_dir": str(tmp_path / "files")}
        job = job_of(tmp_path / str(ahead), memory, zero=3, prefetch=ahead)
        done = observe(job, 1, probe=files_of_weights)
        weights, inside, files, read = done.facts[0]
        assert inside == weights
        assert 2 * weights <= files < 2.3 * weights  # also gradients
        assert (done.metrics[2].pools or {})["parameters"]["live"] == files
        counts.append(read)
    # Embedding, blocks and the rest, in forward and in backward of each step; the order is known from the second on.
    assert counts[0] > 2 * BLOCKS
    assert 1.8 * counts[0] < counts[1] <= 2 * counts[0]


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ranks on the stand-in for an accelerator, for which host memory is another place."""
    close_pools()
    monkeypatch.setenv(DEVICE_VARIABLE, "npu")
    yield
    close_pools()


@pytest.mark.effect(
    "plan.memory.optimizer_device", "host: bytes of states by device, on the stand-in for an accelerator"
)
@pytest.mark.effect(
    "plan.memory.optimizer_bytes", "bytes of states on the host: at most as many, the others on the device"
)
@pytest.mark.effect("plan.memory.offload", "bytes that forward copies to the host, and backward to the device")
@pytest.mark.effect(
    "plan.memory.offload_bytes", "bytes of activations on the host at the peak of a step: at most as many"
)
@pytest.mark.skipif(not HAS_COMPILER, reason="without g++, a backward with streams ends a rank on the stand-in")
@pytest.mark.usefixtures("accelerator")
def test_states_and_activations_in_host_memory(tmp_path: Path) -> None:
    done = run(tmp_path, optimizer_device="host", optimizer_bytes=[200_000], offload=["mlp"], offload_bytes=300_000)
    facts = done.facts[0]
    parameters = facts.parameters[torch.float32, "npu"]
    on_host, on_device = facts.states[torch.float32, "cpu"], facts.states[torch.float32, "npu"]
    assert 150_000 < on_host <= 200_000
    assert 2 * parameters <= on_host + on_device < 2 * parameters + 1000  # also counts of steps
    # MLPs save 32 + 4 * 48 elements for a token, 458,752 bytes in all blocks.
    sent, fetched = (facts.copied(*places) for places in (("npu", "cpu", FORWARD), ("cpu", "npu", BACKWARD)))
    assert 200_000 < sent == fetched <= 300_000
    assert 200_000 < (done.metrics[2].pools or {})["activations"]["peak"] <= 300_000
