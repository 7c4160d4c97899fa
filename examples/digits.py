"""Handwritten digits of scikit-learn (UCI, Alpaydin and Kaynak, 1998): 1,797 images of 8 x 8 pixels, with their class."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image


def records(data: Any) -> Iterator[dict[str, Any]]:
    """Records with `image` and `label`, for data.source."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    for pixels, label in zip(digits.images, digits.target, strict=True):  # 0 to 16
        yield {"image": Image.fromarray((pixels * 15.9375).astype(np.uint8)), "label": int(label)}
