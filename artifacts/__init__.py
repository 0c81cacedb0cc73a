"""Model artifacts: a manifest, weights in orbax, front-end resources; reading, converting, verifying."""

from artifacts.errors import ArtifactError, NinferError, NotYetError

__all__ = ["ArtifactError", "NinferError", "NotYetError"]
