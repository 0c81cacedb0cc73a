"""Make the data of the demo model: fetch the text, train the tokenizer, write the arrays.

    python -m scripts.demo_data --out DIR [--dialogues N] [--workers 2]

Writes the tokenizer's files into DIR/tokenizer, and into DIR the arrays (`packing.py` says which),
`numbers.json` and the data card. The same seed gives the same files.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from scripts.demo_model import card, chat, corpus, packing, tokenizer
from scripts.demo_model.debian import PackageError

TEMPLATE = Path(__file__).parent / "demo_model" / "chat_template.jinja"
TOKENIZER_DIALOGUES = 4000
"""Dialogues that the merges are learned from, at most."""
HELD_OUT_ONE_IN = 50
"""Dialogues of held-out passages, as a share of those to train on."""


def written(
    passages: Sequence[str],
    glosses: Sequence[tuple[str, str]],
    held_out: bool,
    seed: int,
    count: int,
) -> Iterator[tuple[str, str]]:
    """Tasks and complete texts of dialogues: a `chat.Writer` once its first three are bound."""
    from scripts.demo_model.dialogues import dialogues, render

    for dialogue in dialogues(seed, count, passages, glosses, held_out=held_out):
        yield dialogue.task, render(dialogue)


def writer(documents: Sequence[corpus.Document], cache: Path, *, held_out: bool) -> chat.Writer:
    """What makes dialogues out of the training documents or the held-out ones."""
    passages = corpus.passages(documents, held_out=held_out)
    return partial(written, passages, corpus.glosses(cache, held_out=held_out), held_out)


def pack_dialogues(
    folder: Path,
    learned: Tokenizer,
    write: chat.Writer,
    name: str,
    *,
    seed: int,
    count: int,
    workers: int,
) -> dict[str, tuple[int, int]]:
    """Writes the arrays of a number of dialogues. Returns how many and how many tokens by task."""
    tasks: dict[str, tuple[int, int]] = {}

    def arrays() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for one in chat.encode(learned, write, seed=seed, count=count, workers=workers):
            dialogues, tokens = tasks.get(one.task, (0, 0))
            tasks[one.task] = dialogues + 1, tokens + len(one.ids) + 1
            yield one.ids, one.mask

    end = tokenizer.added_id(learned, tokenizer.END_OF_TEXT)
    packing.pack_chat(folder, arrays(), end, name)
    return tasks


def make(out: Path, cache: Path, *, dialogues: int, seed: int, workers: int) -> None:
    """Make all the files.

    Raises:
        PackageError: a package cannot be had.
    """
    out.mkdir(parents=True, exist_ok=True)
    documents = list(corpus.documents(cache))
    print(f"{len(documents):,} documents", flush=True)
    texts: list[str] = []
    if dialogues:
        first = chat.chunk_seed(seed, 0)
        write = writer(documents, cache, held_out=False)
        sample = islice(write(first, min(dialogues, TOKENIZER_DIALOGUES)), TOKENIZER_DIALOGUES)
        texts = [text for _, text in sample]
    learned = tokenizer.train(tokenizer.training_texts(documents, texts))
    template = TEMPLATE.read_text(encoding="utf-8") if TEMPLATE.exists() else ""
    tokenizer.write_tokenizer(out / "tokenizer", learned, template)
    print("tokenizer written", flush=True)

    text_tokens = packing.pack_text(out, learned, documents, seed)
    held_out = packing.pack_held_out(out, learned, documents)
    print(f"{sum(text_tokens.values()):,} tokens of text", flush=True)
    tasks: dict[str, tuple[int, int]] = {}
    if dialogues:
        pack = partial(pack_dialogues, out, learned, workers=workers)
        tasks = pack(write, "chat", seed=seed, count=dialogues)
        kept = writer(documents, cache, held_out=True)
        pack(kept, "held_out_chat", seed=seed + 1, count=max(1, dialogues // HELD_OUT_ONE_IN))
        print(f"{sum(n for _, n in tasks.values()):,} tokens of dialogues", flush=True)

    lengths = np.diff(held_out.offsets)
    held_tokens = {s: int(lengths[held_out.sources == s].sum()) for s in corpus.SOURCES}
    sources = card.count(documents, held_tokens)
    xz = packing.xz_bits_per_byte(d.text for d in documents if d.held_out)
    card.write_card(out / "DATA_CARD.md", sources, tasks, card.notices(cache), xz)
    write_numbers(out / "numbers.json", sources, text_tokens, tasks, xz)


def write_numbers(
    path: Path,
    sources: Mapping[str, card.SourceNumbers],
    text_tokens: Mapping[str, int],
    tasks: Mapping[str, tuple[int, int]],
    xz_bits_per_byte: float,
) -> None:
    """The card's numbers for programs."""
    content = {
        "sources": {
            source: {
                **asdict(numbers),
                "tokens": text_tokens.get(source, 0),
                "held_out_bytes_per_token": numbers.bytes_per_token,
            }
            for source, numbers in sources.items()
        },
        "dialogues": {task: {"count": n, "tokens": t} for task, (n, t) in sorted(tasks.items())},
        "held_out_xz_bits_per_byte": xz_bits_per_byte,
    }
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for what is made")
    parser.add_argument("--cache", type=Path, help="folder for packages (default: OUT/packages)")
    parser.add_argument("--dialogues", type=int, default=0, help="how many (default: none)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="processes that write dialogues")
    options = parser.parse_args(arguments)
    cache = options.cache or options.out / "packages"
    try:
        make(
            options.out,
            cache,
            dialogues=options.dialogues,
            seed=options.seed,
            workers=options.workers,
        )
    except PackageError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
