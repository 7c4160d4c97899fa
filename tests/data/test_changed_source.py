"""A source that was changed between two launches: the resume is refused by name, unless it is accepted."""

from pathlib import Path

import numpy as np
import pytest

from tests.faults.kill import job_file, weft_train
from weft.checkpoint.folders import list_checkpoints
from weft.checkpoint.manifest import read_manifest

LAYOUT = "zero3 on 2"


@pytest.mark.slow("whole commands, one after another")
def test_a_resume_with_replaced_tokens_is_refused_unless_accepted(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with weft_train(job_file(tmp_path, LAYOUT, train={"steps": 2}), LAYOUT, out) as first:
        assert first.wait() == 0, first.printed()
    before = read_manifest(list_checkpoints(out)[0]).data
    job = job_file(tmp_path, LAYOUT, train={"steps": 4})
    tokens = np.load(tmp_path / "tokens.npy")
    np.save(tmp_path / "tokens.npy", tokens[::-1])  # of the same name, size and vocabulary
    with weft_train(job, LAYOUT, out, "--resume", "auto") as other:
        assert other.wait() == 2
    assert f"the tokens of data.path = '{tmp_path}/tokens.npy' are others than those" in other.errors()[1]
    with weft_train(job, LAYOUT, out, "--resume", "auto", "--accept-changes") as other:
        assert other.wait() == 0, other.printed()
    assert "going on after step 2" in other.printed()
    after = read_manifest(list_checkpoints(out)[0])
    assert after.position.step == 4
    assert after.data != before
