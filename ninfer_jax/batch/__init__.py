"""Files of requests: OpenAI batch JSON Lines through one engine, safe against crashes."""

from ninfer_jax.batch.run import run_batch
from ninfer_jax.batch.summary import Summary as BatchSummary

__all__ = ["BatchSummary", "run_batch"]
