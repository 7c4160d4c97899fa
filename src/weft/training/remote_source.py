"""Checks of the object store of a run before its ranks start: checkpoint.remote, and the URL of --resume."""

from pathlib import Path

from weft.checkpoint.folders import list_checkpoints, step_of
from weft.checkpoint.manifest import Manifest, read_manifest
from weft.checkpoint.remote import RemoteFolder, locate
from weft.errors import JobError
from weft.job import Job
from weft.object_store import is_url
from weft.training.checkpoints import checkpoint_folder


def open_remote(job: Job, resume: str | None, run_id: str) -> RemoteFolder | None:
    """Refuse a store that cannot be written, or that has the copies of another run. Writes and removes a small object.

    Args:
        job: job to start.
        resume: "auto", a checkpoint folder, a URL, or None for a new run.
        run_id: identity of the run in the run folder; "" if there is none.

    Returns:
        Folder of the run on the store; None without one.

    Raises:
        JobError: the URL is invalid, has no bucket, or has copies that are not of this run.
        UnreadableError: the store does not answer.
    """
    url = job.checkpoint.remote
    if job.checkpoint.per_host and (url or is_url(resume or "")):
        raise JobError(
            f"checkpoint.per_host with {url or resume}",
            where="checkpoint.per_host",
            rule="ranks copy a checkpoint from a store into a folder that all hosts share",
            fix="set checkpoint.per_host = false, with checkpoint.folder on a shared file system; or leave out the URL",
        )
    if not url:
        return None
    if not is_url(url):
        raise JobError(
            f"checkpoint.remote = {url!r} is no URL",
            where="checkpoint.remote",
            rule="copies go to an object store, by its URL",
            fix="write a URL such as s3://bucket/runs/first; checkpoint.folder names a folder of a file system",
        )
    remote = RemoteFolder(url)
    remote.probe()
    copies, owner = remote.reach(remote.copies), remote.reach(remote.read_run_id)
    is_fresh = resume == "auto" and not list_checkpoints(checkpoint_folder(job))
    may_continue = is_fresh or f"{resume}/".startswith(f"{remote.url}/") or (resume and owner == run_id)
    if copies and not may_continue:
        raise JobError(
            f"{remote.url} has checkpoints of run {owner or 'unknown'}, the newest of step {max(copies)}",
            where=f"checkpoint.remote = {url!r}",
            rule="a URL belongs to one run, and a new run overwrites no checkpoint",
            fix="continue that run with --resume auto in its run folder, or in an empty one; or name another URL",
        )
    return remote


def resume_candidates(job: Job, resume: str) -> list[str]:
    """Checkpoints that a run may resume from, as paths or URLs, preferred ones first.

    Args:
        job: job that resumes.
        resume: "auto", a checkpoint folder or a URL.
    """
    if is_url(resume):
        remote, step = locate(resume)
        return [remote.url_of(step)]
    if resume != "auto":
        return [resume]
    local = list_checkpoints(checkpoint_folder(job))
    if not job.checkpoint.remote:
        return list(map(str, local))
    remote, newest = RemoteFolder(job.checkpoint.remote), max(map(step_of, local), default=-1)
    newer = [remote.url_of(step) for step in remote.reach(remote.copies) if step > newest]
    return [*newer, *map(str, local)]


def manifest_at(checkpoint: str, key: bytes | None) -> Manifest:
    """Manifest of a checkpoint, by its path or URL; raises as `read_manifest`."""
    if not is_url(checkpoint):
        return read_manifest(Path(checkpoint), key)
    remote, step = locate(checkpoint)
    return remote.read_manifest(step, key)
