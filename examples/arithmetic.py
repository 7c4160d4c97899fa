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
    """Reward: 1 for the right number alone, 0.5 for a text that ends with it, 0 otherwise."""
    texts = [completion[0]["content"].strip().rstrip(".") for completion in completions]
    return [
        1.0 if text == str(right) else 0.5 if re.search(rf"\b{right}$", text) else 0.0
        for text, right in zip(texts, answer, strict=True)
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
