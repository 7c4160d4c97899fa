"""Form of the prompts of an evaluation, by lm-eval's own arguments: chat template, system prompt, generation settings."""

import json
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import ConfigDict

from weft.errors import DataError, JobError, nearest

TRIAL = "Two plus two is"


@dataclass(frozen=True)
class Prompts:
    """Form of the prompts, and settings of generated answers."""

    apply_chat_template: bool = False
    """Render each prompt by the chat template of the tokenizer."""
    fewshot_as_multiturn: bool = False
    """Worked examples are turns of user and assistant; False: one message has them all."""
    system_instruction: str | None = None
    """System prompt, before the description of a task; without a chat template, text before each prompt."""
    chat_template_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, such as enable_thinking."""
    gen_kwargs: dict[str, Any] = field(default_factory=dict)
    """Settings of generation that replace those of the tasks, such as temperature and max_gen_toks."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    def text(self) -> str:
        """Settings other than the defaults, for reports; empty without any."""
        parts = [
            "chat template" * self.apply_chat_template,
            "examples as turns" * self.fewshot_as_multiturn,
            "a system prompt" * (self.system_instruction is not None),
            ", ".join(f"{name} = {value}" for name, value in {**self.chat_template_args, **self.gen_kwargs}.items()),
        ]
        return ", ".join(filter(None, parts))


def parse_settings(text: str, option: str) -> dict[str, Any]:
    """Settings of an option: a JSON object, or NAME=VALUE with commas, as lm-eval takes them.

    Args:
        text: value of the option.
        option: name of the option, for the message.

    Raises:
        JobError: it is neither.
    """
    from lm_eval.utils import simple_parse_args_string

    try:
        is_json = text.lstrip().startswith("{")
        found = json.loads(text) if is_json else simple_parse_args_string(text)
        if isinstance(found, dict) and all(is_json or "=" in part for part in text.split(",") if part):
            return {str(name).strip(): value for name, value in found.items()}
    except ValueError:
        pass
    raise JobError(
        f"{option} {text!r}",
        where=option,
        rule="settings are NAME=VALUE, with commas between them, or a JSON object",
        fix=f"for example {option} temperature=0.7,do_sample=true",
    ) from None


def check_prompts(prompts: Prompts, tokenizer: Any, generating: list[str], where: str) -> None:
    """Refuse settings that have no effect, or that the chat template does not take, before a rank starts.

    Args:
        generating: names of the tasks for which the model generates text.
        where: folder of the model, for messages.

    Raises:
        JobError: a setting has no effect or does not exist, or there is no chat template.
        DataError: the chat template does not end, or refuses or ignores the prompt.
    """
    needs_template = {
        "--fewshot-as-multiturn": prompts.fewshot_as_multiturn,
        "--chat-template-args": prompts.chat_template_args,
    }
    if not prompts.apply_chat_template and any(needs_template.values()):
        option = next(name for name, value in needs_template.items() if value)
        raise JobError(
            f"{option} without --apply-chat-template",
            where=option,
            rule="it is a setting of the chat template",
            fix=f"add --apply-chat-template, or leave {option} out",
        )
    if settings := prompts.gen_kwargs:
        from transformers import GenerationConfig

        known = {*vars(GenerationConfig()), "until", "max_gen_toks", "max_tokens", "max_completion_tokens"} - {
            "max_length"
        }
        unknown = next((name for name in settings if name not in known or name.startswith("_")), "")
        if unknown or not generating:
            raise JobError(
                f"--gen-kwargs {unknown}" if unknown else f"--gen-kwargs {settings} for tasks without generated text",
                where="--gen-kwargs",
                rule="settings are those of transformers.GenerationConfig, until and max_gen_toks, of tasks that generate",
                fix=nearest(unknown, known) if unknown else "leave it out, or add a task that generates",
            )
    if prompts.apply_chat_template:
        _check_template(prompts, tokenizer, where)


def _check_template(prompts: Prompts, tokenizer: Any, where: str) -> None:
    from weft.data.chat_template import check_arguments
    from weft.data.template_trial import refuse_endless

    if not tokenizer.chat_template:
        raise JobError(
            "--apply-chat-template, and the tokenizer has no chat template",
            where=where,
            rule="prompts are rendered by the tokenizer's own template",
            fix="leave it out, or save the template of the model as chat_template.jinja in the folder",
        )
    check_arguments(tokenizer, prompts.chat_template_args, "--chat-template-args")
    refuse_endless(tokenizer, where, prompts.chat_template_args)
    messages = [{"role": "user", "content": TRIAL}]
    if prompts.system_instruction is not None:
        messages = [{"role": "system", "content": prompts.system_instruction}, *messages]
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **prompts.chat_template_args
        )
        problem = "" if all(message["content"].strip() in text for message in messages) else "leaves a message out"
    except Exception as error:  # of Jinja, and of the template's own code
        problem = f"refuses it: {' '.join(str(error).split())[:200]}"
    if problem:
        raise DataError(
            f"the chat template {problem}",
            where=f"template of {where}",
            rule="it renders the system prompt and the question",
            fix="leave --system-instruction out, or use a template with system prompts",
        )
