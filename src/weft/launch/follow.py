"""Hosts other than 0: take part in a job, and rejoin it under a new host 0 when host 0 is lost."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from weft.errors import RankFailure, RendezvousError, WeftError
from weft.launch.coordinator import JobCoordinator
from weft.launch.host_reports import HostZeroLost
from weft.launch.rendezvous import RendezvousConfig

RETRY_SECONDS = 0.5

T = TypeVar("T")


def follow_host_0(
    rendezvous: RendezvousConfig,
    ranks: int,
    take_part: Callable[[JobCoordinator], T],
    log: Callable[[str], None],
    *,
    node_rejoin_seconds: float,
    **options: Any,
) -> T:
    """Join a job and take part in it, also under each host 0 that replaces a lost one.

    Args:
        rendezvous: rendezvous of a host other than 0. A name in it is resolved again for a new host 0.
        ranks: number of ranks that this host can run.
        take_part: runs the ranks of this host until the job ends; called again for each new host 0.
        log: prints a progress line.
        node_rejoin_seconds: maximum wait for a new host 0; 0: the loss of host 0 ends the job.
        options: further options of `JobCoordinator.join`.

    Returns:
        Result of `take_part`.

    Raises:
        HostZeroLost: host 0 was lost, and the job allows no restarts.
        RankFailure: no new host 0 within the time.
    """
    options |= {"node_rejoin_seconds": node_rejoin_seconds}
    coordinator, replaceable = JobCoordinator.join(rendezvous, ranks, **options), False
    while True:
        try:
            with closing(coordinator):
                return take_part(coordinator)
        except HostZeroLost as error:
            lost = error
        replaceable = replaceable or coordinator.restarts_allowed()
        if not replaceable or not node_rejoin_seconds:
            raise lost
        endpoint = f"{rendezvous.address}:{rendezvous.port}"
        log(f"waiting {node_rejoin_seconds:g} s for a new host 0 at {endpoint}")
        coordinator = _rejoin(rendezvous, ranks, coordinator.epoch, node_rejoin_seconds, lost, options)
        log(f"host 0 is back at {endpoint}")


@contextmanager
def closing(coordinator: JobCoordinator) -> Iterator[JobCoordinator]:
    """Leave the job at the end of the block; on host 0 this ends the job, with the error of the block on all hosts."""
    failure: WeftError | None = None
    try:
        yield coordinator
    except WeftError as error:
        failure = error
        raise
    finally:
        coordinator.close(failure)


@contextmanager
def joined(rendezvous: RendezvousConfig | None, ranks: int, **options: Any) -> Iterator[JobCoordinator | None]:
    """Take part in a job during the block, as `closing`; None for one host.

    Args:
        rendezvous: rendezvous of several hosts; None for one host.
        ranks: number of ranks that this host can run.
        options: options of `JobCoordinator.join`.
    """
    if rendezvous is None:
        yield None
        return
    with closing(JobCoordinator.join(rendezvous, ranks, **options)) as coordinator:
        yield coordinator


def _rejoin(
    rendezvous: RendezvousConfig,
    ranks: int,
    epoch: int,
    seconds: float,
    lost: HostZeroLost,
    options: dict[str, Any],
) -> JobCoordinator:
    """Join the new host 0, of the same or a later epoch: after a broken link it may be the same one."""
    end = time.monotonic() + seconds
    while True:
        left = end - time.monotonic()
        try:
            return JobCoordinator.join(rendezvous, ranks, **options | {"timeout": max(left, 0.0), "epoch": epoch})
        except (RendezvousError, dist.DistError) as error:
            problem = str(error).partition("\n")[0]
        if time.monotonic() + RETRY_SECONDS > end:
            raise RankFailure(
                f"{lost.what}; no new host 0 within {seconds:g} s: {problem}",
                where=f"{rendezvous.address}:{rendezvous.port}",
                rule="a host 0 that replaces a lost one has the same address or name, the token and the run folder of the job",
                fix=lost.fix,
            )
        time.sleep(RETRY_SECONDS)
