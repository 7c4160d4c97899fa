"""Tasks by name, folder and file, and the refusal of those that cannot be loaded."""

from pathlib import Path

import pytest

from tests.evaluation.stock import write_tasks
from weft.errors import DataError, JobError
from weft.evaluation.tasks import load_tasks

YAML = """task: mine
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: 0
"""


def write_yaml(folder: Path) -> Path:
    tasks = folder / "tasks"
    tasks.mkdir()
    (tasks / "_template.yaml").write_text("output_type: multiple_choice\n")
    (folder / "rows.jsonl").write_text('{"question": "1 + 1 =", "choices": ["2", "3"]}\n')
    (tasks / "mine.yaml").write_text(YAML.format(data=folder / "rows.jsonl"))
    return tasks


@pytest.mark.must("format: tasks of evaluation, jsonl and YAML")
def test_files_and_folders(tmp_path: Path) -> None:
    own, texts, says = write_tasks(tmp_path)
    loaded = load_tasks([own, str(write_yaml(tmp_path)), texts, says], num_fewshot=2)
    assert list(loaded.tasks) == ["facts", "mine", "texts", "says"]
    assert loaded.generating() == ["says"]
    assert loaded.tasks["facts"].get_config("num_fewshot") == 2
    assert load_tasks([str(tmp_path / "tasks" / "mine.yaml")]).tasks.keys() == {"mine"}


def test_unknown_name_gets_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="there is no task helaswag") as caught:
        load_tasks(["helaswag"])
    assert "hellaswag" in str(caught.value.fix)
    with pytest.raises(JobError, match="no tasks are given"):
        load_tasks([])


def test_task_without_its_data_set_is_refused_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import huggingface_hub

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="task arc_easy cannot be loaded") as caught:
        load_tasks(["arc_easy"])
    assert "HF_HUB_OFFLINE=0" in str(caught.value.fix)


def test_same_task_twice_and_broken_yaml_are_refused(tmp_path: Path) -> None:
    own = write_tasks(tmp_path)[0]
    with pytest.raises(JobError, match="facts is named twice"):
        load_tasks([own, own])
    folder = write_yaml(tmp_path)
    (folder / "other.yaml").write_text("output_type: [")
    with pytest.raises(JobError, match=r"other\.yaml is no task"):
        load_tasks([str(folder)])
    (tmp_path / "empty").mkdir()
    with pytest.raises(JobError, match="has no task"):
        load_tasks([str(tmp_path / "empty")])


def test_missing_harness_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.evaluation.tasks.find_spec", lambda name: None)
    with pytest.raises(JobError, match="lm_eval is not installed") as caught:
        load_tasks(["hellaswag"])
    assert caught.value.fix == 'pip install "weft-train[eval]"'
