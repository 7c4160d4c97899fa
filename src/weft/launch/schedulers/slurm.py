"""Slurm: the batch script of a job, and its submission.

The script starts one launcher a node with srun. Before the time limit, Slurm sends USR1 to the script, which sends SIGTERM to
the launchers: the ranks finish their step and save. The job then queues itself again and resumes, as after the loss of a rank
or node. A job queues itself again only with a new checkpoint, so that a job without progress ends.
"""

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from weft.errors import JobError
from weft.launch.agent import SECONDS_TO_END
from weft.launch.environment import FIRST_PORT, PORTS
from weft.launch.rendezvous import new_token
from weft.launch.schedulers.host_command import host_command

EARLY_SECONDS = 60  # by which Slurm may send the signal before the time limit too early
MAX_SIGNAL_SECONDS = 65535  # of sbatch --signal
NODES = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")
TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")
OWN_OPTIONS = {
    "nodes": "--nodes",
    "time": "--time",
    "partition": "--partition",
    "array": "--array",
    "output": "--out, as the output is in the run folder",
    "chdir": "the folder in which you run weft launch slurm",
    **dict.fromkeys(
        ("ntasks", "ntasks-per-node", "signal", "requeue", "no-requeue", "open-mode", "wrap", "parsable", "wait"),
        "the script alone",
    ),
}
"""Options of sbatch that --sbatch may not set, with what sets each."""
SCRIPT, TOKEN = "slurm.sh", "slurm.token"

ADDRESS = """\
# The address is looked up on the last node: the first one may know its own name by a loopback address alone.
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
name=$(scontrol --oneliner show node "${nodes[0]}" | grep -oP '\\bNodeAddr=\\K\\S+')
address=$(srun --nodes=1 --ntasks=1 --nodelist="${nodes[-1]}" getent ahostsv4 "$name" | awk 'NR == 1 { print $1 }')
if [ -z "$address" ]; then
    echo "weft: ${nodes[-1]} finds no IPv4 address of ${nodes[0]} (NodeAddr=$name)" >&2
    exit 2
fi
"""

BODY = """\
run={run}
token={token}

# Slurm sends USR1 to this shell {signal_seconds} s before the time limit; the ranks then finish their step and save.
# On scancel and on requeue Slurm itself sends TERM to the ranks, and this shell waits for them.
at_limit=
ended_by_slurm=
trap 'at_limit=1; scancel --signal=TERM "{this}"' USR1
trap 'ended_by_slurm=1' TERM

{address}endpoint=$address:$(({first_port} + SLURM_JOB_ID % {ports}))

start_host() {{ # on each node
    exec {command}
}}
export -f start_host
export run setting token endpoint

newest_checkpoint() {{
    ls -d {checkpoints}/step-* 2> /dev/null | tail -n 1
}}
before=$(newest_checkpoint)

# The launchers of a job end together: Slurm must not kill one that still saves because another one has ended.
# After {signal_seconds} s it does: the task of a lost node would never end.
srun --nodes="$SLURM_NNODES" --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 --wait={signal_seconds} \\
    bash -c start_host &
step=$!
while kill -0 "$step" 2> /dev/null; do
    wait "$step" # a signal ends the wait
done
wait "$step"
code=$?

reason=
case $code in
    143) [ -n "$at_limit" ] && reason="the time limit is near" ;;
    1 | 137) reason="a rank or a node failed" ;;
esac
if [ -n "$reason" ] && [ -z "$ended_by_slurm" ]; then
    if [ "$(newest_checkpoint)" != "$before" ]; then
        echo "weft: $reason: the job is queued again and resumes from $(newest_checkpoint)"
        scontrol requeue "{this}"
    else
        echo "weft: $reason, and there is no new checkpoint: the job ends" >&2
    fi
fi
exit "$code"
"""


@dataclass(frozen=True)
class SlurmJob:
    """Checked options of a submission.

    Raises:
        JobError: the run folder is not absolute, or the time limit leaves no time to train and to save.
    """

    job: Path
    """Job file."""
    out: Path
    """Run folder, shared by all nodes; of an array, the folder with the run folders 0, 1 ... of its jobs."""
    nodes: range
    """Numbers of nodes with which the job may run; Slurm chooses one whenever it starts the job."""
    time: str
    """Time limit, as Slurm writes it."""
    hang_timeout_seconds: float
    """`guard.hang_timeout_seconds` of the job: maximum time without progress, also while ranks save."""
    partition: str | None = None
    nproc_per_node: int | None = None
    max_restarts: int = 0
    settings: Sequence[str] = ()
    """`key=value` settings of the job."""
    sweep: Sequence[str] = ()
    """One setting for each job of an array; empty: a single job."""
    sbatch: dict[str, str] = field(default_factory=dict)
    """Further options of sbatch, without dashes; the value is "" for an option without a value."""
    checkpoint_folder: Path | None = None
    """Folder of checkpoints; None: the run folder."""

    def __post_init__(self) -> None:
        if not self.out.is_absolute():
            raise JobError(
                f"the run folder {str(self.out)!r} is relative",
                where="out",
                rule="all nodes use the same run folder, on a shared file system",
                fix=f"--out /shared/{self.out.name}, with the path of a folder that all nodes share",
            )
        if self.sweep and self.checkpoint_folder:
            raise JobError(
                f"checkpoint.folder = {str(self.checkpoint_folder)!r} with --array",
                rule="each job of an array has its own checkpoints",
                fix="leave checkpoint.folder empty: each job saves into its own run folder",
            )
        limit, needed = parse_time(self.time), self.signal_seconds + EARLY_SECONDS
        if limit <= needed or self.signal_seconds > MAX_SIGNAL_SECONDS:
            raise JobError(
                f"the time limit {self.time} ({limit} s) leaves no time to train",
                where="--time",
                rule=f"the ranks stop {self.signal_seconds} s before the limit, so that they can finish a step and save: "
                f"{SECONDS_TO_END} s and guard.hang_timeout_seconds = {self.hang_timeout_seconds:g}. Slurm may send the signal "
                f"{EARLY_SECONDS} s too early",
                fix=f"a limit well above {needed // 60 + 1} minutes, or a lower guard.hang_timeout_seconds",
            )

    @property
    def signal_seconds(self) -> int:
        """Seconds before the time limit at which the ranks are stopped."""
        return SECONDS_TO_END + int(self.hang_timeout_seconds)


def parse_nodes(text: str) -> range:
    """Parse a number of nodes, "4", or the least and the largest number, "2-4", as sbatch reads them.

    Raises:
        JobError: the text is neither.
    """
    match = NODES.fullmatch(text)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 0 < least <= most:
        raise JobError(
            f"{text!r} is not a number of nodes",
            where="--nodes",
            rule="a number, or MIN-MAX for a job that Slurm may start with fewer or more nodes",
            fix="for example --nodes 4, or --nodes 2-4",
        )
    return range(least, most + 1)


def parse_time(text: str) -> int:
    """Parse a time limit of Slurm into seconds: "90" (minutes), "90:00", "2:00:00", "1-12", "1-12:30" or "1-12:30:00".

    Raises:
        JobError: the text is no time limit, or zero.
    """
    match = TIME.fullmatch(text)
    seconds = 0
    if match:
        days, first, second, third = (match[name] for name in ("days", "first", "second", "third"))
        if days is not None or third is not None:
            hours, minutes, rest = first, second, third
        else:
            hours, minutes, rest = None, first, second
        seconds = int(days or 0) * 86400 + int(hours or 0) * 3600 + int(minutes or 0) * 60 + int(rest or 0)
    if seconds == 0:
        raise JobError(
            f"{text!r} is not a time limit",
            where="--time",
            rule="MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS, DAYS-HOURS, DAYS-HOURS:MINUTES or\n"
            "         DAYS-HOURS:MINUTES:SECONDS",
            fix="for example --time 2:00:00 for two hours",
        )
    return seconds


def parse_sbatch(entries: Sequence[str]) -> dict[str, str]:
    """Parse options of sbatch such as "gpus-per-node=8" or "exclusive".

    Raises:
        JobError: an entry is malformed or doubled, or the script sets this option itself.
    """
    options: dict[str, str] = {}
    for entry in entries:
        key, equals, value = entry.partition("=")
        problem = fix = ""
        if not re.fullmatch("[a-z][a-z0-9-]+", key) or (equals and not value) or not value.isprintable():
            problem, fix = (
                "is malformed",
                "for example --sbatch gpus-per-node=8, --sbatch account=mine, --sbatch exclusive",
            )
        elif key in OWN_OPTIONS:
            problem, fix = f"sets {key}, which the script sets itself", f"remove it; {key} is set by {OWN_OPTIONS[key]}"
        elif key in options:
            problem, fix = f"sets {key} twice", "keep one of the two"
        if problem:
            raise JobError(
                f"--sbatch {entry!r} {problem}",
                where="command line",
                rule="a long option of sbatch without dashes, as key=value, or key alone for an option without a value",
                fix=fix,
            )
        options[key] = value
    return options


def parse_array(text: str | None) -> list[str]:
    """Parse the sweep of an array: "train.seed=1,2,3" -> ["train.seed=1", "train.seed=2", "train.seed=3"].

    Commas in brackets, braces and quotes belong to a value.

    Raises:
        JobError: there is no key, or fewer than two values.
    """
    if text is None:
        return []
    key, _, values = text.partition("=")
    parts = re.findall(r"""((?:[^,\[{"']|\[[^\]]*\]|\{[^}]*\}|"[^"]*"|'[^']*')+)(?:,|$)""", values)
    if not key.strip() or len(parts) < 2 or ",".join(parts) != values or key.strip() in ("out", "checkpoint.folder"):
        raise JobError(
            f"cannot read --array {text!r}",
            where="command line",
            rule="one key of the job and at least two values, separated by commas; the run folders are made by Weft",
            fix="for example --array train.seed=1,2,3",
        )
    return [f"{key.strip()}={part}" for part in parts]


def sbatch_script(slurm: SlurmJob, python: str, folder: Path) -> str:
    """Batch script of a job or an array of jobs.

    Args:
        slurm: options of the submission.
        python: interpreter on the nodes.
        folder: working directory of the job, for relative paths in the job file.
    """
    index = "/%a" if slurm.sweep else ""
    options = {
        "job-name": f"weft-{slurm.out.name}",
        "nodes": f"{slurm.nodes[0]}-{slurm.nodes[-1]}" if len(slurm.nodes) > 1 else str(slurm.nodes[0]),
        "ntasks-per-node": "1",
        "time": slurm.time,
        **({"partition": slurm.partition} if slurm.partition else {}),
        **({"array": f"0-{len(slurm.sweep) - 1}"} if slurm.sweep else {}),
        "chdir": str(folder),
        "output": f"{slurm.out}{index}/slurm-{'%A_%a' if slurm.sweep else '%j'}.out",
        "open-mode": "append",
        "requeue": "",
        "signal": f"B:USR1@{slurm.signal_seconds}",
    } | slurm.sbatch
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH --{key}{'=' + shlex.quote(value) if value else ''}" for key, value in options.items()]
    run = shlex.quote(str(slurm.out))
    if slurm.sweep:
        values = " ".join(map(shlex.quote, slurm.sweep))
        lines += ["", f"settings=({values})", "setting=${settings[$SLURM_ARRAY_TASK_ID]}"]
        run += '/"$SLURM_ARRAY_TASK_ID"'
    arguments = ["--out", "$run", "--resume", "auto", "--max-restarts", str(slurm.max_restarts)]
    arguments += ["--nproc-per-node", str(slurm.nproc_per_node)] if slurm.nproc_per_node else []
    arguments += [word for setting in slurm.settings for word in ("--set", setting)]
    variables = ["$run", "$setting", "$SLURM_NNODES", "$SLURM_NODEID", "$endpoint", "$token"]
    arguments += ["--set", "$setting"] if slurm.sweep else []
    command = host_command(
        "train",
        str(slurm.job.absolute()),
        arguments,
        hosts="$SLURM_NNODES",
        host="$SLURM_NODEID",
        endpoint="$endpoint",
        token_file="$token",
        python=python,
    )
    checkpoints = shlex.quote(str(slurm.checkpoint_folder)) if slurm.checkpoint_folder else '"$run"'
    body = BODY.format(
        run=run,
        token=shlex.quote(str(slurm.out / TOKEN)),
        signal_seconds=slurm.signal_seconds,
        this="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if slurm.sweep else "$SLURM_JOB_ID",
        command=" ".join(f'"{word}"' if word in variables else shlex.quote(word) for word in command),
        address=ADDRESS if slurm.nodes[-1] > 1 else "address=127.0.0.1 # of the only node\n",
        first_port=FIRST_PORT,
        ports=PORTS,
        checkpoints=checkpoints,
    )
    return "\n".join([*lines, "", body])


def submit(slurm: SlurmJob, script: str) -> str:
    """Write the script and a new token into the run folder, and submit the script; return the job id.

    Raises:
        JobError: there is no sbatch, or it refuses the script.
    """
    if shutil.which("sbatch") is None:
        raise JobError(
            "the command sbatch is not found",
            where="PATH",
            rule="jobs are submitted on a host with Slurm's commands, such as a login node",
            fix="run this command there, or print the script with --dry",
        )
    for folder in [slurm.out, *(slurm.out / str(index) for index in range(len(slurm.sweep)))]:
        folder.mkdir(parents=True, exist_ok=True)
    path, token = slurm.out / SCRIPT, slurm.out / TOKEN
    token.unlink(missing_ok=True)
    token.touch(0o600, exist_ok=False)
    token.write_text(new_token())
    path.write_text(script)
    done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True)
    if done.returncode:
        raise JobError(
            f"sbatch refused the script: {done.stderr.strip()}",
            where=str(path),
            rule="sbatch accepts the options of the script",
            fix="change --time, --partition or --sbatch",
        )
    return done.stdout.strip().partition(";")[0]
