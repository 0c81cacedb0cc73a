"""The functions behind `import ninfer_jax as nj`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from ninfer_jax.config import EngineConfig
from ninfer_jax.engine import Engine
from ninfer_jax.outputs import RequestOutput
from ninfer_jax.sampling_params import SamplingParams
from ninfer_jax.shipped import shipped_model


def load(
    model: str | Path,
    *,
    chat_template: str | None = None,
    verify: bool = True,
    **config: Any,
) -> Engine:
    """Load a model and start an engine on it.

    Args:
      model: a shipped name ("demo"), a model artifact, or a Hugging Face checkpoint folder.
      chat_template: Jinja source to use instead of the checkpoint's (FE-03).
      verify: check the SHA-256 of an artifact's files.
      **config: fields of `EngineConfig`: max_context, max_concurrency, kv_capacity, device_state_slots,
        host_capacity_bytes, prefill_chunk, cache, max_queue, record, dtype, seed, purpose.

    Raises:
      ArtifactError: the folder is damaged, incomplete or of an unknown kind.
      CapacityError, InputError: the configuration cannot work.
    """
    path = shipped_model(model) if isinstance(model, str) else model
    return Engine.load(
        path, EngineConfig.from_dict(config), chat_template=chat_template, verify=verify
    )


@cache
def _demo() -> Engine:
    return load("demo")


def generate(
    prompts: Any, sampling_params: SamplingParams | None = None, *, use_tqdm: bool = True
) -> list[RequestOutput]:
    """`Engine.generate` on the shipped demo model, which is loaded once and kept."""
    return _demo().generate(prompts, sampling_params, use_tqdm=use_tqdm)
