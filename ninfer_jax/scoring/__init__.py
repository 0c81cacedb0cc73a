"""Causal scoring: log-probabilities of given tokens, with a state of its own and no scheduler or cache (SC-01)."""

from ninfer_jax.scoring.results import Perplexity, Score
from ninfer_jax.scoring.scorer import Scorer

__all__ = ["Perplexity", "Score", "Scorer"]
