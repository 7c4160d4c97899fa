"""Chat templates, system prompts, worked examples as turns and generation settings of `weft eval`, beside lm-eval alone."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.data.chats import PLAIN
from tests.evaluation.stock import flat, stock_results, write_tasks
from tests.evaluation.test_evaluation import assert_equal, evaluate_in_the_pool, in_the_pool
from tests.lab.families import family
from tests.lab.jobs import write_job
from tests.lab.pool import start_ranks
from tests.lab.runs import train_in_the_pool
from weft.cli.app import app
from weft.errors import WeftError
from weft.evaluation.prompts import Prompts, parse_settings
from weft.evaluation.results import ModelResults
from weft.evaluation.run import samples_file
from weft.evaluation.tasks import check_examples, load_tasks
from weft.job import Job
from weft.training.task_evaluation import check_tasks

VOICE = "{{ voice or '' }}"


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Model folder with a chat template that reads `voice`, and tasks."""
    folder = tmp_path_factory.mktemp("chatty")
    sizes = {"vocab_size": 300, "initializer_range": 0.3, "max_position_embeddings": 512}
    path = write_job(folder, model={"config": {**family("llama"), **sizes}}, train={"steps": 1})
    run, _ = train_in_the_pool(Job.load(path), 1)
    (run / "export" / "chat_template.jinja").write_text(VOICE + PLAIN)
    return run / "export", write_tasks(folder)


CASES: dict[str, tuple[dict[str, Any], int | None]] = {
    "template": ({"apply_chat_template": True}, None),
    "template, arguments, system prompt": (
        {
            "apply_chat_template": True,
            "chat_template_args": {"voice": "low "},
            "system_instruction": "Be brief.",
        },
        None,
    ),
    "template, examples in one message": ({"apply_chat_template": True}, 2),
    "template, examples as turns": ({"apply_chat_template": True, "fewshot_as_multiturn": True}, 3),
    "system prompt without a template": ({"system_instruction": "Be brief."}, 1),
    "generation": ({"gen_kwargs": {"max_gen_toks": 5, "until": ["e"]}}, None),
}


@pytest.mark.parametrize("case", CASES)
def test_prompts_and_answers_are_those_of_stock_lm_eval(
    case: str, chatty: tuple[Path, list[str]], tmp_path: Path
) -> None:
    """Values of all tasks, and the prompts and answers of all records."""
    (folder, tasks), (settings, few) = chatty, CASES[case]
    out = tmp_path / "eval.json"
    options: dict[str, Any] = {"ranks": 2, "batch_size": 3, "out": out, "num_fewshot": few, "log_samples": True}
    found = evaluate_in_the_pool(folder, tuple(tasks), prompts=Prompts(**settings), **options)
    samples: dict[str, Any] = {}
    own = {"fewshot_as_multiturn": False, **settings}
    expected = stock_results(folder, tmp_path, "facts", "texts", "says", samples=samples, num_fewshot=few, **own)
    assert_equal(flat(found.tasks), expected)
    assert ModelResults.read(out).prompts == Prompts(**settings)
    logged = [json.loads(line) for line in samples_file(out).read_text().splitlines()]
    assert {row["task"] for row in logged} == {"facts", "texts", "says"}
    for row in logged:
        theirs = samples[row["task"]][row["doc_id"]]
        assert [argument[0] for argument in row["arguments"]] == [argument[0] for argument in theirs["arguments"]]
        if row["task"] == "says":
            assert row["resps"] == theirs["resps"]
    prompts = {row["task"]: row["arguments"][0][0] for row in logged}
    assert ("<|im_start|>user" in prompts["facts"]) == own.get("apply_chat_template", False)
    if few and "turns" in case:
        assert prompts["facts"].count("<|im_start|>assistant") == few + 1


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "turns without a template": (
        {"fewshot_as_multiturn": True},
        1,
        "--fewshot-as-multiturn without --apply-chat-template",
    ),
    "arguments without a template": ({"chat_template_args": {"a": 1}}, 1, "--chat-template-args without"),
    "an argument of the call": (
        {"apply_chat_template": True, "chat_template_args": {"tokenize": True}},
        1,
        "the argument tokenize",
    ),
    "generation of other tasks": ({"gen_kwargs": {"temperature": 1.0}}, 1, "for tasks without generated text"),
    "an unknown setting": ({"gen_kwargs": {"temprature": 1.0}}, 3, "--gen-kwargs temprature"),
    "too long answers": ({"gen_kwargs": {"max_gen_toks": 600}}, 3, "generates 600 tokens, and the model has 512"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_without_effect_are_refused(case: str, chatty: tuple[Path, list[str]], tmp_path: Path) -> None:
    (folder, tasks), (settings, count, said) = chatty, REFUSED[case]
    with pytest.raises(WeftError) as caught:
        evaluate_in_the_pool(
            folder, tuple(tasks[:count]), ranks=1, out=tmp_path / "eval.json", prompts=Prompts(**settings)
        )
    assert said in str(caught.value)
    assert caught.value.fix
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "the tokenizer has no chat template"),
        ("{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN, "no system"),
        ("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}", "leaves a message out"),
    ],
)
def test_a_template_without_system_prompts_is_refused(
    template: str | None, said: str, chatty: tuple[Path, list[str]], tmp_path: Path
) -> None:
    """lm-eval would leave the prompt out."""
    folder = tmp_path / "model"
    shutil.copytree(chatty[0], folder)
    (folder / "chat_template.jinja").unlink()
    if template:
        (folder / "chat_template.jinja").write_text(template)
    prompts = Prompts(apply_chat_template=True, system_instruction="Be brief.")
    with pytest.raises(WeftError, match=said):
        evaluate_in_the_pool(folder, tuple(chatty[1][:1]), ranks=1, out=tmp_path / "eval.json", prompts=prompts)


def write(folder: Path, records: list[dict[str, Any]]) -> str:
    file = folder / "own.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


YAML = """
task: own
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
fewshot_split: test
output_type: generate_until
doc_to_text: prompt
doc_to_target: answer
metric_list: [{metric: exact_match}]
"""


@pytest.mark.parametrize(
    ("count", "is_yaml", "most"), [(5, False, 5), (1, False, 1), (5, True, 4), (6, True, 4)], ids=str
)
def test_more_examples_than_records_are_refused_in_every_door(
    count: int, is_yaml: bool, most: int, tmp_path: Path
) -> None:
    """A task of lm-eval with `fewshot_split` leaves out the record that is asked, and those that are equal to it."""
    names = [0, 0, 1, 1, 2, 2] if count == 6 else range(count)
    file = write(tmp_path, [{"prompt": f"{name} is", "answer": str(name)} for name in names])
    if is_yaml:
        file = str(tmp_path / "own.yaml")
        Path(file).write_text(YAML.replace("FILE", str(tmp_path / "own.jsonl")))
    doors: list[Callable[[int], Any]] = [
        lambda few: check_examples(load_tasks([file], few)),
        lambda few: check_tasks(
            Job.parse({"model": {"config": {}}, "eval": {"tasks": [file], "num_fewshot": few}}).eval, str(tmp_path)
        ),
    ]
    for door in doors:
        with pytest.raises(WeftError, match=f"{most + 1} worked examples in each prompt of own, which has {most}"):
            door(most + 1)
    task = load_tasks([file], most).tasks["own"]
    task.set_fewshot_seed(1234)
    for record in task.test_docs():
        assert task.fewshot_context(record, most).count(" is") == most + 1


def test_the_command_refuses_more_examples_than_records(chatty: tuple[Path, list[str]], tmp_path: Path) -> None:
    with pytest.raises(WeftError, match="8 worked examples in each prompt of facts, which has 7"):
        evaluate_in_the_pool(chatty[0], tuple(chatty[1][:1]), ranks=1, out=tmp_path / "eval.json", num_fewshot=8)


def test_texts_have_no_examples(tmp_path: Path) -> None:
    file = write(tmp_path, [{"text": "a b"}, {"text": "c d"}])
    assert load_tasks([file], 20).tasks["own"].get_config("num_fewshot") == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("temperature=0.7,do_sample=true,max_gen_toks=9", {"temperature": 0.7, "do_sample": True, "max_gen_toks": 9}),
        ('{"until": ["\\n", "."], "top_k": 5}', {"until": ["\n", "."], "top_k": 5}),
        ("enable_thinking=False", {"enable_thinking": False}),
        ("temperature", None),
        ("{temperature: 1}", None),
    ],
)
def test_settings_of_options_are_parsed(text: str, expected: dict[str, Any] | None) -> None:
    if expected is None:
        with pytest.raises(WeftError, match="--gen-kwargs"):
            parse_settings(text, "--gen-kwargs")
    else:
        assert parse_settings(text, "--gen-kwargs") == expected


def test_the_command_takes_the_options(chatty: tuple[Path, list[str]], tmp_path: Path) -> None:
    folder, tasks = chatty
    start_ranks(1)
    options = ["--apply-chat-template", "--fewshot-as-multiturn", "--num-fewshot", "1", "--log-samples"]
    options += ["--system-instruction", "Be brief.", "--chat-template-args", "voice=low"]
    options += ["--gen-kwargs", "max_gen_toks=4", "--out", str(tmp_path / "own.json"), "--nproc-per-node", "1"]
    with in_the_pool():
        result = CliRunner().invoke(app, ["eval", str(folder), "--tasks", tasks[2], *options])
    assert result.exit_code == 0, result.output
    written = ModelResults.read(tmp_path / "own.json").prompts
    assert written == Prompts(True, True, "Be brief.", {"voice": "low"}, {"max_gen_toks": 4})
    (first, *_) = (tmp_path / "own.samples.jsonl").read_text().splitlines()
    assert json.loads(first)["arguments"][0][0].startswith("low<|im_start|>system\nBe brief.")
