"""The exceptions a user of the runtime may see. One tree; every message names the thing, the limit and the cure."""

from artifacts.errors import ArtifactError, NinferError, NotYetError

__all__ = [
    "ArtifactError",
    "CapacityError",
    "ConstraintError",
    "EngineFailure",
    "InputError",
    "NinferError",
    "NotYetError",
    "NumericError",
    "OverloadError",
]


class InputError(NinferError, ValueError):
    """A request is refused before anything runs (ENG-07)."""


class CapacityError(NinferError):
    """The requested configuration or request can never fit the configured memory."""


class OverloadError(NinferError):
    """Too many requests are outstanding (ENG-02, ENG-07); trying again later can succeed."""


class ConstraintError(NinferError):
    """A grammar or schema that constrains the output cannot be compiled."""


class NumericError(NinferError):
    """What the model computed for a sequence is not finite; other sequences are not affected."""


class EngineFailure(NinferError):  # noqa: N818 - the name is part of the public contract
    """The engine's own state is no longer trustworthy (ENG-08); it stops and every response is completed."""
