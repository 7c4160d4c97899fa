"""Records of conversations in four shapes, read as one: messages with roles, tools, and the first message with loss."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.data.corpus import SHOWN, arrow_batches, json_records, unreadable
from weft.errors import DataError, nearest

ROLES = ("system", "developer", "user", "assistant", "tool")
SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}
"""Role of each value of `from` in sharegpt records, as in LLaMA-Factory."""
LOSS_FIELDS = ("weight", "train", "loss", "loss_mask")
"""Fields of a message that say whether it has a loss: 0 and false, or 1 and true."""
RECORD_FIELDS = {
    *("messages", "prompt", "completion", "conversations", "instruction", "input", "output", "history"),
    *("system", "tools", "chat_template_kwargs"),
}
"""Fields of a record that Weft reads."""
SHAPES = 'a record has "messages", "prompt" and "completion", "instruction" and "output", or "conversations"'

Message = dict[str, Any]


@dataclass(frozen=True)
class Chat:
    """Conversation, as chat templates of Transformers take it."""

    messages: list[Message]
    """Messages with a role and a content, or the tool calls of an assistant."""
    tools: list[Any] | None
    """JSON schemas of the tools that the assistant may call; None: no tools."""
    first: int
    """Index of the first message that may have a loss: what the assistant says before it belongs to the prompt."""
    where: str
    """Location of the record, for errors."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template for this chat: `chat_template_kwargs` of the record."""
    unread: frozenset[str] = frozenset()
    """Fields of the record that have no effect."""

    @property
    def trained(self) -> list[int]:
        """Indices of the messages that have a loss: the assistant's from `first` on, without those of weight 0."""
        return [
            number
            for number, message in enumerate(self.messages)
            if number >= self.first and message["role"] == "assistant" and message.get("weight", 1)
        ]


def read_chats(source: str, files: Sequence[Path]) -> Iterator[Chat]:
    """Iterate over the conversations of the files, one at a time.

    Args:
        source: jsonl, parquet or datasets.
        files: files from `corpus.find_files`.

    Raises:
        DataError: a file is damaged, or a record is not a conversation; the message has the location.
    """
    for path in files:
        try:
            for record, where in json_records(path) if source == "jsonl" else _table_records(source, path):
                yield to_chat(record, where)
        except OSError as error:
            raise unreadable(path, error) from None


def to_chat(record: Any, where: str) -> Chat:
    """Conversation of a record of any shape.

    The shapes are those of TRL and LLaMA-Factory: `messages` (role and content), `prompt` and `completion` (strings or
    messages), alpaca (`instruction`, `input`, `output`, and `system` and `history`) and sharegpt (`conversations` of from and
    value). Messages may be in the form of another shape's. Of several shapes in a record, the first one counts.

    Args:
        record: value of a line or row.
        where: location of the record.

    Raises:
        DataError: the record has none of the shapes, a message has no known role, no content, or a weight other than 0 and 1,
            or no message of the assistant has a loss.
    """
    if not isinstance(record, dict):
        raise _malformed(record, "record without fields", where, SHAPES)
    record = {key: value for key, value in record.items() if value is not None}
    if "rejected" in record or isinstance(record.get("label"), bool):
        rule = "in supervised fine-tuning, every answer of the assistant is one to learn"
        raise _malformed(list(record), "record of preferences, with answers to avoid", where, rule)
    first = 0
    if "messages" in record:
        messages = _messages(record["messages"], "messages", where)
    elif "prompt" in record and "completion" in record:
        messages = _turns(record["prompt"], "user", "prompt", where)
        first = len(messages)
        messages += _turns(record["completion"], "assistant", "completion", where)
    elif "conversations" in record:
        messages = _messages(record["conversations"], "conversations", where)
    elif "instruction" in record and "output" in record:
        messages = _alpaca(record, where)
    else:
        raise _malformed(record, f"record with the fields {', '.join(record) or 'of nothing'}", where, SHAPES)
    system = record.get("system")
    if system and messages[0]["role"] != "system":
        messages, first = [_message("system", system, "system", where), *messages], first + bool(first)
    if not any(message["role"] == "assistant" for message in messages[first:]):
        part = "completion" if first else "conversation"
        raise DataError(
            f"chat without an assistant turn: the {part} has {', '.join(m['role'] for m in messages[first:])}",
            where=where,
            rule="the loss is on what the assistant says",
            fix="remove the record, or give the answer the role assistant",
        )
    rule = "chat_template_kwargs is an object with arguments of the chat template, or its JSON text"
    arguments = _parsed(record.get("chat_template_kwargs"), "chat_template_kwargs", where, rule)
    if not isinstance(arguments, dict | None):
        raise _malformed(arguments, "chat_template_kwargs that are no object", where, rule)
    unread = frozenset(record.keys() - RECORD_FIELDS)
    chat = Chat(messages, _tools(record.get("tools"), where), first, where, arguments or {}, unread)
    if not chat.trained:
        raise DataError(
            "chat without a loss: all messages of the assistant have the weight 0",
            where=where,
            rule="the loss is on what the assistant says, in messages without a weight or with the weight 1",
            fix="remove the record, or the weight of an answer to learn",
        )
    return chat


def _alpaca(record: dict[str, Any], where: str) -> list[Message]:
    messages, history = [], record.get("history", [])
    if not isinstance(history, list) or any(not isinstance(pair, list) or len(pair) != 2 for pair in history):
        raise _malformed(history, "history that is no list of pairs", where, "history has [question, answer] pairs")
    for pair in history:
        messages += [
            _message(role, text, "history", where) for role, text in zip(("user", "assistant"), pair, strict=True)
        ]
    parts = [record["instruction"], record.get("input") or ""]
    if not all(isinstance(part, str) for part in parts):
        raise _malformed(parts, "instruction or input that is no string", where, "alpaca fields are strings")
    question = _message("user", "\n".join(part for part in parts if part), "instruction", where)
    return [*messages, question, _message("assistant", record["output"], "output", where)]


def _turns(value: Any, role: str, field: str, where: str) -> list[Message]:
    """Messages of a prompt or a completion, which may be a string."""
    return [_message(role, value, field, where)] if isinstance(value, str) else _messages(value, field, where)


def _messages(value: Any, field: str, where: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise _malformed(value, f"{field} without messages", where, f"{field} is a list of messages")
    messages = []
    for number, item in enumerate(value):
        name = f"{field}[{number}]"
        item = {key: part for key, part in item.items() if part is not None} if isinstance(item, dict) else item
        if isinstance(item, dict) and "from" in item and "value" in item:
            own = {key: part for key, part in item.items() if key not in ("from", "value")}
            messages.append(_weighted({**own, **_sharegpt(item, name, where)}, name, where))
        elif isinstance(item, dict) and "role" in item:
            role = _known(item["role"], ROLES, f"{name}.role", where)
            calls = item.get("tool_calls")
            if calls is not None and (role != "assistant" or not _is_list_of_tables(calls)):
                rule = "tool_calls is a list of calls in a message of the assistant"
                raise _malformed(calls, f"{name} has no calls of tools", where, rule)
            content = {} if calls and "content" not in item else _message(role, item.get("content"), name, where)
            messages.append(_weighted({**item, **content}, name, where))
        else:
            raise _malformed(item, f"{name} is no message", where, "a message has role and content, or from and value")
    return messages


def _weighted(message: Message, name: str, where: str) -> Message:
    """Message whose fields of `LOSS_FIELDS` are checked; one without a loss has the weight 0."""
    values = {key: message[key] for key in LOSS_FIELDS if key in message}
    if not values:
        return message
    if not all(isinstance(value, int | float) and value in (0, 1) for value in values.values()):
        raise _malformed(
            values, f"{name} has another weight than 0 and 1", where, "0 or false: no loss; 1 or true: a loss"
        )
    if len(set(values.values())) > 1:
        raise _malformed(values, f"{name} has two weights", where, "a message has a loss, or it has none")
    weight = all(values.values())
    if weight and message["role"] != "assistant":
        rule = "what the assistant says has a loss, and nothing else"
        raise _malformed(values, f"{name} of the role {message['role']} has the weight 1", where, rule)
    return {**message, "weight": int(weight)}


def _is_list_of_tables(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _sharegpt(item: dict[str, Any], name: str, where: str) -> Message:
    speaker, value = _known(item["from"], SPEAKERS, f"{name}.from", where), item["value"]
    if speaker != "function_call":
        return _message(SPEAKERS[speaker], value, name, where)
    try:
        call = json.loads(value)
        function = {"name": call["name"], "arguments": call["arguments"]}
    except (ValueError, TypeError, KeyError, RecursionError):
        rule = 'the value of a function_call is JSON text: {"name": ..., "arguments": {...}}'
        raise _malformed(value, f"{name} is no tool call", where, rule) from None
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def join_parts(content: Any) -> Any:
    """Join the content of a message in parts, `[{"type": "text", "text": ...}]`; any other content is returned as it is."""
    if not isinstance(content, list):
        return content
    texts: list[Any] = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
    are_texts = len(texts) == len(content) and all(isinstance(text, str) for text in texts)
    return "".join(texts) if are_texts else content


def _message(role: str, content: Any, name: str, where: str) -> Message:
    content = join_parts(content)
    if not isinstance(content, str):
        rule = 'the content of a message is a string, or a list of parts {"type": "text", "text": ...}'
        raise _malformed(content, f"{name} has no text", where, rule)
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise _malformed(str(error), f"{name} has half a surrogate pair", where, "text is valid Unicode") from None
    return {"role": role, "content": content}


def _known(role: Any, known: Sequence[str] | dict[str, str], name: str, where: str) -> str:
    if not isinstance(role, str) or role not in known:
        raise DataError(
            f"unknown role {role!r}",
            where=f"{where}, {name}",
            rule=f"a role is one of {', '.join(known)}",
            fix=nearest(str(role), known),
        )
    return role


def _tools(tools: Any, where: str) -> list[Any] | None:
    rule = "tools is a list of JSON schemas, or its JSON text"
    tools = _parsed(tools, "tools", where, rule)
    if tools is not None and not _is_list_of_tables(tools):
        raise _malformed(tools, "tools that are no list of schemas", where, rule)
    return tools or None


def _parsed(value: Any, field: str, where: str, rule: str) -> Any:
    """Value of a field; JSON text, as tables keep values of different shapes, is parsed, and an empty value is None."""
    try:
        return (json.loads(value) if value.strip() else None) if isinstance(value, str) else value or None
    except (ValueError, RecursionError):
        raise _malformed(value, f"{field} that are no JSON", where, rule) from None


def _table_records(source: str, path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    number = 0
    for batch in arrow_batches(source, path):
        for record in batch.to_pylist():
            yield _without_nulls(record), f"{path}, record {number}"
            number += 1


def _without_nulls(value: Any) -> Any:
    """Value without the nulls with which Arrow fills the fields that a record does not have."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _malformed(value: Any, what: str, where: str, rule: str) -> DataError:
    shown = repr(value)
    shown = shown[:SHOWN] + " ..." * (len(shown) > SHOWN)
    return DataError(f"{what}: {shown}", where=where, rule=rule, fix="repair the record, or remove it")
