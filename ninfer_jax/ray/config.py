"""What a processor is made of, and the actors it asks Ray for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ninfer_jax.config import EngineConfig
from ninfer_jax.errors import InputError
from ninfer_jax.shipped import shipped_model


@dataclass(frozen=True)
class ProcessorConfig:
    """Engines on Ray actors. Checked at construction."""

    model: str = "demo"
    """What `load` takes; a folder must be there on every machine."""
    num_replicas: int = 1
    """Actors, an engine each."""
    num_gpus: float = 0
    """GPUs of an actor: 1 on accelerators, 0 on CPU."""
    num_cpus: float = 1
    """CPU cores of an actor."""
    batch_size: int = 512
    """Rows that an actor gets at a time. They are ordered among each other, and lost together if it dies."""
    max_task_retries: int = 5
    """How often rows run again because their actor died. A row that kills its process every time ends the job then."""
    cache: bool = True
    """Whether prompts reuse what others share with them."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `EngineConfig`."""

    def __post_init__(self) -> None:
        for name, least in (("num_replicas", 1), ("batch_size", 1), ("max_task_retries", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise InputError(f"{name} must be an integer, at least {least}; got {value!r}")
        for name in ("num_gpus", "num_cpus"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
                raise InputError(f"{name} must be a number, at least 0; got {value!r}")
        path = Path(self.model)
        if shipped_model(str(path)) == path and path.is_dir():
            # Actors may have another working directory.
            object.__setattr__(self, "model", str(path.absolute()))
        EngineConfig.from_dict(self.engine)  # a mistake is seen here, and not on every machine


def ray_data() -> Any:
    """The module `ray.data`. Raises InputError if it is not installed."""
    try:
        import ray.data
    except ImportError as error:
        raise InputError(
            f'Ray Data is not installed ({error}); pip install "ninfer-jax[ray]"'
        ) from error
    return ray.data


def mapped(dataset: Any, replica: type, config: ProcessorConfig, **arguments: Any) -> Any:
    """A dataset whose blocks go through actors; rows of an actor that dies run again on another,
    `max_task_retries` times.

    Args:
      dataset: a Ray Dataset.
      replica: a class whose objects take a batch as a pyarrow table and give one.
      config: of the actors.
      **arguments: of the class.
    """
    data = ray_data()
    return dataset.map_batches(
        replica,
        fn_constructor_kwargs={"config": config, **arguments},
        batch_size=config.batch_size,
        batch_format="pyarrow",
        compute=data.ActorPoolStrategy(size=config.num_replicas),
        num_cpus=config.num_cpus,
        num_gpus=config.num_gpus,
        max_restarts=-1,
        max_task_retries=config.max_task_retries,
    )
