"""Model architectures an artifact can hold: the registry, and one folder a family."""

from artifacts.architectures.registry import KNOWN_ARCHITECTURES, normalise_architecture

__all__ = ["KNOWN_ARCHITECTURES", "normalise_architecture"]
