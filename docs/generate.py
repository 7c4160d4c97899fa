"""Write the generated pages of docs/; a test fails when they are out of date.

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

from weft.anatomy.build import build_on_meta
from weft.anatomy.documents import TOLERANCE, check_packing
from weft.anatomy.roles import Anatomy
from weft.anatomy.transformers import read_anatomy
from weft.errors import WeftError
from weft.job import Job
from weft.parallel.parallelize import check_axes
from weft.plan import RULES, Plan, Table

DOCS = Path(__file__).parent
# The lists of proved families and techniques are in tests/, which is not an installed package.
LAB = DOCS.parent / "tests" / "lab"
FAMILIES = tuple(runpy.run_path(str(LAB / "families.py"))["FAMILIES"])
TECHNIQUES = runpy.run_path(str(LAB / "techniques.py"))
SHRINK = runpy.run_path(str(LAB / "shrink.py"))
PROVED, NOT_PROVED = SHRINK["PROVED"] | {"pp": SHRINK["PROVED"]["pp"] + SHRINK["BIASED"]}, SHRINK["NOT_PROVED"]


def rows(table: type[Table], prefix: str) -> list[str]:
    """Table rows of all keys below a table of settings."""
    lines = []
    for name, field in table.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Table):
            lines += rows(field.annotation, f"{prefix}{name}.")
        else:
            default = "" if field.default in (None, PydanticUndefined) else f"`{json.dumps(field.default)}`"
            lines.append(f"| `{prefix}{name}` | {default} | {' '.join((field.description or '').split())} |")
    return lines


def keys_page() -> str:
    head = [
        "# Keys of a job",
        "",
        "All keys of `job.toml`, with their defaults. Change a key on the command line:",
        "",
        "    weft train job.toml --set plan.parallel.zero=3 --set optimizer.lr=1e-4",
        "",
        "Generated from `src/weft/job.py` and `src/weft/plan.py`.",
        "",
    ]
    return "\n".join([*head, "| key | default | meaning |", "|---|---|---|", *rows(Job, "")]) + "\n"


def rules_page() -> str:
    head = [
        "# Settings that exclude each other",
        "",
        "Combinations of settings that a plan refuses, with the reason and a fix. The refusal comes at start, before a",
        "rank runs.",
        "",
        "Generated from the table `RULES` in `src/weft/plan.py`.",
        "",
    ]
    lines = [f"| {rule.name} | {rule.reason} | {rule.fix} |" for rule in RULES]
    return "\n".join([*head, "| refused | reason | fix |", "|---|---|---|", *lines]) + "\n"


def compatibility_page() -> str:
    """Compatibility of each pair of techniques: proved, alternatives, or refused by the plan."""
    names, reasons = list(TECHNIQUES["TECHNIQUES"]), []
    head = [
        "# Pairs of techniques",
        "",
        "Techniques that work together in one plan. Generated from `tests/lab/techniques.py` and the rules of",
        "`src/weft/plan.py`.",
        "",
        "- **yes**: `tests/memory/test_pairs.py` trains a small Mixture-of-Experts model with both. For two kinds of",
        "  parallelism: losses, norms, logits, gradients and weights of three steps are those of the untouched model, to",
        "  1e-5 in float32. For a technique that must not change results: they are, bit by bit, those of the plan without",
        "  it.",
        "- or: alternatives, two values of one setting.",
        "- a number: a plan with both is refused, for the reason with that number below the table.",
        "",
    ]
    table = ["| | " + " | ".join(names[:-1]) + " |", "|---" * len(names) + "|"]
    for row, first in enumerate(names[1:], 1):
        cells = [_pair(first, second, reasons) for second in names[:row]] + [""] * (len(names) - 1 - row)
        table.append(f"| {first} | " + " | ".join(cells) + " |")
    notes = [f"{index}. {reason}" for index, reason in enumerate(reasons, 1)]
    return "\n".join([*head, *table, "", *notes]) + "\n"


def _pair(first: str, second: str, reasons: list[str]) -> str:
    """Table cell of a pair; the reason of a refusal is added to `reasons`."""
    tables = TECHNIQUES["join"](second, first)
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
    """Axes supported by each causal language model of Transformers whose default configuration builds."""
    head = [
        "# Families and axes",
        "",
        "Axes of parallelism that each model family supports, as decided by `weft.parallel.parallelize.check_axes` for",
        "two ranks on each axis.",
        "",
        f"Generated with Transformers {transformers.__version__}: every causal language model of Transformers whose default",
        "configuration builds and whose anatomy can be read.",
        "",
        "- **yes**: parity with the untouched model is proved by `tests/parallel/test_axes.py` or, for a small",
        "  configuration of the family, by `tests/parallel/test_families.py`. Ulysses: by the second test with the ring,",
        "  as both share all code that depends on the family. pp: by the second test with 1F1B. A plan with pp is refused",
        "  unless a forward on the meta device, of the full model and of single stages, shows that blocks pass on hidden",
        "  states only.",
        "- accepted: not refused, but not proved either, for the reason that follows: run `weft compare` first.",
        "- any other text is the reason why a plan is refused at start.",
        "",
        "Data parallelism (zero 0 to 3) works for every family. Families that support packed rows: [packing](packing.md).",
        "",
        f"| family | {' | '.join(AXES)} |",
        "|---|" + "---|" * len(AXES),
    ]
    lines = []
    for family in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            model = build_on_meta(small_config(family), torch.float32)
            anatomy = read_anatomy(model)
        except Exception:  # the defaults build no model, or its anatomy cannot be read
            continue
        cells = [verdict(model, anatomy, axis, family) for axis in AXES if axis != "pp"]
        small = build_on_meta(AutoConfig.for_model(**SHRINK["shrunk"](family)), torch.float32)
        cells.append(verdict(small, read_anatomy(small), "pp", family))
        lines.append(f"| {family} | {' | '.join(cells)} |")
    return "\n".join([*head, *lines]) + "\n"


def small_config(family: str) -> Any:
    """Default configuration of a family, with two layers unless it lists its layers one by one."""
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


def packing_page() -> str:
    """Support of packed rows by each family: each document must be computed as if it were alone in its row."""
    head = [
        "# Families and packed documents",
        "",
        "`data.packing = true`, the default, fills rows with several documents, so that no token is wasted on padding.",
        "Weft accepts it for models that compute each document as if it were alone in its row, and tests this at start:",
        "",
        "    $ weft train --set model.config.model_type=minimax ...",
        "    minimax cannot keep packed documents apart: replacing the first document changes the logits of the second by 24%",
        "      where: data.packing = true",
        "      rule:  the result of a document does not depend on the other documents of its row (tested on a small copy)",
        "      fix:   set data.packing = false, for one document or part of a document per row",
        "",
        "**Use it** wherever it is accepted. **Without it** (`packing = false`) a row is one piece of one document, and",
        "is computed by the model's own code, without any mask from Weft.",
        "",
        "**The test** (`src/weft/anatomy/documents.py`) takes 0.02 to 1.8 s, 0.2 s on average (one core):",
        "",
        "1. A small copy of the model is built from its configuration: the same classes, blocks of all kinds, widths of 8",
        "   to 64, seeded weights, float32, on CPU.",
        "2. Eight rows of two documents run as under the plan: with masks of documents and positions that restart; under",
        "   cp, with Weft's own attention.",
        "3. Each document alone runs through the untouched copy, with eager attention and neither masks nor positions.",
        "4. The logits must agree to 0.2 % of the largest one: rounding in float32 is below 0.03 % in all families, and",
        "   the effect of another document is above 6 %.",
        "",
        "- Windows, the number of keys that sparse attention selects, and the length at which LongRoPE changes are scaled",
        "  down with the copy: those that are shorter than `data.seq_len` are shorter than the documents of the copy, and",
        "  have an effect.",
        "- A model that cannot be tested is refused: no copy can be built, or none below 34 million parameters.",
        "- Under tp, cp and attention dropout Weft makes the masks of all rows. There, rows of one document are tested",
        "  too, and a model whose own code adds to its masks is refused (Gemma 3 with `use_bidirectional_attention`).",
        "",
        "**Sparse attention** (axk2, deepseek_v32, glm_moe_dsa, dots3_note, hy_v4) keeps documents apart. But where",
        "`index_topk` is shorter than a document, keys of equal score are chosen by their index in the row, and a score",
        "is zero where the scores of all index heads are zero. With 4 index heads that is common, and packing is refused;",
        "with 8 to 64 it was not seen (30 seeds).",
        "",
        f"Generated with Transformers {transformers.__version__}: the default configuration of every family, rows of any",
        "length.",
        "",
        "| family | packed rows |",
        "|---|---|",
    ]
    lines = [line for family in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) if (line := packing_line(family))]
    return "\n".join([*head, *lines]) + "\n"


def packing_line(family: str) -> str | None:
    """Table row of a family; None if the defaults build no model, or its anatomy cannot be read."""
    try:
        model = build_on_meta(AutoConfig.for_model(family), torch.float32)
        anatomy = read_anatomy(model)
    except Exception:
        return None
    trial = check_packing(model, anatomy)
    if trial.error:
        verdict = "no: " + trial.error.replace("|", "/").partition(" (")[0]
    elif trial.problem:
        verdict = "no: a document changes with the document before it" if trial.leak > TOLERANCE else NOT_ALONE
    else:
        verdict = "**yes**"
    return f"| {family} | {shorten(verdict, 120, placeholder=' ...')} |"


NOT_ALONE = "no: a document differs from the same document alone"
PAGES = {
    "keys.md": keys_page,
    "rules.md": rules_page,
    "compatibility.md": compatibility_page,
    "families.md": families_page,
}

# Takes a minute; tests/anatomy/test_documents.py checks some of its lines, and all of them in the sweep.
SLOW_PAGES = {"packing.md": packing_page}

if __name__ == "__main__":
    for name, page in (PAGES | SLOW_PAGES).items():
        (DOCS / name).write_text(page(), encoding="utf-8")
