"""Anatomy of a model whose roles are not known: an encoder, a vision model, a user's own module.

Data parallelism, and recompute and offload of whole blocks, need no roles. Lists of modules of one class are the blocks, so
that ZeRO gathers one block at a time.
"""

from collections import Counter

from torch import nn

from weft.anatomy.roles import Anatomy, Block


def read_plain_anatomy(model: nn.Module) -> Anatomy:
    """Read the blocks of any module; it may be on the meta device."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    names = block_names(model)
    return Anatomy(
        family=getattr(getattr(model, "config", None), "model_type", type(model).__name__),
        embedding="",
        blocks=tuple(Block(name, (), (), (), (), (), (), ()) for name in names),
        final_norm=None,
        head="",
        tied=False,
        parameters=parameters,
        active_parameters=parameters,
        vocab_size=0,
        max_positions=None,
    )


def block_names(model: nn.Module, beside: str = "") -> list[str]:
    """Names of the modules in the outermost lists of modules of one class that share no parameter with other modules.

    Args:
        model: any module; it may be on the meta device.
        beside: name of a list that is left out, with all inside of it; and lists of modules without children, which may be used
            without a call.
    """
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    found = [beside] if beside else []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or name == beside or any(name.startswith(f"{f}.") for f in found):
            continue
        parameters = list(module.parameters())
        classes = {type(child) for child in module}
        one_class = len(classes) == 1 and nn.ModuleList not in classes  # the inner lists have the blocks
        has_children = any(True for child in module for _ in child.children())
        if one_class and parameters and all(uses[id(p)] == 1 for p in parameters) and (has_children or not beside):
            found.append(name)
    return [
        f"{name}.{index}"
        for name in found
        if name != beside
        for index in range(len(model.get_submodule(name)))  # type: ignore[arg-type]
    ]
