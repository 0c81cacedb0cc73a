"""Incremental detokenisation: the pieces, joined, are the decoding of all ids, for any split.

Each token stands for fixed bytes, so the text is the UTF-8 decoding of their concatenation. A
character whose bytes have not all arrived is held back (at most three bytes); bytes that can never
become one come out as U+FFFD at once, one per maximal ill-formed part, exactly as decoding
everything gives them.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass

from ninfer_jax.frontend.tokenizer import Tokenizer


@dataclass(frozen=True)
class Detokenizer:
    """The state of one incremental decoding. Immutable: `push` returns the next state, so a preview
    costs no undo.

    O(1) per token: no earlier token is looked at again.
    """

    tokenizer: Tokenizer
    skip_special_tokens: bool = True
    pending: bytes = b""
    """The bytes of an unfinished character."""

    def push(self, token_id: int) -> tuple[Detokenizer, str]:
        """The state after one more token, and the text that is now certain.

        A skipped special token is as if it had not been there, also between the bytes of one
        character; so does decoding everything.
        """
        if self.skip_special_tokens and token_id in self.tokenizer.special_token_ids:
            return self, ""
        data = self.pending + self.tokenizer.token_bytes(token_id)
        text, used = codecs.utf_8_decode(data, "replace", False)
        if data[used:] == self.pending:
            return self, text
        return Detokenizer(self.tokenizer, self.skip_special_tokens, data[used:]), text

    def flush(self) -> tuple[Detokenizer, str]:
        """The state with nothing held back, and what was: U+FFFD for an unfinished character, else
        nothing."""
        if not self.pending:
            return self, ""
        text = self.pending.decode("utf-8", "replace")
        return Detokenizer(self.tokenizer, self.skip_special_tokens), text
