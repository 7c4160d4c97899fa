"""Writes the generated pages of docs/: keys.md and rules.md. A test fails when they are out of date.

python docs/generate.py
"""

import json
from pathlib import Path

from pydantic_core import PydanticUndefined

from weft.job import Job
from weft.plan import RULES, Table

DOCS = Path(__file__).parent


def rows(table: type[Table], prefix: str) -> list[str]:
    """A line of the page for each key below a table."""
    lines = []
    for name, field in table.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Table):
            lines += rows(field.annotation, f"{prefix}{name}.")
        else:
            default = "" if field.default in (None, PydanticUndefined) else f"`{json.dumps(field.default)}`"
            lines.append(f"| `{prefix}{name}` | {default} | {' '.join((field.description or '').split())} |")
    return lines


def keys_page() -> str:
    head = ["# Keys of a job", "", "Generated from `src/weft/job.py` and `src/weft/plan.py`.", ""]
    return "\n".join([*head, "| key | default | meaning |", "|---|---|---|", *rows(Job, "")]) + "\n"


def rules_page() -> str:
    head = ["# Settings that exclude each other", "", "Generated from the table `RULES` in `src/weft/plan.py`.", ""]
    lines = [f"| {rule.name} | {rule.reason} | {rule.fix} |" for rule in RULES]
    return "\n".join([*head, "| refused | reason | fix |", "|---|---|---|", *lines]) + "\n"


PAGES = {"keys.md": keys_page, "rules.md": rules_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
