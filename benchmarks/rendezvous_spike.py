"""Faults of a host under torch's dynamic rendezvous beside Weft's own launcher.

PYTHONPATH=. python -m benchmarks.rendezvous_spike [--systems torch,named,weft] [--rows killed,cut] [--repeats 3]   # as root

Three emulated hosts (network namespaces) and spare ones; one rank each: an all-reduce in a loop, by gloo. Ranks are forks.

    torch   elastic agent, DynamicRendezvousHandler and C10dRendezvousBackend, over a C++ TCPStore at the loopback of host 0
    named   the same, with a thread that names lost hosts and passes on failures of ranks (`Watcher`, `NamingAgent`)
    weft    `weft.launch.launcher.launch` with a `JobCoordinator`
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from statistics import median
from typing import Annotated
from unittest.mock import patch

import typer
from rich.console import Console
from rich.table import Table
from tests.lab.commands import ForkedCommand
from tests.lab.hosts import Host, hosts
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from benchmarks.rendezvous_agents import MODULE, STORE_PORT, TUNNEL_PORT, torch_agent, weft_agent
from weft.launch.rendezvous import new_token

FEWER_SECONDS = 5.0  # for a replacement: torch's last call, and Weft's node_rejoin_seconds
LIMIT = 60.0  # for an event to happen
FLOOD = """
import socket, sys, time
begin, made, held = time.monotonic(), 0, []
while True:
    while made < (time.monotonic() - begin) * 4000:
        connection = socket.socket()
        connection.setblocking(False)
        connection.connect_ex((sys.argv[1], int(sys.argv[2])))
        held.append(connection)
        made += 1
        if len(held) > 500:
            held.pop(0).close()
        if made % 1000 == 0:
            print(made / (time.monotonic() - begin), flush=True)
    time.sleep(0.001)
"""


class Behind(datetime):
    """Clock that is 30 s slow, for torch's rendezvous."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:
        """Time 30 s ago."""
        return datetime.now(tz) - timedelta(seconds=30)


@dataclass
class Trial:
    """One job on three emulated hosts, and one spare host."""

    system: str
    emulated: list[Host]
    folder: Path
    fewer: float = FEWER_SECONDS
    token: str = field(default_factory=new_token)
    agents: dict[int, ForkedCommand] = field(default_factory=dict)
    figures: dict[str, float | None] = field(default_factory=dict)
    before: dict[int, int] = field(default_factory=dict)
    """Length of each agent's output at the fault."""
    at: float = 0.0
    """Time of the fault."""

    def start(self, number: int, host: int, is_behind: bool = False) -> None:
        """Start the launcher of a host of the job on an emulated host; its clock may be 30 s slow."""
        arguments = number, self.emulated[host].address, self.emulated[0].address, self.token, self.folder, self.fewer
        now = time.time

        def run() -> None:
            with ExitStack() as stack:
                if is_behind:
                    stack.enter_context(patch("time.time", lambda: now() - 30))
                    stack.enter_context(patch.object(dynamic_rendezvous, "datetime", Behind))
                if self.system == "weft":
                    weft_agent(*arguments)
                else:
                    torch_agent(*arguments, named=self.system == "named")

        self.agents[host] = self.emulated[host].fork([MODULE], run, merge=True)

    def start_all(self, is_behind: bool = False) -> None:
        """Start three hosts, the last one with a clock that may be 30 s slow, and wait until they train."""
        for number in range(3):
            self.start(number, number, is_behind and number == 2)
        began = self.until(lambda: 3 in [ranks for _, ranks, _ in self.attempts()], 40)
        assert began or is_behind, self.agents[0].output
        time.sleep(6.0)  # steps whose duration is known, and keep-alives

    def attempts(self) -> list[tuple[str, int, float]]:
        """Attempts that made steps: number, ranks, and time of the first step."""
        path, found = self.folder / "steps", dict[tuple[str, int], float]()
        for line in path.read_text().splitlines() if path.exists() else []:
            seconds, attempt, ranks = line.split()
            found.setdefault((attempt, int(ranks)), float(seconds))
        return [(attempt, ranks, seconds) for (attempt, ranks), seconds in found.items()]

    def until(self, condition: Callable[[], object], limit: float = LIMIT) -> float | None:
        """Seconds since the fault at which a condition holds; None if it does not within a limit from now."""
        end = time.monotonic() + limit
        while not condition():
            if time.monotonic() > end:
                return None
            time.sleep(0.02)
        return time.monotonic() - self.at

    def mark(self) -> None:
        """An event happens now."""
        self.at, self.before = time.monotonic(), {host: len(agent.output) for host, agent in self.agents.items()}

    def new(self, host: int) -> str:
        """Output of an agent and its ranks since the fault."""
        return self.agents[host].output[self.before.get(host, 0) :]

    def processes(self, host: int) -> list[int]:
        """All processes of an emulated host."""
        command = ["ip", "netns", "pids", self.emulated[host].namespace]
        return [int(pid) for pid in subprocess.run(command, capture_output=True, text=True).stdout.split()]

    def signal_host(self, host: int, number: int) -> None:
        """Send a signal to all processes of a host."""
        for pid in self.processes(host):
            os.kill(pid, number)

    def signal_rank(self, host: int, number: int) -> None:
        """Send a signal to the rank of a host."""
        os.kill(int((self.folder / f"pid-{host}").read_text()), number)

    def label(self, host: int) -> str:
        """Pattern of a host in messages."""
        return rf"host {host} \(" if self.system == "weft" else re.escape(self.emulated[host].address) + r"\b"

    def names(self, host: int, who: tuple[int, ...], limit: float = LIMIT) -> None:
        """Measure until all `who` have printed the name of a host, and count those that name one another."""

        def all_print(pattern: str) -> bool:
            return all(re.search(pattern, self.new(other)) for other in who)

        self.figures["all others print something"] = self.until(lambda: all(self.new(other) for other in who), limit)
        self.figures["all others name the host"] = self.until(lambda: all_print(self.label(host)), limit)
        self.figures["others that name it"] = float(sum(bool(re.search(self.label(host), self.new(b))) for b in who))
        wrong = [b for b in who if any(re.search(self.label(c), self.new(b)) for c in who if c != b)]
        self.figures["others that name another healthy host"] = float(len(wrong))

    def continues(self, ranks: int, name: str, limit: float = LIMIT) -> None:
        """Measure until an attempt with a number of ranks, which begins after the fault, makes a step."""
        later = lambda: [at for _, count, at in self.attempts() if count == ranks and at > self.at]  # noqa: E731
        self.until(later, limit)
        self.figures[name] = next((at - self.at for at in later()), None)


def killed(trial: Trial) -> None:
    """All processes of host 2 are killed; no replacement, then a late one."""
    fault(trial, lambda: trial.signal_host(2, signal.SIGKILL))
    trial.names(2, (0, 1), 20)
    trial.continues(2, "continues with two hosts")
    trial.mark()
    trial.start(2, 3)
    trial.continues(3, "a later host joins, after its start", 30)


def cut(trial: Trial) -> None:
    """The link of host 2 is cut, and restored 40 s later."""
    fault(trial, trial.emulated[2].unplug)
    trial.names(2, (0, 1), 20)
    trial.continues(2, "continues with two hosts", 40 - (time.monotonic() - trial.at))
    trial.until(lambda: time.monotonic() - trial.at > 40)
    trial.mark()
    trial.emulated[2].plug()
    trial.continues(3, "the host that returns joins, after its return", 25)
    trial.figures["its launcher has ended"] = trial.until(lambda: trial.agents[2].poll() is not None, 1)


def replaced(trial: Trial) -> None:
    """All processes of host 2 are killed; a replacement starts 17 s later."""
    fault(trial, lambda: trial.signal_host(2, signal.SIGKILL))
    time.sleep(17)
    trial.start(2, 3)
    trial.continues(3, "continues with three hosts")


def suspended(trial: Trial) -> None:
    """Host 2 is suspended with all its processes and replaced; then it continues."""
    fault(trial, lambda: trial.signal_host(2, signal.SIGSTOP))
    trial.names(2, (0, 1), 18)
    trial.until(lambda: time.monotonic() - trial.at > 20)
    trial.start(2, 3)
    trial.continues(3, "continues with three hosts", 40)
    trial.mark()
    trial.signal_host(2, signal.SIGCONT)
    trial.figures["its launcher ends"] = trial.until(lambda: trial.agents[2].poll() is not None, 15)
    trial.figures["restarts of the others by its return"] = float(sum(at > trial.at for *_, at in trial.attempts()))


def rank_fails(number: int, reason: str) -> Callable[[Trial], None]:
    """The rank of host 2 gets a signal."""

    def run(trial: Trial) -> None:
        fault(trial, lambda: trial.signal_rank(2, number))
        trial.names(2, (0, 1), 20)
        text = rf"(?s)rank 2 on .*?{reason}" if trial.system == "weft" else rf"(?s)report: rank \d on .*?{reason}"
        all_know = lambda: all(re.search(text, trial.new(other)) for other in (0, 1))  # noqa: E731
        trial.figures["all others name rank and reason"] = trial.until(all_know, 10)
        trial.continues(3, "continues with three hosts")

    return run


def straggler(trial: Trial) -> None:
    """The rank of host 2 is stopped."""
    fault(trial, lambda: trial.signal_rank(2, signal.SIGSTOP))
    trial.names(2, (0, 1), 25)


def host_0(trial: Trial) -> None:
    """All processes of host 0 are killed."""
    fault(trial, lambda: trial.signal_host(0, signal.SIGKILL))
    trial.names(0, (1, 2), 30)
    trial.figures["the other launchers end"] = trial.until(
        lambda: all(trial.agents[h].poll() is not None for h in (1, 2))
    )


def strangers(trial: Trial) -> None:
    """4,000 connections a second reach the tunnel of host 0 while host 2 joins; a stranger has no token."""
    trial.start(0, 0)
    trial.start(1, 1)
    if trial.system != "weft":  # Weft starts when all hosts have joined
        trial.until(trial.attempts)
    address = trial.emulated[0].address
    flood = trial.emulated[3].start([sys.executable, "-c", FLOOD, address, str(TUNNEL_PORT)], stdout=subprocess.PIPE)
    time.sleep(2)
    trial.mark()
    trial.start(2, 2)
    trial.continues(3, "joins under a flood, after its start")
    flood.kill()
    assert flood.stdout
    trial.figures["connections of the flood per second"] = float(flood.stdout.read().split()[-1])
    for name, port in (("tunnel", TUNNEL_PORT), ("store", STORE_PORT)):
        code = (
            f"import torch.distributed as d; d.TCPStore({address!r}, {port}, is_master=False, wait_for_workers=False)"
        )
        limited = ["timeout", "15", sys.executable, "-c", code]
        stranger = trial.emulated[3].start(limited, stderr=subprocess.DEVNULL)
        trial.figures[f"a stranger is refused at the {name}"] = float(stranger.wait() != 0)


def clock(trial: Trial) -> None:
    """The clock of host 2 is 30 s slow; no fault."""
    trial.mark()
    trial.start_all(is_behind=True)
    trial.continues(3, "trains with three hosts, after their start", 1)
    time.sleep(20)
    trial.figures["attempts until then"] = float(len(trial.attempts()))


def fault(trial: Trial, plant: Callable[[], None]) -> None:
    """Start the job and plant a fault."""
    trial.start_all()
    trial.mark()
    plant()


ROWS: dict[str, Callable[[Trial], None]] = {
    "killed": killed,
    "cut": cut,
    "replaced": replaced,
    "suspended": suspended,
    "error": rank_fails(signal.SIGUSR1, "planted"),
    "sigkill": rank_fails(signal.SIGKILL, "SIGKILL"),
    "straggler": straggler,
    "host_0": host_0,
    "strangers": strangers,
    "clock": clock,
}


def faults(
    systems: Annotated[str, typer.Option()] = "torch,named,weft",
    rows: Annotated[str, typer.Option()] = ",".join(ROWS),
    repeats: Annotated[int, typer.Option()] = 3,
    outputs: Annotated[Path | None, typer.Option(help="Folder for the outputs of all launchers.")] = None,
) -> None:
    """Plant each fault some times; print the seconds since the fault: median (min-max)."""
    console, table = Console(width=120), Table("fault", "system", "figure", "seconds or number")
    for row in rows.split(","):
        for system in systems.split(","):
            found = [
                run_trial(row, system, outputs and outputs / f"{row}-{system}-{index}") for index in range(repeats)
            ]
            for name in found[0]:
                values = [figures.get(name) for figures in found]
                known = sorted(value for value in values if value is not None)
                text = f"{median(known):.1f} ({known[0]:.1f}-{known[-1]:.1f})" if known else "never"
                missing = f", not in {len(values) - len(known)} of {len(values)}" if len(known) < len(values) else ""
                table.add_row(row, system, name, text + (missing if known else ""))
            print(row, system, json.dumps(found), flush=True)
    console.print(table)


def run_trial(row: str, system: str, outputs: Path | None) -> dict[str, float | None]:
    """Run one job with one fault; return its figures."""
    with tempfile.TemporaryDirectory() as folder, hosts(4) as emulated:
        trial = Trial(system, emulated, Path(folder), 60.0 if row in ("replaced", "suspended") else FEWER_SECONDS)
        ROWS[row](trial)
        for host, agent in trial.agents.items():
            if outputs:
                outputs.mkdir(parents=True, exist_ok=True)
                (outputs / f"host-{host}").write_text(agent.output)
            agent.kill()
        return trial.figures


if __name__ == "__main__":
    typer.run(faults)
