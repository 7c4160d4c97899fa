"""Share of the all-to-all of experts that is overlapped with computation, on an emulated wire between eight ranks.

    python benchmarks/moe_overlap.py            # about ten minutes
    python benchmarks/moe_overlap.py --quick    # a smoke run

Four blocks of Transformers' Qwen3-MoE and DeepSeek-V3, 16 experts of which a token takes 4, ep 8, a step of four micro-batches
in float32. A message takes the time of a slow wire (tests/lab/wire.py), which is set so that the messages of a step take 0.25
or 0.4 times as long as its computation. Seconds are those of one rank on a core plus its waiting for the wire, which do not
depend on other processes; its peers do the same at the same time. Counts have a channel of their own, of 20 microseconds.

    plain    forward and backward of each micro-batch in turn
    joint    the backward of a micro-batch together with the forward of the next one (`plan.comm.expert_overlap`)

Steady: without the first forward and the last backward, which have no partner. Every repeat runs both orders.
"""

import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import typer
from peers.figures import choose, spread
from rich.console import Console
from rich.table import Table
from tests.lab.experts import split_experts
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from weft.anatomy.transformers import read_anatomy
from weft.comm.lanes import Lanes
from weft.device.detect import detect
from weft.parallel.experts.dispatch import Channel
from weft.parallel.experts.shared import overlap_shared_experts

RANKS, MICRO_BATCHES, ALPHA = 8, 4, 20e-6
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 4,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"head_dim": 64, "num_experts": 16, "norm_topk_prob": True},
    "deepseek_v3": {
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 64,
    },
}


class LaneClock:
    """Seconds that the running lane has spent on a core, and seconds of waiting."""

    def __init__(self) -> None:
        self.seconds, self.mark = 0.0, time.thread_time()

    def restart(self) -> None:
        self.seconds, self.mark = 0.0, time.thread_time()

    def start(self) -> None:
        """Go on, in the thread of the lane that runs now."""
        self.mark = time.thread_time()

    def stop(self) -> None:
        now = time.thread_time()
        self.seconds, self.mark = self.seconds + now - self.mark, now

    def now(self) -> float:
        self.stop()
        return self.seconds

    def sleep_until(self, moment: float) -> None:
        self.stop()
        self.seconds = max(self.seconds, moment)

    @contextmanager
    def stopped(self) -> Any:
        """Context in which the clock stops, for work that a real wire would do."""
        self.stop()
        yield
        self.start()


class TimedLanes(Lanes):
    """Lanes whose hand-overs move the clock from thread to thread."""

    def __init__(self, clock: LaneClock):
        super().__init__()
        self.clock = clock

    def run(self, first: Callable[[], Any], second: Callable[[], object]) -> Any:
        def run_first() -> Any:
            result = first()
            self.clock.stop()
            return result

        def run_second() -> None:
            self.clock.start()
            second()
            self.clock.stop()

        result = super().run(run_first, run_second)
        self.clock.start()
        return result

    def hand_over(self) -> None:
        self.clock.stop()
        super().hand_over()
        self.clock.start()


class Figures(NamedTuple):
    """Seconds of a step."""

    total: float
    wire: float
    """Time of the messages of rows."""
    waited: float
    steady: float
    """Share of the messages that is hidden without the first forward and the last backward."""

    @property
    def hidden(self) -> float:
        """Share of the messages of rows that is overlapped with computation."""
        return 1 - self.waited / self.wire


def build(name: str, wire: Any, counts: Any, lanes: Lanes, recompute: bool) -> Any:
    """Model with the experts of rank 0."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **SIZES, **MODELS[name])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="grouped_mm").train()
    anatomy = read_anatomy(model)
    paths = {}
    for block in anatomy.blocks:
        for module in block.experts:
            experts = model.get_submodule(module)
            for key, parameter in list(experts.named_parameters()):
                setattr(experts, key, torch.nn.Parameter(parameter.detach().chunk(RANKS)[0].clone()))
            paths[module] = split_experts(experts, (Channel(wire, lanes, counts, recompute),), is_late=True)
    lanes.registers += overlap_shared_experts(model, anatomy, paths)
    for block in anatomy.blocks if recompute else ():
        module = model.get_submodule(block.name)
        module.forward = partial(checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False)
    return model


def step(model: Any, batches: list[Tensor], lanes: Lanes | None, mark: Callable[[], None]) -> list[Tensor]:
    """Losses of the micro-batches of a step; `mark` is called at both ends of its steady part."""

    def forward(ids: Tensor) -> Tensor:
        return model(input_ids=ids, labels=ids, use_cache=False).loss / len(batches)

    losses = []
    if lanes is None:
        for ids in batches:
            losses.append(forward(ids))
            losses[-1].backward()
        return losses
    losses.append(forward(batches[0]))
    mark()
    for ids in batches[1:]:
        losses.append(lanes.run(partial(forward, ids), losses[-1].backward))
    mark()
    losses[-1].backward()
    return losses


def measure(name: str, recompute: bool, tokens: int, ratios: list[float], repeats: int) -> dict[tuple[float, str], Any]:
    """Figures of both orders by wire / compute; and whether both have the same bits."""
    from tests.lab.wire import new_mirror

    torch.set_num_threads(1)
    wire: Any = new_mirror(RANKS) if not dist.is_initialized() else dist.new_group(backend="weft_mirror")
    counts: Any = dist.new_group(backend="weft_mirror")
    clock = LaneClock()
    lanes = TimedLanes(clock)
    model = build(name, wire, counts, lanes, recompute)
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, 512, (1, tokens), generator=generator) for _ in range(MICRO_BATCHES)]
    marks: list[tuple[float, float]] = []

    def run(order: str, per_byte: float) -> tuple[Figures, list[Tensor]]:
        model.zero_grad()
        marks.clear()
        wire.reset(clock, ALPHA, per_byte)
        counts.reset(clock, ALPHA, 0.0)
        clock.restart()
        messages = lambda: sum(transfer.ended - transfer.began for transfer in wire.transfers)  # noqa: E731
        losses = step(
            model, batches, lanes if order == "joint" else None, lambda: marks.append((wire.waited, messages()))
        )
        total = clock.now()
        (waited, sent), (waited_later, sent_later) = marks or [(0.0, 0.0), (0.0, 0.0)]
        steady = 1 - (waited_later - waited) / (sent_later - sent) if marks else float("nan")
        bits = [loss.detach() for loss in losses] + [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return Figures(total, messages(), wire.waited, steady), bits

    run("plain", 0.0)
    alone, expected = run("plain", 0.0)
    seconds_per_byte = alone.total / sum(transfer.bytes for transfer in wire.transfers)
    found: dict[tuple[float, str], Any] = {}
    for ratio in ratios:
        results: dict[str, list[Figures]] = {"plain": [], "joint": []}
        same = True
        for _ in range(repeats):
            for order, figures in results.items():
                one, bits = run(order, ratio * seconds_per_byte)
                figures.append(one)
                same = same and all(map(torch.equal, bits, expected))
        found |= {(ratio, order): (figures, same) for order, figures in results.items()}
    return found


def main(
    models: Annotated[str, typer.Option(help="Models, separated by commas.")] = "qwen3_moe,deepseek_v3",
    quick: Annotated[bool, typer.Option(help="One repeat, few tokens.")] = False,
) -> None:
    """Measure both orders side by side, and print hidden shares, seconds and bits."""
    sys.path.insert(0, str(Path(__file__).parent.parent))
    tokens, repeats = (32, 1) if quick else (256, 5)
    columns = ("model", "wire / compute", "order", "hidden", "steady", "ms a step", "beside plain", "same bits")
    table = Table(*columns, title=f"{detect().name}, one thread, float32")
    for name in choose("--models", models, list(MODELS)):
        for recompute in (False, True):
            for (ratio, order), (figures, same) in measure(name, recompute, tokens, [0.25, 0.4], repeats).items():
                if order == "plain":
                    base = [one.total for one in figures]
                times = [one.total for one in figures]
                table.add_row(
                    f"{name}{', block recompute' if recompute else ''}",
                    f"{ratio:g}",
                    order,
                    f"{median(one.hidden for one in figures):.1%}",
                    "" if order == "plain" else f"{median(one.steady for one in figures):.1%}",
                    spread([1e3 * seconds for seconds in times], ".0f"),
                    "" if order == "plain" else spread([b / t for b, t in zip(base, times, strict=True)], ".2f"),
                    "yes" if same else "no",
                )
    Console(width=140).print(table)


if __name__ == "__main__":
    typer.run(main)
