"""Energy, price and emission of the devices of a run, step by step."""

import os
import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from weft.comm.collectives import all_reduce
from weft.device.energy import Meter, open_meters
from weft.job import Cluster
from weft.launch.environment import ATTEMPT_VARIABLE
from weft.topology.mesh import AXES
from weft.training.attention import RunAttention
from weft.training.metrics import Attempt
from weft.training.session import Session

JOULES_PER_KWH = 3.6e6


class Expense(NamedTuple):
    """Expense of all devices for a span of time; None: not known. The names are those of `StepMetrics`."""

    joules: float | None
    dollars: float | None
    grams_co2: float | None


class Expenses:
    """Expenses of the steps of a run, the same on every rank. All ranks create it together.

    Counters are used if every device has one; else the energy is the power of `cluster.watts`, or the published power of the
    device, times the time.

    Args:
        local_rank: rank on this host.
        meters: counters of this rank; None: those that the system has.
    """

    def __init__(self, session: Session, local_rank: int, meters: list[Meter] | None = None):
        self._session, self._cluster = session, session.job.cluster
        device = session.device
        self._meters = open_meters(device, local_rank) if meters is None else meters
        needed = device.type != "cpu" or local_rank == 0  # ranks on cpu share the counters of their host
        counts = self._sum(float(local_rank == 0), 1.0, float(needed and not self._meters))
        hosts, ranks, without = map(round, counts)
        self.devices = hosts if device.type == "cpu" else ranks
        self._is_counted = not without
        self._watts = (self._cluster.watts or device.watts or 0.0) * self.devices
        self.source = self._describe()
        self._last, self._counted = time.time(), self._joules()

    def _describe(self) -> str:
        """Source of the energy: counters, or a stated power."""
        if self._is_counted:
            return ", ".join(meter.source for meter in self._meters)
        each = self._watts / self.devices
        stated = "cluster.watts" if self._cluster.watts else "the published power"
        return f"{each:g} W per device by {stated}, not measured" if each else ""

    def _sum(self, *values: float) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=self._session.torch_device)
        return all_reduce(tensor, self._session.mesh, AXES, "sum").tolist()

    def _joules(self) -> float:
        return sum((meter.joules() for meter in self._meters), 0.0)

    def own_joules(self) -> float | None:
        """Energy that the counters of this rank have counted since the previous call; None if not every device has one."""
        if not self._is_counted:
            return None
        before, self._counted = self._counted, self._joules()
        return self._counted - before

    def take(self, counted: float | None) -> Expense:
        """Expense of all devices since the previous call.

        Args:
            counted: `own_joules`, summed over all ranks; None without.
        """
        now = time.time()
        seconds, self._last = now - self._last, now
        joules = (self._watts * seconds or None) if counted is None else counted
        return expense(self._cluster, self.devices, seconds, joules)

    def attempt(self, started: float, step: int, attention: RunAttention) -> Attempt:
        """Record of the start of the ranks.

        Args:
            started: Unix time in seconds at which this rank started.
            step: steps that the run has completed.
            attention: attention kernels, of `weft.training.attention.run_attention`.
        """
        number = int(os.environ.get(ATTEMPT_VARIABLE, "0"))
        return Attempt(number, started, step, dist.get_world_size(), self.devices, self.source, *attention)


def expense(cluster: Cluster, devices: int, seconds: float, joules: float | None) -> Expense:
    """Price and emission by the rates of a job.

    Args:
        cluster: rates.
        devices: number of devices.
        seconds: time for which the devices are paid.
        joules: energy of all devices; None: unknown.
    """
    price, rate = cluster.dollars_per_hour, cluster.grams_co2_per_kwh
    return Expense(
        joules,
        None if price is None else price * devices * seconds / 3600,
        None if rate is None or joules is None else joules / JOULES_PER_KWH * rate,
    )
