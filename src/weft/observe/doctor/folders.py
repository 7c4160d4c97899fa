"""Folders of a run: writable, the same folder on all hosts, enough free space."""

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.errors import JobError
from weft.job import Job
from weft.observe.doctor.finding import Facts, Finding, group, label, size, summarize
from weft.training.run_folder import check_free

PREFIX = ".weft-doctor-"
KEYS = {"out": "run folder", "checkpoint.folder": "checkpoint folder", "data.cache": "token cache"}
MIN_FREE_FILES = 10_000


def folders_of(job: Job) -> dict[str, Path]:
    """Folders of a job that all hosts share, by key."""
    folders = {"out": Path(job.out), "data.cache": Path(job.data.cache).expanduser()}
    if job.checkpoint.folder:
        folders["checkpoint.folder"] = Path(job.checkpoint.folder)
    return folders


def nearest_existing(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    folder = folder.absolute()
    while not folder.is_dir():
        folder = folder.parent
    return folder


class SharedTrial:
    """Trial of host 0 whether other hosts see its folders: a folder of its own in each, removed at the end.

    Host 0 writes a random word, which other hosts must read (`see_trial`), and reads what they write. A context manager.
    """

    def __init__(self, folders: Mapping[str, Path]):
        self.folders, self.nonce = folders, secrets.token_hex(8)
        self.trials: dict[str, Path] = {}

    def __enter__(self) -> "SharedTrial":
        for key, folder in self.folders.items():
            try:
                trial = Path(tempfile.mkdtemp(prefix=PREFIX, dir=nearest_existing(folder)))
                trial.chmod(0o777 if os.geteuid() == 0 else 0o700)
                (trial / "host-0").write_text(self.nonce, encoding="utf-8")
                self.trials[key] = trial
            except OSError:  # reported by `read_folders`
                continue
        return self

    def __exit__(self, *exception: object) -> None:
        for trial in self.trials.values():
            shutil.rmtree(trial, ignore_errors=True)

    def offer(self) -> dict[str, Any]:
        """Message to the other hosts."""
        return {"nonce": self.nonce, "trials": {key: str(trial) for key, trial in self.trials.items()}}

    def seen(self, hosts: int, seconds: float) -> dict[str, list[int]]:
        """Hosts whose files appear in each folder within some seconds."""
        end = time.monotonic() + seconds
        while True:
            found = {
                key: [host for host in range(1, hosts) if _reads(trial / f"host-{host}", self.nonce)]
                for key, trial in self.trials.items()
            }
            if all(len(known) == hosts - 1 for known in found.values()) or time.monotonic() > end:
                return found
            time.sleep(0.1)


def see_trial(offer: Mapping[str, Any], host: int, seconds: float) -> dict[str, bool]:
    """On another host than 0: read the word of host 0 in each of its folders, and write it back.

    Args:
        offer: message of `SharedTrial.offer`.
        host: index of this host.
        seconds: time in which a file of host 0 must be visible.
    """
    end = time.monotonic() + seconds
    seen: dict[str, bool] = {}
    for key, text in offer["trials"].items():
        trial = Path(text)
        while not (found := _reads(trial / "host-0", offer["nonce"])) and time.monotonic() < end:
            time.sleep(0.1)
        seen[key] = found
        if found:
            try:
                (trial / f"host-{host}").write_text(offer["nonce"], encoding="utf-8")
            except OSError:  # host 0 misses the file
                continue
    return seen


def _reads(path: Path, nonce: str) -> bool:
    try:
        return path.read_text(encoding="utf-8") == nonce
    except OSError:
        return False


def read_folders(job: Job, leads: bool) -> dict[str, dict[str, Any]]:
    """State of the folders of a job on this host, by key: existing path, error of a trial file, free bytes and files.

    Args:
        leads: True on host 0, where no other run may hold the folder.
    """
    found: dict[str, dict[str, Any]] = {}
    for key, folder in folders_of(job).items():
        existing, problem = nearest_existing(folder), None
        try:
            with tempfile.TemporaryFile(dir=existing):
                pass
        except OSError as error:
            problem = error.strerror
        status = os.statvfs(existing)
        found[key] = {
            "path": str(folder),
            "existing": str(existing),
            "error": problem,
            "free_bytes": status.f_bavail * status.f_frsize,
            "free_files": status.f_favail if status.f_files else None,
        }
    if leads:
        try:
            check_free(job)
        except JobError as error:
            found["out"]["error"] = error.what
    return found


def judge_folders(hosts: Sequence[Facts]) -> list[Finding]:
    """Red: a folder cannot be written, is not the folder of host 0, or has no space for checkpoints; yellow: less than twice.

    Facts: "folders" of `read_folders`; "seen" of other hosts (`see_trial`); "written" of host 0 (`SharedTrial.seen`); "needs"
    of host 0: checkpoint_bytes, checkpoints and export_bytes.
    """
    findings = []
    examined = [facts for facts in hosts if group(facts, "folders")]
    for facts in examined:
        for key, folder in facts["folders"].items():
            name = f"{KEYS[key]} {folder['path']} on {label(facts)}"
            if folder["error"]:
                fix = f"set {key} to a folder that you may write to, or end the run that uses it"
                findings.append(Finding("red", "folder", f"{name}: {folder['error']}", fix))
            elif folder["free_files"] is not None and folder["free_files"] < MIN_FREE_FILES:
                text = f"{name}: {folder['free_files']} inodes are free"
                findings.append(Finding("yellow", "space", text, "remove files: `weft clean` lists earlier runs"))
    findings += _judge_shared(hosts) + _judge_space(hosts)
    return summarize("folder", findings, examined, "all folders can be written, are shared, and have space")


def _judge_shared(hosts: Sequence[Facts]) -> list[Finding]:
    findings = []
    written = (group(hosts[0], "written") or {}) if hosts else {}
    for facts in hosts[1:]:
        for key, seen in (group(facts, "seen") or {}).items():
            path = facts["folders"][key]["path"] if group(facts, "folders") else key
            fix = f"set {key} to a folder on a shared file system, mounted at the same path on every host"
            if not seen:
                text = f"{KEYS[key]} {path} on {label(facts)} is not the folder of host 0"
                findings.append(Finding("red", "shared folder", text, fix))
            elif facts["host"]["index"] not in written.get(key, ()):
                text = f"host 0 does not see what {label(facts)} writes into the {KEYS[key]} {path}"
                findings.append(Finding("red", "shared folder", text, f"{fix}, writable for all hosts"))
    return findings


def _judge_space(hosts: Sequence[Facts]) -> list[Finding]:
    """Free space on host 0 against the checkpoints that are kept, one that is being written, and the export."""
    needs = (group(hosts[0], "needs") or {}) if hosts else {}
    folders = (group(hosts[0], "folders") or {}) if hosts else {}
    if not needs.get("checkpoint_bytes") or not folders:
        return []
    key = "checkpoint.folder" if "checkpoint.folder" in folders else "out"
    need = needs["checkpoint_bytes"] * needs["checkpoints"] + needs["export_bytes"]
    free = folders[key]["free_bytes"]
    if free >= 2 * need:
        return []
    text = (
        f"{KEYS[key]} {folders[key]['path']}: {size(free)} are free, and {needs['checkpoints']} checkpoints of "
        f"{size(needs['checkpoint_bytes'])} and the export need {size(need)}"
    )
    fix = "free some space, or set checkpoint.folder to a larger disk, or lower checkpoint.keep"
    return [Finding("red" if free < need else "yellow", "space", text, fix)]
