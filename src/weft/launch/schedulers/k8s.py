"""Kubernetes manifests of a job: a JobSet, or a TrainingRuntime and a TrainJob of Kubeflow Trainer.

Each host is a pod that runs Weft's own launcher. Kubernetes gives a pod its index and a name that other pods can resolve, so
that pods need no access to the cluster's API, no privileges and no writable root file system.
"""

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

from weft.errors import JobError
from weft.job import Job
from weft.launch.rendezvous import new_token
from weft.launch.schedulers.host_command import host_command
from weft.plan import check_plan

PORT = 29400
USER_ID = 1000  # of the pods; with fsGroup, so that secrets and volumes are readable
SCRATCH, JOB_FOLDER, TOKEN_FOLDER = "/tmp", "/etc/weft/job", "/etc/weft/token"
REPLICATED_JOB = CONTAINER = "node"  # names that Kubeflow Trainer expects
LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
MAX_LABEL = 63
POD_SUFFIX = 6  # characters that Kubernetes appends to the name of a pod
GRACE_MARGIN_SECONDS = 60  # after the last progress: time until the launcher has ended its ranks
REFUSED = 2  # exit code of input that is refused: a restart would end in the same way
QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]i?)?")


@dataclass(frozen=True)
class Volume:
    """PersistentVolumeClaim with access mode ReadWriteMany, mounted in every pod."""

    claim: str
    path: str
    """Absolute path in the pods."""

    @classmethod
    def parse(cls, text: str) -> "Volume":
        """Parse CLAIM:/path.

        Raises:
            JobError: the text has another form.
        """
        claim, _, path = text.partition(":")
        if not (claim and path.startswith("/") and path.strip("/")):
            raise JobError(
                f"--volume {text}",
                where="weft launch k8s",
                rule="CLAIM:/path, a PersistentVolumeClaim and its absolute path in the pods",
                fix="--volume shared-data:/mnt/shared",
            )
        return cls(claim, str(PurePosixPath(path)))

    def holds(self, path: str) -> bool:
        """True if an absolute path is on this volume."""
        return PurePosixPath(path).is_relative_to(self.path)


@dataclass(frozen=True)
class Pods:
    """Pods of a job: one per host."""

    name: str
    """Name of the job in the cluster."""
    image: str
    nodes: int
    nproc_per_node: int
    volumes: tuple[Volume, ...]
    namespace: str | None = None
    gpus: int = 0
    """Devices per pod."""
    gpu_resource: str = "nvidia.com/gpu"
    """Name of the resource that a device plugin gives to a device."""
    cpus: str = "4"
    """CPUs per pod, as a Kubernetes quantity."""
    memory: str = "32Gi"
    """Memory per pod, as a Kubernetes quantity; includes /dev/shm."""
    shared_memory: str = "8Gi"
    """Size of /dev/shm, as a Kubernetes quantity."""
    max_restarts: int = 3
    """Restarts of the ranks by the launcher, and of all pods by JobSet."""
    token_secret: str | None = None
    """Existing Secret with the key "token"; None: a Secret with a new token is in the manifests."""

    def __post_init__(self) -> None:
        _check_name(self.name, self.nodes)
        if self.nodes < 1:
            raise _refusal(f"--nodes {self.nodes}", "at least one pod", "--nodes 2")
        path = self.image.rpartition("/")[2]
        if ":" not in path and "@" not in path:
            raise _refusal(
                f"--image {self.image} has no tag",
                "all pods, also those of a restart, run the same code: an image has a tag or a digest",
                f"--image {self.image}:TAG, or {self.image}@sha256:DIGEST",
            )
        if self.gpus and self.nproc_per_node > self.gpus:
            raise _refusal(
                f"--nproc-per-node {self.nproc_per_node} with --gpus {self.gpus}",
                "each rank has a device of its own",
                f"--nproc-per-node {self.gpus}, or --gpus {self.nproc_per_node}",
            )
        for option, value in ("cpus", self.cpus), ("memory", self.memory), ("shm", self.shared_memory):
            if not QUANTITY.fullmatch(value):
                raise _refusal(f"--{option} {value}", "a quantity of Kubernetes", f"--{option} 8, or 64Gi for memory")


def manifests(job: Job, pods: Pods, kind: str = "jobset") -> list[dict[str, Any]]:
    """Objects to apply: Secret, ConfigMap, and the job.

    Args:
        job: job, whose run and checkpoint folders are on a volume.
        pods: pods of the job.
        kind: "jobset" for a JobSet, "trainjob" for a TrainingRuntime and a TrainJob.

    Raises:
        JobError: the run folder, the checkpoint folder or the token cache is not on a volume, or the ranks do not fit the plan.
    """
    check_plan(job.plan, pods.nodes * pods.nproc_per_node)
    job = _on_volumes(job, pods)
    metadata = {
        "name": pods.name,
        "labels": {"app.kubernetes.io/name": "weft", "app.kubernetes.io/instance": pods.name},
    }
    if pods.namespace:
        metadata["namespace"] = pods.namespace
    objects: list[dict[str, Any]] = [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"job.toml": job.to_toml()}}
    ]
    if pods.token_secret is None:
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "immutable": True}
        objects.append(secret | {"stringData": {"token": new_token()}})
    spec = _job_set_spec(job, pods)
    if kind == "jobset":
        return [
            *objects,
            {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": spec},
        ]
    group = "trainer.kubeflow.org"
    runtime = {"mlPolicy": {"numNodes": pods.nodes}, "template": {"spec": spec}}
    train_job = {
        "runtimeRef": {"apiGroup": group, "kind": "TrainingRuntime", "name": pods.name},
        "trainer": {"numNodes": pods.nodes},
    }
    common = {"apiVersion": f"{group}/v1alpha1", "metadata": metadata}
    return [
        *objects,
        common | {"kind": "TrainingRuntime", "spec": runtime},
        common | {"kind": "TrainJob", "spec": train_job},
    ]


def to_yaml(objects: Sequence[dict[str, Any]]) -> str:
    """Objects as documents of one YAML file."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=120)


def apply(text: str) -> None:
    """Create the objects in the cluster of kubectl's current context.

    Raises:
        JobError: kubectl is not installed, or fails.
    """
    if shutil.which("kubectl") is None:
        raise _refusal(
            "kubectl is not installed",
            "weft launch k8s creates objects with kubectl",
            "install kubectl, or add --dry and apply the printed manifests elsewhere",
        )
    done = subprocess.run(["kubectl", "apply", "-f", "-"], input=text, text=True)
    if done.returncode:
        raise _refusal(
            f"kubectl apply ended with code {done.returncode}",
            "the cluster has JobSet (--kind jobset) or Kubeflow Trainer (--kind trainjob), and accepts the objects",
            "see the output of kubectl above",
        )


def pod_command(pods: Pods) -> str:
    """Shell command of a pod: wait for the address of pod 0, and start Weft's launcher."""
    name = f"{pods.name}-{REPLICATED_JOB}-0-0.{pods.name}"
    token = f"{SCRATCH}/token"
    resolve = f'import socket; print(socket.gethostbyname("{name}"))'
    train = host_command(
        "train",
        f"{JOB_FOLDER}/job.toml",
        ["--nproc-per-node", str(pods.nproc_per_node), "--resume", "auto", "--max-restarts", str(pods.max_restarts)],
        hosts=pods.nodes,
        host="$JOB_COMPLETION_INDEX",
        endpoint=f"$address:{PORT}",
        token_file=token,
        python="python3",
    )
    words = (f'"{word}"' if "$" in word else shlex.quote(word) for word in train)
    lines = (
        # fsGroup makes the mounted secret readable by the group, which Weft refuses.
        f"(umask 077 && cat {TOKEN_FOLDER}/token > {token})",
        f"until address=$(python3 -c {shlex.quote(resolve)} 2> /dev/null); do sleep 1; done",
        f"exec {' '.join(words)}",
    )
    return "\n".join(("set -e", *lines, ""))


def _job_set_spec(job: Job, pods: Pods) -> dict[str, Any]:
    """Specification of a JobSet: JobSet itself makes the headless service of `network`."""
    rules = [{"action": "FailJob", "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [REFUSED]}}]
    pod_labels = {"app.kubernetes.io/name": "weft", "app.kubernetes.io/instance": pods.name}
    template = {
        "parallelism": pods.nodes,
        "completions": pods.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,  # one pod cannot return alone to an attempt of all pods
        "podFailurePolicy": {"rules": rules},
        "template": {"metadata": {"labels": pod_labels}, "spec": _pod_spec(job, pods)},
    }
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    return {
        "network": {"enableDNSHostnames": True, "subdomain": pods.name, "publishNotReadyAddresses": True},
        "failurePolicy": {
            "maxRestarts": pods.max_restarts,
            "rules": [{"name": "refused", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
        },
        "replicatedJobs": [
            {"name": REPLICATED_JOB, "replicas": 1, "template": {"metadata": {"labels": labels}, "spec": template}}
        ],
    }


def _pod_spec(job: Job, pods: Pods) -> dict[str, Any]:
    """Specification of a pod without privileges, whose root file system is read-only."""
    resources = {"cpu": pods.cpus, "memory": pods.memory} | ({pods.gpu_resource: str(pods.gpus)} if pods.gpus else {})
    claims = {f"volume-{index}": volume for index, volume in enumerate(pods.volumes)}
    mounts = {"scratch": SCRATCH, "shared-memory": "/dev/shm"} | {name: volume.path for name, volume in claims.items()}
    read_only = {"job": JOB_FOLDER, "token": TOKEN_FOLDER}
    container = {
        "name": CONTAINER,
        "image": pods.image,
        "command": ["sh", "-c", pod_command(pods)],
        "workingDir": SCRATCH,
        "env": [{"name": "HOME", "value": SCRATCH}, {"name": "USER", "value": "weft"}],  # no entry in /etc/passwd
        "ports": [{"name": "rendezvous", "containerPort": PORT}],
        "resources": {"requests": resources, "limits": dict(resources)},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            *({"name": name, "mountPath": path} for name, path in mounts.items()),
            {"name": "scratch", "mountPath": "/var/tmp", "subPath": "var-tmp"},  # default of plan.memory.offload_dir
            *({"name": name, "mountPath": path, "readOnly": True} for name, path in read_only.items()),
        ],
    }
    secret = {"secretName": pods.token_secret or pods.name, "defaultMode": 0o400}
    return {
        "restartPolicy": "Never",
        # After SIGTERM the ranks finish their step, save, evaluate and export, as long as the watchdog sees progress.
        "terminationGracePeriodSeconds": int(job.guard.hang_timeout_seconds) + GRACE_MARGIN_SECONDS,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            {"name": "scratch", "emptyDir": {}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": pods.shared_memory}},
            *({"name": name, "persistentVolumeClaim": {"claimName": volume.claim}} for name, volume in claims.items()),
            {"name": "job", "configMap": {"name": pods.name}},
            {"name": "token", "secret": secret},
        ],
    }


def _on_volumes(job: Job, pods: Pods) -> Job:
    """Check that what all pods write together is on a volume; the default token cache is moved beside the run folder."""
    if job.data.cache.startswith("~"):
        cache = str(PurePosixPath(job.out).parent / "weft-cache")
        job = job.model_copy(update={"data": job.data.model_copy(update={"cache": cache})})
    folders = {"out": job.out, "checkpoint.folder": job.checkpoint.folder or job.out, "data.cache": job.data.cache}
    for key, folder in folders.items():
        if not any(volume.holds(folder) for volume in pods.volumes):
            mounted = ", ".join(volume.path for volume in pods.volumes) or "none"
            raise _refusal(
                f"{key} = {folder!r} is on no volume; volumes are mounted at: {mounted}",
                "all pods read and write it, also after a restart: an absolute path on a claim with ReadWriteMany",
                f"--volume CLAIM:/mnt/shared --set {key}=/mnt/shared/{PurePosixPath(folder).name}",
            )
    return job


def _check_name(name: str, nodes: int) -> None:
    """Refuse a name from which Kubernetes cannot make host names of pods."""
    longest = MAX_LABEL - len(f"-{REPLICATED_JOB}-0-{nodes}-") - POD_SUFFIX
    if not LABEL.fullmatch(name) or len(name) > longest:
        raise _refusal(
            f"--name {name!r}",
            f"a label of DNS: letters a-z, digits and hyphens, starting with a letter, at most {longest} characters, as names "
            "of pods begin with it",
            f"--name {re.sub('[^a-z0-9]+', '-', name.lower()).strip('-0123456789')[:longest] or 'train'}",
        )


def _refusal(what: str, rule: str, fix: str) -> JobError:
    return JobError(what, where="weft launch k8s", rule=rule, fix=fix)


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and no references to repeated objects."""

    def ignore_aliases(self, data: Any) -> bool:
        """True: write repeated objects in full."""
        return True


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _block)
