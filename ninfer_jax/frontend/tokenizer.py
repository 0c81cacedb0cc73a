"""Text to token ids and back: a checkpoint's `tokenizer.json` run by the `tokenizers` library.

Only byte-level vocabularies are accepted (every Qwen is one). There, each token stands for fixed
bytes whatever its neighbours are, which is what makes incremental decoding exact (see
`detokenizer`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken

from artifacts.resources import FrontendResources
from ninfer_jax.errors import ArtifactError, InputError, NotYetError

_SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return table


_BYTE_OF_CHAR = _byte_alphabet()


class Tokenizer:
    """Encodes and decodes with a checkpoint's own tokenizer (FE-01). Immutable after construction.

    Ids that the model's embedding has and the tokenizer does not decode to nothing.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: Iterable[int] = (),
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """Wrap a loaded tokenizer; most callers want `from_resources`.

        Args:
            backend: a byte-level tokenizer.
            eos_token_ids: the ids that end a sequence.
            special_tokens: named special tokens ("eos_token": "<|im_end|>", ...) as templates see
                them.

        Raises:
            NotYetError: the decoder is not byte-level.
        """
        decoder = backend.decoder
        if not isinstance(decoder, tokenizers.decoders.ByteLevel):
            kind = type(decoder).__name__ if decoder is not None else "none"
            raise NotYetError(
                f"tokenizer.json has decoder {kind}; only ByteLevel vocabularies are supported yet"
            )
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self.special_token_ids: frozenset[int] = frozenset(
            token_id for token_id, token in added.items() if token.special
        )
        """Ids of added tokens marked special: left out of text by `skip_special_tokens`."""
        self.cut_token_ids: frozenset[int] = frozenset(
            token_id
            for token_id, token in added.items()
            if token.special
            and not (token.normalized or token.lstrip or token.rstrip or token.single_word)
            and not any(token.content in o.content for i, o in added.items() if i != token_id)
        )
        """Special tokens that cut text: found before anything else is, and what stands on either
        side is tokenised without regard to the other. So the tokens before one are those of the
        text before it, whatever follows."""
        self.eos_token_ids: frozenset[int] = frozenset(eos_token_ids)
        """Ids that end a sequence: generation_config's and tokenizer_config's together."""
        self.special_tokens: dict[str, str] = dict(special_tokens or {})
        """Named special tokens, for chat templates."""
        self.vocab_size: int = 1 + max(
            backend.get_vocab(with_added_tokens=True).values(), default=-1
        )
        """One more than the largest id the tokenizer knows; the model's embedding may be larger."""
        self.think_start_id: int | None = backend.token_to_id("<think>")
        """Id of `<think>`, or None if it is no single token."""
        self.think_end_id: int | None = backend.token_to_id("</think>")
        """Id of `</think>`, or None if it is no single token."""
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_resources(cls, resources: FrontendResources) -> Tokenizer:
        """Load `tokenizer.json`, completed by `tokenizer_config.json` as Hugging Face does.

        Tokens that only `added_tokens_decoder` lists are added; named special tokens are special
        even if `tokenizer.json` forgot to say so.

        Raises:
            ArtifactError: the file is missing, is not a tokenizer, or contradicts
                tokenizer_config.json.
            NotYetError: not a byte-level vocabulary.
        """
        path = resources.tokenizer_json
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ArtifactError(
                f"{path}: cannot read the tokenizer ({error}); copy tokenizer.json from the "
                "original checkpoint"
            ) from error
        try:
            json.loads(text)
            backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise ArtifactError(
                f"{path}: not a valid tokenizer.json ({error}); copy it anew from the original "
                "checkpoint"
            ) from error
        # Settings of somebody's training batch, not of the vocabulary; Hugging Face drops them on
        # load too.
        backend.no_truncation()
        backend.no_padding()
        config = resources.tokenizer_config
        _add_listed_tokens(backend, config.get("added_tokens_decoder") or {})
        named = {name: token for name in _SPECIAL_NAMES if (token := _token_text(config.get(name)))}
        _mark_special(backend, named)
        eos = _eos_ids(resources.generation_config.get("eos_token_id"))
        if "eos_token" in named:
            eos_id = backend.token_to_id(named["eos_token"])
            assert eos_id is not None  # _mark_special made sure
            eos |= {eos_id}
        return cls(backend, eos_token_ids=eos, special_tokens=named)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`. Special tokens spelt out in the text become their ids, as chat
        templates need.

        Args:
            text: any string without lone surrogates.
            add_special_tokens: run the tokenizer's post-processor (a BOS, say); Qwen's has none.

        Raises:
            InputError: `text` is no string, or holds lone surrogates, which no UTF-8 text can.
        """
        ids: list[int] = self._encode(text, add_special_tokens).ids
        return ids

    def encode_with_cuts(self, text: str) -> tuple[list[int], list[tuple[int, int, int]]]:
        """`encode`, and where the text is cut: (index in the ids, first character, character after)
        of each of `cut_token_ids`, in order. Raises InputError as `encode` does."""
        encoding = self._encode(text)
        ids: list[int] = encoding.ids
        cuts = []
        for index, token_id in enumerate(ids):
            if token_id in self.cut_token_ids:
                span = encoding.token_to_chars(index)
                assert span is not None  # a token of the text itself
                cuts.append((index, *span))
        return ids, cuts

    def _encode(self, text: str, add_special_tokens: bool = False) -> tokenizers.Encoding:
        if not isinstance(text, str):
            raise InputError(f"text to encode must be a string, got {type(text).__name__}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(
                f"the text holds a lone surrogate at character {error.start} and is not valid "
                "Unicode; decode it with errors='replace' first"
            ) from error
        return self._backend.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are no UTF-8 come out as U+FFFD, ids without an entry as
        nothing."""
        known = [int(i) for i in ids if 0 <= i < self.vocab_size]
        text: str = self._backend.decode(known, skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token adds to the text, special or not; empty if the id has no entry."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self.id_to_token(token_id) or ""
            try:
                known = bytes([_BYTE_OF_CHAR[char] for char in token])
            except KeyError:  # an added token spelt outside the byte alphabet stands for itself
                known = token.encode("utf-8")
            self._bytes[token_id] = known
        return known

    def token_to_id(self, token: str) -> int | None:
        """The id of a token by its spelling in the vocabulary, or None."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def id_to_token(self, token_id: int) -> str | None:
        """The spelling of a token in the vocabulary, or None."""
        if not 0 <= token_id < self.vocab_size:
            return None
        found: str | None = self._backend.id_to_token(token_id)
        return found


def _token_text(entry: Any) -> str | None:
    """A special token of tokenizer_config.json: a string, or an object with `content`."""
    if isinstance(entry, Mapping):
        entry = entry.get("content")
    return entry if isinstance(entry, str) and entry else None


def _eos_ids(entry: Any) -> set[int]:
    if entry is None:
        return set()
    ids = entry if isinstance(entry, list | tuple) else [entry]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise ArtifactError(
                f"generation_config.json: eos_token_id must be an id or a list of ids, got "
                f"{entry!r}"
            )
    return set(ids)


def _add_listed_tokens(backend: tokenizers.Tokenizer, listed: Mapping[str, Any]) -> None:
    present = backend.get_added_tokens_decoder()
    try:
        wanted = {
            int(key): AddedToken(
                entry["content"],
                single_word=entry.get("single_word", False),
                lstrip=entry.get("lstrip", False),
                rstrip=entry.get("rstrip", False),
                normalized=entry.get("normalized", not entry.get("special", False)),
                special=entry.get("special", False),
            )
            for key, entry in listed.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"tokenizer_config.json: malformed added_tokens_decoder ({error!r})"
        ) from error
    for token_id, token in sorted(wanted.items()):
        known = present.get(token_id)
        if known is not None and known.content == token.content and known.special >= token.special:
            continue
        backend.add_tokens([token])
        found = backend.token_to_id(token.content)
        if found != token_id:
            raise ArtifactError(
                f"tokenizer_config.json gives {token.content!r} id {token_id}, tokenizer.json "
                f"makes it {found}; the two files belong to different checkpoints"
            )


def _mark_special(backend: tokenizers.Tokenizer, named: Mapping[str, str]) -> None:
    special = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
    for name, content in named.items():
        if content in special:
            continue
        if backend.token_to_id(content) is None:
            raise ArtifactError(
                f"tokenizer_config.json names {content!r} as {name}, which tokenizer.json does not "
                "contain"
            )
        backend.add_special_tokens([AddedToken(content, special=True, normalized=False)])
