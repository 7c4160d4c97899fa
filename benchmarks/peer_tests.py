"""Own tests of Transformers, TRL and accelerate, unchanged, under Weft.

    python benchmarks/peer_tests.py SOURCES                            # minutes to hours on two cores
    python benchmarks/peer_tests.py SOURCES --suite trl --only dpo     # tests whose name has "dpo"

SOURCES has a checkout of each library in the folders `transformers`, `trl` and `accelerate`; libraries that are not there are
skipped. The sdists of Transformers and TRL have no tests of their trainers: check a tag out. Tests of TRL import private names
of their own version, and run with the package of the checkout; remove `src` of the others, so that the installed version
counts. The sdist of accelerate has its tests: `pip download --no-deps --no-binary :all: accelerate`. The tests need
`parameterized`, `pytest-rerunfailures`, `sentencepiece` and `evaluate`.

Tests run in one process without Weft ("plain"), and those that pass run on two ranks under Weft with zero 2. Those that fail
there run again under zero 0, whose parameters are full tensors, and those that fail there too on two ranks of plain DDP.
A test passes on two ranks if it passes on both. The hub is offline; `peer_hub.py` makes the tiny models and the dataset that
TRL's tests load.

How tests that were written for one process run on two ranks: pytest collects a file under the names that `weft run` binds, and
forks fresh ranks for each test, which have a timeout. Ranks get the same temporary folders, those of rank 0: `tempfile.mkdtemp`
and `tmp_path` count their calls in a folder of the test. No rank removes one before the others have ended the test. Teardowns
of fixtures do not count: one of TRL needs vLLM where ranks have joined.
"""

import contextlib
import faulthandler
import json
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer


class Way(NamedTuple):
    """A way to run a test."""

    ranks: int
    zero: int | None = None
    """ZeRO stage under Weft; None without Weft."""


WAYS = {"plain": Way(1), "zero 2": Way(2, zero=2), "zero 0": Way(2, zero=0), "DDP": Way(2)}
BEFORE = {"zero 2": "plain", "zero 0": "zero 2", "DDP": "zero 0"}
"""Way whose outcome decides which tests run: those that pass plain, and those that fail under Weft."""
SUITES = {
    "transformers": [f"tests/trainer/test_trainer{part}.py" for part in ("", "_callback", "_seq2seq", "_utils")],
    "trl": [f"tests/test_{name}_trainer.py" for name in ("sft", "dpo", "reward", "kto", "grpo", "rloo")],
    "accelerate": [
        *(f"tests/test_{name}.py" for name in ("accelerator", "data_loader", "optimizer", "scheduler", "grad_sync")),
        *(f"src/accelerate/test_utils/scripts/test_{name}.py" for name in ("script", "sync", "ops")),
        "src/accelerate/test_utils/scripts/test_distributed_data_loop.py",
        "src/accelerate/test_utils/scripts/external_deps/test_metrics.py",
    ],
}
"""Files of tests by library; a file of a folder `scripts` is a script for several ranks."""
REMOVED = {"transformers": ("GlueDataset", "GlueDataTrainingArguments")}
"""Names that tests of an older version import, and the installed version may lack; tests that use them fail plain."""
GRACE_SECONDS = 10
"""Time that the other ranks have to end after one has failed."""
CONSEQUENCES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "ended without a result")
"""Texts of failures that another rank has caused."""


class Outcome(NamedTuple):
    """Outcome of a test: "passed", "skipped" or "failed", and why."""

    outcome: str
    reason: str


# In a rank


def share_temporary_folders(folder: Path) -> None:
    """Give this rank the temporary folders that the other ranks of a test have, by the place and the number of the call."""
    calls: Counter[tuple[str, int]] = Counter()

    def mkdtemp(suffix: str | None = None, prefix: str | None = None, dir: Any = None) -> str:
        frame: Any = sys._getframe(1)
        while frame.f_code.co_filename == tempfile.__file__:
            frame = frame.f_back
        place = frame.f_code.co_filename, frame.f_lineno
        calls[place] += 1
        name = f"{prefix or 'tmp'}{Path(place[0]).stem}-{place[1]}-{calls[place]}{suffix or ''}"
        (folder / name).mkdir(exist_ok=True)
        return str(folder / name)

    tempfile.mkdtemp = mkdtemp  # type: ignore[assignment]
    remove = shutil.rmtree

    def rmtree(path: Any, *args: Any, **kwargs: Any) -> None:
        if Path(path).parent != folder:  # which the process that forked the ranks removes
            with contextlib.suppress(FileNotFoundError):  # another rank was faster
                remove(path, *args, **kwargs)

    shutil.rmtree = rmtree  # type: ignore[assignment]
    tempfile.TemporaryDirectory._rmtree = classmethod(lambda *_, **__: None)  # type: ignore[attr-defined]


def run_rank(rank: int, way: Way, port: int, timeout: float, folder: Path, test: Callable[[], Outcome]) -> None:
    """Run a test in this process, a fork, as one of the ranks; write its outcome, and end."""
    os.setsid()
    log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1), os.dup2(log, 2)
    if way.ranks > 1:
        variables = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port}
        variables |= {"WORLD_SIZE": way.ranks, "LOCAL_WORLD_SIZE": way.ranks}
        os.environ.update({name: str(value) for name, value in variables.items()})
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "ACCELERATE_USE_CPU": "true"})
    faulthandler.enable(), faulthandler.dump_traceback_later(timeout)
    (folder / "tmp").mkdir(exist_ok=True)
    (folder / "cwd").mkdir(exist_ok=True)
    os.chdir(folder / "cwd")
    share_temporary_folders(folder / "tmp")
    try:
        if way.zero is not None:
            from weft.training.prepare import init

            init()
        outcome = test()
    except BaseException as error:
        outcome = Outcome("failed", f"{type(error).__name__}: {error}")
    draft = folder / f"draft-{rank}"
    draft.write_text(json.dumps(outcome))
    draft.replace(folder / f"outcome-{rank}")
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(0)


def wait_for_ranks(folder: Path, rank: int, ranks: int) -> None:
    """Wait until all ranks have come here, at most the time that they have after a failure."""
    (folder / f"here-{rank}").touch()
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline and not all((folder / f"here-{other}").exists() for other in range(ranks)):
        time.sleep(0.01)


def run_item(item: Any, folder: Path) -> Outcome:
    """Run an item of pytest in this rank."""
    from _pytest.runner import runtestprotocol

    class SharedFolders:
        def mktemp(self, basename: str, numbered: bool = True) -> Path:
            (folder / "tmp" / basename).mkdir(exist_ok=True)
            return folder / "tmp" / basename

        def getbasetemp(self) -> Path:
            return folder / "tmp"

        _retention_policy, _basetemp = "all", folder / "tmp"

    item.config._tmp_path_factory = SharedFolders()
    reports = runtestprotocol(item, log=False, nextitem=None)
    for report in reports:
        print(report.longrepr or "", flush=True)
    failed = [report for report in reports if report.failed and report.when != "teardown"]
    if failed:
        crash = getattr(failed[0].longrepr, "reprcrash", None)
        return Outcome("failed", crash.message if crash else str(failed[0].longrepr))
    if any(report.skipped for report in reports):
        return Outcome("skipped", "")
    return Outcome("passed", "")


def run_script(path: Path) -> Outcome:
    """Run a script in this rank, as `python path` does."""
    sys.argv = [str(path)]
    runpy.run_path(str(path), run_name="__main__")
    return Outcome("passed", "")


# In the process that forks ranks


def free_port() -> int:
    """Port that is free now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def run_on_ranks(way: Way, folder: Path, timeout: float, test: Callable[[int], Outcome]) -> Outcome:
    """Fork the ranks of a test, and wait until they have ended.

    Args:
        way: how to run the test.
        folder: new folder of the test.
        timeout: seconds after which the ranks are killed.
        test: runs the test in a rank, whose number is its argument.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    port, running = free_port(), {}
    for rank in range(way.ranks):
        if not (process := os.fork()):
            run_rank(rank, way, port, timeout - 3, folder, lambda: test(rank))  # noqa: B023, in a fork
        running[process] = rank
    deadline, in_time = time.monotonic() + timeout, True
    while running:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process:
            rank = running.pop(process)
            found = folder / f"outcome-{rank}"
            if status or not found.exists() or json.loads(found.read_text())[0] == "failed":
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        elif time.monotonic() > deadline:
            in_time = False
            for process in running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process, signal.SIGKILL)
            deadline = float("inf")
        else:
            time.sleep(0.01)
    shutil.rmtree(folder / "tmp", ignore_errors=True)
    outcomes = []
    for rank in range(way.ranks):
        path = folder / f"outcome-{rank}"
        reason = "ended without a result" if in_time else "timeout: ended without a result"
        outcomes.append(Outcome(*json.loads(path.read_text())) if path.exists() else Outcome("failed", reason))
    failed = [outcome for outcome in outcomes if outcome.outcome == "failed"]
    if failed:
        return min(failed, key=lambda outcome: any(text in outcome.reason for text in CONSEQUENCES))
    return outcomes[0]


class RanksOfTests:
    """Plugin of pytest that forks ranks for each test."""

    def __init__(self, name: str, only: set[str] | None, text: str, timeout: float, folder: Path):
        self.way, self.only, self.text, self.timeout, self.folder = WAYS[name], only, text, timeout, folder
        self.outcomes: dict[str, Outcome] = {}
        self._place: tuple[Path, int] | None = None

    def pytest_runtestloop(self, session: Any) -> bool:
        for item in session.items:
            name = f"{Path(item.fspath).stem}::{item.nodeid.partition('::')[2]}"
            if (self.only is not None and name not in self.only) or self.text not in name:
                continue
            folder = self.folder / name.replace("/", "_").replace(":", "_")[:120]
            outcome = run_on_ranks(self.way, folder, self.timeout, lambda rank: self._run(rank, item, folder))  # noqa: B023
            self.outcomes[name] = outcome
            print(
                f"  {outcome.outcome:8} {name}   {outcome.reason.splitlines()[0][:150] if outcome.reason else ''}",
                flush=True,
            )
        return True

    def _run(self, rank: int, item: Any, folder: Path) -> Outcome:
        self._place = folder, rank
        return run_item(item, folder)

    def pytest_runtest_teardown(self) -> None:
        if self._place:
            wait_for_ranks(*self._place, self.way.ranks)


def run_file(
    path: Path, name: str, only: set[str] | None, text: str, timeout: float, folder: Path, results: Path
) -> None:
    """Run the tests of a file in one way, and write their outcomes; in a process of its own."""
    import pytest

    from weft.integrations.script import bound_to
    from weft.plan import Plan

    for module, names in REMOVED.items():
        for name_ in names:
            if not hasattr(sys.modules[module], name_):
                setattr(sys.modules[module], name_, None)
    root = next(parent for parent in path.parents if (parent / "pyproject.toml").exists())
    zero = WAYS[name].zero
    with contextlib.nullcontext() if zero is None else bound_to(Plan.model_validate({"parallel": {"zero": zero}})):
        if "scripts" in path.parts:
            stem = f"{path.stem}::script"
            chosen = (only is None or stem in only) and text in stem
            outcomes = (
                {stem: run_on_ranks(WAYS[name], folder / stem, 5 * timeout, lambda _: run_script(path))}
                if chosen
                else {}
            )
            for key, outcome in outcomes.items():
                print(f"  {outcome.outcome:8} {key}   {outcome.reason[:150]}", flush=True)
        else:
            plugin = RanksOfTests(name, only, text, timeout, folder)
            options = [
                "-q",
                "-s",
                "--rootdir",
                str(root),
                "-p",
                "no:cacheprovider",
                "-p",
                "no:xdist",
                "--disable-warnings",
            ]
            os.chdir(root)
            pytest.main([str(path), *options], plugins=[plugin])
            outcomes = plugin.outcomes
    results.write_text(json.dumps(outcomes))


def in_own_process(function: Callable[..., None], *arguments: Any) -> None:
    """Run a function in a fork, which has the imports of this process."""
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    process.join()


# Tables


def print_table(found: dict[str, dict[str, dict[str, Outcome]]]) -> None:
    """Print the number of tests that passed, by library and way, and then the tests that failed under zero 2."""
    print("\n| tests of | pass plain | pass under zero 2 | others: under zero 0 | others: fail on DDP, too |")
    print("|---|---|---|---|---|")
    for suite, ways in found.items():
        passed = {name: {test for test, one in ways[name].items() if one.outcome == "passed"} for name in WAYS}
        others = passed["plain"] - passed["zero 2"]
        on_ddp = {test for test, one in ways["DDP"].items() if one.outcome == "failed"}
        whole = others & passed["zero 0"]
        counts = len(passed["plain"]), len(passed["zero 2"]), len(whole), len((others - whole) & on_ddp)
        print(f"| {suite} | " + " | ".join(map(str, counts)) + " |")
    for suite, ways in found.items():
        print(f"\n{suite}: failed under zero 2")
        for test in sorted(test for test, one in ways["zero 2"].items() if one.outcome == "failed"):
            print(f"- {test}")
            for name in WAYS:
                if name != "plain" and test in ways[name]:
                    outcome = ways[name][test]
                    print(f"    {name}: {outcome.outcome} {outcome.reason.strip().partition(chr(10))[0][:110]}")


def main(
    sources: Annotated[Path, typer.Argument(help="Folder with the checkouts.")],
    suite: Annotated[str, typer.Option(help="transformers, trl or accelerate; all without it.")] = "",
    file: Annotated[str, typer.Option(help="Text in the names of the files to run.")] = "",
    only: Annotated[str, typer.Option(help="Text in the names of the tests to run.")] = "",
    ways: Annotated[str, typer.Option(help="Ways to run, by their letters: plain, zero 2, zero 0, DDP.")] = "p20d",
    timeout: Annotated[float, typer.Option(help="Seconds for a test.")] = 60,
    out: Annotated[Path, typer.Option(help="Folder for logs of ranks and outcomes.")] = Path("peer-tests"),
    again: Annotated[bool, typer.Option(help="Run tests whose outcome is in --out too.")] = False,
) -> None:
    """Run the tests, and print how many pass, and which do not."""
    sources, out = sources.resolve(), out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    os.environ.update({"HF_HUB_OFFLINE": "1", "HF_HOME": str(out / "hub"), "TOKENIZERS_PARALLELISM": "false"})
    os.environ.update(
        {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "RUN_SLOW": "0", "TRL_EXPERIMENTAL_SILENCE": "1"}
    )
    for module in (
        "torch",
        "transformers.trainer",
        "transformers.testing_utils",
        "accelerate",
        "datasets",
        "peft",
        "pytest",
    ):
        __import__(module)
    from benchmarks.peer_hub import make_hub

    make_hub(out / "hub", sources / "trl")
    chosen = [name for name, letter in zip(WAYS, "p20d", strict=True) if letter in ways]
    found: dict[str, dict[str, dict[str, Outcome]]] = {}
    for library in (name for name in SUITES if name.startswith(suite) and (sources / name).exists()):
        found[library] = {name: {} for name in WAYS}
        for path in (sources / library / name for name in SUITES[library] if file in name):
            for name in WAYS:
                results = out / f"{path.stem}-{name.replace(' ', '-')}.json"
                known = json.loads(results.read_text()) if results.exists() else {}
                before = BEFORE.get(name, "")
                wanted = "passed" if before == "plain" else "failed"
                tests = {key for key, one in found[library].get(before, {}).items() if one.outcome == wanted}
                if name in chosen and (again or only or not known):
                    print(f"{path.relative_to(sources)}: {name}", flush=True)
                    fresh = out / f"fresh-{os.getpid()}.json"
                    in_own_process(run_file, path, name, tests if before else None, only, timeout, out / "tests", fresh)
                    known |= json.loads(fresh.read_text())
                    fresh.unlink()
                    results.write_text(json.dumps(known, indent=1))
                found[library][name].update({key: Outcome(*value) for key, value in known.items()})
    print_table(found)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    typer.run(main)
