"""weft launch"""

import typer

from weft.cli.command import add_command
from weft.cli.launch_hosts import hosts
from weft.cli.launch_k8s import k8s
from weft.cli.launch_ray import ray
from weft.cli.launch_slurm import slurm

launch = typer.Typer(help="Start a job on the hosts of a cluster.", no_args_is_help=True)
for command in (hosts, slurm, ray, k8s):
    add_command(launch, command, reports_steps=True)
