"""What README and docs print runs to its end: settings, commands and programs, in a folder with small models and data."""

import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
import torch.nn.functional as F
import transformers
import typer
from transformers import AutoModelForCausalLM

import weft
from tests.lab import commands as forks
from tests.lab.pool import run_ranks
from tests.lab.printed import PAGES, Block, blocks, commands, files, settings
from tests.lab.workplace import make_workplace, small_job
from weft.cli.app import app
from weft.job import has_trainer

RANKS_OF_A_RUN = 4
"""Settings for more ranks are shown by a dry run."""
WITH_EXPERTS = ("moe", "parallelism", "compression-experts")
NOT_RUN_HERE = {
    r"pip install|make |kubectl|accelerate|export |srun |mpirun ": "installs, or needs another program; options are checked",
    r"python (examples/fetch|benchmarks/|-m (pytest|benchmarks))": "downloads, or takes minutes",
    r".*(--nnodes|--node-rank) ": "several hosts: tests/launch",
    r"weft launch ": "schedulers: tests/launch",
    r".*--device |.*llama-70b": "minutes of a planner for other devices: tests/planner",
    r"weft doctor (runs|--kernels)": "a run that has slowed down; minutes of compilation: tests/observe",
    r"weft (calibrate|plan job.toml --cluster)": "measures links for a minute: tests/cli",
    r"weft checkpoint": "a synopsis: tests/checkpoint, tests/cli",
    r".*\.\.\.$": "an outline",
    r"torchrun ": "tests/launch/test_inside.py",
    r"weft eval .*hellaswag": "downloads",
}
"""Patterns of commands and why they are not run here. The options of those of Weft are parsed all the same."""


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Nested tables with changes."""
    both = {**base, **changes}
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            both[key] = merged(base[key], value)
    return both


@pytest.fixture(scope="session")
def workplace_of_all(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("printed") / "work"
    folder.mkdir()
    make_workplace(folder)
    return folder


@pytest.fixture
def workplace(workplace_of_all: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy of the folder with models, data and a job, as the working directory."""
    folder = tmp_path / "work"
    shutil.copytree(workplace_of_all, folder)
    monkeypatch.chdir(folder)
    return folder


SETTINGS = [(block, table) for page in PAGES for block, table in settings(page)]
SHOWN_ELSEWHERE = {
    'package = "odd_model"': "tests/examples/test_packages.py",
    "weft.devices": "tests/examples/test_packages.py",
    'generator = "process"': "tests/posttraining/test_job.py, with a process that generates",
    "mine:": "below, with its functions",
    "weft.observe.trackers": "trackers: tests/observe",
    "scheduler = {prediction_type": "diffusion: tests/training/test_kinds.py",
    'device = "H100"': "tests/planner",
    '"lora"\npath =': "adapters to go on from: tests/posttraining/test_kinds.py",
}
"""Texts of blocks that are not run here, and where they are shown."""
COMPLETED: dict[str, dict[str, Any]] = {
    "router_bias_rate": {"model": {"path": "models/biased"}},
    "router_z_loss": {"model": {"path": "models/experts"}},
    "experts.gate_up_proj": {"model": {"path": "models/experts"}, "adapter": {"kind": "lora"}},
    'matmul = "fp8"\n': {"plan": {"precision": {"emulate_fp8": True}}},
    "expert_compression": {"plan": {"parallel": {"ep": 2}}},
    "rows_per_rank": {"train": {"global_batch_size": 32}},
    "chat_template_args": {"data": {"format": "chat", "source": "jsonl", "path": "chats.jsonl"}},
    "hellaswag": {"eval": {"tasks": ["capitals.jsonl"]}},
}
"""Tables that blocks with a text need on small models, without a network and on CPUs."""


def ranks_of(plan: dict[str, Any]) -> int:
    """Ranks that a printed plan needs, at least two."""
    axes = {"tp": 1, "cp": 1, "pp": 1, "ep": 1, "etp": 1, **plan.get("parallel", {})}
    rows = len(axes.get("rows_per_rank", []))
    return max(2, rows, axes["pp"] * math.lcm(axes["tp"] * axes["cp"], axes["ep"] * axes["etp"]))


@pytest.mark.slow("compile and FP8 in new processes; others take three seconds")
@pytest.mark.parametrize(("block", "table"), SETTINGS, ids=[f"{block.id}-{n}" for n, (block, _) in enumerate(SETTINGS)])
def test_settings_run(block: Block, table: dict[str, Any], workplace: Path) -> None:
    if place := next((place for text, place in SHOWN_ELSEWHERE.items() if text in block.text), ""):
        pytest.skip(place)
    if "weights" in table:
        (workplace / "own.toml").write_text(block.text)
        check(forks.weft("compress", "models/smollm2", "smaller", "--recipe", "own.toml", "--calibrate", "job.toml"))
        return check_generates(workplace / "smaller")
    if "inside_host" in table:
        (workplace / "cluster.toml").write_text(block.text)
        return check(forks.weft("topology", "--file", "cluster.toml"))
    if "trainer" in table:
        shutil.copytree("models/smollm2", "runs/sft/export")
        path = write(workplace, merged(table, {"trainer": {"options": {"max_steps": 2}}}))
        assert has_trainer(path)
        return check(forks.weft("train", path, "--nproc-per-node", 2))
    if "targets" in table:
        table = {"adapter": table}
    model = "experts" if block.page in WITH_EXPERTS else "smollm2"
    job = merged(small_job(model), table)
    for text, more in COMPLETED.items():
        job = merged(job, more) if text in block.text else job
    if "chat_template_args" in job["data"]:
        add_argument(workplace / "models" / model, job["data"]["chat_template_args"])
    if "sets" in job["data"]:
        del job["data"]["path"]
    job = merged(job, {"train": {"steps": 2, "global_batch_size": max(8, job["train"]["global_batch_size"])}})
    ranks = ranks_of(job.get("plan", {}))
    if ranks > RANKS_OF_A_RUN:
        return check(forks.weft("dryrun", write(workplace, job), "--world-size", ranks))
    check(forks.weft("train", write(workplace, job), "--nproc-per-node", ranks, timeout=300))
    check_generates(workplace / job["out"] / "export") if "task" not in job else None


def add_argument(folder: Path, arguments: dict[str, Any]) -> None:
    """Let the chat template of a model folder read arguments."""
    template = folder / "chat_template.jinja"
    template.write_text("".join(f"{{% if {name} %}}{{% endif %}}" for name in arguments) + template.read_text())


def write(folder: Path, job: dict[str, Any]) -> Path:
    path = folder / "printed.toml"
    path.write_text(tomli_w.dumps(job))
    return path


def check(done: Any) -> None:
    assert done.returncode == 0, done.stdout + done.stderr


def check_generates(folder: Path) -> None:
    """Plain Transformers opens a folder and generates."""
    program = (
        "import sys; from transformers import AutoModelForCausalLM as M, AutoTokenizer as T\n"
        "m, t = M.from_pretrained(sys.argv[1]), T.from_pretrained(sys.argv[1])\n"
        "ids = t('The quick', return_tensors='pt').input_ids\n"
        "assert m.generate(ids, max_new_tokens=4, min_new_tokens=4).shape[1] == ids.shape[1] + 4\n"
        "assert not any(n.split('.')[0] == 'weft' for n in sys.modules)"
    )
    argv = [sys.executable, "-c", program, str(folder)]
    check(subprocess.run(argv, capture_output=True, text=True, timeout=100))


# Commands

COMMANDS: dict[str, list[str]] = {}
for page in PAGES:
    for _, command in commands(page):
        COMMANDS.setdefault(page.stem, []).append(command)
SMALLER = {
    "weft train examples/digits-vit.toml": ["train.steps=2", "train.evaluate_rows=8"],
    "weft train examples/sft.toml": ["train.steps=2"],
    "weft train examples/dpo.toml": ["trainer.options.max_steps=2"],
    "weft train examples/grpo.toml": ["trainer.options.max_steps=2"],
    "weft train": ["train.steps=2"],
}
"""Settings that make a printed command short; the first that begins as the command."""
AT_MOST = {"--nproc-per-node": 2, "--world-size": 64, "train.steps": 4, "checkpoint.every": 2}


@pytest.mark.slow("several commands one after the other, up to the training of three jobs")
@pytest.mark.parametrize("page", COMMANDS)
def test_commands_run(page: str, workplace: Path) -> None:
    """The commands of a page, one after the other."""
    prepare_runs(page)
    for command in COMMANDS[page]:
        words = shorter(shlex.split(command.replace("RUN ", "runs/mine ")))
        if reason := next((why for pattern, why in NOT_RUN_HERE.items() if re.match(pattern, command)), ""):
            assert reason
            parse_options(words)
        elif words[0] == "weft":
            words += ["--yes"] * (words[1] == "clean")  # in place of an answer
            if words[1] == "compress":  # two ways to the same folder
                shutil.rmtree(words[3], ignore_errors=True)
            more = next((keys for start, keys in SMALLER.items() if command.startswith(start)), [])
            check(forks.weft(*words[1:], *(word for key in more for word in ("--set", key)), timeout=300))
        else:
            program = words[2] if words[1] == "-c" else Path(words[1]).read_text()
            check(forks.python(program, *words[2 + (words[1] == "-c") :]))


def prepare_runs(page: str) -> None:
    """Runs that the commands of a page name."""
    shutil.copy("examples/own_loop.py", "train.py")
    for name, axis in (("zero3", {"zero": 3}), ("tp2", {"tp": 2})):
        Path(f"{name}.toml").write_text(tomli_w.dumps({"parallel": axis}))
    named = {name for command in COMMANDS[page] for name in re.findall(r"\bruns/(\w+)", command)} - {"dpo"}
    if "RUN " in " ".join(COMMANDS[page]):
        named.add("mine")
    if "examples/dpo.toml" in " ".join(COMMANDS[page]) and "weft train examples/sft.toml" not in COMMANDS[page]:
        shutil.copytree("models/smollm2", "runs/sft/export")
    if any("models/dpo" in command for command in COMMANDS[page]) and "runs/dpo" not in " ".join(COMMANDS[page]):
        shutil.copytree("models/smollm2", "models/dpo")
    for name in sorted(named):
        job = merged(small_job("smollm2"), {"out": f"runs/{name}", "checkpoint": {"every": 2}})
        check(forks.weft("train", write(Path(), job), "--nproc-per-node", 2))


def shorter(words: list[str]) -> list[str]:
    """Words of a command with fewer ranks and steps."""
    found = list(words)
    for index, word in enumerate(found):
        name, _, value = word.partition("=")
        if name in AT_MOST and value.isdigit():
            found[index] = f"{name}={min(int(value), AT_MOST[name])}"
        elif index and found[index - 1] in AT_MOST and word.isdigit():
            found[index] = str(min(int(word), AT_MOST[found[index - 1]]))
        elif index and found[index - 1] == "--step":
            found[index] = "2"
        elif name == "train.profile_steps":
            found[index] = f"{name}=1-2"
    return found


def parse_options(words: list[str]) -> None:
    """The options of a command of Weft exist and have values that they can have."""
    words = [re.sub(r"[\[\]]|\|[^=]*$", "", word) for word in words if word not in ("...", ">")]
    if "weft" not in words:
        return
    group, *rest = typer.main.get_command(app), *words[words.index("weft") + 1 :]
    context = typer.Context(group)
    while hasattr(group, "commands"):
        group, rest = group.commands[rest[0]], rest[1:]
    group.make_context(group.name, [word for word in rest if not word.endswith(".yaml")], parent=context)


# Programs


def run_programs(rank: int, ranks: int, folder: Path, programs: list[str]) -> list[str]:
    """Each program of a page, after the names that it takes as given; returns the programs that have run."""
    os.chdir(folder)
    torch.manual_seed(0)
    ids = torch.randint(5, 90, (2, 8))
    batch = {"input_ids": ids, "labels": ids}
    names: dict[str, Any] = {"torch": torch, "weft": weft, "transformers": transformers, "folder": "models/t5"}
    names |= {"batch": batch, "batches": [batch], "loader": [batch], "parts": [batch, batch]}
    names |= {"rows_of_all": ids, "ids": ids, "labels": ids, "make": lambda shards: torch.optim.AdamW(shards, lr=0.1)}
    names["my_loss"] = lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    for program in programs:
        names["model"] = AutoModelForCausalLM.from_pretrained("models/smollm2")
        if "weft.prepare" not in program:
            names["run"] = weft.prepare(names["model"], optimizer=names["make"], plan="plan.toml")
        exec(compile(program, program, "exec"), names)
    return programs


def page_of(name: str) -> Path:
    return next(page for page in PAGES if page.stem == name)


def test_programs_of_an_own_loop(workplace: Path) -> None:
    found = [files(block).get("", "") for block in blocks(page_of("own-loop"))]
    programs = [text for text in found if re.search(r"\b(run|weft|rows|schedule)\b", text)]
    assert len(programs) == 9
    assert run_ranks(2, run_programs, workplace, programs) == [programs, programs]
    check_generates(workplace / "out/model")


@pytest.mark.parametrize("page", ["extending", "run"])
def test_functions_of_a_job_run(page: str, workplace: Path) -> None:
    """mine.py, and the settings that name its functions, as printed."""
    found = next(files(block) for block in blocks(page_of(page)) if "mine.py" in files(block))
    (workplace / "mine.py").write_text(missing(found["mine.py"]))
    settings = next(tomllib.loads(text) for name, text in found.items() if name.endswith(".toml"))
    job = merged(small_job("smollm2"), {"plan": settings} if "plan.toml" in found else settings)
    if page == "run":
        job["data"]["path"] = "films"
        (workplace / "films").mkdir()
        for index in range(20):
            (workplace / "films" / f"{index}.srt").write_text(f"Film {index} has words. " * 60)
    check(forks.weft("train", write(workplace, job), "--nproc-per-node", 2))


def missing(program: str) -> str:
    """A module with the functions that a page names and leaves to the reader."""
    given = "import torch\n"
    if "def make" not in program:
        given += "def make(groups, table): return torch.optim.AdamW(groups)\n"
        given += "def rate(step, steps, table): return 1e-3\n"
    return given + program


def test_a_run_from_python(workplace: Path) -> None:
    program = next(block.text for block in blocks(page_of("run")) if "weft.train(" in block.text)
    check(forks.python(program.replace("train.steps=100", "train.steps=2"), timeout=200))
    assert (workplace / "runs/mine/export").is_dir()


def test_a_smaller_model_from_python(workplace: Path) -> None:
    program = next(block.text for block in blocks(page_of("smaller-models")) if "compress_model(" in block.text)
    shutil.rmtree("small")
    check(forks.python(program, timeout=200))
    check_generates(workplace / "small")
