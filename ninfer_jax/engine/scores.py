"""The engine's scoring: `score` and `perplexity`, which no request, scheduler or cache takes part in (SC-01)."""

from __future__ import annotations

from typing import Any

from ninfer_jax.config import Limits
from ninfer_jax.frontend import Frontend
from ninfer_jax.scoring import Perplexity, Score, Scorer, requests


class Scores:
    """What `Engine` can do besides generating; any thread may call it, and calls take turns."""

    frontend: Frontend
    limits: Limits
    _scorer: Scorer

    def score(self, contexts: Any, continuations: Any, *, use_tqdm: bool = False) -> list[Score]:
        """Log-probabilities of continuations given their contexts; results come in the order of the continuations.

        Runs beside the scheduler and the cache, one call after the other, on a state of its own that exists only
        meanwhile (SC-01); on an engine of purpose "generation" its units are compiled when first needed. A context that
        several continuations have in common is computed once. Numbers do not depend on what else is scored.

        Args:
          contexts: strings or lists of token ids, one a continuation; or a single one for all. An empty context is one
            BOS token, where the tokenizer has none the EOS token it names. A pair of strings is cut into tokens as
            lm-evaluation-harness does: spaces at the end of the context go to the continuation, and both are encoded
            together, without special tokens.
          continuations: strings or lists of token ids, or a single one. Together with its context one may be
            max_context + 1 tokens long.
          use_tqdm: show progress on stderr.

        Raises:
          InputError: something is malformed or too long; nothing has run then.
          CapacityError: the device has no room for the temporary state.
          EngineFailure: the engine is closed.
          NumericError: the model's output for a pair is not finite; the others can be scored without it.
        """
        spans = requests.score_spans(
            self.frontend, contexts, continuations, max_context=self.limits.max_context
        )
        return requests.scores(spans, self._scorer.run(spans, use_tqdm=use_tqdm))

    def perplexity(
        self,
        text: Any,
        *,
        window: int | None = None,
        stride: int | None = None,
        use_tqdm: bool = False,
    ) -> Perplexity:
        """How well the model predicts a text: every token after the first is scored once.

        The text runs in windows that begin `stride` tokens apart, each from an empty state; a window scores the tokens
        that the one before it did not reach, each given all of the window before it.

        Args:
          text: a string, encoded without special tokens, or token ids; any length from 2 tokens on.
          window: tokens of a window, at most max_context, which is the default.
          stride: tokens, less than window; default: half the window.
          use_tqdm: show progress on stderr.

        Raises: as in `score`.
        """
        ids, windows, spans = requests.perplexity_spans(
            self.frontend,
            text,
            window=window,
            stride=stride,
            max_context=self.limits.max_context,
        )
        results = self._scorer.run(spans, use_tqdm=use_tqdm)
        return requests.perplexity(self.frontend, text, ids, windows, results)
