"""Runs with copies of their checkpoints on an object store, which fails, and machines that are lost with their disks.

The store is an S3 server in a process of its own, with planted faults; runs of the pool, which are fast, use a folder.
"""

import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.faults.kill import Command, job_file, weft_train
from tests.faults.test_runs import on_step
from tests.lab.commands import start_function, weft
from tests.lab.object_store import ObjectStore
from tests.lab.pool import RankError
from tests.lab.remote_copies import local_checkpoint, send_all
from tests.lab.runs import ObservedRun, observe
from weft import object_store as store_module
from weft.checkpoint import uploads as uploads_module
from weft.checkpoint.folders import folder_of, list_checkpoints, step_of
from weft.checkpoint.manifest import NAME, read_manifest, verify_folder
from weft.checkpoint.remote import RemoteFolder, copy_name, fetch
from weft.checkpoint.uploads import Uploads
from weft.errors import CheckpointError, JobError, UnreadableError
from weft.job import Job
from weft.training import checkpoints as checkpoints_module
from weft.training.metrics import read_metrics
from weft.training.session import Session

URL = "s3://bucket/runs/first"
SHARD = "shard-00000.safetensors"
LAYOUT = "zero3 on 2"


def check_copies(remote: RemoteFolder, scratch: Path, key: bytes | None = None) -> list[int]:
    """Verify each copy that the store shows as complete; steps, newest first."""
    for step in (steps := list(remote.copies())):
        shutil.rmtree(scratch, ignore_errors=True)
        fetch(remote.url_of(step), scratch, key)
    return steps


# Runs in the pool, on a folder


def copy_each(session: Session) -> None:
    """Let each step wait until the checkpoint before has been copied, so that none is skipped."""
    assert session.checkpoints is not None
    snapshots, uploads = session.checkpoints.snapshots, session.checkpoints.uploads

    def wait(*_: object) -> None:
        if snapshots.writing is not None:
            snapshots.writing.join()
        while uploads is not None and uploads.is_busy():
            time.sleep(0.01)

    session.optimizer.inner.register_step_pre_hook(wait)


def train(
    folder: Path, name: str, ranks: int = 1, resume: str | None = None, fault: Any = copy_each, **tables: Any
) -> ObservedRun:
    """Train six steps in the pool, with a checkpoint after every second one."""
    settings = {"every": 2, "remote": f"file://{folder}/store/first", **tables.pop("checkpoint", {})}
    small = {"steps": 6, "global_batch_size": 4, "micro_batch_size": 1}
    path = job_file(folder, LAYOUT, train=small, checkpoint=settings, **tables)
    return observe(Job.load(path, [f'out="{folder / name}"']), ranks, resume=resume, fault=fault)


def check_equal(run: ObservedRun, whole: ObservedRun) -> None:
    """Compare losses, and the last checkpoint bit by bit, with those of an undisturbed run."""
    losses = {row.step: (row.loss, row.grad_norm) for row in whole.metrics}
    assert run.metrics
    assert all(losses[row.step] == (row.loss, row.grad_norm) for row in run.metrics)
    same_last_checkpoint(run.folder, whole.folder)


def same_last_checkpoint(run: Path, whole: Path) -> None:
    last = list_checkpoints(whole)[0]
    assert list_checkpoints(run)[0].name == last.name
    for path in last.glob("*.safetensors"):
        assert path.read_bytes() == (run / last.name / path.name).read_bytes(), path.name


@pytest.mark.must("fault: A machine is lost with its disk", case="2")
@pytest.mark.effect("checkpoint.remote", "copies of checkpoints below the URL, from which a lost run folder continues")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_whose_folder_is_lost_continues_from_its_copies(ranks: int, tmp_path: Path) -> None:
    whole = train(tmp_path, "whole", ranks, checkpoint={"remote": ""})
    train(tmp_path, "run", ranks)
    store = RemoteFolder(f"file://{tmp_path}/store/first")
    assert check_copies(store, tmp_path / "scratch") == [6, 4]  # checkpoint.keep
    store.withdraw(6)
    shutil.rmtree(tmp_path / "run")
    run = train(tmp_path, "run", ranks, "auto")
    assert f"resuming after step 4, from {tmp_path / 'run'}/step-00000004" in run.printed[0]
    assert f"step-00000006 is copied to {store.url}" in run.printed[0]
    check_equal(run, whole)
    assert check_copies(store, tmp_path / "scratch") == [6, 4]
    assert not list(tmp_path.glob("run/.step-*"))


def test_a_url_is_a_source_of_another_run(tmp_path: Path) -> None:
    whole = train(tmp_path, "first")
    url = f"file://{tmp_path}/store/first"
    for name, source in (("second", f"{url}/step-00000004"), ("third", url)):
        run = train(tmp_path, name, resume=source, checkpoint={"remote": ""})
        assert f"copying {url}/step-0000000{4 if name == 'second' else 6} to" in run.printed[0]
    check_equal(train(tmp_path, "fourth", resume=f"{url}/step-00000004", checkpoint={"remote": ""}), whole)
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        train(tmp_path, "fifth", resume=f"{url}/step-00000003", checkpoint={"remote": ""})
    with pytest.raises(CheckpointError, match="there is no complete checkpoint"):
        train(tmp_path, "fifth", resume=f"{url}/nothing", checkpoint={"remote": ""})
    assert not (tmp_path / "fifth").exists()


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing", "manifest"])
def test_a_damaged_copy_is_skipped_for_the_one_before(damage: str, tmp_path: Path) -> None:
    whole = train(tmp_path, "run")
    newest = tmp_path / "store/first/step-00000006"
    path = newest / (NAME if damage == "manifest" else SHARD)
    content = path.read_bytes()
    changed = content[:-1] if damage == "truncated" else content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]
    path.unlink() if damage == "missing" else path.write_bytes(changed)
    (tmp_path / "run").rename(tmp_path / "whole")
    whole.folder = tmp_path / "whole"
    run = train(tmp_path, "run", resume="auto")
    assert f"{newest.name} is skipped: " in run.printed[0]
    assert "resuming after step 4" in run.printed[0]
    check_equal(run, whole)
    assert check_copies(RemoteFolder(f"file://{newest.parent}"), tmp_path / "scratch") == [6, 4]
    for path in newest.parent.glob("*"):  # no copy is left to start from
        (path / NAME).write_bytes(b"{}") if path.is_dir() else None
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(RankError, match="none of 2 checkpoints can be used"):
        train(tmp_path, "run", resume="auto")


def test_a_newer_copy_repairs_a_damaged_checkpoint_of_the_disk(tmp_path: Path) -> None:
    whole = train(tmp_path, "whole", checkpoint={"remote": ""})
    train(tmp_path, "run")
    (tmp_path / "run/step-00000006" / SHARD).write_bytes(b"damaged")
    (tmp_path / "run/export").rename(tmp_path / "run/elsewhere")
    run = train(tmp_path, "run", resume="auto")
    assert "step-00000006 on the disk is now step-00000006.aside-1" in run.printed[0]
    same_last_checkpoint(run.folder, whole.folder)


def test_a_signed_copy_needs_the_key(tmp_path: Path) -> None:
    for name, text in (("key", "ab" * 32), ("other", "cd" * 32)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    whole = train(tmp_path, "run", checkpoint={"key_file": str(tmp_path / "key")})
    (tmp_path / "run").rename(tmp_path / "whole")
    whole.folder = tmp_path / "whole"
    with pytest.raises(UnreadableError, match="it was written with a key"):
        train(tmp_path, "run", resume="auto")
    with pytest.raises(RankError, match="none of 2 checkpoints can be used"):
        train(tmp_path, "run", resume="auto", checkpoint={"key_file": str(tmp_path / "other")})
    shutil.rmtree(tmp_path / "run")
    RemoteFolder(f"file://{tmp_path}/store/first").withdraw(6)
    run = train(tmp_path, "run", resume="auto", checkpoint={"key_file": str(tmp_path / "key")})
    assert "resuming after step 4" in run.printed[0]
    same_last_checkpoint(run.folder, whole.folder)


def test_a_run_without_resume_overwrites_no_copies(tmp_path: Path) -> None:
    train(tmp_path, "run")
    for name in ("run", "other"):
        with pytest.raises(JobError, match="has checkpoints of run"):
            train(tmp_path, name)
    assert not (tmp_path / "other").exists()
    assert not (tmp_path / "run.1").exists()


def delay_uploads(session: Session) -> None:
    """Let the first upload last until the checkpoint of step 4 waits for it."""
    assert session.checkpoints is not None
    assert session.checkpoints.uploads is not None
    uploads = session.checkpoints.uploads
    send = uploads._send_files

    def send_later(step: int, files: Any) -> None:
        while step == 1 and not (uploads.next and step_of(uploads.next[0]) >= 4):
            time.sleep(0.01)
        send(step, files)

    uploads._send_files = send_later  # type: ignore[method-assign]


def test_a_slow_store_gets_the_newest_checkpoint_and_training_does_not_wait(tmp_path: Path) -> None:
    """While the copy of step 1 is sent, its checkpoint stays on the disk; those of steps 2 and 3 are skipped for that of 4."""
    run = train(tmp_path, "run", fault=delay_uploads, checkpoint={"every": 1, "keep": 1})
    url = f"file://{tmp_path}/store/first"
    for step in (2, 3):
        assert f"no copy of step {step} at {url}: step {step + 1} is complete; training continues" in run.printed[0]
    assert f"step-00000001 is copied to {url}" in run.printed[0]
    assert f"step-00000006 is copied to {url}" in run.printed[0]
    assert [row.step for row in run.metrics] == [1, 2, 3, 4, 5, 6]
    assert list(RemoteFolder(url).copies()) == [6]
    assert [step_of(path) for path in list_checkpoints(run.folder)] == [6]


def take_over(session: Session) -> None:
    """Let another run write to the URL from step 3 on."""
    assert session.checkpoints is not None
    assert session.checkpoints.uploads is not None
    uploads = session.checkpoints.uploads

    def claim() -> None:
        while not uploads.remote.copies():
            time.sleep(0.01)
        uploads.remote.claim("another")

    on_step(session, 3, claim)


def test_a_run_sends_no_copy_to_the_url_of_another_run(tmp_path: Path) -> None:
    run = train(tmp_path, "run", fault=take_over)
    assert "no copy of step 6 at" in run.printed[0]
    assert "it belongs to run another by now; training continues" in run.printed[0]
    assert list(RemoteFolder(f"file://{tmp_path}/store/first").copies()) == [2]


def fail_first(session: Session) -> None:
    """Let nothing be sent before the update of step 5, and give up at once."""
    assert session.checkpoints is not None
    assert session.checkpoints.uploads is not None
    remote, fail = session.checkpoints.uploads.remote, [1]
    put = remote.fs.put_file

    def put_or_fail(*arguments: Any) -> None:
        if fail:
            raise PermissionError("the token has expired")
        put(*arguments)

    remote.fs.put_file = put_or_fail
    on_step(session, 5, fail.clear)


def test_a_run_without_its_store_continues_and_says_so(tmp_path: Path) -> None:
    run = train(tmp_path, "run", 2, fault=fail_first)
    url = f"file://{tmp_path}/store/first"
    assert f"no copy of step 2 at {url}: rank " in run.printed[0]
    assert "the token has expired; training continues" in run.printed[0]
    assert f"step-00000006 is copied to {url}" in run.printed[0]
    assert check_copies(RemoteFolder(url), tmp_path / "scratch")[0] == 6


def test_what_a_killed_run_has_not_copied_is_copied_by_the_next(tmp_path: Path) -> None:
    train(tmp_path, "run")
    store = RemoteFolder(f"file://{tmp_path}/store/first")
    store.withdraw(6)
    shard = Path(store.path(copy_name(6, SHARD)))
    written = shard.stat().st_mtime_ns
    run = train(tmp_path, "run", resume="auto")
    assert "the run has ended" in run.printed[0]
    assert f"step-00000006 is copied to {store.url}" in run.printed[0]
    assert shard.stat().st_mtime_ns == written  # it was there with its digest, and not sent again
    assert check_copies(store, tmp_path / "scratch") == [6, 4]


def test_copies_of_steps_that_are_trained_again_are_moved_aside(tmp_path: Path) -> None:
    train(tmp_path, "run")
    run = train(tmp_path, "run", resume=f"{tmp_path}/run/step-00000004")
    store = tmp_path / "store/first"
    assert f"step-00000006 at file://{store} is now step-00000006.aside-1" in run.printed[0]
    assert sorted(path.name for path in store.iterdir() if path.is_dir()) == [
        "step-00000004",
        "step-00000006",
        "step-00000006.aside-1",
    ]
    for path in store.glob("step-*"):
        verify_folder(path)


# An S3 server that fails


@pytest.mark.must("fault: An object store fails, throttles, or damages an upload", case="3")
@pytest.mark.parametrize("seed", range(8))
def test_uploads_are_right_whatever_the_store_does(seed: int, s3: ObjectStore, tmp_path: Path) -> None:
    """A third of the requests fails, each in another way; all copies verify, and one after the other is complete."""
    remote, generator = RemoteFolder(URL), random.getstate()
    s3.plant(0.3, seed=seed)
    for step in (1, 2):
        send_all(remote, local_checkpoint(tmp_path / "run", step, files=1))
    store_module.retrying(lambda: remote.tidy(1, 0), 60)
    assert sum(count for kind, count in s3.planted().items() if kind) > 2
    s3.plant(0.0)
    assert check_copies(remote, tmp_path / "scratch") == [2]
    assert random.getstate() == generator  # it belongs to training: ranks may choose layers by it


@pytest.mark.parametrize("seed", range(3))
def test_an_upload_in_parts_is_right_whatever_the_store_does(seed: int, s3: ObjectStore, tmp_path: Path) -> None:
    remote, folder = RemoteFolder(URL), local_checkpoint(tmp_path / "run", 1, files=1, size=120_000_000)
    s3.plant(0.25, "lost answer", "slow down", "corrupted", "repeated", seed=seed)
    send_all(remote, folder)
    s3.plant(0.0)
    assert check_copies(remote, tmp_path / "scratch") == [1]


def wait_for_uploads(uploads: Uploads) -> None:
    while uploads.is_busy():
        time.sleep(0.01)
    uploads.stop()


def upload(run: Path, steps: list[int], scratch: Path) -> None:
    """Uploading process of a run with one rank: copy checkpoints as they are written, beginning with the newest of before."""
    store = dist.FileStore(str(scratch / f"store-{os.getpid()}"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    uploads = Uploads(RemoteFolder(URL), run, "first", 2, 0.0)
    uploads.start(lambda text: print(text, flush=True))
    for folder in [*list_checkpoints(run)[:1], *(local_checkpoint(run, step, size=200_000) for step in steps)]:
        uploads.offer(folder, read_manifest(folder).files)
        time.sleep(0.05)
    wait_for_uploads(uploads)


@pytest.mark.slow("50 processes are killed")
@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_killed_uploads_leave_complete_copies_and_none_in_part(rate: float, s3: ObjectStore, tmp_path: Path) -> None:
    """After each kill, whatever the store shows as complete verifies, and it is not older than what was there before."""
    remote, rng, newest, kills = RemoteFolder(URL), random.Random(1), 0, 0
    remote.claim("first")
    trial = 0
    while kills < (50 if rate == 0 else 15):
        trial += 1
        s3.plant(rate, "slow down", "lost answer", "truncated", seed=trial)
        steps = list(range(3 * trial + 1, 3 * trial + 4))
        process = start_function(["upload"], lambda steps=steps: upload(tmp_path / "run", steps, tmp_path))
        time.sleep(rng.uniform(0.05, 0.9))
        kills += process.poll() is None
        process.kill()
        s3.plant(0.0)
        found = check_copies(remote, tmp_path / "scratch")
        assert max(found, default=0) >= newest
        newest = max(found, default=0)
    assert newest > trial  # many became complete
    last = start_function(["upload"], lambda: upload(tmp_path / "run", [], tmp_path))
    assert last.wait() == 0, last.output
    assert check_copies(remote, tmp_path / "scratch")[0] == step_of(list_checkpoints(tmp_path / "run")[0])
    assert len(remote._folders()) <= 2


def kill_run(command: Command) -> None:
    """Kill a launcher, and with it its ranks."""
    os.kill(command.process.pid, signal.SIGKILL)
    command.process.wait()


@pytest.mark.slow("real commands are killed, and their disks are lost")
def test_a_run_that_loses_its_machines_ends_with_the_bits_of_an_undisturbed_one(
    s3: ObjectStore, tmp_path: Path
) -> None:
    settings = {"every": 1, "remote": URL}
    job = job_file(tmp_path, LAYOUT, train={"steps": 30}, checkpoint={**settings, "remote": ""})
    with weft_train(job, LAYOUT, tmp_path / "whole") as command:
        assert command.wait() == 0, command.printed()
    job = job_file(tmp_path, LAYOUT, train={"steps": 30}, checkpoint=settings)
    s3.plant(0.05, "slow down", "lost answer", "truncated")
    rng, remote, last = random.Random(2), RemoteFolder(URL), 0
    for kill in range(4):
        with weft_train(job, LAYOUT, tmp_path / "run", "--resume", "auto") as command:
            if kill == 3:
                assert command.wait() == 0, command.printed()
                break
            for rank in (0, 1):
                command.rank_at(rank, last + 3)
            time.sleep(rng.uniform(0.2, 1.0))
            kill_run(command)
        found = check_copies(remote, tmp_path / "scratch")
        assert max(found, default=0) >= last
        last = max(found, default=0)
        shutil.rmtree(tmp_path / "run")
    assert last > 0
    losses = {row.step: row.loss for row in read_metrics(tmp_path / "whole/metrics.jsonl")}
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [losses[row.step] for row in rows] == [row.loss for row in rows]
    same_last_checkpoint(tmp_path / "run", tmp_path / "whole")
    assert check_copies(remote, tmp_path / "scratch")[0] == 30


@pytest.mark.must("fault: An object store cannot be reached when a run starts")
def test_a_store_that_cannot_be_used_is_refused_before_anything_is_written(
    s3: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "START_SECONDS", 0.1)
    job = job_file(tmp_path, LAYOUT, checkpoint={"remote": URL})

    def start(url: str, *options: str) -> tuple[int, str]:
        done = weft(
            "train",
            job,
            "--nproc-per-node",
            "2",
            "--out",
            tmp_path / "run",
            "--set",
            f"checkpoint.remote={url}",
            *options,
        )
        assert not (tmp_path / "run").exists()
        return done.returncode, done.stderr

    code, text = start("s3://elsewhere/first")
    assert code == 2, text
    assert "The specified bucket does not exist" in text
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        for url, *options in ((URL,), (URL, "--resume", "auto"), ("", "--resume", URL)):
            code, text = start(url, *options)
            assert code == 1
            assert "the store cannot be used: Could not connect to the endpoint URL" in text


def test_training_continues_while_the_store_is_gone(
    s3: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request is answered with SlowDown, from before the first checkpoint to the last."""
    monkeypatch.setattr(uploads_module, "SEND_SECONDS", 0.1)
    monkeypatch.setattr(store_module, "SEND_SECONDS", 0.1)
    job = job_file(tmp_path, LAYOUT, checkpoint={"remote": URL})
    with weft_train(job, LAYOUT, tmp_path / "run") as command:
        command.until(lambda: any("copies      of each" in line.text for line in command.lines), "the start screen")
        s3.plant(1.0, "slow down")
        assert command.wait() == 0, command.printed()
    assert "Please reduce your request rate" in command.printed()
    assert f"no copy of step 8 at {URL}" in command.printed()
    assert folder_of(tmp_path / "run", 8).is_dir()
    s3.plant(0.0)
    with weft_train(job, LAYOUT, tmp_path / "run", "--resume", "auto") as command:
        assert command.wait() == 0, command.printed()
    assert check_copies(RemoteFolder(URL), tmp_path / "scratch")[0] == 8


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_that_a_signal_ends_waits_for_its_last_copy_for_a_while(
    fails: bool, s3: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints_module, "SECONDS_AFTER_SIGNAL", 1.0 if fails else 60.0)
    job = job_file(tmp_path, LAYOUT, train={"steps": 100_000}, checkpoint={"every": 0, "remote": URL})
    with weft_train(job, LAYOUT, tmp_path / "run") as command:
        command.rank_at(1, 3)
        s3.plant(1.0 if fails else 0.0, "slow down")
        command.process.send_signal(signal.SIGUSR1)
        assert command.wait() == 128 + signal.SIGUSR1, command.printed()
    s3.plant(0.0)
    last = step_of(list_checkpoints(tmp_path / "run")[0])
    assert (f"the last copy at {URL} is not complete" in command.printed()) is fails
    assert check_copies(RemoteFolder(URL), tmp_path / "scratch") == [last] * (not fails)
