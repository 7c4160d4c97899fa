"""What must be the same on all hosts: versions, environment, job, data, model files and the user's own code."""

import inspect
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from weft.data.corpus import find_files
from weft.device.health import library_versions
from weft.errors import WeftError
from weft.job import DISTILLATION, Job
from weft.observe.doctor.finding import Facts, Finding, Level, describe_values, differing, group, label, summarize
from weft.own_code import load_function, load_module, package_version
from weft.training.same_inputs import digest_files, digest_of_weft
from weft.versions import TESTED, explain_version

RED_VERSIONS = ("python", "torch", "transformers", "weft", "code of Weft", "NCCL", "HCCL")
SETTINGS = ("NCCL_", "HCCL_", "TORCH_", "PYTORCH_", "CUDA_DEVICE_", "OMP_NUM_THREADS")
OF_ONE_HOST = ("_SOCKET_IFNAME", "_IB_HCA", "_LOGS_DIR", "_DEBUG_FILE")  # ends of variables that may differ
MOST_KEYS = 5  # differing keys in a finding


def read_versions(device_type: str) -> dict[str, str]:
    """Versions of Python, libraries, driver and collectives of this host, by name."""
    found = {"python": platform.python_version(), "weft": package_version(), "code of Weft": digest_of_weft()}
    for package in ("torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found | library_versions(device_type)


def read_settings(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment variables that change how ranks compute and communicate."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith(SETTINGS) and not name.endswith(OF_ONE_HOST)
    }


def flatten(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values of nested tables by dotted key; an empty table is a value."""
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        inner = flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
        flat |= inner
    return flat


def read_inputs(job: Job) -> dict[str, dict[str, str]]:
    """Digests of the inputs of a job on this host: {"data": {"digest": ...} or {"missing": text}, ...}.

    The standard library and functions of the user are read by host 0 alone, so that they have no digest here.
    """
    inputs: dict[str, dict[str, str]] = {}
    if job.data.source != "python" and ":" not in job.data.source:
        paths: list[str | None] = [*job.data.sets] or [job.data.path]
        tables = [job.data.model_copy(update={"path": path}) for path in paths]
        inputs["data"] = _digest(
            lambda: [(file, str(file.expanduser().resolve())) for data in tables for file in find_files(data)]
        )
    folders = {"model.path": job.model.path, "adapter.path": job.adapter.path}
    folders["model.config"] = job.model.config if isinstance(job.model.config, str) else None
    folders["distillation.teacher"] = job.distillation.teacher
    folders["data.tokenizer"] = job.data.tokenizer if job.data.tokenizer != "train" else None
    for key, path in folders.items():
        if path:
            inputs[key] = _digest(partial(_files_of, Path(path)))
    return inputs


def _files_of(path: Path) -> list[tuple[Path, str]]:
    path = path.expanduser()
    if path.is_dir():
        return [(file, file.name) for file in sorted(path.iterdir()) if file.is_file()]
    return [(path, path.name)]


def _digest(files: Any) -> dict[str, str]:
    try:
        return {"digest": digest_files(files())}
    except (OSError, WeftError) as error:
        return {"missing": str(error).splitlines()[0]}


def read_own_code(job: Job) -> dict[str, dict[str, str]]:
    """Digests of the modules of the user's functions in a job, by key of the job."""
    named = {"optimizer.name": job.optimizer.name, "optimizer.schedule": job.optimizer.schedule}
    named |= {"train.loss": job.train.loss, "data.source": job.data.source}
    named |= {f"plan.techniques[{index}]": name for index, name in enumerate(job.plan.techniques)}
    named |= {f"train.callbacks[{index}]": name for index, name in enumerate(job.train.callbacks)}
    found: dict[str, dict[str, str]] = {}
    for key, name in named.items():
        if ":" in name and name != DISTILLATION:
            found[key] = _digest_of_module(name, key)
    if job.model.package:
        found["model.package"] = _digest_of_module(job.model.package, "model.package")
    return found


def _digest_of_module(name: str, key: str) -> dict[str, str]:
    try:
        function = load_function(name, key) if ":" in name else load_module(name, key)
        source = Path(inspect.getsourcefile(sys.modules[name.partition(":")[0]]) or "")
        del function
        return {"name": name, "digest": digest_files([(source, source.name)])}
    except (OSError, TypeError, WeftError) as error:
        return {"name": name, "missing": str(error).splitlines()[0]}


def judge_versions(hosts: Sequence[Facts]) -> list[Finding]:
    """Red: versions of Python, torch, Transformers, Weft, NCCL or HCCL differ; yellow: drivers or environment variables differ,
    or torch or Transformers of host 0 is not tested.

    Facts: "versions" of `read_versions`, "settings" of `read_settings`.
    """
    findings = []
    names = dict.fromkeys(name for facts in hosts for name in group(facts, "versions") or ())
    for name in names:
        values = differing(hosts, lambda facts, name=name: (group(facts, "versions") or {}).get(name, "none"))  # type: ignore[misc]
        if len(values) > 1:
            level: Level = "red" if name in RED_VERSIONS else "yellow"
            fix = f"install the same version of {name} on all hosts, for example by the same image"
            findings.append(Finding(level, "version", f"{name}: {describe_values(values)}", fix))
    for name in dict.fromkeys(name for facts in hosts for name in group(facts, "settings") or ()):
        values = differing(hosts, lambda facts, name=name: (group(facts, "settings") or {}).get(name, "unset"))  # type: ignore[misc]
        if len(values) > 1:
            fix = f"set {name} to the same value on all hosts"
            findings.append(Finding("yellow", "environment", f"{name}: {describe_values(values)}", fix))
    versions = (group(hosts[0], "versions") or {}) if hosts else {}
    for name in versions.keys() & TESTED.keys():
        if versions[name] != "not installed" and (line := explain_version(name, versions[name])):
            findings.append(Finding("yellow", "version", line, f"install a tested version of {name} on all hosts"))
    text = ", ".join(f"{name} {versions[name]}" for name in versions if name != "code of Weft")
    return summarize("version", findings, [facts for facts in hosts if group(facts, "versions")], text)


def judge_job(hosts: Sequence[Facts]) -> list[Finding]:
    """Red: the job is refused, or it, an input file or the user's own code is missing on a host or differs between hosts.

    Facts: "needs" of host 0, with "refused"; "job": values by dotted key; "inputs" of `read_inputs`; "code" of `read_own_code`.
    """
    with_job = [facts for facts in hosts if group(facts, "job") is not None]
    refused = [group(facts, "needs") or {} for facts in with_job]
    findings = [Finding("red", "job", needs["refused"], "change the job") for needs in refused if "refused" in needs]
    findings += _judge_keys(with_job) + _judge_digests(with_job, "inputs", "copy the same files to all hosts")
    findings += _judge_digests(with_job, "code", "install the same code on all hosts, and start in its folder")
    return summarize("job", findings, with_job, "all hosts have the same job, inputs and code")


def _judge_keys(hosts: Sequence[Facts]) -> list[Finding]:
    findings = []
    for key in dict.fromkeys(key for facts in hosts for key in facts["job"]):
        values = differing(hosts, lambda facts, key=key: [facts["job"].get(key, "unset")])  # type: ignore[misc]
        if len(values) > 1:
            text = f"{key}: {describe_values([(value[0], found) for value, found in values])}"
            findings.append(Finding("red", "job", text, "give all hosts the same job file and the same --set"))
    if (more := len(findings) - MOST_KEYS) > 0:
        rest = Finding("red", "job", f"{more} more keys differ", "give all hosts the same job file and the same --set")
        findings = [*findings[:MOST_KEYS], rest]
    return findings


def _judge_digests(hosts: Sequence[Facts], name: str, fix: str) -> list[Finding]:
    check = {"inputs": "tokens and inputs", "code": "code"}[name]
    findings = []
    for key in dict.fromkeys(key for facts in hosts for key in group(facts, name) or ()):
        found = [(facts, (group(facts, name) or {}).get(key, {})) for facts in hosts]
        findings += [
            Finding("red", check, f"{key} on {label(facts)}: {entry['missing']}", fix)
            for facts, entry in found
            if "missing" in entry
        ]
        values = differing(hosts, lambda facts, key=key: (group(facts, name) or {}).get(key, {}).get("digest"))  # type: ignore[misc]
        if len(values) > 1:
            short = [(f"digest {value[:12]}", found) for value, found in values]
            findings.append(Finding("red", check, f"{key}: {describe_values(short)}", fix))
    return findings
