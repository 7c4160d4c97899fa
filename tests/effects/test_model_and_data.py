"""Effects of the tables model and data on a run of `weft train`: weights, modules, rows and tokens of a rank."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.data.chats import MARKED, chats, message, save_tokenizer, write_jsonl
from tests.lab.families import family
from tests.lab.jobs import write_job
from tests.lab.pool import close_pools
from tests.lab.runs import observe
from weft.compat import find_hook
from weft.errors import ModelError
from weft.job import Data, Job
from weft.training.session import Session

SEQ_LEN, ROWS = 16, 8
NO_CHANGE = {"lr": 1e-30, "weight_decay": 0.0}
"""Optimizer whose steps are too small for float32: the export of a run has the weights of its start."""
ODD_MODEL = Path(__file__).parents[2] / "examples" / "packages" / "odd-model"


def job_of(folder: Path, model: dict[str, Any], **tables: Any) -> Job:
    """Job of two steps on ready rows of random tokens, in a folder for its data and its run."""
    rows = np.random.default_rng(0).integers(3, 96, (ROWS, SEQ_LEN + 1))
    np.save(folder / "rows.npy", rows)
    data = {"source": "tokens", "path": str(folder / "rows.npy"), "seq_len": SEQ_LEN, "held_out": 0.0}
    tables = {"data": data, "optimizer": NO_CHANGE, **tables}
    job = Job.load(write_job(folder, **tables)).model_dump(exclude_none=True)
    return Job.parse({**job, "model": model})


def first_weights(config: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """Weights of plain Transformers after torch.manual_seed(seed)."""
    torch.manual_seed(seed)
    return dict(AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).state_dict())


def assert_same_weights(folder: Path, expected: dict[str, Tensor]) -> None:
    found = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-20, msg=name)


# Model


def names_of_blocks(session: Session) -> list[str]:
    return [block.name for block in session.anatomy.blocks]


@pytest.mark.effect("model.config", "blocks of the model of a rank: one, as in the named config.json")
@pytest.mark.effect("model.init_seed", "exported weights after steps of size zero: those of torch.manual_seed(7)")
def test_new_weights_have_the_sizes_of_the_configuration_and_the_seed(tmp_path: Path) -> None:
    config = {**family("llama"), "num_hidden_layers": 1}
    (tmp_path / "tiny.json").write_text(json.dumps(config))
    job = job_of(tmp_path, {"config": str(tmp_path / "tiny.json"), "init_seed": 7})
    run = observe(job, 1, probe=names_of_blocks)
    assert run.facts == [["model.layers.0"]]
    assert_same_weights(run.folder / "export", first_weights(config, 7))
    with pytest.raises(AssertionError):
        assert_same_weights(run.folder / "export", first_weights(config, 0))


@pytest.mark.effect("model.path", "exported weights after steps of size zero: those of the folder")
def test_weights_of_a_folder_are_the_start(tmp_path: Path) -> None:
    config = family("llama")
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).save_pretrained(tmp_path / "base")
    run = observe(job_of(tmp_path, {"path": str(tmp_path / "base")}), 1)
    assert_same_weights(run.folder / "export", first_weights(config, 5))


@pytest.fixture
def own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Name of a module that ranks can import, with classes of a model."""
    name = f"model_{tmp_path.name}"  # unknown to Transformers, also where a test runs twice in a process
    text = (ODD_MODEL / "odd_model.py").read_text().replace('"odd"', f'"{name}"')
    (tmp_path / f"{name}.py").write_text(text)
    close_pools()  # their ranks do not have the path
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)
    close_pools()


def module_and_roles(session: Session) -> tuple[str, Any]:
    """Module of the model's class, and the modules of its first block with the roles of attention and mlp."""
    block = session.anatomy.blocks[0]
    return type(session.model).__module__, (block.attention, block.mlp)


@pytest.mark.effect("model.package", "module of the class of a rank's model; without it, its model_type is unknown")
@pytest.mark.effect("model.roles", "modules of attention and mlp that a rank finds in the model; without it, none")
def test_a_model_of_a_package_trains_by_its_roles(own_model: str, tmp_path: Path) -> None:
    table = Job.load(ODD_MODEL / "job.toml").model.model_dump(exclude_none=True)
    table["config"]["model_type"] = own_model
    with pytest.raises(ModelError, match=own_model):
        observe(job_of(tmp_path, {**table, "package": ""}), 1)
    table["package"] = own_model
    without = {key: value for key, value in table.items() if key != "roles"}
    facts = [observe(job_of(tmp_path, model), 1, probe=module_and_roles).facts for model in (without, table)]
    assert facts == [[(own_model, ((), ()))], [(own_model, (("tower.0.mixer",), ("tower.0.net",)))]]


# Data


@dataclass
class Inputs:
    """Forward pre-hook that keeps the tokens and positions of each forward of training."""

    tokens: list[Tensor] = field(default_factory=list)
    positions: list[Tensor] = field(default_factory=list)

    def __call__(self, module: Any, args: Any, inputs: dict[str, Any]) -> None:
        if module.training:
            self.tokens.append(inputs["input_ids"].clone())
            self.positions.append(inputs["position_ids"].clone())


def keep_inputs(session: Session) -> None:
    session.model.register_forward_pre_hook(Inputs(), with_kwargs=True)


@dataclass
class Seen:
    """Facts of a rank about its data."""

    tokens: Tensor
    """Rows of all steps, [rows, seq_len]."""
    positions: Tensor
    train_rows: int
    held_out_rows: int
    files: list[str]
    """Files of tokens that the rank reads."""


def seen_data(session: Session) -> Seen:
    found, train = find_hook(session.model, Inputs), session.job.train
    assert found is not None
    seen = train.steps * train.global_batch_size  # of one rank; rows after them are those of measurements
    spans = session.prepared.train
    rows = len(session.train_rows), len(session.held_out_rows)
    return Seen(
        torch.cat(found.tokens)[:seen], torch.cat(found.positions)[:seen], *rows, [span.tokens for span in spans]
    )


def texts() -> list[str]:
    """Documents of different words, several to a row."""
    return [f"note {index} says {'la ' * (index % 4)}and ends." for index in range(60)]


@pytest.mark.effect("data.path", "tokens that the model gets: the text of the files there")
@pytest.mark.effect(
    "data.shuffle", "false: tokens that the model gets, step by step, are the text in the order of the files"
)
@pytest.mark.effect("data.seq_len", "columns of the tokens that the model gets")
@pytest.mark.effect("data.held_out", "held-out rows of a rank: a quarter of all rows")
@pytest.mark.effect("data.vocab_size", "entries of the trained tokenizer in the export: exactly this number")
@pytest.mark.effect(
    "data.cache", "folder of the files that a rank reads; a second run prints that it uses their tokens"
)
def test_rows_of_a_text_are_as_the_data_table_says(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    for index, text in enumerate(texts()):
        (tmp_path / "notes" / f"{index:02}.txt").write_text(text)
    data = {"path": str(tmp_path / "notes"), "shuffle": False, "seq_len": 24, "held_out": 0.25, "vocab_size": 280}
    job = Job.load(write_job(tmp_path, data=data, train={"steps": 2, "global_batch_size": 4}))
    run = observe(job, 1, fault=keep_inputs, probe=seen_data)
    seen = run.facts[0]
    assert seen.tokens.shape == (8, 24)
    tokenizer = AutoTokenizer.from_pretrained(run.folder / "export")
    stream = tokenizer.eos_token.join(texts())
    assert stream.startswith(tokenizer.decode(seen.tokens.flatten()))
    assert (seen.positions[:, 1:] == 0).any()  # data.packing is true: documents begin inside of rows
    assert seen.held_out_rows / (seen.train_rows + seen.held_out_rows) == pytest.approx(0.25, abs=0.05)
    assert len(tokenizer) == 280
    assert {Path(file).parent.parent for file in seen.files} == {tmp_path / "cache"}
    assert not [line for line in run.screen if "tokens from the cache" in line]
    again = observe(job, 1)
    assert [line for line in again.screen if "tokens from the cache" in line]


@pytest.mark.effect(
    "data.remote_cache", "lines of a run with an empty data.cache: it copies tokens and tokenizer, and makes neither"
)
def test_a_machine_without_tokens_copies_those_of_another(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("\n".join(texts()))
    url = f"file://{tmp_path}/store"
    data = {
        "path": str(tmp_path / "notes.txt"),
        "seq_len": 24,
        "vocab_size": 280,
        "held_out": 0.25,
        "remote_cache": url,
    }
    path = write_job(tmp_path, data=data, train={"steps": 1, "global_batch_size": 4})
    screens, tokens = [], []
    for machine in ("first", "second"):
        run = observe(Job.load(path, [f'data.cache="{tmp_path / machine}"']), 1, fault=keep_inputs, probe=seen_data)
        screens.append(" ".join(run.screen))
        tokens.append(run.facts[0].tokens)
    made = ("training a tokenizer", "tokenizing 1 files")
    assert all(line in screens[0] and line not in screens[1] for line in made)
    assert screens[1].count(f"copied from {url}/tok") == 2
    assert torch.equal(*tokens)


def notes(data: Data) -> Iterator[str]:
    """Documents of the user: as many as data.path says."""
    yield from texts()[: int(data.path or 0)]


@pytest.mark.effect("data.source", "tokens that the model gets: the documents that a function of the user yields")
@pytest.mark.effect("data.packing", "false: a row of a rank for each document, and no document begins inside of a row")
def test_documents_of_a_function_in_rows_of_their_own(tmp_path: Path) -> None:
    data = {"source": f"{__name__}:notes", "path": "12", "packing": False, "shuffle": False, "seq_len": 64}
    train = {"steps": 1, "global_batch_size": 8}
    job = Job.load(write_job(tmp_path, data={**data, "held_out": 0.0}, train=train))
    run = observe(job, 1, fault=keep_inputs, probe=seen_data)
    seen, tokenizer = run.facts[0], AutoTokenizer.from_pretrained(run.folder / "export")
    assert seen.train_rows == 12
    assert not (seen.positions[:, 1:] == 0).any()
    found = [tokenizer.decode(row).rstrip(tokenizer.decode([0])) for row in seen.tokens]
    assert found == texts()[:8]


def targets_of(records: list[dict[str, Any]], tokenizer: Any) -> int:
    """Tokens of the assistant in chats, by Transformers."""
    masks = [
        tokenizer.apply_chat_template(record["messages"], return_dict=True, return_assistant_tokens_mask=True)
        for record in records
    ]
    return sum(sum(mask["assistant_masks"]) for mask in masks)


@pytest.mark.effect("data.format", "chat: target tokens of a step are those of the assistant")
@pytest.mark.effect("data.sets", "rows of a rank: twice the chats of one set, and once those of another")
@pytest.mark.effect("data.too_long", "drop: rows of a rank without the long chat, and a line that one was dropped")
@pytest.mark.effect("data.tokenizer", "tokens that the model gets: chats by the tokenizer and template of the folder")
@pytest.mark.effect(
    "data.chat_template_args", "tokens that the model gets: a variable of the template, before each chat"
)
def test_chats_of_two_sets_are_rows_with_targets_of_the_assistant(tmp_path: Path) -> None:
    folder, arguments = save_tokenizer(tmp_path / "tokenizer", "{{ mood }}" + MARKED), {"mood": "glad"}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    first, second = chats(10)[:3], chats(10)[3:8]
    long = {"messages": [message("user", "more"), message("assistant", "word " * 200)]}
    files = [
        str(write_jsonl(tmp_path / f"{name}.jsonl", found)) for name, found in (("a", first), ("b", [*second, long]))
    ]
    data = {
        "format": "chat",
        "source": "jsonl",
        "sets": {files[0]: 2.0, files[1]: 1.0},
        "too_long": "drop",
        "tokenizer": str(folder),
        "chat_template_args": arguments,
        "packing": False,
        "seq_len": 192,
        "held_out": 0.0,
    }
    count = 2 * len(first) + len(second)
    path = write_job(
        tmp_path,
        model={"config": {**family("llama"), "vocab_size": 400, "max_position_embeddings": 256}},
        data=data,
        train={"steps": 1, "global_batch_size": count},
    )
    tables = Job.load(path).model_dump(exclude_none=True)
    del tables["data"]["path"]
    run = observe(Job.parse(tables), 1, fault=keep_inputs, probe=seen_data)
    seen = run.facts[0]
    assert seen.train_rows == count
    assert run.metrics[0].tokens == 2 * targets_of(first, tokenizer) + targets_of(second, tokenizer)
    assert [line for line in run.screen if "b.jsonl: 5 chats" in line and "0 truncated" in line and "1 dropped" in line]
    expected = [
        tokenizer.apply_chat_template(chat["messages"], tokenize=False, **arguments)
        for chat in [*first, *first, *second]
    ]
    assert all(text.startswith("glad<|im_start|>") for text in expected)
    rows = sorted(tokenizer.decode(row[row != 0]) for row in seen.tokens)
    assert rows == sorted(text[: text.rindex("\n")] for text in expected)  # the last token is a target alone
