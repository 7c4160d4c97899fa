"""Recipes of `weft compress`: what becomes of the weights. Imports no torch."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from weft.errors import JobError, nearest
from weft.job import Job, NamePattern, read_toml
from weft.plan import QUANTIZED_PAIRS, Table
from weft.refusal import Origin, explain


class Recipe(Table):
    """Recipe of a compression, read from a name such as "int4+2:4" or from a TOML file."""

    weights: Literal["int8", "int4", "fp8", "none"] = "none"
    """Format of the weights of linear layers. int8 and fp8 have a scale for each output channel, int4 for each group."""
    group_size: Literal[0, 32, 64, 128, 256] = 0
    """Input channels that share a scale; 0: all, or for int4 the largest of 128, 64 and 32 that divides all layers."""
    symmetric: bool = True
    """Values are multiples of the scale; false: the range of a group also has a zero point, which not all servers support."""
    method: Literal["gptq", "nearest", "full_range"] = "gptq"
    """Rounding. gptq: each column makes up for the errors of those before it, on calibration rows (Frantar et al., 2022);
    nearest: to the nearest value, without calibration; full_range: likewise, with scales of fp8 that clip nothing, too, as
    plan.precision.quantize trains."""
    inputs: Literal["int8", "fp8", "none"] = "none"
    """Format to which the inputs of these layers are rounded when the model runs, with a scale for each token; fp8 with weights
    in fp8, int8 with weights in int8 or int4."""
    dtype: Literal["stored", "fp32", "bf16", "fp16"] = "stored"
    """Dtype of scales and of all weights that are not quantized."""
    sparsity: Literal["none", "2:4"] = "none"
    """2:4: two of four consecutive weights of a row are zero, chosen on calibration rows (SparseGPT: Frantar and Alistarh,
    2023)."""
    drop_blocks: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of the blocks to remove: those that change their inputs least."""
    prune: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of the heads and feed-forward units, or of the experts, to remove from each block."""
    prune_parts: tuple[Literal["heads", "units", "experts"], ...] = ()
    """Parts that prune applies to; empty: experts of models with experts, else heads and feed-forward units."""
    embedding: Literal["int8", "none"] = "none"
    """Format of embeddings, and of an output layer that shares their weights. int8 makes small models much smaller; other
    servers than Transformers may not load it."""
    skip: tuple[NamePattern, ...] = ()
    """Patterns of the full names of linear layers that are left as they are."""
    rows: Annotated[int, Field(ge=1)] = 64
    """Calibration rows, of data.seq_len tokens each."""

    @property
    def prunes(self) -> bool:
        """True if the model gets a smaller configuration."""
        return self.drop_blocks > 0 or self.prune > 0

    @property
    def changes_weights(self) -> bool:
        """True if weights are rounded or set to zero."""
        return (self.weights, self.sparsity, self.embedding) != ("none", "none", "none")

    @property
    def calibrates(self) -> bool:
        """True if rows of text decide the values of weights."""
        return self.sparsity != "none" or (self.weights != "none" and self.method == "gptq")


TRAINED = "trained"
"""Name of the recipe of a run with `plan.precision.quantize`."""
BUILT_IN: dict[str, dict[str, Any]] = {
    "int8": {"weights": "int8", "method": "nearest", "embedding": "int8"},
    "int4": {"weights": "int4", "embedding": "int8"},
    "fp8": {"weights": "fp8", "method": "nearest"},
    "w8a8": {"weights": "int8", "inputs": "int8", "method": "nearest"},
    "2:4": {"sparsity": "2:4"},
}
"""Keys of recipes by name; a recipe with several names, joined by +, has the keys of all."""
FRACTIONS = {"prune": "prune", "drop": "drop_blocks"}
"""Keys by the name before a fraction, as in prune=0.3."""


def read_recipe(text: str, run: Path | None = None) -> Recipe:
    """Read a recipe: names joined by +, or the path of a TOML file.

    Args:
        text: such as "int8", "int4+2:4" or "recipe.toml"; "trained": the grids with which a run has trained.
        run: folder of the run.

    Raises:
        JobError: a name is unknown, two names contradict each other, or a key of the file is unknown or breaks its rule.
    """
    if text == TRAINED:
        return _recipe_of_run(run)
    if text.endswith(".toml"):
        tables, where = read_toml(Path(text)), text
    else:
        tables, where = {}, f"--recipe {text}"
        for name in text.split("+"):
            keys = _keys_of(name, where)
            if clash := sorted(tables.keys() & keys.keys()):
                raise JobError(
                    f"{text} sets {clash[0]} twice",
                    where=where,
                    rule="names joined by + set different things, such as int4+2:4",
                    fix="keep one of them, or write a recipe file",
                )
            tables |= keys
    try:
        recipe = Recipe.model_validate(tables)
    except ValidationError as error:
        raise explain(error, Recipe, tables, Origin(where)) from None
    return check_recipe(recipe, where)


def check_recipe(recipe: Recipe, where: str = "recipe") -> Recipe:
    """Check that the keys of a recipe do not exclude each other. Returns the recipe.

    Args:
        recipe: recipe of any origin.
        where: origin, for the message.

    Raises:
        JobError: two keys exclude each other, or the recipe changes nothing.
    """
    if not recipe.symmetric and (recipe.weights == "fp8" or (recipe.weights == "int4" and recipe.inputs != "none")):
        raise JobError(
            f"symmetric = false with weights = {recipe.weights!r}"
            + (f" and inputs = {recipe.inputs!r}" if recipe.inputs != "none" else ""),
            where=where,
            rule="fp8 has no zero points, and Transformers loads int4 with zero points only where inputs are not rounded",
            fix="set symmetric = true" + (', or inputs = "none"' if recipe.weights == "int4" else ""),
        )
    if recipe.inputs != "none" and (recipe.weights, recipe.inputs) not in QUANTIZED_PAIRS:
        raise JobError(
            f"weights = {recipe.weights!r} with inputs = {recipe.inputs!r}",
            where=where,
            rule="a server multiplies integers by integers, and floating-point numbers by floating-point numbers",
            fix='set inputs = "fp8" for weights = "fp8", inputs = "int8" for int8 and int4, or leave it out',
        )
    if not recipe.prunes and not recipe.changes_weights:
        raise JobError(
            "the recipe changes nothing",
            where=where,
            rule="a recipe sets weights, sparsity, embedding, prune or drop_blocks",
            fix='set weights = "int8" in it, or choose a recipe by name',
        )
    return recipe


def _keys_of(name: str, where: str) -> dict[str, Any]:
    """Keys that a name of a recipe sets."""
    before, equals, fraction = name.partition("=")
    if equals and before in FRACTIONS and re.fullmatch(r"0?\.\d+", fraction):
        return {FRACTIONS[before]: float(fraction)}
    if name in BUILT_IN:
        return BUILT_IN[name]
    raise JobError(
        f"unknown recipe {name!r}",
        where=where,
        rule=f"a recipe is a .toml file, or {', '.join(BUILT_IN)}, {TRAINED}, prune=0.3, drop=0.3, several joined by +",
        fix="write a fraction below 1, such as prune=0.3" if before in FRACTIONS else nearest(name, BUILT_IN),
    )


def _recipe_of_run(run: Path | None) -> Recipe:
    """Recipe that writes the weights with which a run has computed."""
    file = None if run is None else run / "job.toml"
    precision = Job.load(file).plan.precision if file is not None and file.is_file() else None
    if precision is None or precision.quantize == "none":
        raise JobError(
            f"{run} is no run with plan.precision.quantize",
            where=f"--recipe {TRAINED}",
            rule="this recipe writes the rounded weights with which a run has trained",
            fix="choose another recipe, or name a run folder",
        )
    dtype = precision.param_dtype
    return Recipe(
        weights=precision.quantize,
        group_size=precision.quantize_group_size if precision.quantize == "int4" else 0,
        inputs=precision.quantize_inputs,
        method="full_range",
        dtype="stored" if dtype == "fp64" or dtype == "auto" else dtype,
    )
