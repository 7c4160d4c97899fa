"""Plans for unlike hosts: shares in proportion to speed, order of hosts, what is refused, and runs of the plans."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.lab.jobs import write_job
from tests.lab.runs import train_in_the_pool
from weft.cli.app import app
from weft.errors import DeviceError
from weft.job import Job
from weft.observe.unlike_proposal import print_unlike
from weft.planner.costmodel.cluster_file import (
    ClusterFile,
    Figures,
    HostGroup,
    LinkFigures,
    read_cluster,
    read_cluster_file,
)
from weft.planner.costmodel.hardware import GIB, ClusterSpec, find_device
from weft.planner.costmodel.layout import TrainingLayout
from weft.planner.costmodel.unlike import divide_blocks, place
from weft.planner.search.space import Space
from weft.planner.search.space_of_job import space_of
from weft.planner.search.unlike import UnlikeProposal, planned, propose_unlike
from weft.training.metrics import read_metrics

UNLIKE = """
device = "CPU"
devices_per_host = 1

[[host]]
name = "fast"

[[host]]
name = "slow"
scalar = 3.0
"""
MODEL = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}


def job_of(rows: int = 64, **config: object) -> Job:
    tables = {"model": {"config": {**MODEL, **config}}, "train": {"global_batch_size": rows}, "data": {"seq_len": 2048}}
    return Job.parse(tables)


def groups_of(slow: float = 3.0, per_host: int = 1, device: str = "H100") -> tuple[HostGroup, HostGroup]:
    cluster = ClusterSpec(find_device(device), 1, per_host)
    return HostGroup("fast", cluster), HostGroup("slow", cluster, slow)


def proposed(job: Job, groups: tuple[HostGroup, ...], count: int = 5) -> UnlikeProposal:
    return propose_unlike(job, groups, count=count, confirm=False)


def spaces_of(job: Job, groups: tuple[HostGroup, ...]) -> dict[str, Space]:
    hosts = sum(group.cluster.hosts for group in groups)
    return {group.name: space_of(job, replace(group.cluster, hosts=hosts)) for group in groups}


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=4), st.integers(4, 10), st.floats(0, 5))
def test_blocks_are_divided_as_well_as_by_all_divisions(seconds: list[float], blocks: int, last: float) -> None:
    def slowest(counts: tuple[int, ...]) -> float:
        times = [count * one for count, one in zip(counts, seconds, strict=True)]
        return max([*times[:-1], times[-1] + last])

    every = (counts for counts in itertools.product(range(1, blocks + 1), repeat=len(seconds)) if sum(counts) == blocks)
    found = divide_blocks(blocks, seconds, last)
    assert sum(found) == blocks
    assert slowest(found) == pytest.approx(min(map(slowest, every)))


def test_rows_and_stages_follow_the_speeds() -> None:
    job, groups = job_of(), groups_of()
    spaces, dp = spaces_of(job, groups), TrainingLayout(2048, 64, micro_batch=4, dp=2, zero=1)
    placed, equal = place(dp, groups, spaces), place(dp, groups, spaces, equal=True)
    assert placed is not None
    assert equal is not None
    assert (placed.rows, equal.rows) == ((48, 16), (32, 32))
    assert placed.num_micro_batches == 12
    assert 1.8 < equal.terms["compute"] / placed.terms["compute"] < 2.05  # smaller micro-batches are less efficient
    pp = replace(dp, dp=1, pp=2, zero=0, micro_batch=1)
    staged = place(pp, groups, spaces)
    assert staged is not None
    assert staged.rows == (64,)
    assert staged.blocks[0] > 2 * staged.blocks[1]


def test_a_large_head_is_on_the_fast_host() -> None:
    job, groups = job_of(vocab_size=400_000, num_hidden_layers=4), groups_of()
    layout = TrainingLayout(2048, 64, micro_batch=1, pp=2, zero=0)
    ends_fast, ends_slow = (place(layout, order, spaces_of(job, groups)) for order in (groups[::-1], groups))
    assert ends_fast is not None
    assert ends_slow is not None
    assert ends_fast.seconds < 0.7 * ends_slow.seconds


def test_like_hosts_get_equal_shares() -> None:
    found = proposed(job_of(), groups_of(1.0))
    assert len(set(found.best[0].rows)) == 1
    assert found.equal.seconds == pytest.approx(found.best[0].seconds)
    assert planned(found.job, found.best[0]).plan.parallel.rows_per_rank == ()


def test_the_chosen_plan_is_near_the_sum_of_both_speeds() -> None:
    found = proposed(job_of(), groups_of())
    both = 1 / sum(1 / seconds for seconds in found.alone.values())
    assert both / found.best[0].seconds > 0.9
    assert found.equal.seconds / found.best[0].seconds > 1.4


def test_a_slow_link_is_crossed_by_the_pipeline() -> None:
    slow_link = LinkFigures(latency_seconds=1e-4, gb_per_second=0.5).link_model()
    device = replace(find_device("H100"), between=slow_link)
    groups = tuple(HostGroup(group.name, ClusterSpec(device, 1, 2), group.scalar) for group in groups_of())
    first = proposed(job_of(), groups).best[0]
    assert first.layout.pp >= 2  # ranks of pp are the outermost: stages are on different hosts
    assert first.layout.num_devices // first.layout.pp <= 2


def test_small_memory_of_one_host_is_kept() -> None:
    device = find_device("H100")
    small = replace(device, memory=20 * GIB)
    groups = (HostGroup("large", ClusterSpec(device, 1, 1)), HostGroup("small", ClusterSpec(small, 1, 1)))
    for placed in proposed(job_of(), groups, 20).best:
        at_small = [group.name for group in placed.order].index("small")
        cell = (at_small, 0) if placed.layout.pp > 1 else (0, at_small)
        assert placed.layout.tp * placed.layout.cp > 1 or placed.memory[cell] <= 0.92 * 20 * GIB


def test_experts_stay_on_like_hosts() -> None:
    moe = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1024}
    job, groups = job_of(**moe), groups_of(per_host=2)
    spaces, layout = spaces_of(job, groups), TrainingLayout(2048, 64, dp=4, zero=1, ep=4, expert_tp=1)
    assert place(layout, groups, spaces) is None
    inside = place(replace(layout, ep=2), groups, spaces)
    assert inside is not None
    assert inside.rows[0] == inside.rows[1] > inside.rows[2] == inside.rows[3]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (UNLIKE + '[[host]]\nname = "fast"\n', "two tables"),
        ("hosts = 2\n" + UNLIKE, "hosts together with"),
        (UNLIKE.replace("scalar = 3.0", 'device = "H300"'), "H300"),
        (UNLIKE.replace("scalar = 3.0", "speed = 3.0"), "speed"),
    ],
)
def test_cluster_files_that_are_refused(tmp_path: Path, text: str, error: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(DeviceError, match=error):
        read_cluster(path)


def test_hosts_with_devices_of_two_types_are_refused() -> None:
    fast, _ = groups_of()
    with pytest.raises(DeviceError, match="one type of devices"):
        proposed(job_of(), (fast, HostGroup("old", ClusterSpec(find_device("910B"), 1, 1))))
    with pytest.raises(DeviceError, match="devices_per_host"):
        proposed(job_of(), (fast, HostGroup("old", ClusterSpec(find_device("A100"), 1, 8))))


def test_measured_hosts_are_added_to_a_file(tmp_path: Path) -> None:
    first = ClusterFile(device="CPU", devices_per_host=2, scalar=1.1, figures=Figures(fp32_tflops=0.2))
    both = first.with_host(
        "slow", ClusterFile(device="CPU", devices_per_host=2, scalar=1.2, figures=Figures(fp32_tflops=0.1))
    )
    path = tmp_path / "cluster.toml"
    path.write_text(both.to_toml())
    assert read_cluster_file(path) == both
    groups = read_cluster(path).groups
    assert [(group.name, group.scalar, group.cluster.device.peak["fp32"]) for group in groups] == [
        ("host0", 1.1, 0.2e12),
        ("slow", 1.2, 0.1e12),
    ]
    with pytest.raises(DeviceError, match="another name"):
        both.with_host("slow", first)
    with pytest.raises(DeviceError, match="--nproc-per-node 2"):
        both.with_host("third", ClusterFile(device="CPU", devices_per_host=1))


def test_options_for_like_hosts_are_refused(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(UNLIKE)
    arguments = ["plan", str(write_job(tmp_path)), "--cluster", str(tmp_path / "cluster.toml"), "--emit", "megatron"]
    found = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "plan.toml")])
    assert isinstance(found.exception, DeviceError | SystemExit)
    assert not (tmp_path / "plan.toml").exists()


def test_weft_advise_refuses_unlike_hosts(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(UNLIKE)
    found = CliRunner().invoke(app, ["advise", "vision", "--cluster", str(tmp_path / "cluster.toml")])
    assert "has tables [[host]]" in str(found.exception) + found.output
    assert found.exit_code != 0


def test_prices_are_those_of_all_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    fast, slow = groups_of()
    device = replace(slow.cluster.device, dollars_per_hour=1.0, watts=300.0, grams_co2_per_kwh=500.0)
    first = replace(fast.cluster.device, dollars_per_hour=2.0, watts=700.0, grams_co2_per_kwh=500.0)
    groups = tuple(
        replace(group, cluster=replace(group.cluster, device=chosen))
        for group, chosen in ((fast, first), (slow, device))
    )
    job = job_of()
    found = proposed(job, groups)
    print_unlike(found)
    tokens = job.train.global_batch_size * job.data.seq_len / found.best[0].seconds
    printed = capsys.readouterr().out
    assert f"{tokens / 1000:.3g} tokens/J" in printed
    assert f"{1000 * 500 / 3.6e6 / tokens * 1e6:.3g} g CO2 per million tokens" in printed
    assert "per million tokens;" in printed


def test_a_plan_for_unlike_hosts_runs(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(UNLIKE)
    path = write_job(tmp_path, train={"steps": 2, "global_batch_size": 8})
    plan = tmp_path / "plan.toml"
    arguments = ["plan", str(path), "--cluster", str(tmp_path / "cluster.toml"), "--out", str(plan)]
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 0, found.output
    assert "--node-rank 1 on" in found.output
    losses = []
    for name, settings_of_plan in (("planned", [f"plan={plan}"]), ("equal", [])):
        job = Job.load(path, [*settings_of_plan, "train.micro_batch_size=8", f"out={tmp_path / name}"])
        out, _ = train_in_the_pool(job, 2)
        losses.append([step.loss for step in read_metrics(out / "metrics.jsonl")])
        assert bool(job.plan.parallel.rows_per_rank or job.plan.pipeline.stage_blocks) == (name == "planned")
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
