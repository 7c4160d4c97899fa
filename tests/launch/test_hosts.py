"""weft launch hosts: hostfiles, its commands, its supervisor, and jobs over real ssh and mpirun on emulated hosts."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_bad_input import refuse
from tests.lab.jobs import write_job
from tests.lab.sshd import SshHosts, ssh_hosts
from weft.checkpoint.folders import list_checkpoints, step_of
from weft.cli import main
from weft.errors import JobError
from weft.launch.schedulers import host_streams
from weft.launch.schedulers.host_streams import Connection, HostStreams
from weft.launch.schedulers.host_supervisor import MARK
from weft.launch.schedulers.hostfile import HostEntry, read_hostfile
from weft.launch.schedulers.hosts import HostsJob, check_launcher, connections, find_endpoint
from weft.training.metrics import read_metrics

ROOT = Path(__file__).parents[2]
SOURCES = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
SUPERVISOR = [sys.executable, "-m", "weft.launch.schedulers.host_supervisor"]
TOKEN = "0123456789abcdef" * 4


# Hostfiles


def write(folder: Path, text: str) -> Path:
    path = folder / "hosts.txt"
    path.write_text(text)
    return path


def slots(folder: Path, text: str) -> dict[str, int | None]:
    return {entry.name: entry.slots for entry in read_hostfile(write(folder, text))}


def server(name: str, ranks: Sequence[int], **changes: Any) -> dict[str, Any]:
    """Server of a rank table."""
    devices = [
        {"device_id": str(index), "device_ip": "192.168.1.8", "rank_id": str(rank)} for index, rank in enumerate(ranks)
    ]
    return {"server_id": name, "device": devices, **changes}


def table(*servers: dict[str, Any], **changes: Any) -> str:
    return json.dumps(
        {"version": "1.0", "status": "completed", "server_count": str(len(servers)), "server_list": servers} | changes
    )


@pytest.mark.must("format: hostfile")
def test_lines_of_mpirun_deepspeed_and_hydra(tmp_path: Path) -> None:
    text = "# ours\nnode1 slots=8\n\nme@node2   slots=4 max_slots=8 # spare\n  node3:2\n10.0.0.4\nnode5 slots=1 max-slots=1\n"
    assert slots(tmp_path, text) == {"node1": 8, "me@node2": 4, "node3": 2, "10.0.0.4": None, "node5": 1}
    assert read_hostfile(tmp_path / "hosts.txt")[1].where == f"--hostfile {tmp_path}/hosts.txt, line 4"


@pytest.mark.must("format: hostfile")
def test_rank_tables_of_hccl(tmp_path: Path) -> None:
    """Hosts are in the order of their ranks, and are reached by `host_ip` if the table has it."""
    text = table(server("10.0.0.2", [2, 3]), server("node_0", [0, 1], host_ip="10.0.0.1"))
    assert list(slots(tmp_path, text).items()) == [("10.0.0.1", 2), ("10.0.0.2", 2)]
    pods = [
        {"server_id": f"10.0.0.{pod}", "pod_name": f"p{pod}", "devices": [{"device_id": "1"}, {"device_id": "0"}]}
        for pod in (1, 2)
    ]
    old = {"status": "completed", "group_count": "1", "group_list": [{"group_name": "", "instance_list": pods}]}
    assert slots(tmp_path, json.dumps(old)) == {"10.0.0.1": 2, "10.0.0.2": 2}
    ranks = [
        {"rank_id": str(rank), "server_id": f"10.0.0.{2 - rank // 2}", "devices": [{"device_id": str(rank % 2)}]}
        for rank in range(4)
    ]
    old["group_list"] = [{"group_name": "", "instance_list": ranks}]
    assert list(slots(tmp_path, json.dumps(old)).items()) == [("10.0.0.2", 2), ("10.0.0.1", 2)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["names no host"]),
        ("# none\n", ["names no host"]),
        ("a slots=2\nb\na slots=2\n", ["the host a appears twice", "line 3; first in line 1", "a slots=4"]),
        ("a\nme@a\n", ["the host a appears twice"]),
        ("a slots=0", ["a has 0 slots", "line 1", "at least one rank"]),
        ("a:-1", ["a has -1 slots"]),
        ("a\nb slots=x", ["'slots=x' has no number of ranks", "line 2"]),
        ("a:", ["'a:' has no number of ranks"]),
        ("fe80::1", ["has no number of ranks"]),
        ("a slot=8", ["unknown word 'slot=8' after the host a", "line 1"]),
        ("a b", ["unknown word 'b'"]),
        ("a:2 slots=2", ["a has two values of slots"]),
        ("a slots=8 max_slots=4", ["a has 8 slots and max_slots=4", "slots=4"]),
        ("-oProxyCommand=x slots=1", ["'-oProxyCommand=x' is no name of a host"]),
        ("a;b slots=1", ["'a;b' is no name of a host"]),
        ("{", ["the rank table is no JSON"]),
        ("[]", ["the rank table has another shape", "server_list"]),
        ('{"hosts": []}', ["the rank table has another shape", "status"]),
        (table(status="initializing"), ["its status is 'initializing'"]),
        (table(server_count="3"), ["server_count is 3, and server_list has 0 servers"]),
        (table(), ["names no host"]),
        (table(server("a", [])), ["a has 0 slots", "server a"]),
        (table(server("a", [0]), server("a", [1])), ["the host a appears twice", "server a; first in server a"]),
        (table({"server_id": "a"}), ["another shape: KeyError: 'device'"]),
        (
            table(server("a", [], device=[{"device_id": "4", "rank_id": "0"}])),
            ["a has the devices 4", "from 0", "ASCEND_RT_VISIBLE_DEVICES"],
        ),
    ],
)
def test_other_hostfiles_are_refused(text: str, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(JobError) as refused:
        read_hostfile(write(tmp_path, text))
    for word in [*words, "--hostfile", "rule:", "fix:"]:
        assert word in str(refused.value)


def test_files_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("nothing", "binary", "."):
        with pytest.raises(JobError, match="the hostfile cannot be read"):
            read_hostfile(tmp_path / name)


# Commands


def request(*hosts: HostEntry, **changes: Any) -> HostsJob:
    arguments = {"job": Path("/shared/job.toml"), "endpoint": "10.0.0.1:29400", "python": "/env/bin/python"}
    return HostsJob(**{**arguments, "folder": Path("/shared/my work"), "hosts": hosts, **changes})


def remote_words(connection: Connection) -> list[str]:
    """Words of the command that the shell of the host runs, after cd and exec."""
    folder, command = connection.argv[-1].split(" && exec ")
    assert shlex.split(folder) == ["cd", "/shared/my work"]
    return shlex.split(command)


def test_ssh_starts_the_command_on_each_host() -> None:
    hosts = HostEntry("me@node1", 8, ""), HostEntry("node2", None, "")
    asked = request(*hosts, arguments=["--set", "out=it's"], ssh_options=["Port=2222"], environment={"A": "b c"})
    first, second = connections(asked, "ssh")
    assert first.argv[:3] == ["ssh", "-o", "Port=2222"]  # before those of Weft: ssh takes the first value of an option
    assert "BatchMode=yes" in first.argv
    assert (first.argv[-2], first.name, first.hosts) == ("me@node1", "node1", [0])
    command = ["-m", "weft", "train", "/shared/job.toml", "--set"]
    several = ["--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "10.0.0.1:29400"]
    supervisor = ["/env/bin/python", "-m", "weft.launch.schedulers.host_supervisor"]
    expected = [*supervisor, "0", "/env/bin/python", *command, "out=it's", "--nproc-per-node", "8", *several]
    assert remote_words(first) == ["env", "A=b c", *expected]
    assert "--nproc-per-node" not in remote_words(second)
    assert remote_words(second)[-4:] == ["--node-rank", "1", "--rdzv-endpoint", "10.0.0.1:29400"]


def test_mpirun_starts_one_program_a_host() -> None:
    """Each with its own number of ranks, and with all cores."""
    asked = request(HostEntry("node1", 8, ""), HostEntry("node2", 4, ""), ssh_options=["Port=2222"])
    (call,) = connections(asked, "mpirun")
    assert list(call.hosts) == [0, 1]
    programs = " ".join(call.argv).split(" : ")
    assert "--bind-to none" in programs[0]
    assert "plm_rsh_agent ssh -o Port=2222 -o BatchMode=yes" in programs[0]
    for host, (program, count) in enumerate(zip(programs, (8, 4), strict=True)):
        assert f"-np 1 --host node{host + 1} --wdir /shared/my work /env/bin/python" in program
        assert f"--nproc-per-node {count} --nnodes 2 --node-rank {host} " in program
    with pytest.raises(JobError, match="the host me@node1 with --launcher mpirun"):
        connections(request(HostEntry("me@node1", 8, "")), "mpirun")
    with pytest.raises(JobError, match="ssh-option 'ProxyCommand=a b' with --launcher mpirun"):
        connections(request(HostEntry("a", 8, ""), ssh_options=["ProxyCommand=a b"]), "mpirun")


def test_endpoint_is_an_address_of_host_0() -> None:
    one, two = HostEntry("127.0.0.1", 1, "line 1"), HostEntry("127.0.0.2", 1, "line 2")
    address, _, port = find_endpoint([one, two], "/shared/run").partition(":")
    assert address == "127.0.0.1"
    assert find_endpoint([HostEntry("nowhere.invalid", 1, "")], "/shared/run") == f"127.0.0.1:{port}"
    assert find_endpoint([HostEntry("10.0.0.1", 1, ""), two], "/shared/run") == f"10.0.0.1:{port}"
    assert find_endpoint([one, two], "/shared/other") != f"{address}:{port}"
    with pytest.raises(JobError, match=r"nowhere.invalid has no IPv4 address here") as refused:
        find_endpoint([HostEntry("nowhere.invalid", 1, "line 1"), two], "/shared/run")
    assert "--rdzv-endpoint" in str(refused.value)


@pytest.mark.must("command: launch hosts")
def test_dry_prints_the_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, hosts = write_job(tmp_path), write(tmp_path, "127.0.0.1 slots=2\n127.0.0.2 slots=4\n")
    options = ["--max-restarts", "1", "--resume", "auto", "--dry"]
    for launcher, lines in (("ssh", 2), ("mpirun", 1)):
        monkeypatch.setattr(
            sys,
            "argv",
            ["weft", "launch", "hosts", str(job), "--hostfile", str(hosts), "--launcher", launcher, *options],
        )
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        printed = capsys.readouterr().out
        assert len(printed.splitlines()) == lines
        assert f"weft train {job} --resume auto --max-restarts 1 --nproc-per-node 4 --nnodes 2" in printed
        assert not re.search("[0-9a-f]{32}", printed)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("a slots=2\na slots=2", [], "the host a appears twice"),
        ("127.0.0.1 slots=3\n127.0.0.2 slots=2", ["--set", "plan.parallel.tp=2"], "tp"),
        ("127.0.0.1", ["--rdzv-endpoint", "0.0.0.0:1"], "is not the IPv4 address of one interface"),
        ("127.0.0.1", ["--env", "A"], "--env 'A'"),
        ("127.0.0.1", ["--env", "A=1", "--env", "A=2"], "--env 'A=2' sets A twice"),
        ("127.0.0.1", ["--ssh-option", "-p 22"], "--ssh-option '-p 22'"),
        ("127.0.0.1", ["--command", "doctor", "--resume", "auto"], "with --command doctor"),
        ("127.0.0.1", [], "the command ssh is not found"),
        ("127.0.0.1", ["--launcher", "mpirun"], "mpirun is of another kind: HYDRA build details:"),
    ],
)
def test_bad_input_is_refused(
    text: str,
    options: list[str],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "mpirun").write_text("#!/bin/sh\necho 'HYDRA build details:'\n")
    (tmp_path / "mpirun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    job, hosts = write_job(tmp_path), write(tmp_path, text)
    assert words in refuse(capsys, monkeypatch, "launch", "hosts", str(job), "--hostfile", str(hosts), *options)
    assert not (tmp_path / "run").exists()


def test_launch_from_a_rank_is_refused() -> None:
    variables = {"RANK": "1", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"}
    with pytest.raises(JobError, match="in rank 1 of 4 that mpirun has started"):
        check_launcher("ssh", {f"OMPI_COMM_WORLD_{name}": value for name, value in variables.items()})


# Supervisor


class Supervised:
    """Supervisor of a shell script, as ssh starts it."""

    def __init__(self, script: str, setup: str = "pass"):
        code = f"import sys, weft.launch.schedulers.host_supervisor as s; {setup}; sys.exit(s.main(sys.argv[1:]))"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, "3", "bash", "-c", script],
            env=os.environ | {"PYTHONPATH": SOURCES},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self.write(TOKEN)

    def write(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")

    def read(self) -> bytes:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def rest(self) -> list[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout.read().splitlines()


def saving(folder: Path, name: str = "0") -> str:
    """Script that saves after SIGTERM."""
    on_signal = f"trap 'sleep 0.2; echo saved; touch {folder}/saved-{name}; exit 143' TERM"
    return f"{on_signal}; touch {folder}/started-{name}; echo started; while :; do sleep 0.02; done"


def test_supervisor_passes_on_output_and_exit_code() -> None:
    """The token is in the environment of the command, and its lines of two streams have the number of the host."""
    run = Supervised("echo $WEFT_TOKEN; printf '\\x1eon stderr\\n' >&2; printf 'no end'; exit 7")
    lines = run.rest()
    assert lines == [MARK + b"3 " + text for text in (TOKEN.encode(), b"on stderr", b"no end")] + [MARK + b"3=7"]
    assert run.process.wait() == 7


def test_supervisor_passes_on_signals(tmp_path: Path) -> None:
    run = Supervised(saving(tmp_path))
    assert run.read() == MARK + b"3 started\n"
    run.write("0")
    run.write("15")
    assert run.rest() == [MARK + b"3 saved", MARK + b"3=143"]
    run = Supervised("trap '' TERM; sleep 100 & echo started; wait")
    run.read()
    run.write("15")
    run.write("9")  # also to what the command has started
    assert run.rest() == [MARK + b"3=137"]
    assert run.process.wait() == 137


@pytest.mark.parametrize("loss", ["end of input", "silence"])
def test_command_ends_in_order_without_the_launching_machine(loss: str, tmp_path: Path) -> None:
    run = Supervised(saving(tmp_path), "s.SILENCE_SECONDS = 0.5" if loss == "silence" else "pass")
    run.read()
    if loss == "end of input":
        assert run.process.stdin is not None
        run.process.stdin.close()
    lines = run.rest()
    assert b"the launching machine is lost" in lines[0]
    assert lines[1:] == [MARK + b"3 saved", MARK + b"3=143"]


def test_command_saves_after_the_supervisor_was_killed_and_nobody_reads(tmp_path: Path) -> None:
    """mpirun kills what it has started a second after SIGTERM, and closes its pipes."""
    run = Supervised(saving(tmp_path))
    run.read()
    run.process.kill()
    assert run.process.stdin is not None
    assert run.process.stdout is not None
    run.process.stdin.close()
    run.process.stdout.close()
    until((tmp_path / "saved-0").exists, 10)


# Streams of all hosts


def streams(*scripts: str, restarts: bool = False) -> HostStreams:
    """Run of one script a host, without ssh."""
    found = [
        Connection(["env", f"PYTHONPATH={SOURCES}", *SUPERVISOR, str(host), "bash", "-c", script], [host], "ssh")
        for host, script in enumerate(scripts)
    ]
    return HostStreams(found, [f"node{host}" for host in range(len(scripts))], end_seconds=30, restarts=restarts)


def test_first_failure_ends_all_and_is_the_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(host_streams, "REPORT_SECONDS", 0.2)
    wait = f"until [ -e {tmp_path}/started-0 ]; do sleep 0.02; done"
    assert streams(saving(tmp_path), f"{wait}; echo bad; kill -9 $$").run(TOKEN) == 137
    printed = capsys.readouterr()
    assert {"node0: started", "node1: bad", "node0: saved"} == set(printed.out.splitlines())
    assert "weft: SIGTERM to node0\n" in printed.err
    assert "weft: host 1 (node1) failed first: exit code 137 (SIGKILL)\n" in printed.err


def test_success_of_all_hosts_is_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert streams("echo a; echo b", "exit 0").run(TOKEN) == 0
    assert capsys.readouterr() == ("node0: a\nnode0: b\n", "")


def test_with_restarts_the_other_hosts_decide(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_streams, "REPORT_SECONDS", 0)
    assert streams("sleep 0.5; echo continued", "exit 1", restarts=True).run(TOKEN) == 0
    assert "node0: continued" in capsys.readouterr().out


def test_signals_reach_all_hosts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:

    def stop() -> None:
        until(lambda: len(list(tmp_path.glob("started-*"))) == 2, 20)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop).start()
    assert streams(saving(tmp_path, "0"), saving(tmp_path, "1")).run(TOKEN) == 143
    printed = capsys.readouterr()
    assert printed.out.count("saved") == 2
    assert "SIGTERM to node0, node1" in printed.err
    assert "failed" not in printed.err


def test_refused_connection_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    run = streams("exit 0")
    run.connections = [Connection(["bash", "-c", "echo Permission denied >&2; exit 255"], [0], "node0")]
    assert run.run(TOKEN) == 255
    printed = capsys.readouterr()
    assert printed.out == "node0: Permission denied\n"
    assert "no connection to node0: bash ended with exit code 255" in printed.err


def test_lines_that_mpirun_joins_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    run = streams("", "")
    run._take("mpirun", b"of mpirun" + MARK + b"0 first" + MARK + b"1 second" + MARK + b"1=0")
    assert capsys.readouterr().out == "mpirun: of mpirun\nnode0: first\nnode1: second\n"
    assert run.codes == {1: 0}


def until(condition: Callable[[], bool], seconds: float, output: Callable[[], str] = str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:g} s:\n{output()}"
        time.sleep(0.05)


# On emulated hosts, over real ssh and mpirun


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    with ssh_hosts(tmp_path_factory.mktemp("hosts")) as cluster:
        yield cluster


class Launched:
    """`weft launch hosts` on the login host, for two hosts with one rank each."""

    def __init__(self, cluster: SshHosts, folder: Path, launcher: str, *options: str, **tables: dict[str, Any]):
        if launcher == "mpirun" and shutil.which("mpirun") is None:
            pytest.skip("mpirun of Open MPI is not installed: `make cluster-tools` installs it")
        self.cluster, self.folder, self.out = cluster, folder, folder / "run"
        self.job = write_job(folder, **{"train": {"steps": 400, "global_batch_size": 4}, **tables})
        write(folder, "node0 slots=1\nnode1 slots=1\n")
        self.options = ["--launcher", launcher, "--env", f"PYTHONPATH={SOURCES}", "--env", "OMP_NUM_THREADS=1"]
        for key, value in cluster.settings.items():
            self.options += ["--ssh-option", f"{key}={value}"]
        self.start(*options)

    def start(self, *options: str) -> None:
        command = [sys.executable, "-m", "weft", "launch", "hosts", str(self.job), "--hostfile"]
        self.log = self.folder / f"printed-{len(list(self.folder.glob('printed-*')))}"
        with self.log.open("wb") as file:
            self.process = self.cluster.start(
                *command,
                str(self.folder / "hosts.txt"),
                *self.options,
                *options,
                env=os.environ | {"PYTHONPATH": SOURCES},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def printed(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, code: int) -> None:
        """Wait until it has ended, with nothing left on the hosts."""
        assert self.process.wait(300) == code, self.printed()
        self.wait_for_hosts(30)

    def wait_for_hosts(self, seconds: float) -> None:
        """Wait until no process of the job is left on the hosts."""
        until(lambda: not (self.pids(0) or self.pids(1)), seconds, self.printed)

    def pids(self, host: int, word: str = "") -> list[int]:
        """Processes of the job on a host; those with a word in their command."""
        found = {pid: read_process(pid, "cmdline") for pid in self.cluster.processes(host)}
        return [pid for pid, line in found.items() if b"weft" in line and word.encode() in line and b"ssh" not in line]

    def reach(self, step: int) -> None:
        def reached() -> bool:
            assert self.process.poll() is None, self.printed()
            return (self.out / "metrics.jsonl").exists() and len(read_metrics(self.out / "metrics.jsonl")) >= step

        until(reached, 300, self.printed)

    def saved(self) -> int:
        """Step of the newest checkpoint."""
        return max(map(step_of, list_checkpoints(self.out)), default=0)

    def check_equal_to_one_host(self) -> None:
        """Compare its losses with those of `weft train` with two ranks on one machine, to the bit."""
        out = self.folder / "reference"
        command = [sys.executable, "-m", "weft", "train", str(self.job), "--nproc-per-node", "2", "--out", str(out)]
        subprocess.run(command, env=os.environ | {"PYTHONPATH": SOURCES}, check=True, capture_output=True, timeout=300)
        losses, expected = (
            [(row.step, row.loss) for row in read_metrics(run / "metrics.jsonl")] for run in (self.out, out)
        )
        assert losses == expected


def read_process(pid: int, name: str) -> bytes:
    """File of a process; empty if the process has ended."""
    try:
        return Path("/proc", str(pid), name).read_bytes()
    except OSError:
        return b""


def parent(pid: int) -> int:
    fields = read_process(pid, "stat").rpartition(b")")[2].split()
    return int(fields[1]) if fields else 0


@pytest.mark.timeout(900)
class TestOnHosts:
    """Jobs on two hosts with sshd, launched from a third one."""

    @pytest.mark.parametrize("launcher", ["ssh", "mpirun"])
    def test_two_hosts_train_as_one(self, cluster: SshHosts, tmp_path: Path, launcher: str) -> None:
        """No process list, and no environment but that of supervisors that start, shows the token."""
        run = Launched(cluster, tmp_path, launcher, train={"steps": 60, "global_batch_size": 4})
        run.reach(5)
        pids = [*cluster.processes(0), *cluster.processes(1), run.process.pid]
        pids += [
            int(pid) for pid in Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text().split()
        ]
        lines, variables = ([read_process(pid, name) for pid in pids] for name in ("cmdline", "environ"))
        assert sum(b"host_supervisor" in line for line in lines) >= 2
        assert not [line for line in lines if re.search(rb"[0-9a-f]{32}", line)]
        assert not [line for line in variables if re.search(rb"WEFT_TOKEN=0*[1-9a-f]", line)]
        run.wait(0)
        assert "node0: step 60/60" in run.printed()
        assert "node1: host 1 (node1) has 1 ranks of the job" in run.printed()
        run.check_equal_to_one_host()

    @pytest.mark.parametrize("host", [0, 1])
    @pytest.mark.parametrize("launcher", ["ssh", "mpirun"])
    def test_killed_launcher_ends_all(self, cluster: SshHosts, tmp_path: Path, launcher: str, host: int) -> None:
        run = Launched(cluster, tmp_path, launcher)
        run.reach(5)
        supervisors = run.pids(host, "host_supervisor")
        children = [pid for pid in run.pids(host) if parent(pid) in supervisors and pid not in supervisors]
        assert len(children) == 1
        os.kill(children[0], signal.SIGKILL)
        run.wait(137)
        assert f"weft: host {host} (node{host}) failed first: exit code 137 (SIGKILL)" in run.printed()

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    @pytest.mark.parametrize("launcher", ["ssh", "mpirun"])
    def test_signal_saves_on_both_hosts(
        self, cluster: SshHosts, tmp_path: Path, launcher: str, number: signal.Signals
    ) -> None:
        run = Launched(cluster, tmp_path, launcher, train={"steps": 60, "global_batch_size": 4})
        run.reach(5)
        run.process.send_signal(number)
        run.wait(128 + number)
        saved = run.saved()
        assert f"node0: saved after step {saved} in" in run.printed()
        assert run.printed().endswith(f"weft: stopped by {number.name}\n")
        run.start("--resume", "auto")
        run.wait(0)
        run.check_equal_to_one_host()

    @pytest.mark.parametrize("launcher", ["ssh", "mpirun"])
    def test_killed_launching_machine_ends_the_run_in_order(
        self, cluster: SshHosts, tmp_path: Path, launcher: str
    ) -> None:
        run = Launched(cluster, tmp_path, launcher)
        run.reach(5)
        run.process.kill()
        run.wait_for_hosts(120)
        assert run.saved() >= 5

    def test_lost_link_of_the_launching_machine_ends_the_run_in_order(self, cluster: SshHosts, tmp_path: Path) -> None:
        """No packet says that it is lost: the supervisors miss its signs of life."""
        run = Launched(cluster, tmp_path, "ssh", train={"steps": 100_000, "global_batch_size": 4})
        run.reach(5)
        cluster.login.unplug()
        try:
            run.wait_for_hosts(180)
            assert run.saved() >= 5
        finally:
            cluster.login.plug()
            run.process.kill()

    def test_host_without_sshd_is_named(self, cluster: SshHosts, tmp_path: Path) -> None:
        run = Launched(cluster, tmp_path, "ssh", "--ssh-option", "Port=2222")
        assert run.process.wait(60) == 255, run.printed()
        assert "Connection refused" in run.printed()
        assert "weft: no connection to node" in run.printed()

    @pytest.mark.parametrize("launcher", ["ssh", "mpirun"])
    def test_doctor_on_both_hosts(self, cluster: SshHosts, tmp_path: Path, launcher: str) -> None:
        run = Launched(cluster, tmp_path, launcher, "--command", "doctor")
        run.process.wait(300)
        assert "node0: 2 hosts examined" in run.printed()
        assert not run.out.exists()
