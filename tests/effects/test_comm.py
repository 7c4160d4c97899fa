"""Effects of the table plan.comm on a run of `weft train`."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from tests.device.links import two_level_topology
from tests.effects.watch import MOE, SEEN, route_tokens, unwatch, watch
from tests.lab.families import family
from tests.lab.jobs import write_job
from tests.lab.pool import close_pools
from tests.lab.runs import ObservedRun, observe
from weft.comm.compression.rows import row_bytes
from weft.job import Job
from weft.parallel.runtime import runtime
from weft.training import loop
from weft.training.session import Session

Run = Callable[..., ObservedRun]
HIDDEN, LAYERS = 32, 2
EXPERTS = {"model": {"config": MOE}}


def note_nothing(session: Session) -> None:
    """Leave the session as it is."""


def facts_of(session: Session) -> dict[str, Any]:
    """Notes of a rank, and the largest errors that compression has left, by reduction."""
    feedback = runtime(session.model).feedback
    errors = {name: state.committed.abs().max().item() for name, state in feedback.states.items()} if feedback else {}
    return {"seen": unwatch(), "errors": errors}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Function that trains one step with settings of plan.comm; each run is made once."""
    found: dict[str, ObservedRun] = {}

    def trained(ranks: int = 2, fault: Any = note_nothing, hosts: int = 1, **settings: Any) -> ObservedRun:
        names = ("model", "train", "optimizer", "parallel", "pipeline")
        tables = {name: settings.pop(name) for name in names if name in settings}
        key = f"{ranks} {fault.__name__} {hosts} {settings} {tables}"
        if key not in found:
            plan = {name: tables.pop(name, {}) for name in ("parallel", "pipeline")}
            plan |= {"comm": settings, "precision": {"param_dtype": "fp32"}}
            train = {"steps": 1, "global_batch_size": 4, **tables.pop("train", {})}
            job = write_job(tmp_path_factory.mktemp("run"), plan=plan, train=train, **tables)
            found[key] = observe(Job.load(job), ranks, fault=fault, probe=facts_of, hosts=hosts)
        return found[key]

    return trained


def sent(run: ObservedRun, step: int = 1) -> dict[str, dict[str, float]]:
    """Bytes and messages of rank 0 in a step, by mesh axis."""
    return run.metrics[step - 1].comm or {}


# Overlap


@pytest.mark.effect("plan.comm.overlap_chunks", "number of messages along tp: two for each collective of a matmul")
def test_chunks_of_matmuls_are_messages_of_their_own(run: Run) -> None:
    whole, chunks = (sent(run(parallel={"zero": 0, "tp": 2}, **keys))["tp"] for keys in ({}, {"overlap_chunks": 2}))
    # In each layer: a gather before attention and MLP, a scatter after them, and the transposes of both in backward.
    assert chunks["messages"] >= whole["messages"] + LAYERS * 8
    assert "all_to_all_bytes" not in whole
    assert chunks["all_to_all_bytes"] > 0  # a rank adds up its rows itself


def note_gathers(session: Session) -> None:
    """Note which blocks have been gathered, and which one computes."""
    watch(FSDPParamGroup, "unshard", lambda group, *_: SEEN.append(f"gather {group._module_fqn}"))
    for block in session.anatomy.blocks:
        norm = next(
            module for name, module in session.model.get_submodule(block.name).named_modules() if "norm" in name
        )
        norm.register_forward_hook(lambda *_, name=block.name: SEEN.append(f"compute {name}"))


@pytest.mark.effect(
    "plan.comm.prefetch", "blocks that are gathered before the first block computes: three instead of two"
)
def test_prefetch_gathers_blocks_ahead(run: Run) -> None:
    model = {"config": {**family("llama"), "vocab_size": 300, "num_hidden_layers": 4}}
    for ahead, settings in ((1, {}), (2, {"prefetch": 2})):
        ran = run(fault=note_gathers, hosts=2, model=model, parallel={"zero": 3}, **settings)
        for facts in ran.facts:
            first = facts["seen"].index("compute model.layers.0")
            gathered = {event.removeprefix("gather ") for event in facts["seen"][:first] if "layers" in event}
            assert gathered == {f"model.layers.{index}" for index in range(ahead + 1)}


def note_handovers(session: Session) -> None:
    """Note the hand-overs of all steps, without those of measurements after the last one."""

    def note(*_: Any) -> None:
        lanes = runtime(session.model).lanes
        SEEN.append(lanes and lanes.handovers)

    watch(loop, "_summarize", note)


@pytest.mark.effect(
    "plan.comm.expert_overlap", "hand-overs between the lanes of a forward and a backward; no lanes by default"
)
def test_joint_experts_hand_over_between_two_lanes(run: Run) -> None:
    # The first step, and the first one with optimizer states, are measured in one lane.
    train, ep, optimizer = {"steps": 2, "micro_batch_size": 1}, {"zero": 0, "ep": 2}, {"name": "torch.optim:SGD"}
    handovers = partial(run, train=train, optimizer=optimizer, fault=note_handovers)
    plain = handovers(parallel=ep, **EXPERTS)
    joint = handovers(parallel=ep, expert_overlap="joint", **EXPERTS)
    assert [facts["seen"] for facts in plain.facts] == [[None], [None]]
    assert joint.facts[0]["seen"] == joint.facts[1]["seen"]
    assert joint.facts[0]["seen"][0] > 0
    assert any("gains nothing" in line for line in joint.screen)  # on one CPU
    model = {"config": {**MOE, "num_hidden_layers": 4}}
    stages = {"train": {**train, "global_batch_size": 8}, "parallel": {**ep, "pp": 2}, "model": model}
    slots = handovers(4, pipeline={"schedule": "dualpipev"}, **stages)
    assert all(facts["seen"][0] > 0 for facts in slots.facts)


# Hosts


@pytest.mark.effect(
    "plan.comm.hierarchy", "bytes inside a host and between hosts of each axis; flat: of all ranks at once"
)
@pytest.mark.effect(
    "plan.comm.topology", "line with the link of each axis; hierarchical all-to-alls where messages are slow"
)
def test_collectives_of_two_hosts_are_hierarchical(run: Run, tmp_path: Path) -> None:
    parallel = {"zero": 0, "cp": 4, "cp_ulysses": 4, "ep": 4}
    two_hosts = partial(run, 4, hosts=2, parallel=parallel, **EXPERTS)
    known, path = two_level_topology(2, 2), tmp_path / "links.toml"
    slow = known.links[1].model_copy(update={"latency_seconds": 0.5})
    path.write_text(known.model_copy(update={"links": (known.links[0], slow)}).to_toml())
    auto, flat, declared = two_hosts(), two_hosts(hierarchy="flat"), two_hosts(topology=str(path))
    assert not any("host" in axis or "between" in axis for axis in sent(flat))
    for ran in (auto, declared):
        assert {"ep host", "ep between", "cp_ulysses host", "cp_ulysses between"} <= sent(ran).keys()
        assert "ep" not in sent(ran)
    # An all-to-all of heads sends as many bytes in either way: by hosts only where fewer messages are faster.
    heads = sent(flat)["cp_ulysses"]["all_to_all_bytes"]
    assert sent(auto)["cp_ulysses"]["all_to_all_bytes"] == heads
    assert "cp_ulysses" not in sent(declared)
    assert sent(declared)["cp_ulysses between"]["all_to_all_bytes"] == heads * 2 // 3  # to two of three other ranks
    assert "ep 4: between hosts" in auto.screen
    assert "ep 4: between hosts (network, 0.1 GB/s, 500 ms)" in declared.screen


# Compression


def route_in_turn(session: Session) -> None:
    """Send the copies of tokens to all experts in turn: half of the rows of each of two ranks leave it."""
    route_tokens(session, 8)


@pytest.mark.effect("plan.comm.expert_compression", "bytes along ep: rows to experts and their gradients have 8 bits")
@pytest.mark.parametrize("row_format", ["int8", "fp8"])
def test_rows_to_experts_have_8_bits(row_format: str, run: Run) -> None:
    ep = {"zero": 0, "ep": 2}
    full = run(parallel=ep, fault=route_in_turn, **EXPERTS)
    small = run(parallel=ep, fault=route_in_turn, expert_compression=row_format, **EXPERTS)
    rows = 2 * 32 * 2 // 2  # of two rows of tokens, two copies each, of which half leave the rank
    saved = rows * (4 * HIDDEN - row_bytes(HIDDEN))  # in forward, and again in backward
    assert sent(full)["ep"]["all_to_all_bytes"] - sent(small)["ep"]["all_to_all_bytes"] == 2 * LAYERS * saved


ZERO_2 = {"zero": 2}
CODECS: dict[str, tuple[float, dict[str, bool]]] = {  # bytes relative to float32, further settings
    "bf16": (1 / 2, {}),
    "fp16": (1 / 2, {}),
    "int8": (1 / 4, {}),
    "2:4": (9 / 32, {"error_feedback": False}),
}


@pytest.mark.effect("plan.comm.compression", "bytes of the gradients that a rank sends, relative to those in float32")
@pytest.mark.parametrize("codec", CODECS)
def test_codecs_shrink_the_messages_of_gradients(codec: str, run: Run) -> None:
    ratio, settings = CODECS[codec]
    plain, coded = run(parallel=ZERO_2), run(parallel=ZERO_2, compression=codec, **settings)
    gradients = sent(plain)["dp_shard"]["reduce_scatter_bytes"]
    assert "all_to_all_bytes" not in sent(plain)["dp_shard"]
    assert "reduce_scatter_bytes" not in sent(coded)["dp_shard"]
    assert sent(coded)["dp_shard"]["all_to_all_bytes"] == pytest.approx(ratio * gradients, rel=0.03)
    assert sent(coded)["dp_shard"]["all_gather_bytes"] == sent(plain)["dp_shard"]["all_gather_bytes"]


@pytest.mark.effect("plan.comm.compression", "bytes of the signs that a rank sends in a step after freeze_steps")
def test_1_bit_adam_sends_signs(run: Run) -> None:
    optimizer = {"name": "onebit-adam", "freeze_steps": 1, "warmup_steps": 0}
    ran = run(parallel=ZERO_2, compression="1-bit", optimizer=optimizer, train={"steps": 2})
    before, after = (sent(ran, step)["dp_shard"] for step in (1, 2))
    assert "all_to_all_bytes" not in before
    assert after["all_to_all_bytes"] == pytest.approx(
        1.25 / 32 * before["reduce_scatter_bytes"], rel=0.03
    )  # and scales


@pytest.fixture
def top4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The example package with a codec, as if installed."""
    package = Path(__file__).parents[2] / "examples" / "packages" / "weft-top4"
    (tmp_path / "top4-1.dist-info").mkdir()
    (tmp_path / "top4-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: top4\nVersion: 1\n")
    (tmp_path / "top4-1.dist-info" / "entry_points.txt").write_text("[weft.codecs]\ntop4 = weft_top4:TOP4\n")
    close_pools()  # their ranks do not have the path
    for path in (package, tmp_path):
        monkeypatch.syspath_prepend(path)
    yield
    close_pools()


@pytest.mark.effect("plan.comm.compression", "bytes of gradients in the codec of an installed package")
def test_a_codec_of_a_package_shrinks_the_messages_of_gradients(run: Run, top4: None) -> None:
    plain, coded = run(parallel=ZERO_2), run(parallel=ZERO_2, compression="top4")
    gradients = sent(plain)["dp_shard"]["reduce_scatter_bytes"]
    assert sent(coded)["dp_shard"]["all_to_all_bytes"] == pytest.approx(3 / 64 * gradients, rel=0.03)


@pytest.mark.effect(
    "plan.comm.compress_scope", "bytes of gradients: as without compression on one host, fewer on two hosts"
)
def test_messages_inside_a_host_are_not_compressed(run: Run) -> None:
    inter_node = {"compression": "int8", "compress_scope": "inter_node"}
    plain, everywhere = run(parallel=ZERO_2), run(parallel=ZERO_2, compression="int8")
    one, two = run(parallel=ZERO_2, **inter_node), run(parallel=ZERO_2, hosts=2, **inter_node)
    found = [sum(axis["bytes"] for axis in sent(ran).values()) for ran in (plain, everywhere, one, two)]
    assert found == [found[0], found[1], found[0], found[1]]
    assert found[1] < found[0]


@pytest.mark.effect("plan.comm.error_feedback", "errors that a rank keeps for the next message: none with false")
def test_errors_are_kept_for_the_next_message(run: Run) -> None:
    kept, lost = (run(parallel=ZERO_2, compression=codec, **CODECS[codec][1]) for codec in ("int8", "2:4"))
    for rank in (0, 1):
        assert len(kept.facts[rank]["errors"]) > LAYERS
        assert all(error > 0 for error in kept.facts[rank]["errors"].values())
        assert lost.facts[rank]["errors"] == {}
