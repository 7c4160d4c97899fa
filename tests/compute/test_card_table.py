"""docs/compute.md says of every operator of Weft whether it has run on a card."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CUSTOM_OPERATOR = re.compile(r'(?:custom_op|triton_op)\(\s*"(weft::\w+)"')
TRITON_KERNEL = re.compile(r"^@jit\b", re.MULTILINE)


def test_every_operator_is_in_the_table_or_in_the_list_of_what_has_not_run() -> None:
    """A Triton kernel is covered by the custom operators of its file; a file without one is named itself."""
    page = (ROOT / "docs" / "compute.md").read_text()
    section = page.partition("\n## What has run on a card\n")[2].partition("\n## ")[0]
    done, _, never = section.partition("\nNever on a card")
    expected: list[str] = []
    for path in sorted((ROOT / "src" / "weft").rglob("*.py")):
        source = path.read_text()
        operators = CUSTOM_OPERATOR.findall(source)
        kernel = [str(path.relative_to(ROOT))] if TRITON_KERNEL.search(source) else []
        expected += operators or kernel
    assert len(expected) > 15
    for name in expected:
        assert (f"`{name}`" in done) + (f"`{name}`" in never) == 1, (
            f"{name} must be in the table, or in the list below it"
        )
    assert set(re.findall(r"`(weft::\w+)`", section)) <= set(expected)
