"""Bytes sent by tensor, sequence, context and pipeline parallelism in one micro-batch equal the textbook volume."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.lab.families import family
from tests.lab.parity import packed_batches, plan_for, share
from tests.lab.plans import resolved
from tests.lab.pool import close_pools, run_ranks
from weft.anatomy.build import build_on_meta
from weft.checkpoint.loading import materialize
from weft.checkpoint.model_config import read_config
from weft.comm.recorder import Recorder
from weft.job import Model
from weft.parallel.parallelize import parallelize
from weft.plan import Plan
from weft.topology.mesh import build_mesh, data_rank
from weft.training.forward_backward import forward_backward

PAGE = Path(__file__).parents[2] / "docs" / "traffic.md"
SOURCE = Model(config={**family("qwen3"), "tie_word_embeddings": False})
LAYERS, BATCH, TOKENS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 16, 32, 4, 2, 8
FLOAT = 4  # bytes
ACTIVATIONS = BATCH * TOKENS * HIDDEN * FLOAT
NORMS = LAYERS * (2 * HIDDEN + 2 * HEAD_DIM)  # parameters of the norms of all blocks, including q and k norms


def traffic(rank: int, ranks: int, plan: Plan) -> dict[tuple[str, str], int]:
    """Bytes sent by this rank in one micro-batch, by (axis, operation)."""
    plan = resolved(plan, ranks)
    mesh = build_mesh(plan, "cpu", ranks)
    model = parallelize(build_on_meta(read_config(SOURCE), torch.float32), plan, mesh)
    materialize(model, SOURCE, torch.device("cpu"))
    batches = share(packed_batches(96)[0], data_rank(mesh), plan.parallel.data_ranks, BATCH)
    sums: Counter[tuple[str, str]] = Counter()
    with Recorder() as recorder:
        forward_backward(model, batches, 1.0)
    for message in recorder.messages:
        sums[message.axis, message.operation] += message.bytes
    return dict(sums)


def count(ranks: int, **parallel: Any) -> dict[tuple[str, str], int]:
    return run_ranks(ranks, traffic, plan_for("fp32", **parallel))[0]


class Volume(NamedTuple):
    """Textbook volume of one collective: bytes sent by one rank in one micro-batch."""

    layout: str
    ranks: int
    parallel: dict[str, Any]
    axis: str
    operation: str
    formula: str
    bytes: int


def volumes() -> Iterator[Volume]:
    """Volumes of all layouts: A = batch x tokens x hidden x 4 bytes, L layers, n ranks, T = batch x tokens."""
    ends, loss = 1, 3 * BATCH * TOKENS * FLOAT  # loss: largest logit, sum of exponentials, logit of the target
    for n in (2, 4):
        part = (n - 1) / n
        pairs = 2 * (2 * LAYERS + ends) * ACTIVATIONS * part
        keys = (
            LAYERS * 2 * KV_HEADS * HEAD_DIM * HIDDEN if n > KV_HEADS else 0
        )  # keys and values that several ranks share
        norms = (NORMS + HIDDEN + keys) * FLOAT
        tp = ("tp, sp", n, {"tp": n}, "tp")
        yield Volume(*tp, "reduce_scatter", "2 (2 L + 1) A (n - 1) / n", int(pairs))
        yield Volume(*tp, "all_gather", "the same", int(pairs))
        shared = "the loss 3 T, gradients of norms" + (" and of shared keys and values" if keys else "")
        yield Volume(*tp, "all_reduce", f"2 ({shared}) (n - 1) / n", int(2 * (loss + norms) * part))
    norms = LAYERS * 2 * HEAD_DIM * FLOAT
    total = 2 * ((4 * LAYERS + 2 * ends) * ACTIVATIONS + loss + norms) // 2
    plain = "2 ((4 L + 2) A + loss + q and k norms) (n - 1) / n"
    yield Volume("tp without sp", 2, {"tp": 2, "sp": False}, "tp", "all_reduce", plain, total)
    for n in (2, 4):
        elements = BATCH * TOKENS // n * HEAD_DIM * (2 * HEADS + 2 * max(KV_HEADS, n)) * (n - 1) // n
        text = "2 L T/n head_dim (2 heads + 2 max(kv heads, n)) (n - 1) / n"
        cp = ("cp, Ulysses", n, {"cp": n, "cp_ulysses": n}, "cp_ulysses", "all_to_all")
        yield Volume(*cp, text, 2 * LAYERS * elements * FLOAT)
        keys = BATCH * TOKENS // n * 2 * KV_HEADS * HEAD_DIM * FLOAT
        text = "L KV/n (2 (n - 1) + n): one round in forward, one in backward, and gradients back to their rank"
        yield Volume("cp, ring", n, {"cp": n}, "cp_ring", "send", text, LAYERS * keys * (2 * (n - 1) + n))
    yield Volume("pp", 2, {"pp": 2}, "pp", "send", "A to the next stage (and A back from it)", ACTIVATIONS)
    yield Volume("pp with tp 2, sp", 4, {"pp": 2, "tp": 2}, "pp", "send", "A / tp", ACTIVATIONS // 2)


VOLUMES = list(volumes())


@pytest.mark.parametrize("volume", VOLUMES, ids=lambda v: f"{v.layout} {v.ranks} {v.operation}")
def test_volume(volume: Volume) -> None:
    found = count(volume.ranks, **volume.parallel, zero=0)
    assert found[volume.axis, volume.operation] == volume.bytes


def test_without_sequence_parallelism_nothing_is_gathered() -> None:
    assert ("tp", "reduce_scatter") not in count(2, tp=2, sp=False, zero=0)


def page() -> str:
    """docs/traffic.md."""
    lines = [
        "# Traffic of the axes",
        "",
        "Bytes that one rank sends in one micro-batch, for each parallel axis: the textbook formula, and the bytes counted in",
        "a run. Use the formulas to estimate the traffic of a larger model.",
        "",
        f"The run is one micro-batch of {BATCH} x {TOKENS} tokens through a Qwen3 with {LAYERS} layers (hidden size {HIDDEN},",
        f"{HEADS} heads, {KV_HEADS} KV heads, float32). A is batch x tokens x hidden size x 4 bytes, T is batch x tokens, L is",
        "the number of layers, and n is the number of ranks. The traffic of the ZeRO stages is counted in",
        "`tests/parallel/test_traffic.py`. The traffic of expert dispatch and combine depends on the router, and is counted in",
        "`tests/parallel/test_expert.py`: 2 T K H (n - 1) / n in each direction if routing is balanced.",
        "",
        "Generated by `python -m tests.parallel.test_traffic_of_axes`; a test compares it with a new run.",
        "",
        "| layout | n | operation | formula | textbook | counted |",
        "|---|---|---|---|---|---|",
    ]
    for v in VOLUMES:
        counted = count(v.ranks, **v.parallel, zero=0)[v.axis, v.operation]
        lines.append(f"| {v.layout} | {v.ranks} | {v.operation} | {v.formula} | {v.bytes} | {counted} |")
    return "\n".join(lines) + "\n"


def test_traffic_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run python -m tests.parallel.test_traffic_of_axes"


if __name__ == "__main__":
    PAGE.write_text(page())
    close_pools()
