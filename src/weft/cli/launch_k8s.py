"""weft launch k8s"""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.options import SetOption


class Kind(StrEnum):
    """Kind of the job in the cluster."""

    jobset = "jobset"
    trainjob = "trainjob"


def k8s(
    job: Annotated[Path, typer.Argument(help="Job as TOML; paths in it are those of the pods.")],
    image: Annotated[str, typer.Option(help="Image with Weft: REGISTRY/NAME:TAG or REGISTRY/NAME@sha256:DIGEST.")],
    nproc_per_node: Annotated[int, typer.Option(min=1, help="Ranks per pod.")],
    volume: Annotated[
        list[str], typer.Option(help="Claim with ReadWriteMany and its path in the pods, CLAIM:/path; repeatable.")
    ],
    nodes: Annotated[int, typer.Option(help="Number of pods; each is a host.")] = 1,
    name: Annotated[str, typer.Option(help="Name of the job in the cluster.")] = "weft",
    namespace: Annotated[str | None, typer.Option(help="Namespace; default: that of kubectl's context.")] = None,
    kind: Annotated[Kind, typer.Option(help="JobSet, or TrainJob of Kubeflow Trainer.")] = Kind.jobset,
    gpus: Annotated[int, typer.Option(min=0, help="Devices per pod.")] = 0,
    gpu_resource: Annotated[str, typer.Option(help="Resource name of a device.")] = "nvidia.com/gpu",
    cpus: Annotated[str, typer.Option(help="CPUs per pod.")] = "4",
    memory: Annotated[str, typer.Option(help="Memory per pod, with /dev/shm.")] = "32Gi",
    shm: Annotated[str, typer.Option(help="Size of /dev/shm.")] = "8Gi",
    max_restarts: Annotated[int, typer.Option(min=0, help="Restarts of the ranks, and of all pods.")] = 3,
    token_secret: Annotated[
        str | None, typer.Option(help='Secret with the key "token"; default: a new one with a new token.')
    ] = None,
    out: Annotated[str | None, typer.Option(help="Run folder in the pods, instead of out in the job.")] = None,
    set_: SetOption = [],  # noqa: B006
    dry: Annotated[bool, typer.Option("--dry", help="Print the manifests, and create nothing.")] = False,
) -> None:
    """Train a job in pods of Kubernetes, with JobSet or Kubeflow Trainer."""
    from weft.job import Job
    from weft.launch.schedulers.k8s import Pods, Volume, apply, manifests, to_yaml

    chosen = Job.load(job, [*set_, *([f"out={json.dumps(out)}"] if out else [])])
    pods = Pods(
        name=name,
        image=image,
        nodes=nodes,
        nproc_per_node=nproc_per_node,
        volumes=tuple(map(Volume.parse, volume)),
        namespace=namespace,
        gpus=gpus,
        gpu_resource=gpu_resource,
        cpus=cpus,
        memory=memory,
        shared_memory=shm,
        max_restarts=max_restarts,
        token_secret=token_secret,
    )
    text = to_yaml(manifests(chosen, pods, kind.value))
    if dry:
        print(text, end="")
    else:
        apply(text)
