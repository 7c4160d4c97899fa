"""Blocks of modules whose roles are not known."""

from torch import nn

from weft.anatomy.plain import block_names


def test_blocks_are_in_the_inner_of_two_lists() -> None:
    """PoolFormer has a list of layers for each stage; a list has no forward that ZeRO could gather weights for."""
    stages = nn.ModuleList(nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(2)) for _ in range(2))
    model = nn.ModuleDict({"stages": stages})
    assert block_names(model) == ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"]
