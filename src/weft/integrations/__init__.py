"""Weft under the code of other libraries: accelerate, Transformers' Trainer, TRL and PEFT. Needs the extra weft-train[hf]."""

from importlib.util import find_spec

from weft.errors import JobError

if find_spec("accelerate") is None:
    raise JobError(
        "accelerate is not installed",
        where="weft.integrations",
        rule="scripts of accelerate, of Transformers' Trainer and of TRL need these libraries",
        fix='pip install "weft-train[hf]"',
    )
