"""Chat data: every shape, the tokens with a loss, rows of whole chats, sets by weight, and refusals with their record."""

import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from datasets import Dataset, DatasetDict
from tokenizers import processors
from transformers import AutoTokenizer

from tests.data.chats import (
    CALLS,
    HEAD,
    MARKED,
    PLAIN,
    PROMPT,
    chats,
    decoded,
    message,
    save_tokenizer,
    write_jsonl,
)
from weft.data import IGNORED, Prepared, Rows, evaluation_batches, prepare
from weft.data.batches import collate
from weft.data.chat import to_chat
from weft.data.chat_template import ChatTemplate
from weft.data.packing import best_fit_order
from weft.errors import DataError
from weft.job import Data

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
ASKED = [message("user", "Hi"), message("assistant", "Ho")]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("plain") / "tokenizer")


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("marked") / "tokenizer", MARKED)


def prepared(tmp_path: Path, folder: Path, records: list[Any] | None = None, **keys: Any) -> tuple[Prepared, list[str]]:
    """Prepare records; return the tokens and the lines that are printed."""
    lines: list[str] = []
    path = keys.pop("path", None) or (
        None if "sets" in keys else str(write_jsonl(tmp_path / "chats.jsonl", records or []))
    )
    defaults = {"source": "jsonl", "seq_len": 255, "held_out": 0.0, "shuffle": False, "cache": str(tmp_path / "cache")}
    data = Data(**{**defaults, "format": "chat", "path": path, "tokenizer": str(folder), **keys})
    return prepare(data, model_folder=None, log=lines.append), lines


def rows(found: Prepared, seq_len: int = 255, packing: bool = False) -> list[np.ndarray]:
    opened = Rows(found.train, seq_len=seq_len, packing=packing, shuffle=False, seed=0)
    return [opened[number].tokens.numpy() for number in range(len(opened))]


def texts(found: Prepared, tokenizer: Path) -> list[str]:
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    return [decoded(loaded, row) for row in rows(found)]


SHAPES = {
    "messages": {"messages": ASKED},
    "messages of from and value": {"messages": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]},
    "prompt and completion": {"prompt": ASKED[:1], "completion": ASKED[1:]},
    "strings": {"prompt": "Hi", "completion": "Ho"},
    "alpaca": {"instruction": "Hi", "input": "", "output": "Ho"},
    "sharegpt": {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_each_shape_gives_the_same_chat(shape: str) -> None:
    chat = to_chat(SHAPES[shape], "here")
    assert chat.messages == ASKED
    assert chat.first == ("completion" in SHAPES[shape])


def test_other_fields_of_the_shapes() -> None:
    alpaca = {"instruction": "Add", "input": "1 2", "output": "3", "system": "Count.", "history": [["Hi", "Ho"]]}
    assert to_chat(alpaca, "").messages == [
        message("system", "Count."),
        *ASKED,
        message("user", "Add\n1 2"),
        message("assistant", "3"),
    ]
    assert to_chat({"prompt": "Hi", "completion": "Ho", "system": "Count."}, "").first == 2
    called = {"from": "function_call", "value": json.dumps(CALL["function"])}
    turns = [
        {"from": "human", "value": "1+2"},
        called,
        {"from": "observation", "value": "3"},
        {"from": "gpt", "value": "3"},
    ]
    chat = to_chat({"conversations": turns, "tools": json.dumps([TOOL])}, "")
    assert [m["role"] for m in chat.messages] == ["user", "assistant", "tool", "assistant"]
    assert chat.messages[1]["tool_calls"] == [CALL]
    assert chat.tools == [TOOL]


@pytest.mark.parametrize("kind", ["plain", "marked"])
def test_what_the_assistant_says_has_a_loss(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(kind)
    earlier = [*ASKED, message("user", "Bye"), message("assistant", "Later")]
    records = [{"messages": earlier}, {"prompt": earlier[:3], "completion": earlier[3:]}]
    records.append(
        {"messages": [ASKED[0], {"role": "assistant", "content": "", "tool_calls": [CALL]}], "tools": [TOOL]}
    )
    found = texts(prepared(tmp_path, tokenizer, records)[0], tokenizer)
    head, user = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "<|im_start|>user\nBye<|im_end|>\n"
    last = "<|im_start|>assistant\n{Later<|im_end|>\n}"
    assert found[0] == head + "{Ho<|im_end|>\n}" + user + last
    assert found[1] == head + "Ho<|im_end|>\n" + user + last
    assert '{{"name": "add", "arguments": {"a": 1}}<|im_end|>\n}' in found[2]
    assert '"parameters"' in found[2]


@pytest.mark.must("format: chat template")
def test_masks_equal_those_of_transformers(tmp_path: Path, marked: Path) -> None:
    records = chats(12)
    tokenizer = AutoTokenizer.from_pretrained(marked)
    stored = rows(prepared(tmp_path, marked, records)[0])
    for record, row in zip(records, stored, strict=True):
        expected = tokenizer.apply_chat_template(
            record["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        assert np.where(row < 0, ~row, row).tolist() == expected["input_ids"]
        assert (row >= 0).astype(int).tolist() == expected["assistant_masks"]


TEMPLATES = Path(importlib.util.find_spec("trl").submodule_search_locations[0]) / "chat_templates"  # type: ignore[union-attr,index]


@pytest.mark.parametrize("name", ["cohere2", "gemma", "gemma3", "lfm2", "llama3", "qwen2_5_vl", "qwen3_instruct_2507"])
def test_turns_of_published_templates_are_those_that_trl_marks(name: str, plain: Path) -> None:
    chat = to_chat({"messages": [*ASKED, message("user", "Bye"), message("assistant", "So long")]}, "here")
    found = []
    for file in (f"{name}.jinja", f"{name}_training.jinja"):
        tokenizer = AutoTokenizer.from_pretrained(plain, bos_token="<|endoftext|>")
        tokenizer.chat_template = (TEMPLATES / file).read_text()
        ids, mask = ChatTemplate(tokenizer, file).encode(chat)
        found.append(decoded(tokenizer, np.where(mask, ids, ~ids)))
    assert found[0] == found[1]
    assert found[0].count("{") == found[0].count("}") == 2
    assert "Hi" not in "".join(part.partition("}")[0] for part in found[0].split("{")[1:])


@pytest.mark.must("format: chats, jsonl, parquet and datasets")
@pytest.mark.parametrize("source", ["jsonl", "parquet", "datasets"])
def test_each_source_gives_the_same_tokens(source: str, tmp_path: Path, plain: Path) -> None:
    records = [{**chat, "tools": None} for chat in chats(5)] + [{"messages": ASKED, "tools": json.dumps([TOOL])}]
    expected = [row.tolist() for row in rows(prepared(tmp_path, plain, records)[0])]
    folder = tmp_path / source
    folder.mkdir()
    if source == "jsonl":
        write_jsonl(folder / "a.jsonl", records)
    elif source == "parquet":
        parquet.write_table(arrow.Table.from_pylist(records), folder / "a.parquet")
    else:
        Dataset.from_list(records).save_to_disk(folder)
    found, _ = prepared(tmp_path, plain, source=source, path=str(folder))
    assert [row.tolist() for row in rows(found)] == expected


def test_the_splits_of_a_dataset_are_not_mixed(tmp_path: Path, plain: Path) -> None:
    DatasetDict({name: Dataset.from_list(chats(3)) for name in ("train", "test")}).save_to_disk(tmp_path / "splits")
    (tmp_path / "splits" / "train" / "cache-1.arrow").write_bytes(b"left by Dataset.map")
    with pytest.raises(DataError, match="has several splits"):
        prepared(tmp_path, plain, source="datasets", path=str(tmp_path / "splits"))
    found, _ = prepared(tmp_path, plain, source="datasets", path=str(tmp_path / "splits" / "train"))
    assert len(rows(found)) == 3


def test_a_packed_row_has_whole_chats(tmp_path: Path, plain: Path) -> None:
    for shuffle in (False, True):
        found, _ = prepared(tmp_path, plain, chats(40), shuffle=shuffle)
        alone, packed = rows(found), Rows(found.train, seq_len=255, packing=True, shuffle=False, seed=0)
        assert len(packed) <= len(alone) / 2
        pieces = []
        for number in range(len(packed)):
            row = packed[number]
            assert len(row.tokens) <= 256
            pieces += np.split(row.tokens.numpy(), row.starts)
        assert [piece.tolist() for piece in pieces] == [row.tolist() for row in alone]
    batch = collate(packed, range(len(packed)), len(packed))
    targets = sum((row[1:] >= 0).sum() for row in alone)
    assert (batch.targets != IGNORED).sum() == targets
    assert batch.input_ids.min() >= 0


def test_best_fit_fills_rows_and_prefers_no_length_at_the_end() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 5000)
    order = best_fit_order(lengths, 128)
    assert sorted(order.tolist()) == list(range(5000))
    filled, used = 1, 0
    for length in lengths[order].tolist():
        filled, used = (filled, used + length) if used + length <= 128 else (filled + 1, length)
    assert filled <= 1.03 * lengths.sum() / 128
    assert abs(lengths[order[-1000:]].mean() - lengths.mean()) < 5


def test_chats_stay_whole_in_shards_and_splits(tmp_path: Path, plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [row.tolist() for row in rows(prepared(tmp_path, plain, chats(20))[0])]
    monkeypatch.setattr("weft.data.store.SHARD_TOKENS", 300)
    found, _ = prepared(tmp_path, plain, chats(20), held_out=0.3)
    assert len(found.train) > 2
    spans = [*found.train, *found.held_out]
    again = Rows(spans, seq_len=255, packing=False, shuffle=False, seed=0)
    assert [again[number].tokens.tolist() for number in range(len(again))] == expected


def test_long_chats_are_truncated_dropped_or_refused(tmp_path: Path, plain: Path) -> None:
    long = {"messages": [*ASKED, message("user", "more"), message("assistant", "word " * 200)]}
    records = [{"messages": ASKED}, long]
    found, lines = prepared(tmp_path, plain, records, seq_len=63)
    assert [len(row) for row in rows(found)][1] == 64
    assert "2 chats" in lines[-1]
    assert "1 truncated to seq_len + 1 = 64 tokens, 0 dropped" in lines[-1]
    again, lines = prepared(tmp_path, plain, records, seq_len=63)
    assert again == found
    assert "1 truncated" in lines[-1]
    found, lines = prepared(tmp_path, plain, records, seq_len=63, too_long="drop")
    assert len(rows(found)) == 1
    assert "0 truncated to seq_len + 1 = 64 tokens, 1 dropped" in lines[-1]
    with pytest.raises(DataError, match="chat of ") as caught:
        prepared(tmp_path, plain, records, seq_len=63, too_long="refuse")
    assert "line 2" in str(caught.value)


def test_sets_are_repeated_by_weight_and_each_gives_held_out_chats(tmp_path: Path, plain: Path) -> None:
    files = [write_jsonl(tmp_path / "a.jsonl", chats(10)), write_jsonl(tmp_path / "b.jsonl", chats(34)[10:])]
    parts = [prepared(tmp_path, plain, path=str(file), held_out=0.25)[0] for file in files]
    found, _ = prepared(tmp_path, plain, sets={str(files[0]): 2.5, str(files[1]): 0.5}, held_out=0.25)
    assert found.held_out == parts[0].held_out + parts[1].held_out
    first, second = ([row.tolist() for row in rows(part)] for part in parts)
    both = [row.tolist() for row in rows(found)]
    assert both[: 2 * len(first)] == first * 2
    rest = both[2 * len(first) :]
    of_first = next(index for index, row in enumerate(rest) if row == second[0])
    assert rest == first[:of_first] + second[: len(rest) - of_first]
    assert sum(map(len, rest[:of_first])) == pytest.approx(sum(map(len, first)) / 2, rel=0.4)
    assert sum(map(len, rest[of_first:])) == pytest.approx(sum(map(len, second)) / 2, rel=0.2)
    assert (
        found.identity != prepared(tmp_path, plain, sets={str(file): 1.0 for file in files}, held_out=0.25)[0].identity
    )


@pytest.mark.parametrize(
    ("weight", "count"), [(0.2, 1), (0.25, 1), (0.5, 2), (0.625, 3), (0.99, 4), (1.0, 4), (1.25, 5), (2.5, 10)]
)
def test_weights_count_chats_whatever_their_lengths(weight: float, count: int, tmp_path: Path, plain: Path) -> None:
    records = [{"messages": [ASKED[0], message("assistant", "word " * length)]} for length in (40, 1, 2, 3)]
    file = write_jsonl(tmp_path / "a.jsonl", records)
    whole = [row.tolist() for row in rows(prepared(tmp_path, plain, path=str(file))[0])]
    found, lines = prepared(tmp_path, plain, sets={str(file): weight})
    assert [row.tolist() for row in rows(found)] == (whole * 3)[:count]
    assert any(f"an epoch has {count} chats" in line for line in lines) == (weight != 1)


def test_a_weight_that_leaves_no_chat_is_refused(tmp_path: Path, plain: Path) -> None:
    file = str(write_jsonl(tmp_path / "a.jsonl", chats(4)))
    with pytest.raises(DataError, match=r"0\.1 times the chats of .* is none"):
        prepared(tmp_path, plain, sets={file: 0.1})


def test_one_chat_of_a_set_is_not_cut_into_splits(tmp_path: Path, plain: Path) -> None:
    files = [str(write_jsonl(tmp_path / f"{count}.jsonl", chats(count))) for count in (1, 5)]
    found, _ = prepared(tmp_path, plain, sets=dict.fromkeys(files, 1.0), held_out=0.3)
    alone, _ = prepared(tmp_path, plain, path=files[0])
    assert rows(found)[0].tolist() == rows(alone)[0].tolist()


THINKS = PLAIN.replace(
    "{{ message['content'] }}",
    "{% if enable_thinking is defined and not enable_thinking %}<quiet>{% endif %}{{ voice or '' }}{{ message['content'] }}",
)


@pytest.mark.parametrize("source", ["jsonl", "parquet"])
def test_arguments_of_job_and_record_reach_the_template(source: str, tmp_path: Path) -> None:
    """Those of a record come first; the tokens are those of `apply_chat_template` of Transformers."""
    folder = save_tokenizer(tmp_path / "tokenizer", THINKS)
    own: list[Any] = [None, {"enable_thinking": False}, {"enable_thinking": True}, json.dumps({"voice": "low"})]
    own = own if source == "jsonl" else [json.dumps(value) if value else None for value in own[:3]] + own[3:]
    records = [{"messages": ASKED, "chat_template_kwargs": value} for value in own]
    path = write_jsonl(tmp_path / "a.jsonl", records)
    if source == "parquet":
        path = tmp_path / "a.parquet"
        parquet.write_table(arrow.Table.from_pylist(records), path)
    job = {"enable_thinking": False, "voice": "loud"}
    found, _ = prepared(tmp_path, folder, source=source, path=str(path), chat_template_args=job)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    parsed = [json.loads(value) if isinstance(value, str) else value or {} for value in own]
    expected = [tokenizer.apply_chat_template(ASKED, **{**job, **value})["input_ids"] for value in parsed]
    assert [[max(token, ~token) for token in row.tolist()] for row in rows(found)] == expected
    without, _ = prepared(tmp_path, folder, source=source, path=str(path))
    assert without.digest != found.digest
    assert len({tuple(row) for row in expected}) == 3


@pytest.mark.parametrize(
    ("keys", "record", "expected"),
    [
        ({"chat_template_args": {"enable_thinkin": 1}}, {}, "does not read enable_thinkin"),
        ({"chat_template_args": {"tokenize": True}}, {}, "the argument tokenize"),
        ({}, {"chat_template_kwargs": {"add_generation_prompt": True}}, "the argument add_generation_prompt"),
        ({}, {"chat_template_kwargs": {"messages": []}}, "the argument messages"),
        ({}, {"chat_template_kwargs": [1]}, "chat_template_kwargs that are no object: [1]"),
        ({}, {"chat_template_kwargs": "{"}, "chat_template_kwargs that are no JSON: '{'"),
        ({"format": "text", "chat_template_args": {"a": 1}}, {}, 'data.chat_template_args with data.format = "text"'),
    ],
)
def test_arguments_that_the_template_does_not_take_are_refused(
    keys: dict[str, Any], record: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    folder = save_tokenizer(tmp_path / "tokenizer", THINKS)
    with pytest.raises(DataError) as caught:
        prepared(tmp_path, folder, [{"messages": ASKED, **record}], **keys)
    assert expected in str(caught.value)
    assert caught.value.fix


def test_arguments_can_keep_a_template_from_ending(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "tokenizer", PLAIN + "{% for a in range(n or 0) %}{{ 'x' * n }}{% endfor %}")
    prepared(tmp_path, folder, [{"messages": ASKED}])
    with pytest.raises(DataError, match="the chat template does not end"):
        prepared(tmp_path, folder, [{"messages": ASKED}], chat_template_args={"n": 99999})


def test_contents_in_parts_are_joined(tmp_path: Path, plain: Path) -> None:
    def parts(*texts: str) -> list[dict[str, Any]]:
        return [{"type": "text", "text": text, "image_url": None} for text in texts]

    joined = [{"messages": [message("system", ""), *ASKED]}, {"prompt": ASKED[:1], "completion": ASKED[1:]}]
    in_parts = [
        {
            "messages": [
                {**message("system", ""), "content": []},
                *({**m, "content": parts(*m["content"])} for m in ASKED),
            ]
        },
        {
            "prompt": [{"role": "user", "content": parts("Hi")}],
            "completion": [{"from": "gpt", "value": parts("H", "o")}],
        },
    ]
    expected, found = (texts(prepared(tmp_path, plain, records)[0], plain) for records in (joined, in_parts))
    assert found == expected
    assert "{Ho" in found[0]


def test_fields_of_records_without_effect_are_named(tmp_path: Path, plain: Path) -> None:
    record = {"messages": ASKED, "id": 3, "tools": None, "chat_template_kwargs": {"enable_thinking": False}}
    _, lines = prepared(tmp_path, plain, [record])
    assert next(line for line in lines if "without effect" in line).endswith("['enable_thinking', 'id']")


def test_a_held_out_split_counts_only_targets(tmp_path: Path, plain: Path) -> None:
    found, _ = prepared(tmp_path, plain, chats(20), held_out=0.3)
    held_out = Rows(found.held_out, seq_len=255, packing=True, shuffle=False, seed=0)
    scored = sum(
        int((batch.targets != IGNORED).sum())
        for batch in evaluation_batches(held_out, micro_batch=2, data_rank=0, data_ranks=1)
    )
    alone = Rows(found.held_out, seq_len=255, packing=False, shuffle=False, seed=0)
    assert scored == sum(int((alone[number].tokens[1:] >= 0).sum()) for number in range(len(alone)))
    assert 0 < scored < found.held_out_tokens / 2


def test_rows_of_tokens_may_mark_tokens_without_a_loss(tmp_path: Path) -> None:
    array = np.array([[5, ~6, 7, ~400], [1, 2, 3, 4]])
    np.save(tmp_path / "rows.npy", array)
    data = Data(source="tokens", path=str(tmp_path / "rows.npy"), seq_len=3, held_out=0, cache=str(tmp_path / "cache"))
    found = prepare(data, model_folder=None, log=lambda line: None)
    assert found.vocab_size == 401
    batch = collate(Rows(found.train, seq_len=3, packing=True, shuffle=False, seed=0), range(2), 2)
    assert batch.input_ids.tolist() == [[5, 6, 7], [1, 2, 3]]
    assert batch.targets.tolist() == [[IGNORED, 7, IGNORED], [2, 3, 4]]


def test_the_template_is_part_of_the_cached_content(tmp_path: Path, plain: Path) -> None:
    other = save_tokenizer(tmp_path / "other", PLAIN.replace("'<|im_start|>", "'<|im_start|> "))
    same = save_tokenizer(tmp_path / "same")
    records = chats(3)
    digests = {prepared(tmp_path, folder, records)[0].digest for folder in (plain, same, other)}
    assert len(digests) == 2


THINKING = (
    HEAD + "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}"
    "{{ '<think>' if loop.last }}{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{% endfor %}" + PROMPT
)
"""Marks each turn, and renders the last one differently."""
WEIGHTS = {
    "weight": {"weight": 0},
    "train": {"train": False},
    "loss": {"loss": False, "weight": 0},
    "loss_mask": {"loss_mask": 0.0},
}


@pytest.mark.parametrize("template", [PLAIN, MARKED, THINKING], ids=["plain", "marked", "thinking"])
def test_messages_of_weight_zero_have_no_loss(template: str, tmp_path: Path) -> None:
    """In each shape; messages of weight 1, and users of weight 0, are as those without a weight."""
    tokenizer = save_tokenizer(tmp_path / "tokenizer", template)
    asked = [message("user", "Hi"), message("assistant", "No"), message("user", "Bye"), message("assistant", "Yes")]
    expected = texts(prepared(tmp_path, tokenizer, [{"messages": asked}])[0], tokenizer)[0]
    assert "{No<|im_end|>" in expected
    whole = expected.replace("{No<|im_end|>\n}", "No<|im_end|>\n").replace("{No<|im_end|>}", "No<|im_end|>")
    records = []
    for fields in WEIGHTS.values():
        turns = [{**asked[0], "weight": 0}, {**asked[1], **fields}, asked[2], {**asked[3], "train": True}]
        speakers = [{"from": turn["role"], "value": turn["content"]} for turn in asked]
        records += [
            {"messages": turns},
            {"prompt": turns[:1], "completion": turns[1:]},
            {"conversations": [speakers[0], {**speakers[1], **fields}, *speakers[2:]]},
        ]
    assert texts(prepared(tmp_path, tokenizer, records)[0], tokenizer) == [whole] * len(records)


def test_fields_that_no_template_reads_are_named_at_each_start(tmp_path: Path, plain: Path) -> None:
    reads = save_tokenizer(tmp_path / "reads", PLAIN.replace(CALLS, CALLS + "{{ message.mood or '' }}"))
    said = [
        {**ASKED[0], "score": 3, "name": "Ann"},
        {**ASKED[1], "mood": "glad", "reasoning": "as", "weight": 1},
    ]
    record = {"conversations": [{"from": "human", "value": "Hi", "stars": 5}, {"from": "gpt", "value": "Ho"}]}
    for _ in range(2):  # the second time from the cache
        _, lines = prepared(tmp_path, plain, [{"messages": said}, record])
        (named,) = [line for line in lines if "without effect" in line]
        assert named.endswith("['mood', 'reasoning', 'score', 'stars']")
    _, lines = prepared(tmp_path, reads, [{"messages": said}])
    assert next(line for line in lines if "without effect" in line).endswith("['reasoning', 'score']")
    assert not any("without effect" in line for line in prepared(tmp_path, plain, chats(3))[1])


AS_TEXT = CALLS.replace("call['function'] | tojson", "call['function']['name'] + call['function']['arguments']")
PRINTED = CALLS.replace("call['function'] | tojson", "call['function']['name'] ~ call['function']['arguments']")


@pytest.mark.parametrize("calls", [CALLS, AS_TEXT, PRINTED], ids=["object", "concatenated", "printed"])
def test_arguments_of_calls_are_rendered_once(calls: str, tmp_path: Path) -> None:
    """Objects and their JSON text are the same, whichever of them the template reads."""
    tokenizer = save_tokenizer(tmp_path / "tokenizer", PLAIN.replace(CALLS, calls))
    arguments = {"city": "Köln", "days": [1, 2]}
    records = []
    for given in (arguments, json.dumps(arguments, ensure_ascii=False)):
        function = {"name": "add", "arguments": given}
        call = {"id": "1", "type": "function", "function": function}
        records += [
            {"messages": [ASKED[0], {"role": "assistant", "content": "", "tool_calls": [call]}], "tools": [TOOL]},
            {
                "conversations": [
                    {"from": "human", "value": "Hi"},
                    {"from": "function_call", "value": json.dumps(function)},
                ],
                "tools": json.dumps([TOOL]),
            },
        ]
    found = {tuple(row.tolist()) for row in rows(prepared(tmp_path, tokenizer, records)[0])}
    assert len(found) == 1
    text = AutoTokenizer.from_pretrained(tokenizer).decode([max(token, ~token) for token in found.pop()])
    assert json.dumps(arguments, ensure_ascii=False) in text


def without_stop(template: str) -> str:
    return template.replace("'<|im_end|>\n'", "''").replace(" + '<|im_end|>\n'", "")


STOPS = {
    "ends with the next header": (without_stop(PLAIN), False),
    "end outside of the mark": (
        MARKED.replace("{{ '<|im_end|>\n' }}{% endgeneration %}", "{% endgeneration %}{{ '<|im_end|>\n' }}"),
        False,
    ),
    "plain text": (PLAIN.replace("<|im_end|>", "***"), False),
    "marked": (MARKED, True),
    "plain": (PLAIN, True),
}


@pytest.mark.parametrize("case", STOPS)
def test_a_template_whose_stop_token_has_no_loss_is_named(case: str, tmp_path: Path) -> None:
    template, trains = STOPS[case]
    tokenizer = save_tokenizer(tmp_path / "tokenizer", template)
    for _ in range(2):  # the second time from the cache
        _, lines = prepared(tmp_path, tokenizer, chats(3))
        named = [line for line in lines if "no stop token has a loss" in line]
        assert len(named) == (not trains)
        assert all("template of data.tokenizer" in line and "<|endoftext|>" in line for line in named)
    # the fix that the line names
    ended = template.replace("***", "").replace(CALLS, CALLS + "{{ '<|endoftext|>' }}")
    fixed = save_tokenizer(tmp_path / "fixed", ended)
    assert not any("no stop token" in line for line in prepared(tmp_path, fixed, chats(3))[1])


def test_a_template_that_writes_the_time_is_named_and_its_tokens_are_kept(tmp_path: Path, plain: Path) -> None:
    tokenizer = save_tokenizer(tmp_path / "timed", "{{ strftime_now('%H:%M:%S.%f') }}" + MARKED)
    first, lines = prepared(tmp_path, tokenizer, chats(3))
    assert [str(tokenizer) in line for line in lines if "strftime_now" in line] == [True]
    again, lines = prepared(tmp_path, tokenizer, chats(3))
    assert again.identity == first.identity
    assert any("strftime_now" in line for line in lines)
    other, _ = prepared(tmp_path, tokenizer, chats(3), cache=str(tmp_path / "other"))
    assert other.identity != first.identity
    assert not any("strftime_now" in line for line in prepared(tmp_path, plain, chats(3))[1])


def test_a_second_that_passes_between_two_renderings_is_no_error(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "timed", "{{ strftime_now('%H:%M:%S') }}" + PLAIN)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    template, ends = ChatTemplate(tokenizer, str(folder)), time.monotonic() + 1.5
    chat = to_chat({"messages": ASKED * 3}, "here")
    while time.monotonic() < ends:
        ids, mask = template.encode(chat)
        assert decoded(tokenizer, np.where(mask, ids, ~ids)).count("{") == 3


BAD_RECORDS = {
    "no fields": ([1], "record without fields"),
    "another shape": ({"text": "Hi"}, "record with the fields text"),
    "no messages": ({"messages": []}, "messages without messages"),
    "no message": ({"messages": ["Hi"]}, "messages[0] is no message"),
    "no content": ({"messages": [{"role": "user"}, ASKED[1]]}, "messages[0] has no text"),
    "images": ({"messages": [{"role": "user", "content": [{"type": "image"}]}, ASKED[1]]}, "messages[0] has no text"),
    "unknown role": ({"messages": [message("usr", "Hi"), ASKED[1]]}, "unknown role 'usr'"),
    "unknown speaker": ({"conversations": [{"from": "humans", "value": "Hi"}]}, "unknown role 'humans'"),
    "no assistant": ({"messages": ASKED[:1]}, "chat without an assistant turn"),
    "no assistant in the completion": ({"prompt": ASKED, "completion": ASKED[:1]}, "chat without an assistant turn"),
    "preferences": ({"prompt": "Hi", "chosen": "Ho", "rejected": "No"}, "record of preferences"),
    "unwanted answer": ({"prompt": "Hi", "completion": "Ho", "label": False}, "record of preferences"),
    "half a weight": (
        {"messages": [ASKED[0], {**ASKED[1], "weight": 0.5}]},
        "messages[1] has another weight than 0 and 1: {'weight': 0.5}",
    ),
    "a weight in words": ({"messages": [ASKED[0], {**ASKED[1], "train": "no"}]}, "another weight than 0 and 1"),
    "a list of weights": ({"messages": [ASKED[0], {**ASKED[1], "loss_mask": [0, 1]}]}, "another weight than 0 and 1"),
    "two weights": ({"messages": [ASKED[0], {**ASKED[1], "weight": 1, "loss": False}]}, "has two weights"),
    "a loss on the user": (
        {"conversations": [{"from": "human", "value": "Hi", "train": True}, {"from": "gpt", "value": "Ho"}]},
        "conversations[0] of the role user has the weight 1",
    ),
    "no weight": (
        {"messages": [ASKED[0], {**ASKED[1], "weight": 0}]},
        "all messages of the assistant have the weight 0",
    ),
    "arguments": (
        {
            "messages": [
                ASKED[0],
                {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "{a"}}]},
            ]
        },
        "arguments of a call that are no JSON object: '{a'",
    ),
    "history": ({"instruction": "Hi", "output": "Ho", "history": ["Hi"]}, "history that is no list of pairs"),
    "no history": ({"instruction": "Hi", "output": "Ho", "history": 5}, "history that is no list of pairs"),
    "no calls": ({"messages": [ASKED[0], {**ASKED[1], "tool_calls": 5}]}, "messages[1] has no calls of tools"),
    "calls of a user": (
        {"messages": [{**ASKED[0], "tool_calls": [CALL]}, ASKED[1]]},
        "messages[0] has no calls of tools",
    ),
    "half a character": ({"messages": [message("user", "\ud800"), ASKED[1]]}, "half a surrogate pair"),
    "tools": ({"messages": ASKED, "tools": "{"}, "tools that are no JSON"),
    "tool call": ({"conversations": [{"from": "function_call", "value": "add"}]}, "is no tool call"),
    "assistant first": ({"messages": ASKED[1:]}, "the chat begins with the assistant"),
    "cut off": ({"messages": [message("user", "why? " * 300), ASKED[1]]}, "is cut off"),
}


@pytest.mark.parametrize("case", BAD_RECORDS)
def test_a_bad_record_is_refused_with_its_line(case: str, tmp_path: Path, plain: Path) -> None:
    record, expected = BAD_RECORDS[case]
    with pytest.raises(DataError) as caught:
        prepared(tmp_path, plain, [{"messages": ASKED}, record])
    assert expected in str(caught.value)
    assert "chats.jsonl, line 2, byte" in str(caught.value)
    assert caught.value.rule
    assert caught.value.fix
    assert not list((tmp_path / "cache").glob(".*"))


def test_the_suggested_length_keeps_a_target(tmp_path: Path, plain: Path) -> None:
    records = [{"messages": [message("user", "why? " * 300), ASKED[1]]}]
    with pytest.raises(DataError, match="is cut off") as caught:
        prepared(tmp_path, plain, records)
    assert caught.value.fix is not None
    seq_len = int(caught.value.fix.split("data.seq_len = ")[1].split()[0])
    found, _ = prepared(tmp_path, plain, records, seq_len=seq_len)
    assert (rows(found, seq_len)[0][1:] >= 0).sum() == 1
    with pytest.raises(DataError, match="is cut off"):
        prepared(tmp_path, plain, records, seq_len=seq_len - 1)


LOOP = "{% for a in range(99999) %}"
BAD_TEMPLATES = {
    "none": (None, "the tokenizer has no chat template"),
    "without roles": ("{% for m in messages %}{{ m['content'] }}{% endfor %}", "ignores roles"),
    "without messages": ("Hello", "ignores roles"),
    "last message only": ("{{ messages[-1]['role'] + messages[-1]['content'] }}", "ignores messages"),
    "error": ("{{ raise_exception('no') }}", "the chat template refuses the chat: no"),
    "unstable prefix": (
        PLAIN.replace(
            "{{ message['content'] }}", "{{ message['content'] if loop.last else message['content'] + '.' }}"
        ),
        "differently when others follow",
    ),
    "empty generation": (PLAIN + "{% generation %}{% endgeneration %}", "no token of the assistant has a loss"),
    "no tools": (PLAIN.replace("(tools | tojson)", "''"), "the tool 'add' is not in the text"),
    "computes without end": (PLAIN + f"{LOOP}{LOOP}{{% endfor %}}{{% endfor %}}", "the chat template does not end"),
    "writes without end": (PLAIN + f"{LOOP}{{{{ 'x' * 99999999 }}}}{{% endfor %}}", "the chat template does not end"),
}


@pytest.mark.parametrize("case", BAD_TEMPLATES)
def test_a_bad_template_is_refused(case: str, tmp_path: Path) -> None:
    template, expected = BAD_TEMPLATES[case]
    with pytest.raises(DataError) as caught:
        prepared(tmp_path, save_tokenizer(tmp_path / "bad", template), [{"messages": ASKED * 2, "tools": [TOOL]}])
    assert expected in str(caught.value)
    assert caught.value.rule
    assert caught.value.fix


def test_keys_that_do_not_fit_are_refused(tmp_path: Path, plain: Path) -> None:
    file = str(write_jsonl(tmp_path / "a.jsonl", chats(3)))
    for keys, expected in (
        ({"source": "text", "path": file}, 'data.format = "chat" with data.source = "text"'),
        ({"path": file, "sets": {file: 1.0}}, "data.sets replaces data.path"),
        ({"format": "text", "sets": {file: 1.0}}, 'data.sets with data.format = "text"'),
        ({"format": "text", "path": file, "too_long": "drop"}, 'data.too_long with data.format = "text"'),
        ({"path": file, "tokenizer": "train"}, "no tokenizer for chats"),
        ({"path": file, "seq_len": 15, "too_long": "drop"}, "no chat in 1 file, after 3 were dropped"),
    ):
        with pytest.raises(DataError) as caught:
            prepared(tmp_path, plain, **keys)
        assert expected in str(caught.value)


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_a_chat_begins_once(template: str, tmp_path: Path) -> None:
    """With the token that the template writes, also where the tokenizer puts one before every text, as that of Llama does."""
    folder = save_tokenizer(tmp_path / "tokenizer", "{{ bos_token }}" + template)
    tokenizer = AutoTokenizer.from_pretrained(folder, bos_token="<s>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    tokenizer.save_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder)("a")["input_ids"][0] == tokenizer.bos_token_id
    found, _ = prepared(tmp_path, folder, chats(4))
    for row, record in zip(rows(found), chats(4), strict=True):
        ids = np.where(row < 0, ~row, row).tolist()
        assert ids == tokenizer.apply_chat_template(record["messages"])["input_ids"]
        assert ids.count(tokenizer.bos_token_id) == 1
