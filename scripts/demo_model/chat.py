"""Dialogues as token ids, made and encoded by several processes.

Dialogues come in chunks, and a chunk depends on the seed and its own number alone, so that the
number of processes changes nothing.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from scripts.demo_model.packing import AssistantMarks, assistant_mask

CHUNK = 1000
"""Dialogues made at a time."""

Writer = Callable[[int, int], Iterable[tuple[str, str]]]
"""Given a seed and a count, tasks and complete texts of that many dialogues. For several processes
it must be one that `pickle` can send."""


@dataclass(frozen=True)
class EncodedDialogue:
    """A dialogue as the model sees it."""

    task: str
    ids: np.ndarray
    """uint16 [T]."""
    mask: np.ndarray
    """bool [T]: the assistant's tokens."""


@dataclass(frozen=True)
class _Job:
    write: Writer
    tokenizer: Tokenizer
    marks: AssistantMarks
    seed: int

    def run(self, chunk: tuple[int, int]) -> list[EncodedDialogue]:
        number, count = chunk
        written = list(self.write(chunk_seed(self.seed, number), count))
        texts = [text for _, text in written]
        found = []
        encodings = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        for (task, _), encoding in zip(written, encodings, strict=True):
            ids = np.array(encoding.ids, np.uint16)
            found.append(EncodedDialogue(task, ids, assistant_mask(ids, self.marks)))
        return found


def chunk_seed(seed: int, number: int) -> int:
    """The seed of one chunk, 32 bits."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])


def encode(
    tokenizer: Tokenizer, write: Writer, *, seed: int, count: int, workers: int = 1
) -> Iterator[EncodedDialogue]:
    """Dialogues, always the same ones in the same order for a seed and a count.

    Args:
        tokenizer: encodes the texts.
        write: makes them.
        seed: of all chunks.
        count: dialogues in all.
        workers: processes; with 1, this one.
    """
    job = _Job(write, tokenizer, AssistantMarks.of(tokenizer), seed)
    chunks = [(i, min(CHUNK, count - start)) for i, start in enumerate(range(0, count, CHUNK))]
    if workers == 1:
        for chunk in chunks:
            yield from job.run(chunk)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, initializer=_start, initargs=(job,)) as pool:
        for encoded in pool.imap(_run, chunks):
            yield from encoded


_job: _Job | None = None
"""In a worker process, what it works on."""


def _start(job: _Job) -> None:
    global _job
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _job = job


def _run(chunk: tuple[int, int]) -> list[EncodedDialogue]:
    assert _job is not None
    return _job.run(chunk)
