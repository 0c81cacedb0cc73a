"""A document of the corpus."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

HELD_OUT_ONE_IN = 50


@dataclass(frozen=True)
class Document:
    """One text that belongs together."""

    source: str
    """Short name of the source, such as "novels"."""
    name: str
    """Unique within the source, such as "Emma, chapter 12"."""
    text: str

    @property
    def held_out(self) -> bool:
        """Whether the document is kept from training: one in fifty, by a hash of its name."""
        digest = hashlib.sha256(f"{self.source}/{self.name}".encode()).digest()
        return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0
