"""Bits per byte of held-out documents: what the model needs to say each of them, from the end-of-text token on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from scripts.demo_model.geometry import CONTEXT, END_OF_TEXT
from scripts.demo_model.packing import HeldOut

Score = Callable[[np.ndarray], np.ndarray]
"""`score(tokens [B, T + 1]) -> nats [B, T]`: negative log-likelihood of every token after the first."""


def bits_per_byte(
    text: HeldOut, score: Score, *, batch: int = 16, length: int = CONTEXT
) -> dict[str, float]:
    """Bits the model needs for a byte of each source's text, and of all of it ("all").

    A document longer than `length` tokens is read in windows that overlap by half, so that each token is counted once
    and sees at least `length / 2` tokens before it, or its whole document.
    """
    windows, counted, sources = _windows(text, length)
    nats = np.zeros(len(windows))
    for first in range(0, len(windows), batch):
        some, mask = windows[first : first + batch], counted[first : first + batch]
        # One shape for all batches, so that `score` is compiled once.
        padded = np.pad(some, [(0, batch - len(some)), (0, 0)])
        nats[first : first + batch] = (score(padded)[: len(some)] * mask).sum(axis=1)
    bits = nats / np.log(2.0)
    found = {}
    for source in np.unique(text.sources).tolist():
        size = text.byte_counts[text.sources == source].sum()
        found[source] = float(bits[sources == source].sum() / size)
    return found | {"all": float(bits.sum() / text.byte_counts.sum())}


def _windows(text: HeldOut, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token windows [W, length + 1], which of their predictions count [W, length], and their sources [W]."""
    windows, counted, sources = [], [], []
    for index, source in enumerate(text.sources):
        document = np.concatenate([[END_OF_TEXT], text.document(index)]).astype(np.int32)
        begin = done = 0  # `done` tokens after the first are counted
        while done < document.size - 1:
            window = document[begin : begin + length + 1]
            mask = np.zeros(length, bool)
            mask[done - begin : window.size - 1] = True
            windows.append(np.pad(window, (0, length + 1 - window.size)))
            counted.append(mask)
            sources.append(source)
            done = begin + window.size - 1
            begin += length // 2
    return np.stack(windows), np.stack(counted), np.array(sources)
