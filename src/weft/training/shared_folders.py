"""Folders that all hosts of a run share, compared before data is prepared; all hosts refuse a folder that one does not share.

Host 0 writes a random word into each folder, which every other host must read there.
"""

import platform
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

from weft.checkpoint.together import unshared_error
from weft.files import replace_file
from weft.job import Job
from weft.launch.coordinator import JobCoordinator
from weft.training.run_folder import NONCE_FILE, run_folders

SHARING_SECONDS = 10.0  # delay allowed until a file of host 0 is visible on other hosts
NONCE = "nonce"  # key of the published settings


def shared_folders(job: Job) -> dict[str, str]:
    """Folders that all hosts of a run must share, with the key of each; none if each host keeps its own checkpoints."""
    return {} if job.checkpoint.per_host else {str(folder): key for folder, key in run_folders(job).items()}


def write_nonce(folders: Mapping[str, str], nonce: str = "") -> str:
    """Write a random word into folders, by which other hosts recognize them; return it.

    Args:
        folders: folders, with the key of each.
        nonce: word of before; "" for a new one.
    """
    nonce = nonce or secrets.token_hex(8)
    for folder in folders:
        replace_file(Path(folder) / NONCE_FILE, nonce)
    return nonce


def check_shared(folders: Mapping[str, str], nonce: str) -> None:
    """Refuse folders that are not those of host 0.

    Args:
        folders: folders on this host, with the key of each.
        nonce: content of their `NONCE_FILE`, written by host 0.

    Raises:
        JobError: the file is missing or has other content.
    """
    deadline = time.monotonic() + SHARING_SECONDS
    for folder, key in folders.items():
        while not _reads(Path(folder) / NONCE_FILE, nonce):
            if time.monotonic() > deadline:
                raise unshared_error(Path(folder), key, platform.node())
            time.sleep(0.1)


def share_with_launchers(coordinator: JobCoordinator, folders: Mapping[str, str]) -> str:
    """Let the launchers of all hosts compare folders. Called on every host; host 0 returns when all others have compared.

    Args:
        coordinator: connection to the other hosts.
        folders: folders that host 0 has created, with the key of each.

    Returns:
        The word in the folders.

    Raises:
        JobError: this host does not share a folder.
        RankFailure: on host 0, another host has refused to start, for this or another reason.
    """
    if coordinator.host:
        nonce = coordinator.wait_for_config(NONCE)[NONCE]
        check_shared(folders, nonce)
        coordinator.confirm_settings()
        return nonce
    nonce = write_nonce(folders)
    coordinator.publish_config({NONCE: nonce})
    if not coordinator.lost_host_0():  # hosts that were lost with it confirm when they are back
        coordinator.wait_for_confirmations()
    return nonce


def _reads(path: Path, nonce: str) -> bool:
    try:
        return path.read_text(encoding="utf-8") == nonce
    except (OSError, ValueError):
        return False
