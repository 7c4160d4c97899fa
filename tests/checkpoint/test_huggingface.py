"""Loading Hugging Face folders into shards, saving them, and damaged folders."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.lab.families import FAMILIES, family
from tests.lab.parity import plan_for
from tests.lab.plans import resolved
from tests.lab.pool import RankError, run_ranks
from tests.lab.shrink import shrunk
from weft.anatomy.build import build_on_meta
from weft.checkpoint.huggingface import convert_folder, gather_weights, save_folder
from weft.checkpoint.loading import materialize
from weft.checkpoint.model_config import read_config
from weft.checkpoint.plain_model import build_plain
from weft.errors import CheckpointError, ModelError
from weft.job import Model
from weft.parallel.parallelize import parallelize
from weft.topology.mesh import build_mesh


def save_plain(folder: Path, name: str = "qwen3_moe") -> Model:
    source = Model(config=family(name), init_seed=5)
    build_plain(source, read_config(source), torch.float32).save_pretrained(folder)
    return Model(path=str(folder))


def load_on_ranks(
    rank: int, world_size: int, source: Model
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int]:
    """Full weights (rank 0), buffers of this rank, and the number of parameter elements that it holds."""
    plan = resolved(plan_for("fp32"), world_size)
    model = build_on_meta(read_config(source), torch.float32)
    parallelize(model, plan, build_mesh(plan, "cpu", world_size))
    materialize(model, source, torch.device("cpu"))
    held = sum(parameter.to_local().numel() for parameter in model.parameters())
    return gather_weights(model), dict(model.named_buffers()), held


@pytest.mark.must("format: Hugging Face folder, read")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_is_loaded_into_shards_with_all_buffers(name: str, tmp_path: Path) -> None:
    source = save_plain(tmp_path, name)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    results = run_ranks(2, load_on_ranks, source)
    weights = results[0][0]
    for key, value in plain.state_dict().items():
        assert torch.equal(weights[key], value), key
    for _, buffers, held in results:
        assert held <= 0.7 * sum(parameter.numel() for parameter in plain.parameters())
        for key, buffer in plain.named_buffers():
            assert torch.equal(buffers[key], buffer), key


def test_initialized_weights_equal_plain_transformers() -> None:
    config = read_config(Model(config=family("llama")))
    torch.manual_seed(11)
    plain = AutoModelForCausalLM.from_config(config).state_dict()
    weights = run_ranks(2, load_on_ranks, Model(config=family("llama"), init_seed=11))[0][0]
    assert all(torch.equal(weights[key], value) for key, value in plain.items())


@pytest.mark.parametrize("damage", ["truncated", "missing", "one weight missing"])
def test_damaged_weights_are_an_error_on_every_rank(damage: str, tmp_path: Path) -> None:
    source = save_plain(tmp_path)
    file = tmp_path / "model.safetensors"
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-1000])
    elif damage == "missing":
        file.unlink()
    else:
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
        weights = model.state_dict()
        del weights["model.norm.weight"]
        model.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(RankError, match="CheckpointError") as caught:
        run_ranks(2, load_on_ranks, source)
    assert "model.norm.weight" in str(caught.value) or damage != "one weight missing"
    with pytest.raises(CheckpointError):
        build_plain(source, read_config(source), torch.float32)


@pytest.mark.must("format: Hugging Face folder, written")
def test_a_saved_folder_loads_with_the_same_weights(tmp_path: Path) -> None:
    for name in ("gpt2", "qwen3_moe", "deepseek_v3"):
        source = Model(config=family(name))
        config = read_config(source)
        plain = build_plain(source, config, torch.float32)
        save_folder(config, dict(plain.state_dict()), None, tmp_path / name, torch.float32)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        for (key, value), found in zip(plain.state_dict().items(), again.state_dict().values(), strict=True):
            assert torch.equal(found, value), key
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_convert_folder_changes_the_dtype_and_never_overwrites(tmp_path: Path) -> None:
    save_plain(tmp_path / "from")
    convert_folder(tmp_path / "from", tmp_path / "to", "bf16")
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "from").state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "to", dtype="auto").state_dict()
    assert all(torch.equal(after[key], value.bfloat16()) for key, value in before.items())
    with pytest.raises(CheckpointError, match="exists"):
        convert_folder(tmp_path / "from", tmp_path / "to", "bf16")
    with pytest.raises(CheckpointError, match="no weights"):
        convert_folder(tmp_path / "nowhere", tmp_path / "new", "bf16")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (Model(config={"hidden_size": 32}), "model_type"),
        (Model(config={"model_type": "no_such_family"}), "no_such_family"),
        (Model(config="nowhere/config.json"), "there is no file"),
        (Model(path="nowhere"), "there is no file"),
    ],
)
def test_bad_configurations_are_refused(source: Model, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        read_config(source)


@pytest.mark.parametrize("name", ["mamba2", "bamba", "falcon_h1", "nemotron_h", "granitemoehybrid"])
def test_configurations_with_infinite_values_are_read_and_written(name: str, tmp_path: Path) -> None:
    """Transformers writes them as {"__float__": "Infinity"}, which is not a JSON number."""
    config = AutoConfig.for_model(**shrunk(name))
    plain = AutoModelForCausalLM.from_config(config)
    plain.save_pretrained(tmp_path / "from")
    assert '"__float__"' in (tmp_path / "from" / "config.json").read_text()
    found = read_config(Model(path=str(tmp_path / "from")))
    assert list(found.time_step_limit) == list(config.time_step_limit)
    assert read_config(Model(config=str(tmp_path / "from" / "config.json"))).to_dict() == found.to_dict()
    save_folder(found, dict(plain.state_dict()), None, tmp_path / "to", torch.float32)
    again = Model(path=str(tmp_path / "to"))
    assert list(read_config(again).time_step_limit) == list(config.time_step_limit)
    weights = build_plain(again, read_config(again), torch.float32).state_dict()
    assert all(torch.equal(weights[key], value) for key, value in plain.state_dict().items())


def test_a_family_without_a_causal_model_is_refused() -> None:
    with pytest.raises(ModelError, match="vit is an encoder of images"):
        build_on_meta(read_config(Model(config={"model_type": "vit"})), torch.float32)
