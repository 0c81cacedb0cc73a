"""Token sequences as arrays to train on.

- `text.npy`: uint16 ids of the training documents, each ended by `<|endoftext|>`, in shuffled order.
- `chat.npy`, `chat_mask.npy`: uint16 ids of the dialogues, ended likewise, and a bit for each token,
  packed eight to a byte, high bits first: whether it is the assistant's.
- `held_out_text.npz`: what was kept from training (see `HeldOut`).
"""

from __future__ import annotations

import lzma
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from scripts.demo_model import tokenizer as tokens
from scripts.demo_model.document import Document

BATCH = 64
"""Documents encoded at a time."""


@dataclass(frozen=True)
class HeldOut:
    """The documents kept from training, for bits per byte by source.

    A document's ids are `ids[offsets[i] : offsets[i + 1]]`, with no `<|endoftext|>` at either end.
    """

    ids: np.ndarray
    """uint16 [T]."""
    offsets: np.ndarray
    """int64 [D + 1]."""
    byte_counts: np.ndarray
    """int64 [D]: bytes of each document in UTF-8."""
    sources: np.ndarray
    """str [D]."""
    names: np.ndarray
    """str [D]."""

    def document(self, index: int) -> np.ndarray:
        """The ids of one document, uint16."""
        return self.ids[self.offsets[index] : self.offsets[index + 1]]


@dataclass(frozen=True)
class AssistantMarks:
    """The ids that show which tokens are the assistant's."""

    header: tuple[int, ...]
    """`<|im_start|>assistant` and a newline."""
    think: int
    end: int

    @staticmethod
    def of(tokenizer: Tokenizer) -> AssistantMarks:
        """The ids in a tokenizer."""
        header = tokenizer.encode(f"{tokens.TURN_START}assistant\n", add_special_tokens=False)
        think, end = (tokens.added_id(tokenizer, t) for t in (tokens.THINK, tokens.TURN_END))
        return AssistantMarks(tuple(header.ids), think, end)


def assistant_mask(ids: Sequence[int] | np.ndarray, marks: AssistantMarks) -> np.ndarray:
    """Which tokens are the assistant's: from behind its header through `<|im_end|>`, in turns that
    begin with `<think>`. A turn without an end reaches to the end of the ids.

    Returns:
        bool [T].
    """
    ids = np.asarray(ids)
    mask = np.zeros(len(ids), bool)
    ends = np.flatnonzero(ids == marks.end)
    for start in np.flatnonzero(ids == marks.header[0]):
        body = start + len(marks.header)
        opening = ids[start : body + 1]
        if opening.tolist() == [*marks.header, marks.think]:
            after = ends[ends >= body]
            mask[body : after[0] + 1 if len(after) else len(ids)] = True
    return mask


def pack_text(
    folder: Path, tokenizer: Tokenizer, documents: Iterable[Document], seed: int
) -> dict[str, int]:
    """Writes `text.npy` of the training documents. Returns the tokens of each source."""
    training = [document for document in documents if not document.held_out]
    np.random.default_rng(seed).shuffle(training)
    end = tokens.added_id(tokenizer, tokens.END_OF_TEXT)
    counts: dict[str, int] = {}
    parts = []
    for document, ids in _encoded(tokenizer, training):
        parts += [ids, np.array([end], np.uint16)]
        counts[document.source] = counts.get(document.source, 0) + len(ids) + 1
    np.save(folder / "text.npy", _joined(parts))
    return counts


def pack_held_out(folder: Path, tokenizer: Tokenizer, documents: Iterable[Document]) -> HeldOut:
    """Writes `held_out_text.npz` and returns what is in it."""
    kept = [document for document in documents if document.held_out]
    parts = [ids for _, ids in _encoded(tokenizer, kept)]
    held_out = HeldOut(
        ids=_joined(parts),
        offsets=np.cumsum([0, *map(len, parts)], dtype=np.int64),
        byte_counts=np.array([len(d.text.encode()) for d in kept], np.int64),
        sources=np.array([d.source for d in kept], str),
        names=np.array([d.name for d in kept], str),
    )
    np.savez(folder / "held_out_text.npz", **vars(held_out))
    return held_out


def read_held_out(folder: Path) -> HeldOut:
    """What `pack_held_out` wrote there."""
    with np.load(folder / "held_out_text.npz") as arrays:
        return HeldOut(**arrays)


def pack_chat(
    folder: Path,
    dialogues: Iterable[tuple[np.ndarray, np.ndarray]],
    end_of_text: int,
    name: str = "chat",
) -> int:
    """Writes `chat.npy` and `chat_mask.npy`, or others of that name.

    Args:
        folder: where to.
        dialogues: ids (integers [T]) and whether each is the assistant's (bool [T]).
        end_of_text: the id that ends each dialogue. It never counts as the assistant's.
        name: of the files.

    Returns:
        The tokens written.
    """
    ids, masks = [], []
    for dialogue, mask in dialogues:
        ids += [dialogue.astype(np.uint16), np.array([end_of_text], np.uint16)]
        masks += [mask.astype(bool), np.zeros(1, bool)]
    joined = _joined(ids)
    np.save(folder / f"{name}.npy", joined)
    np.save(folder / f"{name}_mask.npy", np.packbits(np.concatenate([np.zeros(0, bool), *masks])))
    return len(joined)


def read_chat(folder: Path, name: str = "chat") -> tuple[np.ndarray, np.ndarray]:
    """What `pack_chat` wrote there: uint16 [T] ids and the bool [T] mask."""
    ids = np.load(folder / f"{name}.npy")
    bits = np.load(folder / f"{name}_mask.npy")
    return ids, np.unpackbits(bits, count=len(ids)).astype(bool)


def xz_bits_per_byte(texts: Iterable[str]) -> float:
    """Bits that `xz -9` needs for each byte of the texts, one after the other in UTF-8: what a model
    should do better than.

    Raises:
        ValueError: no text.
    """
    data = "".join(texts).encode()
    if not data:
        raise ValueError("no text to compress")
    return 8 * len(lzma.compress(data, preset=9)) / len(data)


def _encoded(
    tokenizer: Tokenizer, documents: Sequence[Document]
) -> Iterator[tuple[Document, np.ndarray]]:
    for start in range(0, len(documents), BATCH):
        batch = documents[start : start + BATCH]
        encodings = tokenizer.encode_batch([d.text for d in batch], add_special_tokens=False)
        for document, encoding in zip(batch, encodings, strict=True):
            yield document, np.array(encoding.ids, np.uint16)


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.uint16), *parts])
