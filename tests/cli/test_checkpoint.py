"""Output and exit codes of `weft checkpoint`."""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.lab.checkpoints import train_and_save
from tests.lab.families import family
from tests.lab.parity import plan_for
from tests.lab.pool import run_ranks
from weft.checkpoint.convert import to_checkpoint
from weft.checkpoint.dcp import DcpFolder
from weft.checkpoint.diff import diff
from weft.checkpoint.folders import folder_of, part_of, set_aside
from weft.checkpoint.manifest import read_manifest, write_manifest
from weft.checkpoint.model_config import read_config
from weft.checkpoint.plain_model import build_plain
from weft.cli import main
from weft.cli.checkpoint import SHOWN
from weft.job import Data, Job, Model

SOURCE = Model(config={**family("llama"), "tie_word_embeddings": True})
WEIGHT = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with run `a`, steps 1 and 2, and run `b`, in which another layout saved step 2 again."""
    folder = tmp_path_factory.mktemp("trained")
    run_ranks(2, train_and_save, SOURCE, plan_for("fp32", zero=3), folder / "a", (0, 1), None)
    run_ranks(2, train_and_save, SOURCE, plan_for("fp32", zero=3), folder / "a", (1, 2), folder_of(folder / "a", 1))
    run_ranks(2, train_and_save, SOURCE, plan_for("fp32", tp=2), folder / "b", (2, 2), folder_of(folder / "a", 2))
    return folder


@pytest.fixture
def runs(trained: Path, tmp_path: Path) -> Path:
    """Copy of `trained` that a test may damage."""
    return Path(shutil.copytree(trained, tmp_path / "runs"))


class Weft:
    """Runner of commands in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
        self.capsys, self.monkeypatch = capsys, monkeypatch

    def __call__(self, *arguments: str | Path, code: int = 0) -> str:
        """Output of a command on one line; checks its exit code."""
        self.monkeypatch.setattr(sys, "argv", ["weft", *map(str, arguments)])
        self.monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as stopped:
            main()
        printed = self.capsys.readouterr()
        assert "Traceback" not in printed.err
        assert stopped.value.code == code, printed
        return " ".join((printed.out + printed.err).replace("│", " ").split())


@pytest.fixture
def weft(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Weft:
    return Weft(capsys, monkeypatch)


def flip(file: Path, offset: int = -9) -> None:
    raw = bytearray(file.read_bytes())
    raw[offset] ^= 1
    file.write_bytes(raw)


@pytest.mark.must("command: checkpoint ls")
def test_ls_shows_every_folder_and_its_state(runs: Path, weft: Weft) -> None:
    run = runs / "a"
    text = weft("checkpoint", "ls", run)
    assert text.count("complete") == 2
    assert text.count("2 ranks, dp_shard 2, zero 3") == 2
    assert "good" not in text

    part_of(run, 3).mkdir()
    (part_of(run, 3) / "shard-00000.safetensors").write_bytes(b"half")
    set_aside(folder_of(run, 1))
    shutil.copytree(folder_of(run, 2), run / "best")
    shutil.copytree(folder_of(run, 2), folder_of(run, 4))
    (folder_of(run, 4) / "manifest.json").unlink()
    shutil.copytree(folder_of(run, 2), run / "worst")
    flip(run / "worst" / "shard-00001.safetensors")
    text = weft("checkpoint", "ls", run, "--verify")
    states = [
        "set aside, good",
        "good",
        "damaged: shard-00001.safetensors",
        "unfinished",
        "damaged: there is no checkpoint",
    ]
    assert text.index("best 2 ") < text.index("step-00000002 2 ")
    places = [text.index(state) for state in states]
    assert places == sorted(places)
    assert "damaged" in weft("checkpoint", "ls", run)  # a missing manifest is reported without reading all files
    assert sorted(path.name for path in run.iterdir())[0] == ".step-00000003.part"  # listing changes nothing


@pytest.mark.must("command: checkpoint verify")
def test_verify_checks_every_byte(runs: Path, weft: Weft) -> None:
    first, second = folder_of(runs / "a", 1), folder_of(runs / "a", 2)
    assert weft("checkpoint", "verify", runs / "a").count("is good: 2 files") == 2
    files = sorted(first.iterdir())
    assert len(files) == 3
    for file in files:
        whole = file.read_bytes()
        for place in (0, len(whole) // 2, len(whole) - 1):
            flip(file, place)
            text = weft("checkpoint", "verify", first, second, code=1)
            assert f"{first} does not verify" in text
            assert "rule:" in text
            assert f"{second} is good" in text
            file.write_bytes(whole)
    (first / "more").touch()
    assert "more is not part of the checkpoint" in weft("checkpoint", "verify", first, code=1)
    (first / "more").unlink()
    weft("checkpoint", "verify", first)


@pytest.mark.must("command: checkpoint diff")
def test_equal_state_in_two_layouts_is_equal(runs: Path, weft: Weft) -> None:
    text = weft("checkpoint", "diff", folder_of(runs / "a", 2), folder_of(runs / "b", 2))
    assert "The checkpoints are equal" in text
    assert "weights 20 0" in text
    assert "exp_avg_sq 20 0" in text
    assert "job.plan.parallel.tp: 1 against 2" in text
    assert "position" not in text.replace("and position.", "")


def test_another_step_differs_everywhere(runs: Path, weft: Weft) -> None:
    text = weft("checkpoint", "diff", folder_of(runs / "a", 1), folder_of(runs / "b", 2), code=1)
    assert "The first tensor that differs is weights/model.embed_tokens.weight" in text
    assert "weights 20 20" in text
    assert "buffers 2 0" in text
    assert "position.step: 1 against 2" in text


def test_long_lists_are_truncated_unless_all_is_given(runs: Path, tmp_path: Path, weft: Weft) -> None:
    source = folder_of(runs / "a", 2)
    other = Job(model=SOURCE).model_copy(update={"out": "elsewhere", "data": Data(path="a", seq_len=12, source="text")})
    manifest = read_manifest(source)
    job = {**other.model_dump(mode="json", exclude_none=True), **{f"key{number}": number for number in range(20)}}
    target = Path(shutil.copytree(source, tmp_path / "copy"))
    write_manifest(manifest.model_copy(update={"job": job}), target)
    keys = diff(source, target).job
    assert len(keys) > 20
    text = weft("checkpoint", "diff", source, target)
    assert text.count(" job.") == SHOWN
    assert f"{len(keys) - SHOWN} more keys of the job differ; --all lists them" in text
    text = weft("checkpoint", "diff", source, target, "--all")
    assert text.count(" job.") == len(keys)
    assert "more keys" not in text

    text = weft("checkpoint", "diff", folder_of(runs / "a", 1), folder_of(runs / "b", 2), "--all", code=1)
    assert text.count("elements differ, first at") == 1 + 60  # the first difference is also named before the table
    text = weft("checkpoint", "diff", folder_of(runs / "a", 1), folder_of(runs / "b", 2), code=1)
    assert text.count("elements differ, first at") < 1 + 60


def test_generators_are_compared_on_request(runs: Path) -> None:
    a, b = folder_of(runs / "a", 1), folder_of(runs / "a", 2)
    assert "rng" not in diff(a, b).compared
    assert diff(a, b, generators=True).compared["rng"] == 4


def converted(folder: Path, name: str, change: Any) -> Path:
    """Checkpoint converted from a Hugging Face folder after a change of one weight."""
    source = folder / f"{name}-hf"
    build_plain(SOURCE, read_config(SOURCE), torch.float32).save_pretrained(source)
    weights = load_file(source / "model.safetensors")
    change(weights[WEIGHT])
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    return to_checkpoint(source, folder / name, job=Job())


def set_bits(index: tuple[int, int], bits: int) -> Any:
    """Function that sets the bits of an element."""

    def change(weight: torch.Tensor) -> None:
        weight.view(torch.int32)[index] = bits

    return change


NAN, ANOTHER_NAN, ZERO, MINUS_ZERO, ONE, ONE_UP, INF = (
    0x7FC00000,
    0x7FC00001,
    0,
    -(2**31),
    0x3F800000,
    0x3F800001,
    0x7F800000,
)


@pytest.mark.parametrize(
    ("a", "b", "largest"),
    [(ZERO, MINUS_ZERO, 0.0), (NAN, ANOTHER_NAN, float("inf")), (ONE, ONE_UP, 2.0**-23), (INF, ONE, float("inf"))],
)
def test_one_bit_is_found_and_measured(a: int, b: int, largest: float, tmp_path: Path, weft: Weft) -> None:
    one, other = converted(tmp_path, "a", set_bits((3, 5), a)), converted(tmp_path, "b", set_bits((3, 5), b))
    found = diff(one, other)
    (tensor,) = found.tensors
    assert (tensor.name, tensor.elements, tensor.first) == (f"weights/{WEIGHT}", 1, (3, 5))
    assert tensor.largest == largest
    assert not found.equal
    text = weft("checkpoint", "diff", one, other, code=1)
    assert f"The first tensor that differs is weights/{WEIGHT}: 1 of 1,536 elements differ, first at [3, 5]" in text
    assert diff(one, one).equal


def test_identical_nans_are_equal(tmp_path: Path) -> None:
    one, other = (converted(tmp_path, name, set_bits((0, 0), NAN)) for name in ("a", "b"))
    assert diff(one, other).equal


def test_tensors_of_one_side_only(runs: Path, tmp_path: Path, weft: Weft) -> None:
    bare = converted(tmp_path, "bare", lambda weight: None)
    text = weft("checkpoint", "diff", folder_of(runs / "a", 1), bare, code=1)
    assert "60 tensors are in A alone, the first is exp_avg/model.embed_tokens.weight" in text


def test_damaged_checkpoint_is_refused(runs: Path, weft: Weft) -> None:
    a, b = folder_of(runs / "a", 1), folder_of(runs / "a", 2)
    flip(b / "shard-00000.safetensors")
    assert "has the digest" in weft("checkpoint", "diff", a, b, code=2)


@pytest.mark.must("command: checkpoint convert")
def test_convert_round_trip(runs: Path, tmp_path: Path, weft: Weft) -> None:
    source = folder_of(runs / "a", 2)
    text = weft("checkpoint", "convert", source, tmp_path / "hf", "--to", "hf")
    assert "no tokenizer" in text
    weft("checkpoint", "convert", tmp_path / "hf", tmp_path / "back", "--to", "weft")
    text = weft("checkpoint", "diff", source, tmp_path / "back", code=1)
    assert "weights 20 0" in text
    assert "buffers 2 0" in text


def test_convert_from_and_to_megatron(tmp_path: Path, weft: Weft) -> None:
    saved = Path(__file__).parent.parent / "checkpoint" / "megatron_core" / "qwen3"
    (tmp_path / "job.toml").write_text(f'[model]\nconfig = "{saved / "config.json"}"\n')
    command = ("checkpoint", "convert", saved / "iter_0000001", tmp_path / "made", "--job", tmp_path / "job.toml")
    assert "optimizer states of Megatron-Core are not converted" in weft(*command, "--to", "weft")
    weft("checkpoint", "convert", tmp_path / "made", tmp_path / "back", "--to", "megatron", "--dtype", "bf16")
    assert DcpFolder(tmp_path / "back").read("decoder.final_layernorm.weight").dtype == torch.bfloat16
    weft("checkpoint", "convert", tmp_path / "made", tmp_path / "dcp", "--to", "dcp", "--job", tmp_path / "job.toml")
    assert "model.norm.weight" in DcpFolder(tmp_path / "dcp").tensors
    options = ("--to", "megatron", "--tokenizer", saved)
    assert "belongs to --to hf" in weft("checkpoint", "convert", tmp_path / "made", tmp_path / "no", *options, code=2)


def test_convert_to_dcp_says_what_it_has(runs: Path, tmp_path: Path, weft: Weft) -> None:
    source = folder_of(runs / "a", 2)
    assert "weights alone" not in weft("checkpoint", "convert", source, tmp_path / "dcp", "--to", "dcp")
    (tmp_path / "job.toml").write_text(Job(model=SOURCE).to_toml())
    back = ("--to", "weft", "--job", tmp_path / "job.toml")
    weft("checkpoint", "convert", tmp_path / "dcp", tmp_path / "back", *back)
    text = weft("checkpoint", "diff", source, tmp_path / "back", code=1)
    assert "exp_avg_sq 20 0" in text
    weft("checkpoint", "convert", source, tmp_path / "hf", "--to", "hf")
    assert "weights alone" in weft("checkpoint", "convert", tmp_path / "hf", tmp_path / "plain", "--to", "dcp")
    options = ("--to", "dcp", "--dtype", "bf16")
    assert "--dtype belongs to" in weft("checkpoint", "convert", source, tmp_path / "no", *options, code=2)
    assert not (tmp_path / "no").exists()


@pytest.mark.must("command: export")
def test_export_of_a_step(runs: Path, tmp_path: Path, weft: Weft) -> None:
    (runs / "a" / "job.toml").write_text(Job(model=SOURCE).to_toml())
    weft("export", runs / "a", tmp_path / "hf", "--step", "2", "--dtype", "bf16")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    assert found.dtype == torch.bfloat16
    weft("checkpoint", "convert", folder_of(runs / "b", 2), tmp_path / "same", "--to", "hf", "--dtype", "bf16")
    same = AutoModelForCausalLM.from_pretrained(tmp_path / "same", dtype="auto").state_dict()
    assert all(torch.equal(same[key], value) for key, value in found.state_dict().items())
    assert "there is no checkpoint in" in weft("export", runs / "a", tmp_path / "no", "--step", "7", code=2)
    assert "is no run folder" in weft("export", tmp_path, tmp_path / "no", "--step", "2", code=2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ls", "{nowhere}"], "there is no folder"),
        (["diff", "{a}", "{nowhere}"], "there is no checkpoint in"),
        (["diff", "{a}", "{hf}"], "there is no checkpoint in"),
        (["diff", "{a}", "{file}"], "there is no checkpoint in"),
        (["convert", "{run}", "{to}", "--to", "hf"], "is a run with 2 checkpoints"),
        (["convert", "{file}", "{to}", "--to", "weft"], "is a file"),
        (["convert", "{a}", "{hf}", "--to", "hf"], "exists"),
        (["convert", "{hf}", "{to}", "--to", "weft", "--dtype", "bf16"], "belongs to --to hf"),
        (["convert", "{a}", "{to}"], "--to"),
    ],
)
def test_bad_input(arguments: list[str], words: str, runs: Path, tmp_path: Path, weft: Weft) -> None:
    (tmp_path / "file").touch()
    build_plain(SOURCE, read_config(SOURCE), torch.float32).save_pretrained(tmp_path / "hf")
    places = {name: tmp_path / name for name in ("nowhere", "hf", "file", "to")}
    filled = [argument.format(run=runs / "a", a=folder_of(runs / "a", 1), **places) for argument in arguments]
    assert words in weft("checkpoint", *filled, code=2)
    assert not os.path.lexists(tmp_path / "to")


def test_verify_without_a_checkpoint(tmp_path: Path, weft: Weft) -> None:
    assert "there is no checkpoint in" in weft("checkpoint", "verify", tmp_path / "nowhere", code=1)
