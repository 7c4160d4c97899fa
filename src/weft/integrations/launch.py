"""Launch of a script on the ranks of this host, or of several hosts together."""

from pathlib import Path

from weft.device.detect import detect
from weft.launch.follow import joined
from weft.launch.launcher import default_ranks, launch, thread_variables
from weft.launch.rendezvous import RendezvousConfig
from weft.launch.watchdog import Timeouts
from weft.memory.offload import explain_host_memory
from weft.plan import Plan, check_plan, refuse_run_keys


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

    Raises:
        PlanError: the plan does not fit the number of ranks.
        RankFailure: a rank failed; see `weft.launch.launcher.launch`.
    """
    device = detect()
    ranks = ranks or default_ranks(device)
    environment = environment | thread_variables(device, ranks)
    with joined(rendezvous, ranks, node_rejoin_seconds=0) as coordinator:
        if plan:
            refuse_run_keys(plan, "weft run")
            check_plan(plan, coordinator.world_size() if coordinator else ranks)
            for line in explain_host_memory(plan.memory, device.type):
                print(line, flush=True)
        launch(
            command,
            ranks=ranks,
            log_dir=log_dir,
            environment=environment | (coordinator.network_environment() if coordinator else {}),
            timeouts=Timeouts(other=hang_timeout, hang=hang_timeout),
            max_restarts=max_restarts,
            coordinator=coordinator,
        )
