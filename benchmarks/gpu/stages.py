"""Stages of known length: each row is printed and written at once, and a stage that passes its time is cut."""

import argparse
import json
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench import Bench, Row, markdown

from weft.device.device import Device


class StageCut(BaseException):
    """The time of a stage is over. No Exception, because stages go on to the next row after one."""


@dataclass(frozen=True)
class Stage:
    """Measurements that are made together."""

    run: Callable[[Bench], Iterable[Row]]
    """Rows, preferably one by one: a generator."""
    seconds: int
    """Time on the accelerator, after which the stage is cut; compilation included."""
    proves: str
    by_default: bool = True


def parse(stages: Mapping[str, Stage], text: str, out: str) -> argparse.Namespace:
    """Command line of a script: `stages` (names), `small` and `out`."""
    table = [{"stage": name, "s": stage.seconds, "proves": stage.proves} for name, stage in stages.items()]
    rule = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=text, epilog=markdown(table), formatter_class=rule)
    chosen = [name for name, stage in stages.items() if stage.by_default]
    parser.add_argument("--stages", type=lambda names: names.split(","), default=chosen)
    parser.add_argument("--small", action="store_true", help="small models, without limits of time")
    parser.add_argument("--out", type=Path, default=Path(out), help=f"JSON file with all rows; default: {out}")
    arguments = parser.parse_args()
    if unknown := set(arguments.stages) - set(stages):
        parser.error(f"no stages: {', '.join(sorted(unknown))}")
    return arguments


def require_accelerator(device: Device, small: bool) -> None:
    if device.type == "cpu" and not small:
        raise SystemExit("no accelerator found; --small runs every stage on the CPU")


def run_stages(stages: Mapping[str, Stage], names: Iterable[str], bench: Bench, out: Path, timed: bool) -> list[str]:
    """Run stages in order; return the names of those that raised an error.

    Args:
        stages: stages by name.
        names: stages to run.
        bench: argument of the stages.
        out: JSON file, which is written again after each row.
        timed: cut stages that pass their time.
    """
    results: dict[str, Any] = {"device": bench.device.name, "torch": torch.__version__}
    print(f"{bench.device.name}, torch {torch.__version__}", flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in names:
        stage, begin, rows = stages[name], time.perf_counter(), list[Row]()
        results[name] = {"rows": rows, "ended": "killed"}
        print(f"\n## {name}: {stage.proves}\n", flush=True)

        def add(row: Row, rows: list[Row] = rows) -> None:
            rows.append(row)
            lines = markdown([row]).splitlines()
            same = len(rows) > 1 and list(row) == list(rows[-2])
            print(*(lines[2:] if same else lines), sep="\n", flush=True)
            out.write_text(json.dumps(results, indent=1))

        ended = _run(stage, bench, add, stage.seconds if timed else 0)
        seconds = time.perf_counter() - begin
        results[name] |= {"ended": ended, "seconds": round(seconds, 1)}
        out.write_text(json.dumps(results, indent=1))
        print(f"\n{name}: {seconds:.0f} s of {stage.seconds}, {ended}", flush=True)
        if ended not in ("complete", "cut"):
            failed.append(name)
        bench.free()
    return failed


def _run(stage: Stage, bench: Bench, add: Callable[[Row], None], limit: int) -> str:
    """Run a stage for at most `limit` seconds (0: without a limit); return how it ended."""

    def cut(*_: Any) -> None:
        raise StageCut

    handler = signal.signal(signal.SIGALRM, cut)
    signal.setitimer(signal.ITIMER_REAL, limit, 10)  # repeated, as Python drops what is raised in a finalizer
    try:
        for row in stage.run(bench):
            add(row)
        return "complete"
    except StageCut:
        return "cut"
    except Exception:  # the next stages still run
        return traceback.format_exc(limit=-6)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
