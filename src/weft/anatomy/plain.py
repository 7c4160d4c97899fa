"""Anatomy of a model whose roles are not known: an encoder, a vision model, a user's own module.

Only data parallelism, which needs no roles, applies to such a model. Lists of modules of one class are its blocks, so that
ZeRO gathers one block at a time.
"""

from collections import Counter

from torch import nn

from weft.anatomy.roles import Anatomy, Block


def read_plain_anatomy(model: nn.Module) -> Anatomy:
    """Read the blocks of any module; it may be on the meta device."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    names = [f"{name}.{index}" for name, stack in _stacks(model).items() for index in range(len(stack))]
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


def _stacks(model: nn.Module) -> dict[str, nn.ModuleList]:
    """Outermost lists of several modules of one class, none of which shares a parameter with another module."""
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    found: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) < 2 or any(name.startswith(f"{f}.") for f in found):
            continue
        parameters = list(module.parameters())
        if len({type(child) for child in module}) == 1 and parameters and all(uses[id(p)] == 1 for p in parameters):
            found[name] = module
    return found
