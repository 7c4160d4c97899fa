"""Writes the generated pages of docs/: keys.md, rules.md and families.md. A test fails when they are out of date.

python docs/generate.py
"""

import json
import runpy
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
import transformers
from pydantic_core import PydanticUndefined
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from weft.anatomy.roles import Anatomy
from weft.anatomy.transformers import read_anatomy
from weft.checkpoint.huggingface import build_on_meta
from weft.errors import WeftError
from weft.job import Job
from weft.parallel.parallelize import check_axes
from weft.plan import RULES, Plan, Table

DOCS = Path(__file__).parent
# What is proved stands with the tests, which are not installed.
LAB = DOCS.parent / "tests" / "lab"
FAMILIES = tuple(runpy.run_path(str(LAB / "families.py"))["FAMILIES"])
TECHNIQUES = runpy.run_path(str(LAB / "techniques.py"))
SHRINK = runpy.run_path(str(LAB / "shrink.py"))
PROVED, NOT_PROVED = SHRINK["PROVED"] | {"pp": SHRINK["PROVED"]["pp"] + SHRINK["BIASED"]}, SHRINK["NOT_PROVED"]


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


def compatibility_page() -> str:
    """Which two techniques go together: what a plan says of each pair."""
    names, reasons = list(TECHNIQUES["TECHNIQUES"]), []
    head = [
        "# Pairs of techniques",
        "",
        "Generated from `tests/lab/techniques.py` and the rules of `src/weft/plan.py`.",
        "",
        "- **yes**: `tests/memory/test_pairs.py` trains a small model of experts with both. Two splits of the work: losses,",
        "  norms, logits, gradients and weights of three steps are the untouched model's to 1e-5 in float32. Else they are,",
        "  bit by bit, those of the plan without what should change nothing.",
        "- or: two values of one setting.",
        "- a number: a plan with both is refused, for the reason below.",
        "",
    ]
    table = ["| | " + " | ".join(names[:-1]) + " |", "|---" * len(names) + "|"]
    for row, one in enumerate(names[1:], 1):
        cells = [_pair(one, other, reasons) for other in names[:row]] + [""] * (len(names) - 1 - row)
        table.append(f"| {one} | " + " | ".join(cells) + " |")
    notes = [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    return "\n".join([*head, *table, "", *notes]) + "\n"


def _pair(one: str, other: str, reasons: list[str]) -> str:
    tables = TECHNIQUES["join"](other, one)
    if tables is None:
        return "or"
    try:
        Plan.model_validate(tables).resolve(TECHNIQUES["ranks_of"](tables))
    except WeftError as error:
        reason = f"{error.what}: {error.rule}"
        if reason not in reasons:
            reasons.append(reason)
        return str(reasons.index(reason) + 1)
    return "**yes**"


AXES: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2},
    "cp (ring)": {"cp": 2},
    "cp (Ulysses)": {"cp": 2, "cp_ulysses": 2},
    "ep": {"ep": 2},
    "pp": {"pp": 2},
}


def families_page() -> str:
    """Which family takes which axis: every causal language model of Transformers whose default configuration builds."""
    head = [
        "# Families and axes",
        "",
        f"Generated with Transformers {transformers.__version__}: every causal language model of Transformers whose default",
        "configuration builds and can be read, and what `weft.parallel.parallelize.check_axes` says of two ranks on each axis.",
        "",
        "- **yes**: parity with the untouched model is proved by `tests/parallel/test_axes.py` or, for a small configuration",
        "  of the family, by `tests/parallel/test_families.py`. Ulysses: by the second with the ring, which shares all that",
        "  depends on the family. pp: by the second, with 1F1B; a plan is refused unless a forward without numbers, of the",
        "  whole model and of single stages, shows that hidden states are all that its blocks hand on.",
        "- accepted: nothing speaks against it, and it is not proved, for the reason that follows: try `weft compare` first.",
        "- anything else is why a plan is refused at start.",
        "",
        "Data parallelism (zero 0 to 3) needs nothing of a family but that it takes masks of documents (Mamba does not).",
        "",
        f"| family | {' | '.join(AXES)} |",
        "|---|" + "---|" * len(AXES),
    ]
    lines = []
    for family in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            model = build_on_meta(small_config(family), torch.float32)
            anatomy = read_anatomy(model)
        except Exception:  # its defaults make no model, or none that can be read
            continue
        cells = [verdict(model, anatomy, axis, family) for axis in AXES if axis != "pp"]
        small = build_on_meta(AutoConfig.for_model(**SHRINK["shrunk"](family)), torch.float32)
        cells.append(verdict(small, read_anatomy(small), "pp", family))
        lines.append(f"| {family} | {' | '.join(cells)} |")
    return "\n".join([*head, *lines]) + "\n"


def small_config(family: str) -> Any:
    """The default configuration, with two layers where it does not list them one by one."""
    config = AutoConfig.for_model(family)
    for key in ("num_hidden_layers", "n_layer"):
        if key in config.to_dict() and getattr(config, "layer_types", None) is None:
            setattr(config, key, 2)
    return config


def verdict(model: Any, anatomy: Anatomy, axis: str, family: str) -> str:
    plan = Plan.model_validate({"parallel": AXES[axis]}).resolve(2)
    try:
        check_axes(model, anatomy, plan)
    except WeftError as refusal:
        what = refusal.what.removeprefix(f"{anatomy.family} cannot be cut into stages: ").replace("|", "/")
        return "no experts" if not anatomy.has_experts and axis == "ep" else shorten(what, 150, placeholder=" ...")
    short = axis.split(" ")[0]
    if family in FAMILIES or family in PROVED[short]:
        return "**yes**"
    return f"accepted, not proved: {NOT_PROVED[short].get(family, 'not tried')}"


PAGES = {
    "keys.md": keys_page,
    "rules.md": rules_page,
    "compatibility.md": compatibility_page,
    "families.md": families_page,
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
