"""Launch of a script on the ranks of this host, or of several hosts together."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from weft.device.detect import detect
from weft.errors import WeftError
from weft.launch.coordinator import JobCoordinator
from weft.launch.launcher import default_ranks, launch, thread_variables
from weft.launch.rendezvous import RendezvousConfig
from weft.launch.watchdog import Timeouts
from weft.memory.offload import explain_host_memory
from weft.plan import Plan, check_plan, refuse_unequal_rows
from weft.training.shared_folders import share_with_launchers


def run_on_ranks(
    command: list[str],
    plan: Plan | None,
    ranks: int | None,
    log_dir: Path,
    *,
    environment: dict[str, str],
    hang_timeout: float,
    max_restarts: int,
    rendezvous: RendezvousConfig | None,
    shared: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Start the ranks of a script, and wait until all of them have ended.

    Args:
        command: command of each rank.
        plan: plan of the script; None: the ranks choose it.
        ranks: ranks on this host; None: one per accelerator, or two on CPU.
        log_dir: folder for the output of the ranks.
        environment: further environment variables of the ranks.
        hang_timeout: seconds without progress of any rank after which the script is ended.
        max_restarts: maximum consecutive restarts.
        rendezvous: rendezvous of several hosts; None for one host.
        shared: folders that all hosts must share, and that host 0 has created, with the key of each.

    Raises:
        JobError: the hosts do not share a folder.
        PlanError: the plan does not fit the number of ranks.
        RankFailure: a rank failed; see `weft.launch.launcher.launch`.
    """
    device = detect()
    ranks = ranks or default_ranks(device)
    # Trainer and accelerate train on several processes of a CPU only if this variable says so.
    own = {"ACCELERATE_USE_CPU": "true"} if device.type == "cpu" else thread_variables(device, ranks)
    environment = environment | own
    timeouts = Timeouts(other=hang_timeout, hang=hang_timeout)
    coordinator = JobCoordinator.join(rendezvous, ranks, node_rejoin_seconds=0) if rendezvous else None
    failure: WeftError | None = None
    try:
        if coordinator and shared:
            share_with_launchers(coordinator, shared)
        world_size = coordinator.world_size() if coordinator else ranks
        if plan:
            refuse_unequal_rows(plan, "weft run")
            check_plan(plan, world_size)
            for line in explain_host_memory(plan.memory, device.type):
                print(line, flush=True)
        launch(
            command,
            ranks=ranks,
            log_dir=log_dir,
            environment=environment | (coordinator.network_environment() if coordinator else {}),
            timeouts=timeouts,
            max_restarts=max_restarts,
            coordinator=coordinator,
        )
    except WeftError as error:
        failure = error
        raise
    finally:
        if coordinator:
            coordinator.close(failure)
