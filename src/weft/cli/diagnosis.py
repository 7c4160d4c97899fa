"""weft doctor RUN"""

import json as json_module
import math
from dataclasses import asdict
from pathlib import Path


def diagnose_run(run: Path, json: Path | None = None) -> int:
    """Print the diagnosis of a run folder.

    Args:
        run: run folder.
        json: file for the result; None for none.

    Returns:
        Exit code: 0 if nothing is to blame, 1 if there is a culprit.
    """
    from weft.cli.outputs import check_outputs
    from weft.training.run_folder import check_run

    check_run(run)
    check_outputs(json=json)

    from rich.console import Console  # after the checks above, because importing torch takes seconds
    from rich.table import Table

    from weft.observe.diagnosis import diagnose

    found, console = diagnose(run), Console(highlight=False, soft_wrap=True, markup=False)
    table = Table("seconds of a step", "expected", "measured", "rose at step", title=f"expected: {found.source}")
    for term in found.terms:
        expected = "" if term.expected is None else f"{term.expected:.4f}"
        measured = "" if math.isnan(term.measured) else f"{term.measured:.4f}"
        table.add_row(term.name, expected, measured, "" if term.since is None else str(term.since))
    console.print(table)
    for line in found.notes:
        console.print(f"note: {line}")
    if found.verdict:
        for line in found.verdict.evidence:
            console.print(f"evidence: {line}")
    console.print(found.headline)
    if json is not None:
        text = json_module.dumps(asdict(found), indent=1).replace("NaN", "null")
        json.write_text(text + "\n", encoding="utf-8")
    return 1 if found.verdict else 0
