"""Rounds of ranks: a launcher that starts the ranks of a job again leaves its job in the run folder, and continues its run.

    round_of(os.environ)                # identities of this round, and those of earlier rounds of the same job
    resume_sources(found, out, None)    # ["auto"] if an earlier round has prepared the run in `out`

Launchers count failures, not rounds: when a host joins or leaves, torchrun starts all ranks again with the same count. Imports
no torch.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from weft.files import read_identities, replace_file

ROUND_FILE = "launcher_run"
"""File in the run folder with the identities of the newest round that has prepared it, one a line."""
ERROR_VARIABLE, RESTARTS_VARIABLE = "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RESTART_COUNT"
COUNTED = {"SLURM_JOB_ID": "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID": RESTARTS_VARIABLE}
"""Variables with the id of a job, and those that count its restarts. A second command of the job has the same id and count."""


@dataclass(frozen=True)
class LaunchRound:
    """Identities by which the rounds of a job know each other."""

    own: tuple[str, ...] = ()
    """Identities of this round, which it leaves in the run folder."""
    earlier: tuple[str, ...] = ()
    """Identities that earlier rounds of the same job have left."""


def round_of(environment: Mapping[str, str]) -> LaunchRound:
    """Round of the process with this environment.

    An agent of torchrun has one folder of logs for all rounds of its ranks, and no other agent has it.
    """
    agent = _agent(environment.get(ERROR_VARIABLE, ""))
    own, earlier = ([agent], [agent]) if agent else ([], [])
    for name, counter in COUNTED.items():
        if name in environment and not (agent and counter == RESTARTS_VARIABLE):
            ids = [f"{name} {environment[name]} {count}" for count in range(int(environment.get(counter, "0")) + 1)]
            own, earlier = [*own, ids[-1]], [*earlier, *ids[:-1]]
    return LaunchRound(tuple(own), tuple(earlier))


def join_rounds(rounds: Iterable[LaunchRound]) -> LaunchRound:
    """Round of a job whose ranks have these rounds: hosts that stay know the earlier ones, and hosts that join do not."""
    found = list(rounds)
    own = dict.fromkeys(name for each in found for name in each.own)
    return LaunchRound(tuple(own), tuple(dict.fromkeys(name for each in found for name in each.earlier)))


def write_round(out: Path, launch_round: LaunchRound) -> None:
    """Leave the identities of a round in its run folder."""
    replace_file(out / ROUND_FILE, "\n".join(launch_round.own))


def resume_sources(launch_round: LaunchRound, out: Path, resume: str | None) -> list[str]:
    """Sources to resume from, in order of preference: after an earlier round, the newest checkpoint of the run itself.

    A round that ended before it prepared the run folder is none: the folder may have an earlier run.

    Args:
        launch_round: round of all ranks.
        out: run folder.
        resume: source that the user has given, or None.

    Raises:
        UnreadableError: a file of the run folder cannot be read at the moment.
    """
    rule = "a restarted run continues from its newest checkpoint"
    left: list[str] = []
    if launch_round.earlier:
        left = read_identities(out / ROUND_FILE, "it is not known whether the run has begun", rule).splitlines()
    is_restart = not set(left).isdisjoint(launch_round.earlier)
    return [source for source in dict.fromkeys(["auto" if is_restart else None, resume]) if source]


def _agent(error_file: str) -> str:
    """Identity of the agent of torchrun that has made an error file, FOLDER/attempt_N/LOCAL_RANK/error.json."""
    attempt = Path(error_file).parent.parent
    return f"agent {attempt.parent}" if attempt.name.startswith("attempt_") else ""
