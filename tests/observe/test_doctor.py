"""Judgements of `weft doctor` on facts of two hosts, one fault each, and the functions that read facts."""

import json
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.device.links import measurement
from tests.lab.jobs import write_job
from weft.cli import main
from weft.device.cpu import Cpu
from weft.device.health import DeviceHealth
from weft.job import Job
from weft.launch.oom_kills import ControlGroup
from weft.observe.doctor.clocks import measure_clock
from weft.observe.doctor.devices import read_infiniband, read_network
from weft.observe.doctor.finding import Facts, Finding
from weft.observe.doctor.folders import SharedTrial, read_folders, see_trial
from weft.observe.doctor.judge import exit_code, judge, print_findings, reason_against_ranks, write_findings
from weft.observe.doctor.limits import cpu_quota, read_limits
from weft.observe.doctor.needs import estimate_needs
from weft.observe.doctor.paths import LEAST_MTU, Responder, partners, probe_path
from weft.observe.doctor.processor import read_processor
from weft.observe.doctor.same import read_inputs, read_own_code, read_settings
from weft.training.same_inputs import digest_files

GIB = 2**30


def host(index: int) -> Facts:
    """Facts of a healthy host with eight accelerators and a job."""
    devices = [
        asdict(
            DeviceHealth(
                n,
                name="GPU",
                uncorrected=0,
                corrected=3,
                power_limit=700.0,
                default_power_limit=700.0,
                clock_limit=1980.0,
                max_clock=1980.0,
                pcie_width=16,
                max_pcie_width=16,
                links_up=18,
                links_down=0,
                numa_node=n // 4,
            )
        )
        for n in range(8)
    ]
    other = 1 - index
    folder = {"existing": "/s", "error": None, "free_bytes": 100 * GIB, "free_files": 10**6}
    return {
        "host": {"index": index, "name": f"node{index}", "address": f"10.0.0.{index + 1}"},
        "device": {"type": "cuda", "ranks": 8, "memory": 80 * GIB},
        "processor": {"busy": 0.02, "steal": 0.0, "governors": ["performance"], "frequency_driver": "", "smt": True},
        "versions": {"python": "3.12.1", "torch": "2.13.0", "NCCL": "2.27.5", "driver": "550.54", "weft": "0.1.0"},
        "settings": {"NCCL_ALGO": "Ring"},
        "limits": {
            "nofile": 65536,
            "nproc": None,
            "memlock": None,
            "shm": {"total": 500 * GIB, "free": 500 * GIB},
            "memory_total": 1000 * GIB,
            "memory_available": 900 * GIB,
            "swap_total": 8 * GIB,
            "swap_used": 0,
            "cgroup_memory": None,
            "cgroup_cores": None,
            "cgroup_processes": None,
            "cores": 96,
            "is_root": False,
        },
        "devices": {
            "devices": devices,
            "network": {
                "name": "eth0",
                "bits_per_second": 100 * 10**9,
                "pcie_width": 16,
                "max_pcie_width": 16,
                "numa_node": 0,
            },
            "infiniband": [
                {"name": "mlx5_0:1", "state": "ACTIVE", "rate": "400 Gb/sec", "link_downed": 0, "numa_node": 1}
            ],
        },
        "clock": {"offset_seconds": 0.001 * index, "error_seconds": 0.002, "monotonic_seconds": 100.0},
        "clock_late": {"offset_seconds": 0.001 * index, "error_seconds": 0.002, "monotonic_seconds": 110.0},
        "path": {"interface": "eth0", "mtu": 9000, "to": [[other, {"tcp": None, "mtu": 9000}]]},
        "job": {"train.steps": 100, "model.path": "m"},
        "inputs": {"data": {"digest": "a" * 64}},
        "code": {"train.loss": {"name": "mine:loss", "digest": "b" * 64}},
        "folders": {"out": {"path": "/s/run", **folder}, "data.cache": {"path": "/s/cache", **folder}},
    } | (
        {"seen": {"out": True, "data.cache": True}}
        if index
        else {
            "written": {"out": [1], "data.cache": [1]},
            "needs": {
                "checkpoint_bytes": 10 * GIB,
                "checkpoints": 3,
                "export_bytes": 2 * GIB,
                "shared_bytes": 0,
                "peak_bytes": 60 * GIB,
            },
            "names": [{"name": f"node{n}", "address": f"10.0.0.{n + 1}", "ssh": None} for n in range(2)],
            "ranks": [
                {"host": n // 8, "local_rank": n % 8, "rates": {"matmul": 700e12 + n * 1e12, "copy": 2e12}}
                for n in range(16)
            ],
            "links": measurement([8, 8], lambda a, b: 10e9 if a // 8 != b // 8 else 300e9).model_dump(),
        }
    )


def put(*path: str | int, value: Any) -> Callable[[list[Facts]], None]:
    """Change of one value of the facts; the first part of the path is the index of a host."""

    def change(hosts: list[Facts]) -> None:
        *parents, last = path
        table: Any = hosts
        for part in parents:
            table = table[part]
        table[last] = value

    return change


def clock(offset: float) -> Callable[[list[Facts]], None]:
    """Offset of the clock of host 1, at both times."""

    def change(hosts: list[Facts]) -> None:
        hosts[1]["clock"]["offset_seconds"] = hosts[1]["clock_late"]["offset_seconds"] = offset

    return change


def slow_host(hosts: list[Facts]) -> None:
    for rank in hosts[0]["ranks"][8:]:
        rank["rates"]["matmul"] *= 0.7


def on_cpu(hosts: list[Facts]) -> None:
    for facts in hosts:
        facts["device"] = {"type": "cpu", "ranks": 8, "memory": None}


def cpu_needs_more(hosts: list[Facts]) -> None:
    on_cpu(hosts)
    hosts[1]["limits"]["cgroup_memory"] = 200 * GIB


DEVICE = (1, "devices", "devices", 3)
FAULTS = [
    (clock(-5.0), "red", "clock", "host 1 (node1) is 5 s behind host 0"),
    (clock(0.2), "yellow", "clock", "ahead of"),
    (put(1, "clock_late", "offset_seconds", value=0.051), "red", "clock drift", "drifts by 5000 ppm"),
    (put(1, "clock_late", "offset_seconds", value=0.01), "yellow", "clock drift", "drifts by 900 ppm"),
    (
        put(1, "versions", "torch", value="2.12.0"),
        "red",
        "version",
        "torch: 2.13.0 on host 0 (node0); 2.12.0 on host 1",
    ),
    (put(1, "versions", "NCCL", value="2.20"), "red", "version", "NCCL"),
    (put(1, "versions", "driver", value="570.1"), "yellow", "version", "driver"),
    (put(1, "settings", "NCCL_ALGO", value="Tree"), "yellow", "environment", "NCCL_ALGO"),
    (put(1, "job", "train.steps", value=200), "red", "job", "train.steps: 100 on host 0 (node0); 200 on host 1"),
    (put(0, "needs", value={"refused": "tp 3 does not fit"}), "red", "job", "tp 3 does not fit"),
    (
        put(1, "inputs", "data", value={"missing": "no file"}),
        "red",
        "tokens and inputs",
        "data on host 1 (node1): no file",
    ),
    (put(1, "inputs", "data", "digest", value="c" * 64), "red", "tokens and inputs", "digest cccccccccccc on host 1"),
    (put(1, "code", "train.loss", "digest", value="d" * 64), "red", "code", "train.loss"),
    (
        put(0, "path", "to", 0, 1, "mtu", value=1500),
        "red",
        "path MTU",
        "from host 0 (node0) to host 1 (node1), packets of 1500",
    ),
    (put(1, "path", "to", 0, 1, "tcp", value="refused"), "red", "path", "no TCP connection from host 1"),
    (put(1, "path", "to", 0, 1, "mtu", value=None), "yellow", "path MTU", "no UDP packet"),
    (put(1, "path", value={"interface": "eth0", "mtu": 1500, "to": []}), "yellow", "MTU", "1500 on host 1"),
    (put(0, "names", 1, "address", value=None), "red", "name resolution", "node1 has no address"),
    (put(0, "names", 1, "ssh", value="Permission denied"), "red", "ssh", "node1 fails: Permission denied"),
    (put(0, "names", 1, "address", value="10.9.9.9"), "yellow", "name resolution", "10.9.9.9"),
    (put(1, "folders", "out", "error", value="Read-only file system"), "red", "folder", "on host 1 (node1): Read-only"),
    (put(1, "seen", "out", value=False), "red", "shared folder", "is not the folder of host 0"),
    (put(0, "written", "out", value=[]), "red", "shared folder", "host 0 does not see"),
    (
        put(0, "folders", "out", "free_bytes", value=20 * GIB),
        "red",
        "space",
        "20 GiB are free, and 3 checkpoints of 10 GiB",
    ),
    (put(0, "folders", "out", "free_bytes", value=40 * GIB), "yellow", "space", "need 32 GiB"),
    (put(1, "folders", "out", "free_files", value=5), "yellow", "space", "5 inodes"),
    (put(1, "limits", "nofile", value=512), "red", "open files", "512 files"),
    (put(1, "limits", "nofile", value=2048), "yellow", "open files", "2048 files"),
    (put(1, "limits", "nproc", value=100), "red", "processes", "100 processes"),
    (put(1, "limits", "cgroup_processes", value=1000), "yellow", "processes", "1000 processes"),
    (put(1, "limits", "memlock", value=65536), "yellow", "locked memory", "64 KiB"),
    (put(1, "limits", "shm", value={"total": 2**26, "free": 2**26}), "red", "shared memory", "64 MiB"),
    (put(1, "limits", "shm", value={"total": 2**29, "free": 2**29}), "yellow", "shared memory", "512 MiB"),
    (put(0, "needs", "shared_bytes", value=100 * GIB), "red", "shared memory", "in-memory checkpoints need 800 GiB"),
    (put(0, "needs", "peak_bytes", value=90 * GIB), "red", "device memory", "needs 90 GiB, and a device has 80 GiB"),
    (put(0, "needs", "peak_bytes", value=75 * GIB), "yellow", "device memory", "75 GiB"),
    (cpu_needs_more, "red", "memory", "needs 480 GiB, and its control group allows 200 GiB"),
    (put(1, "limits", "swap_used", value=4 * GIB), "yellow", "swap", "4 GiB of swap"),
    (put(1, "processor", "steal", value=0.3), "red", "steal time", "30%"),
    (put(1, "processor", "busy", value=0.5), "yellow", "load", "50% of the cores"),
    (put(1, "processor", "governors", value=["powersave"]), "yellow", "governor", "powersave"),
    (put(1, "limits", "cgroup_cores", value=2.5), "yellow", "cores", "control group grants 2.5 cores for 8 ranks"),
    (put(*DEVICE, "uncorrected", value=2), "red", "memory errors", "device 3 of host 1 (node1): 2 uncorrected"),
    (put(*DEVICE, "repair", value="remapped row pending"), "red", "memory errors", "remapped row pending"),
    (put(*DEVICE, "alarms", value=["Xid 79"]), "red", "alarms", "Xid 79"),
    (put(*DEVICE, "slowed_by", value=["hw_thermal_slowdown"]), "red", "throttling", "hw_thermal_slowdown"),
    (put(*DEVICE, "power_limit", value=500.0), "yellow", "power limit", "500 W, the default is 700 W"),
    (put(*DEVICE, "clock_limit", value=1410.0), "yellow", "clock limit", "1410 MHz of 1980 MHz"),
    (put(*DEVICE, "pcie_width", value=8), "yellow", "PCIe width", "8 of 16 lanes"),
    (put(*DEVICE, "links_up", value=17), "red", "links of devices", "17 NVLink or HCCS links are up, 18"),
    (put(1, "devices", "infiniband", 0, "numa_node", value=0), "yellow", "affinity", "devices 4, 5, 6, 7"),
    (put(1, "devices", "infiniband", 0, "state", value="DOWN"), "red", "network card", "mlx5_0:1 is DOWN"),
    (put(1, "devices", "network", "pcie_width", value=4), "yellow", "network card", "4 of 16"),
    (
        put(0, "ranks", 5, "rates", "matmul", value=400e12),
        "red",
        "slow device",
        "rank 5 on host 0 (node0): matmul has 57%",
    ),
    (put(0, "ranks", 5, "rates", "copy", value=1.85e12), "yellow", "slow device", "memory copy has 92%"),
    (slow_host, "red", "slow device", "all ranks of host 1 (node1): matmul has"),
    (
        put(0, "links", value=measurement([8, 8], lambda a, b: 1e9 if (a, b) == (2, 12) else 10e9).model_dump()),
        "red",
        "slow link",
        "from rank 2 (node0) to rank 12 (node1) is slow",
    ),
    (
        put(0, "links", value=measurement([8, 8], lambda a, b: 0.5e9).model_dump()),
        "yellow",
        "slow network",
        "0.5 GB/s, and their interfaces state 12.5 GB/s",
    ),
    (put(0, "failure", value="rank 3 was killed"), "red", "ranks", "rank 3 was killed"),
    (put(1, "limits", value={"error": "OSError: no"}), "yellow", "limits", "host 1 (node1): not examined: OSError: no"),
]


def test_healthy_hosts_have_green_findings_alone() -> None:
    findings = judge([host(0), host(1)])
    assert {finding.level for finding in findings} == {"green"}
    assert len(findings) == 13
    assert exit_code(findings) == 0


@pytest.mark.parametrize(
    ("plant", "level", "check", "words"), FAULTS, ids=[f"{fault[1]} {fault[2]}" for fault in FAULTS]
)
def test_a_fault_is_named(plant: Callable[[list[Facts]], None], level: str, check: str, words: str) -> None:
    """One finding names the fault, with a fix; all other checks stay green."""
    hosts = [host(0), host(1)]
    plant(hosts)
    findings = judge(json.loads(json.dumps(hosts)))
    (found,) = [finding for finding in findings if finding.level in ("red", "yellow")]
    assert (found.level, found.check) == (level, check)
    assert words in found.text
    assert found.fix
    assert exit_code(findings) == (level == "red")
    assert findings[0] == found


def test_noise_of_a_fleet_is_no_fault() -> None:
    """Rates that all scatter by 8 % name nobody; two CPU ranks may differ by a fifth."""
    hosts = [host(0), host(1)]
    for index, rank in enumerate(hosts[0]["ranks"]):
        rank["rates"]["matmul"] = 700e12 * (1 - 0.08 * (index % 5) / 4)
    assert exit_code(judge(hosts)) == 0
    assert {finding.level for finding in judge(hosts)} == {"green"}
    on_cpu(hosts)
    hosts[0]["ranks"] = [{"host": n, "local_rank": 0, "rates": {"matmul": rate}} for n, rate in enumerate((1e9, 0.8e9))]
    assert "slow device" not in {finding.check for finding in judge(hosts)}
    hosts[0]["ranks"][1]["rates"]["matmul"] = 0.4e9
    (found,) = [finding for finding in judge(hosts) if finding.check == "slow device"]
    assert (found.level, found.text) == ("red", "rank 1 on host 1 (node1): matmul has 40% of the usual rate")


def test_ranks_are_not_started_where_they_would_hang() -> None:
    hosts = [host(0), host(1)]
    assert reason_against_ranks(hosts) is None
    hosts[1]["path"]["to"][0][1]["mtu"] = 1500
    assert "packets of 1500 bytes pass" in reason_against_ranks(hosts)


def test_many_differing_keys_are_counted() -> None:
    hosts = [host(0), host(1)]
    hosts[1]["job"] = {f"key{n}": n for n in range(20)}
    found = [finding for finding in judge(hosts) if finding.check == "job"]
    assert len(found) == 6
    assert found[-1].text == "17 more keys differ"


def test_equal_findings_of_many_hosts_are_one() -> None:
    hosts = [host(0), *(host(1) for _ in range(5))]
    for index, facts in enumerate(hosts):
        facts["host"] = {"index": index, "name": f"node{index}", "address": f"10.0.0.{index + 1}"}
        facts["path"]["to"], facts["limits"]["nofile"] = [], 512
    (found,) = [finding for finding in judge(hosts) if finding.check == "open files"]
    assert found.text.endswith("host 3 (node3) and 2 more hosts: a process may open 512 files")


def test_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    findings = [
        Finding("red", "clock", "slow [now]", "fix it"),
        Finding("green", "job", "same"),
        Finding("skipped", "x", "y"),
    ]
    print_findings(findings, "2 hosts examined", everything=False)
    printed = capsys.readouterr().out
    assert printed.startswith("2 hosts examined: 1 red, 1 green, 1 skipped\n")
    assert "slow [now]" in printed
    assert "same" not in printed
    print_findings(findings, "2 hosts examined", everything=True)
    assert "same" in capsys.readouterr().out
    write_findings(findings, [host(0)], tmp_path / "doctor.json")
    found = json.loads((tmp_path / "doctor.json").read_text())
    assert found["exit_code"] == 1
    assert found["findings"][0] == {"level": "red", "check": "clock", "text": "slow [now]", "fix": "fix it"}
    assert found["hosts"][0]["host"]["name"] == "node0"


# Facts


def test_the_offset_of_a_clock_is_within_its_error() -> None:
    """Host 0 is 3 s ahead; one of the exchanges is fast, the others take 20 ms in one direction."""
    calls = iter(range(100))

    class Store:
        def server_time(self) -> float:
            now = time.time() + 3.0
            if next(calls) != 5:
                time.sleep(0.02)
            return now

    found = measure_clock(Store())
    assert found["error_seconds"] < 0.01
    assert abs(found["offset_seconds"] + 3.0) <= found["error_seconds"] + 1e-4


def test_path_to_a_responder() -> None:
    with Responder("127.0.0.1", b"12345678") as responder:
        ports = responder.udp_port, responder.tcp_port
        assert probe_path("127.0.0.1", *ports, b"12345678", 9000) == {"tcp": None, "mtu": 9000}
        assert probe_path("127.0.0.1", *ports, b"another!", LEAST_MTU)["mtu"] is None
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert "refused" in probe_path("127.0.0.1", *(port, port), b"12345678", LEAST_MTU)["tcp"]


@pytest.mark.parametrize("count", [1, 2, 8, 9, 100])
def test_every_host_is_probed_and_many_hosts_stay_few_probes(count: int) -> None:
    probed = {other for index in range(count) for other in partners(index, count)}
    assert probed == (set(range(count)) if count > 1 else set())
    assert all(index not in partners(index, count) and len(partners(index, count)) <= 8 for index in range(count))


def test_another_host_sees_a_shared_folder_alone(tmp_path: Path) -> None:
    with SharedTrial({"out": tmp_path / "not" / "there"}) as trial:
        offer = trial.offer()
        assert see_trial(offer, 1, 1.0) == {"out": True}
        assert trial.seen(3, 0.0) == {"out": [1]}
        assert see_trial({**offer, "trials": {"out": str(tmp_path / "elsewhere")}}, 2, 0.0) == {"out": False}
    assert list(tmp_path.iterdir()) == []


def test_folders_of_a_job(tmp_path: Path) -> None:
    job = Job.load(write_job(tmp_path))
    found = read_folders(job, leads=True)
    assert found["out"]["error"] is None
    assert found["out"]["existing"] == str(tmp_path)
    assert found["data.cache"]["free_bytes"] > 0
    assert not (tmp_path / "run").exists()


def test_inputs_and_code_are_compared_by_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "doctor_own_loss.py").write_text("def loss(logits, targets):\n    return logits.sum()\n")
    monkeypatch.syspath_prepend(tmp_path)
    job = Job.load(write_job(tmp_path, train={"loss": "doctor_own_loss:loss"}))
    inputs, code = read_inputs(job), read_own_code(job)
    assert set(inputs) == {"data"}
    assert set(code) == {"train.loss"}
    (tmp_path / "text" / "3.txt").write_text("stale")
    (tmp_path / "doctor_own_loss.py").write_text("def loss(logits, targets):\n    return logits.mean()\n")
    assert read_inputs(job)["data"]["digest"] != inputs["data"]["digest"]
    assert read_own_code(job)["train.loss"]["digest"] != code["train.loss"]["digest"]
    missing = job.model_copy(update={"data": job.data.model_copy(update={"path": str(tmp_path / "nothing")})})
    assert "no file" in read_inputs(missing)["data"]["missing"]
    absent = job.model_copy(update={"train": job.train.model_copy(update={"loss": "nowhere_at_all:loss"})})
    assert "nowhere_at_all" in read_own_code(absent)["train.loss"]["missing"]


def test_a_long_file_is_sampled(tmp_path: Path) -> None:
    path = tmp_path / "long"
    path.write_bytes(bytes(4 * 2**20))
    before = digest_files([(path, "long")])
    with path.open("r+b") as file:
        file.seek(4 * 2**20 - 1)
        file.write(b"1")
    assert digest_files([(path, "long")]) != before


def test_settings_of_one_host_may_differ() -> None:
    variables = {"NCCL_ALGO": "Ring", "NCCL_SOCKET_IFNAME": "eth3", "HOME": "/root", "TORCH_NCCL_TRACE": "1"}
    assert read_settings(variables) == {"NCCL_ALGO": "Ring", "TORCH_NCCL_TRACE": "1"}


def test_quota_of_control_groups(tmp_path: Path) -> None:
    own = tmp_path / "own"
    second = tmp_path / "2" / "pod" / "container"
    second.mkdir(parents=True)
    (second / "cpu.max").write_text("max 100000\n")
    (second.parent / "cpu.max").write_text("250000 100000\n")
    own.write_text("0::/pod/container\n")
    assert cpu_quota(tmp_path / "2", own) == 2.5
    first = tmp_path / "1" / "cpu" / "docker"
    first.mkdir(parents=True)
    (first / "cpu.cfs_quota_us").write_text("50000\n")
    (first / "cpu.cfs_period_us").write_text("100000\n")
    (first.parent / "cpu.cfs_quota_us").write_text("-1\n")
    (first.parent / "cpu.cfs_period_us").write_text("100000\n")
    own.write_text("3:cpuset:/\n4:cpu,cpuacct:/docker\n")
    assert cpu_quota(tmp_path / "1", own) == 0.5
    assert cpu_quota(tmp_path / "1", tmp_path / "nothing") is None


def test_limits_of_this_host(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(
        "MemTotal:       1000 kB\nMemAvailable:    400 kB\n"
        "SwapTotal:       100 kB\nSwapFree:         70 kB\nHugePages_Total:      16\n"
    )
    (tmp_path / "memory.max").write_text("4096\n")
    found = read_limits(tmp_path, ControlGroup((tmp_path,), 2))
    assert (found["memory_total"], found["memory_available"], found["swap_used"]) == (
        1000 * 1024,
        400 * 1024,
        30 * 1024,
    )
    assert (found["cgroup_memory"], found["huge_pages"]) == (4096, 16)
    assert found["cores"] >= 1


def test_load_and_steal_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "proc").mkdir()
    stat = tmp_path / "proc" / "stat"
    stat.write_text("cpu  100 0 50 1000 0 0 0 10 0 0\ncpu0 1 1 1\n")
    governor = tmp_path / "sys/devices/system/cpu/cpu0/cpufreq"
    governor.mkdir(parents=True)
    (governor / "scaling_governor").write_text("powersave\n")
    (tmp_path / "sys/devices/system/cpu/smt").mkdir()
    (tmp_path / "sys/devices/system/cpu/smt/active").write_text("1\n")
    monkeypatch.setattr(time, "sleep", lambda seconds: stat.write_text("cpu  120 0 60 1050 0 0 0 30 0 0\n"))
    found = read_processor(tmp_path)
    assert (found["busy"], found["steal"]) == (0.3, 0.2)
    assert (found["governors"], found["smt"]) == (["powersave"], True)


def test_network_cards(tmp_path: Path) -> None:
    card = tmp_path / "class/net/eth0/device"
    card.mkdir(parents=True)
    (card.parent / "speed").write_text("100000\n")
    for name, text in (("current_link_width", "8"), ("max_link_width", "16"), ("numa_node", "-1")):
        (card / name).write_text(f"{text}\n")
    found = read_network("eth0", tmp_path)
    assert (found["bits_per_second"], found["pcie_width"], found["numa_node"]) == (10**11, 8, None)
    assert read_network("lo", tmp_path)["bits_per_second"] is None
    port = tmp_path / "class/infiniband/mlx5_0/ports/1"
    (port / "counters").mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (port / "counters" / "link_downed").write_text("2\n")
    (found,) = read_infiniband(tmp_path)
    assert (found["name"], found["state"], found["link_downed"]) == ("mlx5_0:1", "ACTIVE", 2)


# Command


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["weft", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


@pytest.mark.must("command: doctor")
def test_one_host(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that fits this machine."""
    result = tmp_path / "doctor.json"
    options = ("doctor", str(write_job(tmp_path)), "--quick", "--json", str(result), "--nproc-per-node", "1")
    assert run(monkeypatch, *options) == 0
    found = json.loads(result.read_text())
    assert {"job", "folder", "limits", "memory"} <= {f["check"] for f in found["findings"] if f["level"] == "green"}
    assert found["hosts"][0]["skipped"] == {"speed": "left out by --quick", "links": "left out by --quick"}
    assert "1 host examined: 0 red" in capsys.readouterr().out


def test_needs_of_a_job(tmp_path: Path) -> None:
    needs = estimate_needs(Job.load(write_job(tmp_path, checkpoint={"every": 1, "keep": 5})), 2, Cpu(), dry_run=False)
    assert needs["checkpoints"] == 3  # of two steps, and one that is being written
    assert needs["checkpoint_bytes"] == 3 * needs["export_bytes"]  # weights and two states of AdamW, all in float32
    refused = Job.load(write_job(tmp_path, plan={"parallel": {"tp": 3}}))
    assert "cannot be divided" in estimate_needs(refused, 2, Cpu(), dry_run=False)["refused"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.toml"], "there is no file nowhere.toml"),
        (["--nnodes", "2"], "host 0 of 2 has no --rdzv-endpoint"),
        (["--json", "nowhere/file.json"], "there is no folder nowhere"),
        (["--hostfile", "nowhere"], "the hostfile cannot be read"),
    ],
)
def test_bad_input(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "doctor", *arguments) == 2
    assert words in capsys.readouterr().err
