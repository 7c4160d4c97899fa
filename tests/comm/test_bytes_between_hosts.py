"""Recorded bytes between hosts equal the bytes counted by the network interfaces of emulated hosts."""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.lab.commands import ForkedCommand, completed
from tests.lab.hosts import INTERFACE, hosts, payload_sent
from weft.backends.hierarchical import register_backend
from weft.comm.compression.codecs import CODECS
from weft.comm.compression.feedback import Feedback
from weft.comm.compression.reduce import AllReduce, levels_of
from weft.comm.recorder import Recorder

ROOT = Path(__file__).parents[2]
ELEMENTS = 2**20
PER_HOST, HOSTS = 2, 2


def rank_main(out: Path) -> None:
    """Entry point of a rank: all-reduce a tensor with each algorithm and codec."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    x = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(dist.get_rank()))
    flat, levels = (dist.new_group(backend=register_backend(kind)) for kind in ("flat", "two_level"))
    ways: dict[str, Any] = {
        "flat": lambda: dist.all_reduce(x.clone(), group=flat),
        "hierarchical": lambda: dist.all_reduce(x.clone(), group=levels),
    }
    for name, codec in CODECS.items():
        feedback = Feedback(codec)
        feedback.begin()
        ways[name] = lambda name=name, feedback=feedback: AllReduce(
            name, x.clone(), levels_of(levels, "inter_node"), feedback
        ).wait()
    found = {}
    for name, way in ways.items():
        way()  # creates the connections
        dist.barrier()
        before = payload_sent()
        dist.barrier()
        with Recorder() as recorder:
            way()
        dist.barrier()
        carried = payload_sent() - before
        own = torch.tensor([recorder.bytes_by("link").get("between", 0)])
        every = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(every, own)
        found[name] = carried, int(sum(every[:PER_HOST]))
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))


def test_interface_counters_equal_recorded_bytes(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    with hosts(HOSTS) as made:
        processes: list[ForkedCommand] = []
        for rank in range(HOSTS * PER_HOST):
            environment = {"RANK": rank, "WORLD_SIZE": HOSTS * PER_HOST, "MASTER_ADDR": made[0].address}
            environment |= {"MASTER_PORT": 29400, "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": 1}
            own = os.environ | {key: str(value) for key, value in environment.items()}
            processes.append(made[rank // PER_HOST].fork(["rank"], partial(rank_main, out), env=own))
        ended = [completed(process, 120) for process in processes]
        assert [process.returncode for process in ended] == [0] * len(ended), ended
    found = json.loads(out.read_text())
    for name, (carried, recorded) in found.items():
        if name != "flat":  # the recorder does not know which links of a ring leave a host
            assert carried == pytest.approx(recorded, rel=0.05), name
    carried = {name: carried for name, (carried, _) in found.items()}
    assert carried["hierarchical"] < carried["flat"] / 1.45
    assert carried["2:4"] < 0.3 * carried["hierarchical"]
    assert carried["2:4"] < 0.57 * carried["bf16"]
    assert carried["1-bit"] < 0.1 * carried["hierarchical"]
