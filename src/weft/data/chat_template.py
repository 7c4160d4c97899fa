"""Tokens of conversations by a tokenizer's chat template, and the tokens that have a loss: what the assistant says."""

import hashlib
import inspect
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.data.chat import LOSS_FIELDS, Chat, Message
from weft.data.store import ChatCounts
from weft.data.template_trial import refuse_endless
from weft.errors import DataError, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KNOWN_FIELDS = {"role", "content", "tool_calls", "tool_call_id", "name", *LOSS_FIELDS}
"""Fields of messages that Weft reads, or that say to which call an answer belongs."""
REASONING_FIELDS = {"reasoning_content", "reasoning", "thinking"}
"""Transformers passes the field of any of these names to the template under all of them."""
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
SHOWN = 200  # characters of an error message of the library, or of a template's output, that are shown


class ChatTemplate:
    """Chat template of a tokenizer.

    The tokens with a loss are those that the template marks with `{% generation %}`. In a template without this mark, what the
    assistant says is the text by which a conversation grows when its turn is added; the text before must not change.

    Args:
        tokenizer: fast tokenizer with a chat template.
        where: folder of the tokenizer, for errors.
        arguments: arguments of the template for every chat, `data.chat_template_args`; those of a record come first.

    Raises:
        DataError: the tokenizer has no template or no offsets, the template does not end, does not tell a user from an
            assistant, or does not read an argument.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", where: str, arguments: Mapping[str, Any] | None = None):
        self.tokenizer, self.where, self.arguments = tokenizer, where, dict(arguments or {})
        template = tokenizer.chat_template
        if not template:
            raise DataError(
                "the tokenizer has no chat template",
                where=where,
                rule="chats are rendered by the tokenizer's own template",
                fix="use the tokenizer of an instruct model, or save a template as chat_template.jinja in its folder",
            )
        if not tokenizer.is_fast:
            raise DataError(
                "the tokenizer does not tell the characters of its tokens",
                where=where,
                rule="what the assistant says is found in the text and marked in the tokens",
                fix="use a tokenizer with a tokenizer.json",
            )
        words = set(re.findall(r"\w+", template if isinstance(template, str) else "\n".join(template.values())))
        check_arguments(tokenizer, self.arguments, "data.chat_template_args")
        if unread := sorted(self.arguments.keys() - words):
            raise DataError(
                f"the chat template does not read {unread[0]}",
                where=f"data.chat_template_args, template of {where}",
                rule="each argument is a variable of the template",
                fix=f"{nearest(unread[0], sorted(words))}, or remove it",
            )
        refuse_endless(tokenizer, where, self.arguments)
        self.writes_time = "strftime_now" in words
        """True if the template writes the date or the time."""
        self._words = words
        self._fields = KNOWN_FIELDS | words | (REASONING_FIELDS if REASONING_FIELDS & words else set())
        self._stops = {tokenizer.eos_token_id, *tokenizer.all_special_ids}
        self._stops |= {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._check_roles()

    def digest(self) -> str:
        """Digest of the templates and of their arguments."""
        parts = [self.tokenizer.chat_template, sorted(self.arguments.items())]
        return hashlib.blake2b(repr(parts).encode()).hexdigest()

    def encode(self, chat: Chat) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of a chat, and those among them that have a loss: ids int32 [tokens], mask bool [tokens].

        Raises:
            DataError: the template refuses the chat, or renders a turn differently when others follow it.
        """
        try:
            return self._encode(chat)
        except DataError:
            if not self.writes_time:
                raise
            return self._encode(chat)  # the time may have changed between two renderings

    def _encode(self, chat: Chat) -> tuple[np.ndarray, np.ndarray]:
        check_arguments(self.tokenizer, chat.arguments, f"{chat.where}, chat_template_kwargs")
        chat = self._with_arguments(chat)
        text = self._apply(chat, chat.messages, tokenize=False)
        _check_tools(chat, text)
        if self._marks(chat):
            encoded = self._apply(
                chat,
                chat.messages,
                return_dict=True,
                return_assistant_tokens_mask=True,
                tokenizer_kwargs={"return_offsets_mapping": True},
            )
            mask = np.asarray(encoded["assistant_masks"], bool)
            spoken = [number for number, message in enumerate(chat.messages) if message["role"] == "assistant"]
            marked = _runs(mask)
            for index, number in enumerate(spoken):
                if number in chat.trained:
                    continue
                try:
                    mask &= ~self._turn(chat, number, text, encoded)
                except DataError:  # other messages change the turn: it is found if the template marks each turn once
                    if len(marked) != len(spoken):
                        raise
                    mask[slice(*marked[index])] = False
        else:
            encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            mask = np.zeros(len(encoded["input_ids"]), bool)
            for number in chat.trained:
                mask |= self._turn(chat, number, text, encoded)
        return np.asarray(encoded["input_ids"], np.int32), mask

    def unread_fields(self, chat: Chat) -> set[str]:
        """Fields of a record, its messages and its chat_template_kwargs that neither Weft nor the template reads."""
        of_messages = {field for message in chat.messages for field in message} - self._fields
        return of_messages | chat.unread | (chat.arguments.keys() - self._words)

    def trains_stop(self, ids: np.ndarray, mask: np.ndarray) -> bool:
        """True if a turn with a loss ends with a special token; white space may follow it.

        Args:
            ids: tokens of a chat.
            mask: tokens with a loss.
        """
        for begin, end in _runs(mask):
            for token in reversed(ids[begin:end].tolist()):
                if token in self._stops:
                    return True
                if str(self.tokenizer.decode([token])).strip():
                    break
        return False

    def _with_arguments(self, chat: Chat) -> Chat:
        """Chat whose calls of tools have their arguments as the template reads them: as a table, or as JSON text."""
        if not any(message.get("tool_calls") for message in chat.messages):
            return chat
        messages = [
            {**message, "tool_calls": [self._with_own_arguments(call, chat.where) for call in message["tool_calls"]]}
            if message.get("tool_calls")
            else message
            for message in chat.messages
        ]
        return replace(chat, messages=messages)

    def _with_own_arguments(self, call: dict[str, Any], where: str) -> dict[str, Any]:
        function = call.get("function", call)
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if arguments is None:
            return call
        try:
            table = json.loads(arguments.strip() or "{}") if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            table = None
        if not isinstance(table, dict):
            raise DataError(
                f"arguments of a call that are no JSON object: {str(arguments)[:SHOWN]!r}",
                where=where,
                rule="the arguments of a call are an object, or its JSON text",
                fix="repair the record, or remove it",
            )
        own: Any = table
        if self._reads_arguments_as_text:
            own = arguments if isinstance(arguments, str) else json.dumps(table, ensure_ascii=False)
        function = {**function, "arguments": own}
        return {**call, "function": function} if "function" in call else function

    @cached_property
    def _reads_arguments_as_text(self) -> bool:
        """True if the template writes the arguments of a call without `tojson`: an object would become that of Python."""
        where = "a call of a tool, tried once"
        tool = {"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}
        for arguments in ({"city": "Bern"}, '{"city": "Bern"}'):
            call = {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": arguments}}
            messages: list[Message] = [{"role": "user", "content": "Hi"}]
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            try:
                text = self._apply(Chat(messages, [tool], 0, where), messages, tokenize=False)
            except DataError:
                continue
            return isinstance(arguments, str) or str(arguments) in text
        return False

    def _marks(self, chat: Chat) -> bool:
        """True if the template for this chat marks what the assistant says."""
        return bool(GENERATION.search(self.tokenizer.get_chat_template(tools=chat.tools)))

    def _turn(self, chat: Chat, number: int, text: str, encoded: Any) -> np.ndarray:
        """Tokens of a turn of the assistant: bool [tokens]."""
        return _overlap(encoded, self._prompt(chat, number, text), self._end(chat, number, text))

    def _prompt(self, chat: Chat, number: int, text: str) -> int:
        """Characters before a turn of the assistant, with the header of the turn."""
        if not number:
            raise DataError(
                "the chat begins with the assistant",
                where=chat.where,
                rule="without {% generation %} in the template, an assistant's turn is what follows another message",
                fix="remove the first message, or mark the assistant's turns in the template with {% generation %}",
            )
        return self._prefix(chat, number, text, add_generation_prompt=True)

    def _end(self, chat: Chat, number: int, text: str) -> int:
        """Characters up to the end of a turn of the assistant."""
        last = number + 1 == len(chat.messages)
        return len(text) if last else self._prefix(chat, number + 1, text, add_generation_prompt=False)

    def _prefix(self, chat: Chat, number: int, text: str, *, add_generation_prompt: bool) -> int:
        """Characters of the first messages, if the text begins with them."""
        prefix = self._apply(chat, chat.messages[:number], tokenize=False, add_generation_prompt=add_generation_prompt)
        if not text.startswith(prefix):
            same = next((i for i, pair in enumerate(zip(prefix, text, strict=False)) if pair[0] != pair[1]), len(text))
            raise DataError(
                f"the template renders the first {number} message{'s' * (number > 1)} differently when others follow: "
                f"{prefix[same : same + SHOWN // 4]!r} becomes {text[same : same + SHOWN // 4]!r}",
                where=f"{chat.where}; template of {self.where}",
                rule="without {% generation %} in the template, the assistant's turn is what the text grows by",
                fix="mark the assistant's turns in the template with {% generation %}, or give each turn a record of its "
                "own with prompt and completion",
            )
        return len(prefix)

    def _apply(self, chat: Chat, messages: list[Message], **options: Any) -> Any:
        try:
            arguments = {**self.arguments, **chat.arguments}
            return self.tokenizer.apply_chat_template(messages, tools=chat.tools, **arguments, **options)
        except Exception as error:  # templates raise errors of Jinja and of their own code
            raise DataError(
                f"the chat template refuses the chat: {' '.join(str(error).split())[:SHOWN]}",
                where=chat.where,
                rule=f"the template of {self.where} renders every chat",
                fix="repair the record, or remove it",
            ) from None

    def _check_roles(self) -> None:
        """Refuse a template that leaves out a message, or renders it alike for user and assistant."""
        said = ("what the user says", "what the assistant says")
        where = "a conversation of two messages, tried at start"
        texts = []
        for roles in (("user", "assistant"), ("assistant", "user")):
            messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
            try:
                texts.append(self._apply(Chat(messages, None, 0, where), messages, tokenize=False))
            except DataError:  # the template demands another order of roles, or more: it knows the roles
                return
        if texts[0] == texts[1] or not all(text in texts[0] for text in said):
            raise DataError(
                f"the chat template ignores {'roles' if texts[0] == texts[1] else 'messages'}: it renders two messages "
                f"as {texts[0][:SHOWN]!r}",
                where=self.where,
                rule="the text shows who says what",
                fix="use the template of an instruct model",
            )


def check_arguments(tokenizer: "PreTrainedTokenizerBase", arguments: Mapping[str, Any], where: str) -> None:
    """Refuse arguments of a chat template that would change how it is called, such as `tokenize`.

    Args:
        tokenizer: tokenizer with a chat template.
        arguments: arguments by name.
        where: key of the job or location of the record, for the message.

    Raises:
        DataError: names the argument.
    """
    if not arguments:
        return
    own = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters} - {"documents"}
    if taken := sorted(own & arguments.keys()):
        raise DataError(
            f"the argument {taken[0]}",
            where=where,
            rule=f"the template gets variables of its own, such as enable_thinking; {taken[0]} is set by Weft",
            fix=f"remove {taken[0]}",
        )


def encode_chats(
    template: ChatTemplate, chats: Iterable[Chat], *, capacity: int, too_long: str, counts: ChatCounts
) -> Iterator[tuple[np.ndarray, int]]:
    """Tokens of each chat; a token without loss is stored as the bitwise complement of its id.

    Args:
        capacity: maximum tokens of a chat.
        too_long: truncate, drop or refuse; see `data.too_long`.
        counts: counts to add to.

    Yields:
        (int32 [tokens], 64-bit digest) of each chat.

    Raises:
        DataError: a chat is too long, or has no target left.
    """
    for chat in chats:
        ids, mask = template.encode(chat)
        length = len(ids)
        if length > capacity and too_long == "refuse":
            raise DataError(
                f"chat of {length} tokens",
                where=chat.where,
                rule=f"a row has seq_len + 1 = {capacity} tokens, and data.too_long = refuse",
                fix=f"set data.seq_len = {length - 1} or more, or data.too_long to truncate or drop",
            )
        if length > capacity and too_long == "drop":
            counts.dropped += 1
            continue
        targets = np.flatnonzero(mask[1:]) + 1
        if not len(targets):
            raise DataError(
                "no token of the assistant has a loss",
                where=chat.where,
                rule=f"the template of {template.where} marks what the assistant says",
                fix="remove the record, or repair {% generation %} in the template",
            )
        if targets[0] >= capacity:
            raise DataError(
                f"the first token of the assistant is token {targets[0] + 1} of {length}, and is cut off",
                where=chat.where,
                rule=f"a row has seq_len + 1 = {capacity} tokens, and a chat keeps a token with a loss",
                fix=f'set data.seq_len = {targets[0]} or more, or data.too_long = "drop"',
            )
        counts.chats += 1
        counts.stops = counts.stops or template.trains_stop(ids, mask)
        counts.unread = sorted({*counts.unread, *template.unread_fields(chat)})
        counts.truncated += length > capacity
        ids, mask = ids[:capacity], mask[:capacity]
        counts.targets += int(mask[1:].sum())
        stored = np.where(mask, ids, ~ids)
        yield stored, int.from_bytes(hashlib.blake2b(stored.tobytes(), digest_size=8).digest())


def _check_tools(chat: Chat, text: str) -> None:
    """Refuse a template that leaves out the tools of a chat, or their calls."""
    calls = [call for message in chat.messages for call in message.get("tool_calls") or ()]
    for function in [tool.get("function", tool) for tool in [*(chat.tools or ()), *calls]]:
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or name not in text:
            raise DataError(
                f"the tool {name!r} is not in the text of the chat",
                where=chat.where,
                rule="tools and their calls have a name, and the chat template renders it",
                fix="use a chat template with tools, or remove tools and their calls from the record",
            )


def _runs(mask: np.ndarray) -> list[list[int]]:
    """First token and end of each run of tokens with a loss."""
    runs: list[list[int]] = np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2).tolist()
    return runs


def _overlap(encoded: Any, begin: int, end: int) -> np.ndarray:
    """Tokens with a character in [begin, end) of the text: bool [tokens]."""
    offsets = np.asarray(encoded["offset_mapping"], np.int64).reshape(-1, 2)
    return (offsets[:, 0] < end) & (offsets[:, 1] > begin)
