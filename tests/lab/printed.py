"""Settings, commands and programs that README and docs print: indented blocks, by page and line."""

import re
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FILE = re.compile(r"^# ([\w-]+\.(?:toml|py))\b.*$", re.MULTILINE)
"""First line of a file within a block."""
COMMAND = re.compile(r"^(?:\$ )?(weft|python|torchrun|pip|make|srun|mpirun|kubectl|export|accelerate)\s")


class Block(NamedTuple):
    """A block of a page."""

    page: str
    """Name of the page without .md."""
    line: int
    text: str
    """Without its indentation."""

    @property
    def id(self) -> str:
        """Page and first line of the text, for ids of tests: they stay when lines are added above."""
        return f"{self.page}-{self.text.splitlines()[0][:40].strip()}"


def blocks(page: Path) -> list[Block]:
    """Indented blocks of a page, outside of fences and lists."""
    found: list[Block] = []
    lines: list[str] = []
    fence, before = False, ""
    for number, line in enumerate([*page.read_text().splitlines(), "end"], 1):
        fence ^= line.startswith("```")
        if not fence and line.startswith("    ") and (lines or not before.strip()):
            lines.append(line)
        elif lines and not line.strip():
            lines.append("")
        elif lines:
            text = "\n".join(each[4:] for each in lines).rstrip()
            found.append(Block(page.stem, number - len(lines), text))
            lines = []
        before = line
    return found


def files(block: Block) -> dict[str, str]:
    """Files of a block, by the name in a comment before them; "" for lines before the first name, or without any."""
    parts = FILE.split(block.text)
    return {name: text.strip("\n") for name, text in zip(["", *parts[1::2]], parts[::2], strict=True) if text.strip()}


def settings(page: Path) -> list[tuple[Block, dict[str, Any]]]:
    """Blocks and files of blocks that are TOML tables."""
    found = []
    for block in blocks(page):
        for name, text in files(block).items():
            if name.endswith(".py") or COMMAND.match(text):
                continue
            try:
                table = tomllib.loads(text)
            except tomllib.TOMLDecodeError:
                continue
            if name == "plan.toml":
                table = {"plan": table}
            if table:
                found.append((block, table))
    return found


def commands(page: Path) -> list[tuple[Block, str]]:
    """Lines of blocks that are commands, joined where they end in a backslash, without prompt and comment."""
    found = []
    for block in blocks(page):
        for line in files(block).get("", "").replace("\\\n", " ").splitlines():
            if COMMAND.match(line):
                found.append((block, re.sub(r"\s+# .*$", "", line).removeprefix("$ ").strip()))
    return found
