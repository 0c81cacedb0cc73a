"""Reads the keys of a Hugging Face `config.json`: typed, bounded, with errors naming file and key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from artifacts.architectures.config_checks import MAX_COUNTS, MAX_SIZE
from artifacts.errors import ArtifactError, NotYetError


class Keys:
    """One JSON object of the config file; every failure names the file and the key."""

    def __init__(self, values: Mapping[str, Any], where: str, path: str = "") -> None:
        self.values, self.where, self.path = values, where, path

    def fail(self, key: str, message: str) -> ArtifactError:
        return ArtifactError(f"{self.where}: {self.path}{key} {message}")

    def not_yet(self, key: str) -> NotYetError:
        return NotYetError(
            f"{self.where}: {self.path}{key} = {self.values[key]!r} is not implemented yet"
        )

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        """The value of a key; null counts as absent, and a bool never passes for a number."""
        value = self.values.get(key)
        if value is None:
            if default is ...:
                raise self.fail(key, "is missing")
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            names = " or ".join(k.__name__ for k in kinds)
            raise self.fail(key, f"must be {names}, not {value!r}")
        return value

    def integer(self, key: str, default: Any = ...) -> Any:
        value = self.get(key, int, default)
        if value is not None and value > MAX_COUNTS.get(key, MAX_SIZE):
            raise self.fail(key, f"is {value}; at most {MAX_COUNTS.get(key, MAX_SIZE)} is possible")
        return value

    def number(self, key: str, default: Any = ...) -> float:
        value = self.get(key, (int, float), default)
        try:
            return float(value)
        except OverflowError:
            raise self.fail(key, "is too large") from None

    def integers(self, key: str, default: Any = ...) -> tuple[int, ...]:
        values = self.get(key, list, default)
        if any(isinstance(v, bool) or not isinstance(v, int) for v in values):
            raise self.fail(key, f"must be a list of integers, not {values!r}")
        return tuple(values)

    def section(self, key: str) -> Keys:
        return Keys(self.get(key, dict, {}), self.where, f"{self.path}{key}.")

    def only(self, key: str, allowed: tuple[Any, ...]) -> None:
        """Refuses a present value outside `allowed` as not implemented."""
        if self.values.get(key) is not None and self.values[key] not in allowed:
            raise self.not_yet(key)

    def refuse_quantization(self) -> None:
        """Refuses weights stored in a quantised format."""
        quantised = self.values.get("quantization_config")
        if quantised:
            method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
            raise NotYetError(
                f"{self.where}: {self.path}quantization_config ({method}) is not implemented yet; "
                "use the BF16 release"
            )


def huggingface_architecture(raw: Mapping[str, Any], where: str = "config.json") -> str:
    """The first name under `architectures`, as it stands. ArtifactError when there is none."""
    names = Keys(raw, where).get("architectures", list)
    if not names or not isinstance(names[0], str):
        raise ArtifactError(f"{where}: architectures must name one class, not {names!r}")
    return names[0]
