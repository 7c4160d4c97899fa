"""Private parts of torch that Weft uses: each test fails where a version of torch changes one, and says what it is for."""

from typing import Any

from torch import Tensor, nn

from weft.compat import find_hook


class Mark:
    """Hook that changes nothing."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Leave the arguments unchanged."""


def test_objects_of_weft_travel_with_a_module_as_forward_pre_hooks() -> None:
    module, mark = nn.Linear(2, 2), Mark()
    assert find_hook(module, Mark) is None, "a module without hooks has none"
    module.register_forward_pre_hook(lambda *_: None)
    module.register_forward_pre_hook(mark)
    assert find_hook(module, Mark) is mark, (
        "nn.Module._forward_pre_hooks no longer maps to the registered hooks: weft.runtime(model) needs another way"
    )
    assert isinstance(module(nn.Parameter(module.weight.new_zeros(1, 2))), Tensor)
