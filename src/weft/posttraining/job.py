"""Job of a trainer of TRL, read from and written to TOML. Imports no torch.

A job with the table `[trainer]` is such a job; all other jobs are `weft.job.Job`.
"""

import os
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import Field, ValidationError
from pydantic.json_schema import models_json_schema

from weft.errors import JobError
from weft.job import AUTO, Adapter, Eval, Job, OutFolder, assign_all, read_toml
from weft.plan import Plan, Table
from weft.posttraining.kinds import KINDS, Kind, names_of
from weft.refusal import explain, refuse_invalid_numbers


class StartModel(Table):
    """Model that training starts from."""

    path: str
    """Hugging Face folder with weights and tokenizer."""


class Rows(Table):
    """Rows of the trainer, in the format of TRL."""

    path: str
    """A .jsonl or .parquet file, a glob of such files, or a folder of `Dataset.save_to_disk`."""
    eval_path: str | None = None
    """Rows to evaluate on, in the same form."""
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the rows of `path` to evaluate on, chosen at random by the option seed."""
    chat_template_args: dict[str, Any] = {}  # noqa: RUF012  (pydantic copies it)
    """Arguments of the chat template for every row of messages, such as {enable_thinking = false}; those in
    `chat_template_kwargs` of a row come first."""


class Trainer(Table):
    """Trainer of TRL."""

    kind: Kind
    """dpo, orpo, cpo, simpo: pairs of answers; kto: single judged answers; reward: a reward model from pairs; grpo, rloo,
    online_dpo: generated answers with rewards; gkd: answers of a teacher."""
    rewards: tuple[str, ...] = ()
    """Functions of yours, "package.module:function", as TRL calls them, or folders of reward models; for grpo, rloo and
    online_dpo."""
    reference: str = ""
    """Hugging Face folder of the reference model of dpo, kto and online_dpo; empty: the model that training starts from."""
    teacher: str = ""
    """Hugging Face folder of the teacher of gkd, with the tokens of the model."""
    generator: Literal["copy", "process"] = "copy"
    """Place where completions are generated for grpo and rloo. copy: in each rank, by a copy of the full model that it makes
    and frees; process: in one process on the host of rank 0, on a device without a rank; no rank holds the full model."""
    options: dict[str, Any] = {}  # noqa: RUF012  (pydantic copies it)
    """Settings of TRL's own configuration of this trainer, such as `beta`, `learning_rate` and `max_steps`."""


class TrainerJob(Table):
    """Job of a trainer of TRL."""

    model: StartModel
    adapter: Adapter = Adapter()
    data: Rows
    trainer: Trainer
    eval: Eval = Eval()
    plan: Plan | None = Plan()
    """None, in TOML "auto": the planner chooses the plan when the ranks have loaded the model."""
    out: OutFolder

    @classmethod
    def load(cls, path: str | os.PathLike[str], assignments: Iterable[str] = ()) -> "TrainerJob":
        """Read a job from TOML and apply `key=value` assignments with dotted keys.

        Raises:
            JobError: the file is missing or not TOML, a key is unknown, or a value breaks its rule.
        """
        return cls.parse(read_toml(path), assignments, where=str(path))

    @classmethod
    def parse(cls, tables: dict[str, Any], assignments: Iterable[str] = (), *, where: str) -> "TrainerJob":
        """Create a job from nested tables and apply `key=value` assignments.

        Raises:
            JobError: a key is unknown, or a value breaks its rule.
        """
        tables, origin = assign_all(tables, assignments, where)
        tables = {**tables, "plan": None} if tables.get("plan") == AUTO else tables
        try:
            job = cls.model_validate(tables)
        except ValidationError as error:
            raise explain(error, cls, tables, origin) from None
        refuse_invalid_numbers(tables, job, origin)
        job.check(where)
        return job

    def check(self, where: str) -> None:
        """Check rules that join several keys.

        Raises:
            JobError: names the keys.
        """
        kind = KINDS[self.trainer.kind]
        if kind.rewards != bool(self.trainer.rewards):
            raise JobError(
                f"trainer.kind = {self.trainer.kind} with {len(self.trainer.rewards) or 'no'} rewards",
                where=where,
                rule=f"{names_of('rewards')} score answers by trainer.rewards; the other trainers have none",
                fix='set trainer.rewards, for example to ["my_rewards:is_right"]'
                if kind.rewards
                else "remove trainer.rewards",
            )
        if kind.teacher != bool(self.trainer.teacher) or (self.trainer.reference and not kind.reference):
            key = "reference" if self.trainer.reference and not kind.reference else "teacher"
            raise JobError(
                f"trainer.kind = {self.trainer.kind} with trainer.{key} = {getattr(self.trainer, key)!r}",
                where=where,
                rule=f"{names_of('teacher')} has a trainer.teacher, and {names_of('reference')} may have a trainer.reference",
                fix="set trainer.teacher to a Hugging Face folder" if kind.teacher else f"remove trainer.{key}",
            )
        if (self.data.eval_path or self.data.held_out) and not kind.evaluates:
            raise JobError(
                f"trainer.kind = {self.trainer.kind} with rows to evaluate on",
                where=where,
                rule="this trainer of TRL has no evaluation: it generates in training alone",
                fix="remove data.eval_path and data.held_out; [eval] evaluates tasks",
            )
        if self.data.chat_template_args and not kind.template:
            raise JobError(
                f"trainer.kind = {self.trainer.kind} with data.chat_template_args = {self.data.chat_template_args}",
                where=where,
                rule="this trainer of TRL renders messages without further arguments",
                fix="remove data.chat_template_args, or set their defaults in the template",
            )
        if self.trainer.generator == "process":
            self._check_generator(self.trainer.kind in ("grpo", "rloo"), where)
        self._check_evaluation(where)
        if self.adapter.kind == "qlora" or self.adapter.base or (self.adapter.path and self.adapter.kind == "none"):
            key = "kind" if self.adapter.kind in ("qlora", "none") else "base"
            raise JobError(
                f"adapter.{key} = {getattr(self.adapter, key)}"
                + f" with adapter.path = {self.adapter.path}" * bool(self.adapter.path)
                + " in a job with a trainer",
                where=where,
                rule="a trainer trains adapters, lora or dora, on a model folder: new ones, or those of adapter.path",
                fix='set adapter.kind = "lora", with plan.precision.frozen_weights = "nf4" for QLoRA, and remove adapter.base',
            )

    def _check_evaluation(self, where: str) -> None:
        if self.data.eval_path and self.data.held_out:
            raise JobError(
                f"data.eval_path with data.held_out = {self.data.held_out}",
                where=where,
                rule="the rows to evaluate on have one source",
                fix="remove one of the two keys",
            )
        if self.eval.tasks and self.trainer.kind == "reward":
            raise JobError(
                f"trainer.kind = reward with eval.tasks = {list(self.eval.tasks)}",
                where=where,
                rule="tasks are evaluated by the probabilities of tokens, and a reward model returns one number for a text",
                fix="remove eval.tasks; data.held_out evaluates the rewards",
            )

    def _check_generator(self, generates: bool, where: str) -> None:
        """Check the keys beside `trainer.generator = "process"`."""
        loading = self.trainer.options.get("model_init_kwargs")
        given = f"with model_init_kwargs = {loading}" if loading else f"with adapter.path = {self.adapter.path}"
        if not generates or loading or self.adapter.path:
            raise JobError(
                'trainer.generator = "process" ' + (given if generates else f"for trainer.kind = {self.trainer.kind}"),
                where=where,
                rule="the process loads model.path by itself, and generates completions for grpo and rloo",
                fix='set trainer.generator = "copy"' + (f", or remove {given.split()[1]}" if generates else ""),
            )

    def to_toml(self) -> str:
        """TOML text of the full job, which `load` reads back to an equal job."""
        return tomli_w.dumps({"plan": AUTO, **self.model_dump(exclude_none=True)})


def job_schema() -> dict[str, Any]:
    """JSON schema of the file of a job: with a table trainer that of `TrainerJob`, else that of `Job`."""
    _, schema = models_json_schema([(Job, "validation"), (TrainerJob, "validation")])
    for job in ("Job", "TrainerJob"):  # a plan may also be the path of a file, or "auto"
        schema["$defs"][job]["properties"]["plan"] = {"anyOf": [{"$ref": "#/$defs/Plan"}, {"type": "string"}]}
    refs = {name: {"$ref": f"#/$defs/{job}"} for name, job in (("then", "TrainerJob"), ("else", "Job"))}
    return {"if": {"required": ["trainer"]}, **refs, **schema}
