"""Dates as people write them, and as ISO 8601 has them: "March 3, 1998" and "1998-03-03"."""

import datetime
import random
from collections.abc import Iterator
from typing import Any

FORMATS = ("%d %B %Y", "%B %d, %Y", "%a %d %b %Y", "%d.%m.%Y", "%d/%m/%y", "%A, %d. %B %Y")


def records(data: Any) -> Iterator[dict[str, str]]:
    """Records with `source` and `target`, for data.source."""
    chance = random.Random(0)
    for _ in range(20_000):
        day = datetime.date(1970, 1, 1) + datetime.timedelta(days=chance.randrange(20_000))
        yield {"source": day.strftime(chance.choice(FORMATS)), "target": day.isoformat()}
