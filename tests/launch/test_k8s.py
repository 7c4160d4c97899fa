"""Manifests for Kubernetes: the published schemas, what makes a pod safe, refused input, and the command of a pod."""

import os
import shlex
import stat
import subprocess
import sys
import tomllib
import typing
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.lab.hosts import hosts
from tests.lab.jobs import write_job
from weft.errors import JobError, PlanError
from weft.job import Job
from weft.launch.rendezvous import TOKEN
from weft.launch.schedulers.k8s import Pods, Volume, apply, manifests, pod_command, to_yaml
from weft.training.metrics import read_metrics

ROOT = Path(__file__).parents[2]
SHARED = Volume("shared-data", "/mnt/shared")
JOB = Job.parse({"model": {"config": {"model_type": "llama"}}, "out": "/mnt/shared/runs/first"})
MODELS = {
    "ConfigMap": "io_k8s_api_core_v1_config_map.IoK8sApiCoreV1ConfigMap",
    "Secret": "io_k8s_api_core_v1_secret.IoK8sApiCoreV1Secret",
    "JobSet": "jobset_v1alpha2_job_set.JobsetV1alpha2JobSet",
    "TrainJob": "trainer_v1alpha1_train_job.TrainerV1alpha1TrainJob",
    "TrainingRuntime": "trainer_v1alpha1_training_runtime.TrainerV1alpha1TrainingRuntime",
}
"""Models by kind in the package kubeflow-trainer-api, which Kubeflow publishes; made from the OpenAPI schemas of Kubeflow
Trainer, of JobSet and of Kubernetes."""


def make_pods(**changes: Any) -> Pods:
    options: dict[str, Any] = {"name": "first", "image": "registry.example/weft:1.0", "nodes": 2, "nproc_per_node": 8}
    return Pods(**options | {"volumes": (SHARED,), "gpus": 8} | changes)


def objects(kind: str = "jobset", job: Job = JOB, **changes: Any) -> dict[str, dict[str, Any]]:
    """Objects by kind, as read from the YAML text."""
    return {found["kind"]: found for found in yaml.safe_load_all(to_yaml(manifests(job, make_pods(**changes), kind)))}


def pod_template(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    spec = found["JobSet"]["spec"] if "JobSet" in found else found["TrainingRuntime"]["spec"]["template"]["spec"]
    return spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def unknown_fields(annotation: Any, value: Any, path: str = "") -> list[str]:
    """Fields of a value that its model does not have, at any depth."""
    if typing.get_origin(annotation) is not None and not isinstance(value, dict | list):
        return []
    if isinstance(value, list):
        inner = next((typing.get_args(a)[0] for a in _alternatives(annotation) if typing.get_origin(a) is list), Any)
        return [name for index, item in enumerate(value) for name in unknown_fields(inner, item, f"{path}[{index}]")]
    model = next((a for a in _alternatives(annotation) if hasattr(a, "model_fields")), None)
    if model is None or not isinstance(value, dict):
        return []
    known = {field.alias or name: field.annotation for name, field in model.model_fields.items()}
    missing = [f"{path}.{key}" for key in value if key not in known]
    return missing + [
        name
        for key, item in value.items()
        if key in known
        for name in unknown_fields(known[key], item, f"{path}.{key}")
    ]


def _alternatives(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) is typing.Annotated:
        return _alternatives(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) is typing.Union:
        return [found for inner in typing.get_args(annotation) for found in _alternatives(inner)]
    return [annotation]


@pytest.mark.must("format: manifests of Kubernetes")
@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
@pytest.mark.parametrize("changes", [{}, {"gpus": 0, "nodes": 1, "namespace": "research", "token_secret": "own"}])
def test_objects_follow_the_published_schemas(kind: str, changes: dict[str, Any]) -> None:
    pytest.importorskip("kubeflow_trainer_api", reason='pip install "weft-train[dev]" has the schemas of Kubernetes')
    for name, found in objects(kind, **changes).items():
        module, _, model_name = MODELS[name].partition(".")
        model = getattr(import_module(f"kubeflow_trainer_api.models.{module}"), model_name)
        model.from_dict(found)
        assert unknown_fields(model, found) == []
        if name in ("JobSet", "TrainingRuntime"):
            pod_template({name: found})["containers"][0]["securitycontext"] = {}
            (wrong,) = unknown_fields(model, found)
            assert wrong.endswith("containers[0].securitycontext")
            pod_template({name: found})["terminationGracePeriodSeconds"] = "long"
            with pytest.raises(ValueError, match="terminationGracePeriodSeconds"):
                model.from_dict(found)


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_pods_have_no_privileges_and_time_for_a_checkpoint(kind: str) -> None:
    pod = pod_template(
        objects(kind, JOB.model_copy(update={"guard": JOB.guard.model_copy(update={"hang_timeout_seconds": 900.0})}))
    )
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert pod["terminationGracePeriodSeconds"] > 900
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["shared-memory"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    assert volumes["token"]["secret"]["defaultMode"] == 0o400
    mounted = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounted["/mnt/shared"]["persistentVolumeClaim"] == {"claimName": "shared-data"}
    assert {"/tmp", "/var/tmp", "/dev/shm"} < set(mounted)


def test_job_and_token_are_in_the_manifests() -> None:
    found = objects(namespace="research")
    job = Job.parse(tomllib.loads(found["ConfigMap"]["data"]["job.toml"]))
    assert job.out == JOB.out
    assert job.data.cache == "/mnt/shared/runs/weft-cache"
    token = found["Secret"]["stringData"]["token"]
    assert TOKEN.fullmatch(token)
    assert token != objects()["Secret"]["stringData"]["token"]
    assert {item["metadata"]["namespace"] for item in found.values()} == {"research"}
    own = objects(token_secret="own")
    assert "Secret" not in own
    assert next(v for v in pod_template(own)["volumes"] if v["name"] == "token")["secret"]["secretName"] == "own"


def test_a_train_job_refers_to_the_runtime_beside_it() -> None:
    found = objects("trainjob")
    reference = found["TrainJob"]["spec"]["runtimeRef"]
    assert (reference["kind"], reference["name"]) == ("TrainingRuntime", found["TrainingRuntime"]["metadata"]["name"])
    assert found["TrainJob"]["spec"]["trainer"]["numNodes"] == 2


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"name": "First_run"}, "--name first-run"),
        ({"name": "a" * 48}, "at most 47 characters"),
        ({"nodes": 0}, "--nodes 0"),
        ({"image": "registry.example:5000/weft"}, "has no tag"),
        ({"gpus": 4}, "--nproc-per-node 8 with --gpus 4"),
        ({"memory": "much"}, "--memory much"),
        ({"volumes": ()}, "'/mnt/shared/runs/first' is on no volume; volumes are mounted at: none"),
        ({"volumes": (Volume("other", "/mnt/sha"),)}, "mounted at: /mnt/sha"),
    ],
)
def test_bad_input_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(JobError) as refused:
        manifests(JOB, make_pods(**changes))
    assert text in str(refused.value)
    assert "fix:" in str(refused.value)


def test_images_with_tag_or_digest_and_longest_name_are_accepted() -> None:
    for image in ("weft:1", "registry.example:5000/weft:1", "weft@sha256:" + "0" * 64):
        make_pods(image=image)
    make_pods(name="a" * 47)


def test_ranks_that_do_not_fit_the_plan_are_refused() -> None:
    job = Job.parse(
        {"model": {"config": {"model_type": "llama"}}, "out": "/mnt/shared/x", "plan": {"parallel": {"tp": 3}}}
    )
    with pytest.raises(PlanError):
        manifests(job, make_pods())


@pytest.mark.parametrize("text", ["shared-data", ":/mnt", "shared-data:mnt", "shared-data:/"])
def test_a_volume_without_claim_or_path_is_refused(text: str) -> None:
    with pytest.raises(JobError, match="--volume"):
        Volume.parse(text)


def test_without_kubectl_the_manifests_can_still_be_printed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(JobError, match="--dry"):
        apply("")


def test_kubectl_gets_the_manifests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kubectl, got = tmp_path / "kubectl", tmp_path / "got"
    kubectl.write_text(f'#!/bin/sh\necho "$@" > {got}\ncat >> {got}\n')
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    apply("kind: Secret\n")
    assert got.read_text() == "apply -f -\nkind: Secret\n"
    kubectl.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(JobError, match="code 3"):
        apply("")


def test_the_command_of_two_pods_trains_a_job(tmp_path: Path) -> None:
    """On two emulated hosts, with the index that Kubernetes sets, a secret that the group can read, and the name of pod 0."""
    job = Job.load(write_job(tmp_path, train={"steps": 4}))
    pods = make_pods(nproc_per_node=1, gpus=0, volumes=(Volume("shared", str(tmp_path)),))
    found = {item["kind"]: item for item in manifests(job, pods)}
    etc = tmp_path / "etc"
    for folder, files in (("job", found["ConfigMap"]["data"]), ("token", found["Secret"]["stringData"])):
        (etc / folder).mkdir(parents=True)
        for name, text in files.items():
            (etc / folder / name).write_text(text)
            (etc / folder / name).chmod(0o440)
    logs = []
    with hosts(2) as emulated:
        names = tmp_path / "hosts"
        names.write_text(f"127.0.0.1 localhost\n{emulated[0].address} first-node-0-0.first\n")
        for index, host in enumerate(emulated):
            scratch = tmp_path / f"scratch-{index}"
            scratch.mkdir()
            command = pod_command(pods).replace("/tmp/", f"{scratch}/").replace("/etc/weft", str(etc))
            mounts = f"mount -t tmpfs tmpfs /dev/shm && mount --bind {names} /etc/hosts"
            logs.append(tmp_path / f"pod-{index}.log")
            with logs[-1].open("w") as log:
                host.start(
                    ["unshare", "-m", "sh", "-c", f"{mounts} && exec sh -c {shlex.quote(command)}"],
                    env=os.environ
                    | {
                        "JOB_COMPLETION_INDEX": str(index),
                        "HOME": str(scratch),
                        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
                    },
                    cwd=scratch,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
        for host, log in zip(emulated, logs, strict=True):
            assert host.processes[0].wait(240) == 0, log.read_text()
    assert stat.S_IMODE((tmp_path / "scratch-0" / "token").stat().st_mode) == 0o600
    assert [row.step for row in read_metrics(Path(job.out, "metrics.jsonl"))] == [1, 2, 3, 4]
    assert "2 ranks" in logs[0].read_text()
