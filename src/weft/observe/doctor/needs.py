"""Needs of a job on its hosts: memory of a rank by a dry run, bytes of checkpoints and export."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from weft.device.device import Device
from weft.errors import JobError, WeftError
from weft.job import Job, resolve_job
from weft.plan import BYTES
from weft.training.job_checks import check_model
from weft.training.startup import checkpoint_bytes

DRY_RUN_SECONDS = 300.0


def estimate_needs(job: Job, world_size: int, device: Device, *, dry_run: bool) -> dict[str, Any]:
    """Needs of a job, in bytes; {"refused": text} for a job that `weft train` refuses.

    Args:
        world_size: ranks of all hosts.
        device: device of the ranks.
        dry_run: also run `weft dryrun`, in another process, for the peak of the first and the last rank.

    Returns:
        checkpoint_bytes, checkpoints (kept, and one being written), export_bytes, shared_bytes (in-memory checkpoints per
        rank); with `dry_run` also peak_bytes per rank.
    """
    try:
        return _estimate(job, world_size, device, dry_run)
    except WeftError as error:
        return {"refused": str(error)}


def _estimate(job: Job, world_size: int, device: Device, dry_run: bool) -> dict[str, Any]:
    resolved = resolve_job(job, world_size, native_bf16=device.supports("bf16"))
    plan = resolved.plan
    anatomy = check_model(resolved).anatomy
    trained = anatomy.parameters - anatomy.frozen_parameters
    each = checkpoint_bytes(resolved, trained)
    kept = min(job.checkpoint.keep or 10**9, max(1, job.train.steps // max(1, job.checkpoint.every)))
    needs: dict[str, Any] = {
        "checkpoint_bytes": each,
        "checkpoints": 1 + kept if job.checkpoint.every else 1,
        "export_bytes": anatomy.parameters * BYTES[plan.precision.param_dtype],
        "shared_bytes": 2 * each / world_size if job.checkpoint.memory_every else 0.0,
    }
    if dry_run:
        needs["peak_bytes"] = _peak(job, world_size, device.type)
    return needs


def _peak(job: Job, world_size: int, device_type: str) -> int:
    """Peak bytes of a rank, the maximum over the first and the last one; in a process without the threads of this one."""
    with tempfile.TemporaryDirectory(prefix="weft-doctor-") as name:
        path, result = Path(name) / "job.toml", Path(name) / "peak.json"
        path.write_text(job.to_toml(), encoding="utf-8")
        command = [sys.executable, "-m", "weft", "dryrun", str(path), "--world-size", str(world_size)]
        done = subprocess.run(
            [*command, "--device", device_type, "--json", str(result)],
            capture_output=True,
            text=True,
            timeout=DRY_RUN_SECONDS,
        )
        if done.returncode:
            lines = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()
            raise JobError(f"the dry run of the job ended with code {done.returncode}: {lines[0]}")
        return max(rank["peak"] for rank in json.loads(result.read_text(encoding="utf-8")))
