"""What reads stored objects, whatever holds them."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class ObjectSource(Protocol):
    """Where stored objects are read from."""

    def read_into(self, name: str, plane: str, start: int, out: np.ndarray) -> None:
        """Fills the 1-D, contiguous `out` with elements from `start` of one plane of an object."""
