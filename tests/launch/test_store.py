"""The store of a job does what torch's own does, for all threads at once, and only for its user."""

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

import pytest
import torch.distributed as dist

from weft.launch.scratch import scratch_folder
from weft.launch.store import LARGEST, SocketStore, StoreServer


@pytest.fixture
def path() -> Iterator[Path]:
    with scratch_folder() as folder, StoreServer(folder / "store") as server:
        yield server.path


@pytest.fixture(params=["own", "torch"])
def store(request: pytest.FixtureRequest, path: Path) -> dist.Store:
    """A store of Weft, and one of torch: what holds for the one holds for the other."""
    return SocketStore(path, timedelta(seconds=5)) if request.param == "own" else dist.HashStore()


@pytest.mark.parametrize("prefix", [False, True])
def test_does_what_stores_of_torch_do(store: dist.Store, prefix: bool) -> None:
    one = dist.PrefixStore("p", store) if prefix else store
    one.set("a", "1")
    one.set("a", "2")
    assert one.get("a") == b"2"
    one.set("none", "")
    assert one.get("none") == b""
    assert [one.add("n", 3), one.add("n", -5)] == [3, -2]
    assert one.get("n") == b"-2"
    assert one.compare_set("a", "1", "3") == b"2"
    assert one.compare_set("a", "2", "3") == b"3"
    assert one.compare_set("new", "", "4") == b"4"
    assert one.compare_set("other", "5", "6") == b"5"
    assert one.check(["a", "n", "new"])
    assert not one.check(["a", "other"])
    assert one.delete_key("new")
    assert not one.delete_key("new")
    assert not one.check(["new"])
    one.multi_set(["x", "y"], ["7", "8"])
    assert one.multi_get(["y", "x"]) == [b"8", b"7"]
    one.wait(["x", "y"], timedelta(seconds=1))
    assert one.num_keys() >= 5
    with pytest.raises(dist.DistStoreError):
        one.wait(["never"], timedelta(seconds=0.1))


def test_who_waits_is_woken_and_keeps_nobody_waiting(path: Path) -> None:
    store, found = SocketStore(path, timedelta(seconds=20)), []
    waiters = [threading.Thread(target=lambda: found.append(store.get("late"))) for _ in range(20)]
    for waiter in waiters:
        waiter.start()
    begin = time.monotonic()
    for number in range(100):
        store.set("k", str(number))
        assert store.get("k") == str(number).encode()
    assert time.monotonic() - begin < 10
    assert found == []
    other = store.clone()
    other.set("late", b"x" * 3_000_000)
    for waiter in waiters:
        waiter.join()
    assert found == [b"x" * 3_000_000] * 20


def test_a_key_that_does_not_come_in_time(path: Path) -> None:
    store = SocketStore(path, timedelta(seconds=0.2))
    with pytest.raises(dist.DistStoreError, match=r"never did not come within 0\.2 s"):
        store.get("never")
    store.set("never", "now")
    assert store.get("never") == b"now"


def test_the_end_of_the_server(path: Path) -> None:
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
    assert "has gone" in errors[0]
    with pytest.raises(dist.DistNetworkError):
        store.set("a", "1")
    with pytest.raises(dist.DistNetworkError, match="no store at"):
        SocketStore(server.path)


@pytest.mark.parametrize(
    "noise",
    [b"\xff" * 1000, b"\x00" + (LARGEST + 1).to_bytes(4, "big"), b"\x01\x00\x00\x00\x00", b"\x05\x00\x00\x00\x00"],
)
def test_noise_ends_its_own_connection_only(noise: bytes, path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(str(path))
        connection.sendall(noise)
        connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    SocketStore(path).set("a", "1")


@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")
def test_other_users_reach_nothing(path: Path) -> None:
    SocketStore(path).set("a", "1")
    script = (
        f"import os, socket; os.setgid(65534); os.setuid(65534); socket.socket(socket.AF_UNIX).connect({str(path)!r})"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "PermissionError" in ended.stderr


def test_a_path_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="set TMPDIR to a shorter folder"):
        StoreServer(tmp_path / ("a" * 120))


GROUP = """
import gc, sys
from pathlib import Path
import torch, torch.distributed as dist
from weft.device.device import detect
from weft.launch.launcher import connect
rank, size, _ = connect(detect())
gc.collect()  # nothing that torch still needs may go
for _ in range(3):
    numbers = torch.ones(3)
    dist.all_reduce(numbers, group=dist.new_group())
    assert numbers.tolist() == [2.0] * 3
dist.group.WORLD.get_group_store().set(f"done/{rank}", "1")
dist.group.WORLD.get_group_store().wait(["done/0", "done/1"])
"""


def test_groups_of_torch_meet_at_it(path: Path) -> None:
    common = {**os.environ, "WEFT_STORE": str(path), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", GROUP], env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    assert [rank.wait(60) for rank in ranks] == [0, 0]
