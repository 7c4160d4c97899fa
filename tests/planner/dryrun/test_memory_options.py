"""`weft memory`: the result of each option is the dry run of the corresponding plan."""

import json
import sys
from pathlib import Path

import pytest

from tests.planner.dryrun.test_trace import DENSE, job_for
from weft.cli import main
from weft.plan import Memory
from weft.planner.dryrun import memory_options
from weft.planner.dryrun.memory_options import OPTIONS, compare_options
from weft.planner.dryrun.trace import trace


def test_each_option_is_a_dry_run_of_its_plan() -> None:
    job = job_for({**DENSE, "num_hidden_layers": 1}, "bf16", 2, zero=0)
    options = {option.name: option for option in compare_options(job, 2, 0, "cuda")}
    assert list(options) == list(OPTIONS)
    found = {name: option.found for name, option in options.items() if option.found is not None}
    assert len(found) == len(OPTIONS)
    base = found["base plan"]
    memory = Memory(offload=("attention",))
    moved = job.model_copy(update={"plan": job.plan.model_copy(update={"memory": memory})})
    (expected,) = trace(moved, 2, [0], "cuda")
    assert found["offload attention"].count == expected.count
    assert 0 < found["offload attention"].offloaded["activations"] <= found["offload attention"].offload_traffic
    # Pool blocks may be an eighth larger than requested.
    assert found["optimizer on the host"].offload_traffic == pytest.approx(
        2 * base.count.state_bytes["optimizer"], rel=0.125
    )
    assert found["recompute block"].count.flops > base.count.flops == found["split weights"].count.flops
    for name, other in found.items():
        assert other.count.peak <= base.count.peak, name
        assert sum(other.count.peak_roles.values()) == other.count.peak_bytes["activations"]


@pytest.mark.must("command: memory", case="3")
@pytest.mark.parametrize("count", [3, len(OPTIONS)])
def test_refused_options_are_printed(
    count: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    some = dict(list(OPTIONS.items())[:count])
    monkeypatch.setattr(memory_options, "OPTIONS", some)
    job = Path(__file__).parents[3] / "examples" / "llama-70b.toml"
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "head_dim": 16, "vocab_size": 512}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    settings = [f"model.config.{key}={value}" for key, value in small.items()]
    settings += [
        "data.seq_len=32",
        "train.global_batch_size=1",
        "plan.parallel.tp=1",
        "plan.precision.param_dtype=fp32",
    ]
    arguments = [word for setting in settings for word in ("--set", setting)]
    monkeypatch.setattr(sys, "argv", ["weft", "memory", str(job), *arguments, "--json", str(tmp_path / "options.json")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    text = capsys.readouterr().out
    assert "refused:" in text
    assert "weights without param_dtype = bf16" in text
    rows = json.loads((tmp_path / "options.json").read_text())
    assert [row["option"] for row in rows] == list(some)
    assert rows[1]["refused"]
    assert rows[0]["peak"] == sum(rows[0]["peak_bytes"].values())
