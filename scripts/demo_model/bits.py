"""Bits per byte of held-out documents: what the model needs to say each of them, from the end-of-text token on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scripts.demo_model.geometry import CONTEXT, END_OF_TEXT

Score = Callable[[np.ndarray], np.ndarray]
"""`score(tokens [B, T + 1]) -> nats [B, T]`: negative log-likelihood of every token after the first."""


@dataclass(frozen=True)
class HeldOutText:
    """Token ids of whole documents, one after another, and the UTF-8 bytes of their text."""

    ids: np.ndarray
    offsets: np.ndarray
    """Document d is ids[offsets[d]:offsets[d + 1]]."""
    byte_counts: np.ndarray


def read_held_out(folder: Path) -> HeldOutText:
    """The held-out text of a data folder."""
    with np.load(folder / "held_out_text.npz") as arrays:
        return HeldOutText(arrays["ids"], arrays["offsets"], arrays["bytes"])


def bits_per_byte(
    text: HeldOutText, score: Score, *, batch: int = 16, length: int = CONTEXT
) -> float:
    """Bits the model needs for a byte of the text.

    A document longer than `length` tokens is read in windows that overlap by half, so that each token is counted once
    and sees at least `length / 2` tokens before it, or its whole document.
    """
    windows, counted = _windows(text, length)
    nats = 0.0
    for first in range(0, len(windows), batch):
        some, mask = windows[first : first + batch], counted[first : first + batch]
        rest = batch - len(some)
        nats += float((score(np.pad(some, [(0, rest), (0, 0)]))[: len(some)] * mask).sum())
    return nats / np.log(2.0) / float(text.byte_counts.sum())


def _windows(text: HeldOutText, length: int) -> tuple[np.ndarray, np.ndarray]:
    windows, counted = [], []
    for start, stop in zip(text.offsets[:-1], text.offsets[1:], strict=True):
        document = np.concatenate([[END_OF_TEXT], text.ids[start:stop]]).astype(np.int32)
        done = 0  # tokens after the first that an earlier window has counted
        begin = 0
        while done < document.size - 1:
            window = document[begin : begin + length + 1]
            mask = np.zeros(length, bool)
            mask[done - begin : window.size - 1] = True
            windows.append(np.pad(window, (0, length + 1 - window.size)))
            counted.append(mask)
            done = begin + window.size - 1
            begin += length // 2
    # Windows of like length stand together only by chance; all are padded to the same shape.
    return np.stack(windows), np.stack(counted)
