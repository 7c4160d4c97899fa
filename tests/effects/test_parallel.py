"""Effects of the table plan.parallel on a run of `weft train`, beside a run with the defaults of the tests."""

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.tensor import DTensor

from tests.lab.jobs import write_job
from tests.lab.runs import ObservedRun, observe
from weft.job import Job
from weft.training.session import Session


def count_parameters(session: Session) -> int:
    """Elements of the parameters that this rank holds."""
    local = (p.to_local() if isinstance(p, DTensor) else p for p in session.model.parameters())
    return sum(p.numel() for p in local)


def run(folder: Path, ranks: int = 2, probe: Any = None, **tables: Any) -> ObservedRun:
    return observe(Job.load(write_job(folder, **tables)), ranks, probe=probe)


@pytest.mark.effect("plan.parallel.zero", "elements of the parameters of a rank: all with 0, half on two ranks with 3")
def test_zero(tmp_path: Path) -> None:
    counts = {zero: run(tmp_path, probe=count_parameters, plan={"parallel": {"zero": zero}}).facts for zero in (0, 3)}
    assert counts[0][0] == counts[0][1]
    assert sum(counts[3]) == counts[0][0]
