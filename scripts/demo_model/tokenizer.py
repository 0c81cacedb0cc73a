"""The demo model's tokenizer: a byte-level BPE of 6144 tokens with Qwen's added tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer

from scripts.demo_model.document import Document

VOCABULARY = 6144
MODEL_MAX_LENGTH = 2048
"""Tokens of the longest sequence that the model is trained for."""
MASK = "<|mask|>"
"""Stands for a token that block drafting is to fill in."""
END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
THINK = "<think>"
ADDED: dict[str, bool] = {
    END_OF_TEXT: True,
    TURN_START: True,
    TURN_END: True,
    "<|object_ref_start|>": True,
    "<|object_ref_end|>": True,
    "<|box_start|>": True,
    "<|box_end|>": True,
    "<|quad_start|>": True,
    "<|quad_end|>": True,
    "<|vision_start|>": True,
    "<|vision_end|>": True,
    "<|vision_pad|>": True,
    "<|image_pad|>": True,
    "<|video_pad|>": True,
    "<tool_call>": False,
    "</tool_call>": False,
    "<|fim_prefix|>": False,
    "<|fim_middle|>": False,
    "<|fim_suffix|>": False,
    "<|fim_pad|>": False,
    "<|repo_name|>": False,
    "<|file_sep|>": False,
    "<tool_response>": False,
    "</tool_response>": False,
    THINK: False,
    "</think>": False,
    MASK: True,
}
"""The added tokens in the order of their ids, the last ones, and whether each is special."""

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Where Qwen3.5 cuts text before merging: words with the space before them, single digits, runs of
signs, newlines."""
MOST_OF_A_SOURCE = 4_000_000
"""Characters of one source that the merges are learned from."""

_ADDED_TEXT = re.compile("|".join(map(re.escape, ADDED)))


def training_texts(documents: Iterable[Document], dialogues: Iterable[str]) -> Iterator[str]:
    """What the merges are learned from: of each source every n-th training document, so that it
    gives at most about `MOST_OF_A_SOURCE` characters, and the dialogues without added tokens."""
    sources: dict[str, list[Document]] = {}
    for document in documents:
        if not document.held_out:
            sources.setdefault(document.source, []).append(document)
    for kept in sources.values():
        step = -(-sum(len(document.text) for document in kept) // MOST_OF_A_SOURCE)
        yield from (document.text for document in kept[:: max(step, 1)])
    for text in dialogues:
        yield from filter(None, _ADDED_TEXT.split(text))


def train(texts: Iterable[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    """A tokenizer whose merges are learned from texts. The same texts give the same tokenizer.

    Args:
        texts: in any number; each is cut by itself.
        vocabulary: tokens in all: 256 bytes, merges, and the added tokens as the last.

    Raises:
        ValueError: the texts are too few for that many merges.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    learned = vocabulary - len(ADDED)
    trainer = BpeTrainer(
        vocab_size=learned,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=2,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != learned:
        raise ValueError(
            f"{tokenizer.get_vocab_size()} tokens learned, {learned} wanted: more text"
        )
    tokenizer.add_tokens(
        [AddedToken(text, normalized=False, special=special) for text, special in ADDED.items()]
    )
    return tokenizer


def added_id(tokenizer: Tokenizer, text: str) -> int:
    """The id of an added token. Raises KeyError if the tokenizer has none of that text."""
    token_id = tokenizer.token_to_id(text)
    if token_id is None:
        raise KeyError(text)
    return int(token_id)


def write_tokenizer(folder: Path, tokenizer: Tokenizer, chat_template: str) -> None:
    """Writes tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json,
    as a checkpoint of Hugging Face has them."""
    folder.mkdir(parents=True, exist_ok=True)
    content = json.loads(tokenizer.to_str())
    _write(folder / "tokenizer.json", content)
    _write(folder / "tokenizer_config.json", tokenizer_config(content["added_tokens"]))
    _write(folder / "generation_config.json", generation_config(tokenizer))
    (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")


def tokenizer_config(added_tokens: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of tokenizer_config.json, given the added tokens of tokenizer.json."""
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(token["id"]): {key: value for key, value in token.items() if key != "id"}
            for token in added_tokens
        },
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": TURN_END,
        "errors": "replace",
        "model_max_length": MODEL_MAX_LENGTH,
        "pad_token": END_OF_TEXT,
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }


def generation_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of generation_config.json."""
    end_of_text, turn_end = (added_id(tokenizer, text) for text in (END_OF_TEXT, TURN_END))
    return {
        "bos_token_id": end_of_text,
        "do_sample": True,
        "eos_token_id": [turn_end, end_of_text],
        "pad_token_id": end_of_text,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, ensure_ascii=False, indent=None if "model" in content else 2)
    path.write_text(text + "\n", encoding="utf-8")
