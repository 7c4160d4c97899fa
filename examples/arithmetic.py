"""Sums of two numbers, to learn by trial: python examples/arithmetic.py data/sums.jsonl

Writes prompts for examples/grpo.toml, and has the reward for the answers.
"""

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

PROMPT = "What is {} + {}? Answer with the number only."


def is_right(completions: list[Any], answer: list[int], **_: Any) -> list[float]:
    """Reward: 1 for the right number alone, 0.2 for a text in which it occurs, 0 otherwise."""
    texts = [completion[0]["content"].strip() for completion in completions]
    found = [re.findall(r"\d+", text) for text in texts]
    return [
        1.0 if text.rstrip(".") == str(right) else 0.2 if str(right) in numbers else 0.0
        for text, numbers, right in zip(texts, found, answer, strict=True)
    ]


def main() -> None:
    """Write every sum of two numbers below 20, in random order."""
    sums = [(a, b) for a in range(20) for b in range(20)]
    random.Random(0).shuffle(sums)
    rows = [{"prompt": [{"role": "user", "content": PROMPT.format(a, b)}], "answer": a + b} for a, b in sums]
    path = Path(sys.argv[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{path}: {len(rows)} prompts")


if __name__ == "__main__":
    main()
