"""Times of the ranks in a file for each host: few appends in large jobs, and no rank damages the lines of another."""

import gzip
import json
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest
from torch.distributed.device_mesh import init_device_mesh

from tests.lab.jobs import write_job
from tests.lab.pool import run_ranks
from tests.lab.runs import train_in_the_pool
from weft.job import Job
from weft.observe.diagnosis import diagnose
from weft.observe.rank_timeline import _read_logs, read_timeline
from weft.training import rank_times
from weft.training.host_lines import HostLinesFile
from weft.training.metrics import to_line
from weft.training.rank_times import (
    LINE_SECONDS,
    RankPlace,
    RankTimes,
    RankTimesWriter,
    append_seconds,
    line_seconds,
)

TRACES = Path(__file__).parents[1] / "observe" / "traces"


@pytest.mark.parametrize("name", ["rank", "link", "data", "healthy"])
def test_files_of_hosts_and_of_ranks_have_the_same_diagnosis(name: str, tmp_path: Path) -> None:
    """The recordings are of an earlier version, which wrote a file for each rank."""
    of_ranks, of_hosts = tmp_path / "ranks", tmp_path / "hosts"
    for folder in (of_ranks, of_hosts):
        (folder / "logs").mkdir(parents=True)
        (folder / "run_id").write_text("recorded")
    logs: list[list[dict[str, object]]] = []
    for text in gzip.decompress((TRACES / f"{name}.jsonl.gz").read_bytes()).splitlines():
        line = json.loads(text)
        logs += [[]] if "rank" in line else []
        logs[-1].append(line)
    for rank, lines in enumerate(logs):
        (of_ranks / "logs" / f"times-{rank:05}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with (of_hosts / "logs" / "times-host-00000.jsonl").open("w") as file:
        for index in range(max(map(len, logs))):
            for rank, lines in enumerate(logs):
                for line in lines[index : index + 1]:
                    file.write("\n" + json.dumps(line | ({} if "after" in line else {"rank": rank})) + "\n")
    assert diagnose(of_hosts) == diagnose(of_ranks)


def test_a_run_has_one_file_for_the_ranks_of_its_host(tmp_path: Path) -> None:
    job = write_job(tmp_path, train={"steps": 12, "global_batch_size": 4}, data={"seq_len": 16})
    out, _ = train_in_the_pool(Job.load(job), 4)
    (path,) = (out / "logs").iterdir()
    assert path.name == "times-host-00000.jsonl"
    lines = path.read_text().split("\n")[:-1]
    records = [json.loads(line) for line in lines if line]
    longest = 0.0
    for rank in range(4):
        place, *times = [line for line in records if line["rank"] == rank]
        assert (place["host"], place["world_size"]) == (0, 4)
        assert [line["first"] for line in times] == [1, *(line["last"] + 1 for line in times[:-1])]
        assert times[-1]["last"] == 12
        longest = max(longest, sum(line["seconds"] for line in times))
    assert 4 <= appends(path) <= 4 * (longest / LINE_SECONDS + 2)


def test_each_host_has_a_file_and_its_ranks_append_their_last_lines_after_a_failure(tmp_path: Path) -> None:
    run_ranks(4, write_times, tmp_path)
    files = sorted((tmp_path / "logs").iterdir())
    assert [path.name for path in files] == ["times-host-00000.jsonl", "times-host-00001.jsonl"]
    for host, path in enumerate(files):
        records = [json.loads(line) for line in path.read_text().split("\n") if line]
        assert Counter(line["rank"] for line in records) == {2 * host: 6, 2 * host + 1: 6}  # a place, and five lines
        assert appends(path) == 2
    assert [place.host for place in _read_logs(tmp_path)[0]] == [0, 0, 1, 1]


def write_times(rank: int, ranks: int, out: Path) -> None:
    """Times of five steps, of ranks of two hosts that take themselves to be of a job in which appends are rare."""
    mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("pp", "dp"))
    with (
        mock.patch.object(rank_times, "host_id", return_value=[f"host {rank // 2}"]),
        mock.patch.object(rank_times, "append_seconds", return_value=1e6),
        suppress(InterruptedError),
        RankTimesWriter(out, mesh, "cuda", 1, print) as times,
    ):
        times.file.appended = time.perf_counter()
        for step in range(1, 6):
            times.begin_step()
            times.begin_compute()
            times.end_step(step, {}, 0.0)
            times._end_line()
        raise InterruptedError


def test_10240_ranks_append_100_times_a_second_together(tmp_path: Path) -> None:
    """Of 1,280 hosts every 80th is simulated, and of its 8 ranks one, for an hour of steps of 0.7 s."""
    ranks, every, step = 10_240, 80, 0.7
    assert (
        (line_seconds(2), append_seconds(2)) == (line_seconds(20), append_seconds(20)) == (LINE_SECONDS, LINE_SECONDS)
    )
    assert line_seconds(100) == LINE_SECONDS
    seconds = append_seconds(ranks)
    chosen = range(0, ranks, every)
    files = [HostLinesFile(tmp_path / f"{rank // 8}", print, seconds, -seconds * rank / ranks) for rank in chosen]
    count = round(3600 / step)
    lines, since = 0, 0.0
    for index in range(1, count + 1):
        now = index * step
        if now - since >= line_seconds(ranks):
            since, lines = now, lines + 1
            for file in files:
                file.add("{}\n")
                file.append_at(now)
    for file in files:
        file.close()
    assert len(list(tmp_path.iterdir())) == len(chosen)
    texts = [path.read_text().split("\n")[:-1] for path in tmp_path.iterdir()]
    assert sum(map(appends, tmp_path.iterdir())) * every <= 100 * 3600
    assert all(lines - 6 <= text.count("{}") <= lines for text in texts)  # the others are in memory
    assert lines * ranks <= 500 * 3600


def test_a_torn_line_damages_no_line_of_another_rank(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "times-host-00000.jsonl"
    path.parent.mkdir()
    write_process(path, [0, 1], ranks=2, first=1, last=15, seconds=1.0, started=1.0)
    with path.open("ab") as file:  # rank 1 was killed within a write
        file.write(b'\n{"first": 16, "last": 16, "sec')
    write_process(path, [0, 1], ranks=2, first=16, last=40, seconds=1.0, started=2.0)
    assert read_timeline(tmp_path).last == 40
    lines = [line for line in path.read_text().split("\n") if line]
    assert len(lines) == 2 * (1 + 15) + 1 + 2 * (1 + 25)


def test_repeated_steps_of_a_run_on_other_hosts_are_those_of_the_last_attempt(tmp_path: Path) -> None:
    """Four ranks on two hosts, then three ranks on three hosts, of which the first has the file of the earlier first host."""
    (tmp_path / "logs").mkdir()
    path = "times-host-{:05}.jsonl"
    for host in range(2):
        write_process(
            tmp_path / "logs" / path.format(host),
            [2 * host, 2 * host + 1],
            4,
            first=1,
            last=30,
            seconds=1.0,
            started=1.0,
        )
    for host in range(3):
        write_process(tmp_path / "logs" / path.format(host), [host], 3, first=11, last=60, seconds=2.0, started=2.0)
    found = read_timeline(tmp_path)
    assert [place.rank for place in found.places] == [0, 1, 2]
    assert (found.last, found.seconds[:, 0].tolist()) == (60, [1.0] * 3)
    assert (found.seconds[:, found.steps > 10] == 2.0).all()


def appends(path: Path) -> int:
    """Number of appends to a file: each begins with an empty line."""
    return path.read_text().split("\n")[:-1].count("")


def write_process(
    path: Path, own: list[int], ranks: int, *, first: int, last: int, seconds: float, started: float
) -> None:
    """Append the lines of some ranks of a host for their steps."""
    for rank in own:
        file = HostLinesFile(path, print, seconds=0.0, appended=0.0)
        file.add(to_line(RankPlace(rank, ranks, rank, "", "", 0, first, started)))
        for step in range(first, last + 1):
            file.add(to_line(RankTimes(step, step, seconds, 0.0, {}, 0.0, 0.0, 0.0, rank)))
            file.append_at(0.0)
        file.close()
