"""Store: same behaviour as torch's stores, safe for concurrent threads, accessible only to its user."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo

from tests.lab.commands import completed, start_python
from tests.lab.pool import run_ranks
from tests.launch.test_membership import CountingServer
from weft.launch.rank_entry import LAZY_GLOO
from weft.launch.scratch import scratch_folder
from weft.launch.store import CHECK, GET, MAX_LENGTH, SocketStore, StoreServer, encode_fields, read_fields


@pytest.fixture
def path() -> Iterator[Path]:
    with scratch_folder() as folder, StoreServer(folder / "store") as server:
        yield server.path


@pytest.fixture(params=["own", "torch"])
def store(request: pytest.FixtureRequest, path: Path) -> dist.Store:
    """A store of Weft or of torch: both must behave the same."""
    return SocketStore(path, timedelta(seconds=5)) if request.param == "own" else dist.HashStore()


@pytest.mark.parametrize("prefix", [False, True])
def test_behaves_like_a_store_of_torch(store: dist.Store, prefix: bool) -> None:
    tested = dist.PrefixStore("p", store) if prefix else store
    tested.set("a", "1")
    tested.set("a", "2")
    assert tested.get("a") == b"2"
    tested.set("none", "")
    assert tested.get("none") == b""
    assert [tested.add("n", 3), tested.add("n", -5)] == [3, -2]
    assert tested.get("n") == b"-2"
    assert tested.compare_set("a", "1", "3") == b"2"
    assert tested.compare_set("a", "2", "3") == b"3"
    assert tested.compare_set("new", "", "4") == b"4"
    assert tested.compare_set("other", "5", "6") == b"5"
    assert tested.check(["a", "n", "new"])
    assert not tested.check(["a", "other"])
    assert tested.delete_key("new")
    assert not tested.delete_key("new")
    assert not tested.check(["new"])
    tested.multi_set(["x", "y"], ["7", "8"])
    assert tested.multi_get(["y", "x"]) == [b"8", b"7"]
    tested.wait(["x", "y"], timedelta(seconds=1))
    assert tested.num_keys() >= 5
    with pytest.raises(dist.DistStoreError):
        tested.wait(["never"], timedelta(seconds=0.1))


def test_waiting_threads_are_woken_and_do_not_block_other_threads(path: Path) -> None:
    store, values = SocketStore(path, timedelta(seconds=20)), []
    waiters = [threading.Thread(target=lambda: values.append(store.get("late"))) for _ in range(20)]
    for waiter in waiters:
        waiter.start()
    begin = time.monotonic()
    for value in range(100):
        store.set("k", str(value))
        assert store.get("k") == str(value).encode()
    assert time.monotonic() - begin < 10
    assert values == []
    other = store.clone()
    other.set("late", b"x" * 3_000_000)
    for waiter in waiters:
        waiter.join()
    assert values == [b"x" * 3_000_000] * 20


def test_a_missing_key_times_out(path: Path) -> None:
    store = SocketStore(path, timedelta(seconds=0.2))
    with pytest.raises(dist.DistStoreError, match=r"never not set within 0\.2 s"):
        store.get("never")
    store.set("never", "now")
    assert store.get("never") == b"now"


def test_the_clock_of_the_server_is_told(path: Path) -> None:
    before = time.time()
    assert before <= SocketStore(path).server_time() <= time.time()


def test_clients_get_an_error_when_the_server_is_closed(path: Path) -> None:
    server = StoreServer(path.with_name("other"))
    store, errors = SocketStore(server.path), []

    def wait() -> None:
        try:
            store.get("never")
        except dist.DistNetworkError as error:
            errors.append(str(error))

    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.1)
    server.close()
    server.close()
    waiter.join(10)
    assert len(errors) == 1
    assert "is gone" in errors[0]
    with pytest.raises(dist.DistNetworkError):
        store.set("a", "1")
    with pytest.raises(dist.DistNetworkError, match="no store at"):
        SocketStore(server.path)


@pytest.mark.parametrize(
    "noise",
    [b"\xff" * 1000, b"\x00" + (MAX_LENGTH + 1).to_bytes(4, "big"), b"\x01\x00\x00\x00\x00", b"\x05\x00\x00\x00\x00"],
)
def test_an_invalid_request_closes_only_its_own_connection(noise: bytes, path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(str(path))
        connection.sendall(noise)
        connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    SocketStore(path).set("a", "1")


@pytest.mark.must("fault: Another user of the host looks for the job's stores")
@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")
def test_other_users_cannot_connect(path: Path) -> None:
    SocketStore(path).set("a", "1")
    script = (
        f"import os, socket; os.setgid(65534); os.setuid(65534); socket.socket(socket.AF_UNIX).connect({str(path)!r})"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "PermissionError" in ended.stderr


def test_a_too_long_socket_path_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="set TMPDIR to a shorter path"):
        StoreServer(tmp_path / ("a" * 120))


GROUP = """
import gc, os
import torch, torch.distributed as dist
from weft.device.detect import detect
from weft.launch.rank_entry import connect
rank, size, _ = connect(detect())
gc.collect()  # must not delete anything that torch still uses
for _ in range(3):
    values = torch.ones(3)
    dist.all_reduce(values, group=dist.new_group())
    assert values.tolist() == [2.0] * 3
dist.group.WORLD.get_group_store().set(f"done/{rank}", "1")
dist.group.WORLD.get_group_store().wait(["done/0", "done/1"])
os._exit(0)  # as ranks do: gloo's threads sometimes abort a process whose interpreter has ended
"""


def test_process_groups_of_torch_use_the_store(path: Path) -> None:
    common = {**os.environ, "WEFT_STORE": str(path), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [start_python(GROUP, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)]
    ended = [completed(rank, 60) for rank in ranks]
    assert [rank.returncode for rank in ended] == [0, 0], ended


def test_many_processes_connect_at_once(path: Path) -> None:
    """Hosts of a large job start together; a full queue of connections would look like an end of the store."""

    async def ask() -> list[bytes]:
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(bytes([CHECK]) + encode_fields([b"missing"]))
        answer = await read_fields(reader)
        writer.close()
        return answer

    async def ask_all() -> list[list[bytes]]:
        return await asyncio.gather(*(ask() for _ in range(400)))

    assert asyncio.run(ask_all()) == [[b"-"]] * 400


def sum_by_gloo(rank: int, world_size: int, path: Path, lazy: str) -> float:
    with mock.patch.dict(os.environ, {LAZY_GLOO: lazy}):
        store = SocketStore(path)
        group = ProcessGroupGloo(dist.PrefixStore(lazy, store), rank, world_size, timedelta(seconds=60))
        value = torch.ones(1)
        group.allreduce([value]).wait()
        group.barrier().wait()
    return float(value)


def test_groups_of_gloo_that_connect_lazily_ask_the_store_less_than_for_each_pair() -> None:
    made = {}
    for lazy in ("0", "1"):
        with scratch_folder() as folder, CountingServer(folder / "store") as server:
            assert run_ranks(8, sum_by_gloo, server.path, lazy) == [8.0] * 8
            made[lazy] = server.requests[GET]
    assert made["0"] >= 8 * 7
    assert made["1"] <= 8 * 5
