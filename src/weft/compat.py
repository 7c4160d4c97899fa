"""Private parts of torch that Weft uses; tests/test_compat.py fails with a clear text when a version of torch changes one."""

from typing import Any, TypeVar

from torch import nn

Hook = TypeVar("Hook")


def find_hook(module: nn.Module, kind: type[Hook]) -> Hook | None:
    """The first forward pre-hook of a class that is registered on a module; None without one.

    Objects of Weft that belong to a module are registered on it as hooks, so that no attribute is set on a user's module.
    """
    hooks: Any = module._forward_pre_hooks.values()
    return next((hook for hook in hooks if isinstance(hook, kind)), None)
