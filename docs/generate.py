"""Write the generated pages of docs/; a test fails when they are out of date.

python docs/generate.py
"""

import json
import runpy
import sys
from pathlib import Path
from textwrap import shorten, wrap
from typing import Any

import torch
import transformers
from pydantic_core import PydanticUndefined
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from weft.anatomy.build import build_on_meta
from weft.anatomy.documents import TOLERANCE, check_packing
from weft.anatomy.roles import Anatomy
from weft.anatomy.transformers import read_anatomy, read_any_anatomy
from weft.errors import WeftError
from weft.job import Job, keys
from weft.parallel.choices import check_axes, choose
from weft.parallel.sequence.recurrent_heads import mixer_heads
from weft.parallel.tensor.checks import replicated_parts, splittable
from weft.plan import RULES, Plan, Table, broken_rules, check_plan, resolve_plan
from weft.posttraining.job import Rows, StartModel, Trainer

DOCS = Path(__file__).parent
# The lists of proved families and techniques are in tests/, which is not an installed package.
LAB = DOCS.parent / "tests" / "lab"
FAMILIES = tuple(runpy.run_path(str(LAB / "families.py"))["FAMILIES"])
TECHNIQUES = runpy.run_path(str(LAB / "techniques.py"))
SHRINK = runpy.run_path(str(LAB / "shrink.py"))
sys.path.append(str(LAB.parents[1]))
LIBRARY = runpy.run_path(str(LAB / "library_kinds.py"))
READ_MARKS = runpy.run_path(str(LAB / "marks.py"))["read_marks"]
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
        "Generated from `src/weft/job.py`, `src/weft/plan/` and `src/weft/posttraining/job.py`.",
        "",
    ]
    columns = ["| key | default | meaning |", "|---|---|---|"]
    trainer = [
        "",
        "## Jobs with a trainer of TRL",
        "",
        "Such a job has the table `trainer` ([fine-tuning](fine-tuning.md)). Its tables `adapter`, `eval` and `plan`, and"
        " `out`,",
        "are those above; the others are",
        "",
    ]
    own = [*rows(StartModel, "model."), *rows(Rows, "data."), *rows(Trainer, "trainer.")]
    return "\n".join([*head, *columns, *rows(Job, ""), *trainer, *columns, *own]) + "\n"


def effects_page() -> str:
    """Page of what each key changes in a run, by the tests that observe it."""
    head = [
        "# Observed effect of each key",
        "",
        "Each key of a job has a test that trains with a value other than the default, on the path of `weft train`, and",
        "observes what the value changes by a count or a fact. Equal losses alone are no effect.",
        "",
        "Generated from the marks `effect` in `tests/`.",
        "",
    ]
    found: dict[str, list[tuple[str, str]]] = {}
    for mark in READ_MARKS("effect"):
        key, effect = mark.arguments
        found.setdefault(key, []).append((effect, mark.test))
    lines = [f"| `{key}` | {effect} | `{test}` |" for key in keys() for effect, test in found.get(key, [])]
    return "\n".join([*head, "| key | observed effect | test |", "|---|---|---|", *lines]) + "\n"


def rules_page() -> str:
    head = [
        "# Settings that exclude each other",
        "",
        "Combinations of settings that a plan refuses, with the reason and a fix. The refusal comes at start, before a",
        "rank runs.",
        "",
        "Generated from the table `RULES` in `src/weft/plan/rules.py`.",
        "",
    ]
    keys_of = {rule.name: ", ".join(f"`plan.{key}`" for key in rule.keys) for rule in RULES}
    lines = [f"| {rule.name} | {keys_of[rule.name]} | {rule.reason} | {rule.fix} |" for rule in RULES]
    return "\n".join([*head, "| refused | keys | reason | fix |", "|---|---|---|---|", *lines]) + "\n"


def compatibility_page() -> str:
    """Compatibility of each pair of techniques: proved, alternatives, or refused by the plan."""
    names, reasons = list(TECHNIQUES["TECHNIQUES"]), []
    head = [
        "# Pairs of techniques",
        "",
        "Techniques that work together in one plan. Generated from `tests/lab/techniques.py` and the rules of",
        "`src/weft/plan/`.",
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
    plan = Plan.model_validate(tables)
    if broken := broken_rules(plan):
        reason = f"{broken[0].name}: {broken[0].reason}"
        if reason not in reasons:
            reasons.append(reason)
        return str(reasons.index(reason) + 1)
    check_plan(plan, TECHNIQUES["ranks_of"](tables))
    return "**yes**"


AXES: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2},
    "cp (ring)": {"cp": 2},
    "cp (Ulysses)": {"cp": 2, "cp_ulysses": 2},
    "ep": {"ep": 2},
    "pp": {"pp": 2},
}


FAMILIES_HEAD = f"""# Families and axes

Parallelism that each family of Transformers and Diffusers supports, by kind of model: find yours below before you
write a plan.

    $ weft plan job.toml --device A100-80    # candidates, without the axes that the model does not support
    $ weft compare job.toml                  # parity of your own configuration with the untouched model

Generated with Transformers {transformers.__version__}: verdicts of the code that checks a plan at start
(`weft.parallel.choices.choose`), for two ranks on each axis. A family is in a table if Transformers builds a
model from its default configuration, or else from a small one (`tests/lab/shrink.py`).

- **yes**: parity with the untouched model is proved by a test for a small configuration of the family.
- **yes**, with a name: parity is proved, and each tp rank computes this attention, MLP or recurrent mixer in full,
  because the role of a weight is not known, or heads cannot be divided. The other parts of the blocks are split, and in
  decoders of text the vocabulary.
- accepted: not refused, but not proved either, for the reason that follows: run `weft compare` first.
- any other text is the reason why a plan is refused at start.
"""


def families_page() -> str:
    """Axes supported by each family of Transformers, for decoders of text and for other kinds of models."""
    return "\n".join(
        [*FAMILIES_HEAD.splitlines(), "", *causal_table(), *(line for task in KINDS for line in kinds_table(task))]
    )


def causal_table() -> list[str]:
    """Section of causal language models."""
    found: dict[str, list[str]] = {}
    for family in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            small = build_on_meta(AutoConfig.for_model(**SHRINK["shrunk"](family)), torch.float32)
            model = build_as_default(family) or small
            anatomy = read_anatomy(model)
        except Exception:  # no model can be built, or its anatomy cannot be read
            continue
        cells = [verdict(model, anatomy, axis, family) for axis in AXES if axis != "pp"]
        proved = (
            "**yes**"
            if family in LIBRARY["PROVED"]["causal"]["zero 3"]
            else LIBRARY["not_proved"]("causal", "zero 3", family)
        )
        found[family] = [proved, *cells, verdict(small, read_anatomy(small), "pp", family)]
    absent = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(found))
    return [
        "## Decoders of text",
        "",
        "Tests: zero by `tests/training/test_library_kinds.py`; the other axes by `tests/parallel/test_axes.py` and",
        "`tests/parallel/test_families.py`. Ulysses: by the second test with the ring, as both share all code that depends",
        "on the family. pp: with 1F1B. A plan with pp is refused unless a forward on the meta device, of the full model and",
        "of single stages, shows what blocks pass on. Attention dropout is 0 here: under tp and cp it needs attention that",
        "goes through Transformers' AttentionInterface. Packed rows: [packing](packing.md).",
        "",
        *shares(found, ["zero", *AXES]),
        "",
        "Not in the table, because no model without an encoder is built (encoders with `is_decoder = false` are below), or no",
        "blocks are found:",
        *wrap(", ".join(absent) + ".", 118),
        "",
        *table("family", ["zero", *AXES], found),
    ]


def shares(found: dict[str, list[str]], axes: list[str]) -> list[str]:
    """Shares of families that are proved, and accepted, by axis."""
    lines = [f"Of {len(found)} families:", ""]
    for index, axis in enumerate(axes):
        cells = [row[index] for row in found.values() if row[index] != "no experts"]
        proved = sum(cell.startswith("**yes**") for cell in cells)
        accepted = proved + sum(cell.startswith("accepted") for cell in cells)
        of = "" if len(cells) == len(found) else f" of {len(cells)}"
        lines.append(
            f"- {axis}: {proved}{of} proved ({proved / len(cells):.0%}), {accepted} accepted ({accepted / len(cells):.0%})"
        )
    return lines


def table(head: str, axes: list[str], found: dict[str, list[str]]) -> list[str]:
    lines = [f"| {family} | {' | '.join(cells)} |" for family, cells in found.items()]
    return [f"| {head} | {' | '.join(axes)} |", "|---|" + "---|" * len(axes), *lines, ""]


KINDS = {
    "masked": ("Encoders of text", "AutoModelForMaskedLM"),
    "seq2seq": ("Encoder-decoders", "AutoModelForSeq2SeqLM"),
    "images": ("Encoders of images", "AutoModelForImageClassification"),
    "image-text": ("Models of images and text", "AutoModelForImageTextToText"),
    "speech": ("Speech to text", "AutoModelForSpeechSeq2Seq"),
    "audio": (
        "Audio",
        "AutoModelForCTC` and, for families without a class for CTC, of\n`AutoModelForAudioClassification",
    ),
    "diffusion": ("Diffusion transformers (Diffusers)", "diffusers.models.transformers"),
}
"""Title of the section of each other task, and class of Transformers, or library, that builds its models."""


def kinds_table(task: str) -> list[str]:
    """Section of a kind of models that are not decoders of text."""
    title, builder = KINDS[task]
    library = "Diffusers" if builder.startswith("diffusers") else "Transformers"
    axes, found, absent = LIBRARY["AXES"], {}, []
    for family in sorted(LIBRARY["MAPPINGS"][task][1]):
        try:
            model, batch = LIBRARY["build_of_library"](task, family)
            LIBRARY["loss_of_library"](model, batch)
        except Exception:
            absent.append(family)
            continue
        found[family] = [kind_verdict(model, task, axis, family) for axis in axes]
    return [
        f"## {title}",
        "",
        f"Models of `{builder}`. `tests/training/test_library_kinds.py` proves that the loss and all",
        "gradients are those of one process, in float32. cp divides heads (Ulysses).",
        "",
        *shares(found, list(axes)),
        "",
        *(
            [
                *wrap(f"Not in the table: {library} computes no loss of a small model of {', '.join(absent)}.", 118),
                "",
            ]
            if absent
            else []
        ),
        *table("family", list(axes), found),
    ]


def kind_verdict(model: Any, task: str, axis: str, family: str) -> str:
    try:
        tables = {"parallel": LIBRARY["AXES"][axis], "precision": {"param_dtype": "fp32"}}
        choose(model, resolve_plan(Plan.model_validate(tables), 2, native_bf16=True), "cpu", None)
    except WeftError as refusal:
        return reason(refusal, family)
    if family in LIBRARY["PROVED"][task][axis]:
        whole = replicated(model, read_any_anatomy(model, needs_roles=False)) if axis.startswith("tp") else ""
        return f"**yes**{f', {whole} in full' if whole else ''}"
    return LIBRARY["not_proved"](task, axis, family)


def build_as_default(family: str) -> Any:
    """Model of the default configuration, without attention dropout, with two layers unless it lists them; or None."""
    try:
        config = AutoConfig.for_model(family)
        text = config.get_text_config()
        for key in ("num_hidden_layers", "n_layer"):
            if key in config.to_dict() and getattr(config, "layer_types", None) is None:
                setattr(config, key, 2)
        for key in ("attention_dropout", "attn_pdrop"):
            if getattr(text, key, None):
                setattr(text, key, 0.0)
        model = build_on_meta(config, torch.float32)
        read_anatomy(model)
        return model
    except Exception:
        return None


def reason(refusal: WeftError, family: str) -> str:
    what = refusal.what.removeprefix(f"{family} cannot be cut into stages: ").replace("|", "/").replace("\n", " ")
    return shorten(what, 150, placeholder=" ...")


def verdict(model: Any, anatomy: Anatomy, axis: str, family: str) -> str:
    """Cell of a causal language model."""
    plan = resolve_plan(Plan.model_validate({"parallel": AXES[axis]}), 2, native_bf16=True)
    short, beside = axis.split(" ")[0], ""
    try:
        check_axes(model, anatomy, plan)
    except WeftError as refusal:
        if axis == "ep" and not anatomy.has_experts:
            return "no experts"
        plan = resolve_plan(Plan.model_validate({"parallel": AXES[axis] | {"sp": False}}), 2, native_bf16=True)
        try:
            assert axis == "tp"
            check_axes(model, anatomy, plan)
        except (WeftError, AssertionError):
            return reason(refusal, anatomy.family)
        short, beside = "tp without sp", ", with sp = false"
    if family in FAMILIES or family in PROVED[short]:
        whole = replicated(model, anatomy) if axis == "tp" else ""
        return f"**yes**{beside}{f', {whole} in full' if whole else ''}"
    return f"accepted{beside}, not proved: {NOT_PROVED[axis.split(' ')[0]].get(family, 'not tried')}"


def replicated(model: Any, anatomy: Anatomy) -> str:
    """Last names of the parts of blocks that each of two tp ranks computes in full."""
    others = splittable(model, anatomy, 2)
    blocks = (*others, *anatomy.blocks) if anatomy.has_roles else others
    names = [name for block in blocks for name in replicated_parts(model, anatomy, block, 2)]
    mixers = (name for block in blocks for name in block.recurrence)
    names += [name for name in mixers if mixer_heads(model.get_submodule(name), 2) is None]
    return " and ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))


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
    "reference/effects.md": effects_page,
    "compatibility.md": compatibility_page,
    "families.md": families_page,
}

# Takes a minute; tests/anatomy/test_documents.py checks some of its lines, and all of them in the sweep.
SLOW_PAGES = {"packing.md": packing_page}

if __name__ == "__main__":
    for name, page in (PAGES | SLOW_PAGES).items():
        (DOCS / name).write_text(page(), encoding="utf-8")
