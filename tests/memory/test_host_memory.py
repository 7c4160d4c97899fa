"""Memory of the host on CPU ranks: nothing is freed, and a run says so."""

from pathlib import Path
from typing import Any

import pytest

from tests.lab.jobs import write_job
from tests.lab.runs import observe
from weft.job import Job
from weft.memory.offload import explain_host_memory
from weft.plan import Memory


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"optimizer_device": "host"}, ["plan.memory.optimizer_device"]),
        ({"offload": ("block",)}, ["plan.memory.offload_to"]),
        ({"offload": ("mlp",), "optimizer_device": "host"}, ["plan.memory.optimizer_device", "plan.memory.offload_to"]),
        ({"offload": ("block",), "offload_to": "disk"}, []),
        ({"optimizer_device": "disk"}, []),
        ({}, []),
    ],
)
def test_settings_that_free_nothing_are_named_on_a_cpu(settings: dict[str, Any], named: list[str]) -> None:
    lines = explain_host_memory(Memory(**settings), "cpu")
    assert len(lines) == bool(named)
    assert all(key in lines[0] for key in named)
    assert explain_host_memory(Memory(**settings), "cuda") == []


def test_the_first_screen_names_them(tmp_path: Path) -> None:
    job = Job.load(write_job(tmp_path, plan={"memory": {"optimizer_device": "host"}}))
    (line,) = [line for line in observe(job, 1).screen if "frees no memory" in line]
    assert line.startswith("memory      plan.memory.optimizer_device")
