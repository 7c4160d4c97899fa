"""weft launch slurm"""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.options import MaxRestarts, OutOption, Ranks, SetOption


def slurm(
    job: Annotated[Path, typer.Argument(help="Job as TOML.")],
    nodes: Annotated[str, typer.Option(help="Number of nodes; MIN-MAX: as many as Slurm has, at each start.")],
    time: Annotated[str, typer.Option(help="Time limit of the job, such as 2:00:00; then it is queued again.")],
    partition: Annotated[str | None, typer.Option(help="Partition of Slurm; default: the cluster's.")] = None,
    nproc_per_node: Ranks = None,
    set_: SetOption = [],  # noqa: B006
    sbatch: Annotated[
        list[str], typer.Option(help="Option of sbatch without dashes, key=value; repeatable: gpus-per-node=8.")
    ] = [],  # noqa: B006
    array: Annotated[
        str | None, typer.Option(help="One job for each value of a key: train.seed=1,2,3; run folders OUT/0, OUT/1 ...")
    ] = None,
    max_restarts: MaxRestarts = 0,
    out: OutOption = None,
    dry: Annotated[bool, typer.Option("--dry", help="Print the script; write and submit nothing.")] = False,
) -> None:
    """Submit a job to Slurm; it is queued again at its time limit and resumes."""
    from weft.job import Job
    from weft.launch.schedulers.slurm import SlurmJob, parse_array, parse_nodes, parse_sbatch, sbatch_script, submit
    from weft.plan import check_plan
    from weft.training.inputs import check_inputs
    from weft.training.run_folder import check_writable

    sweep, numbers = parse_array(array), parse_nodes(nodes)
    for setting in sweep or [""]:
        chosen = Job.load(job, [*set_, *([setting] if setting else [])])
        if nproc_per_node:
            for count in numbers:
                check_plan(chosen.plan, nproc_per_node * count)
    chosen = chosen.model_copy(update={"out": str(out or chosen.out)})
    request = SlurmJob(
        job=job,
        out=Path(chosen.out),
        nodes=numbers,
        time=time,
        hang_timeout_seconds=chosen.guard.hang_timeout_seconds,
        partition=partition,
        nproc_per_node=nproc_per_node,
        max_restarts=max_restarts,
        settings=set_,
        sweep=sweep,
        sbatch=parse_sbatch(sbatch),
        checkpoint_folder=Path(chosen.checkpoint.folder) if chosen.checkpoint.folder else None,
    )
    script = sbatch_script(request, sys.executable, Path.cwd())
    if dry:
        print(script, end="")
        return
    check_inputs(chosen)
    check_writable(chosen, new=False)
    job_id = submit(request, script)
    print(f"job {job_id}: {nodes} node{'s' * (numbers[-1] > 1)}, {time}, in {chosen.out}")
    for index, setting in enumerate(sweep):
        print(f"  {job_id}_{index}: {setting}, in {chosen.out}/{index}")
    output = f"{chosen.out}/0/slurm-{job_id}_0.out" if sweep else f"{chosen.out}/slurm-{job_id}.out"
    print(f"watch:  squeue --job {job_id}; tail -F {shlex.quote(output)}")
    print(f"cancel: scancel {job_id}, which saves a checkpoint if KillWait of the cluster is long enough")
