"""The root of the exception tree, and the errors of model artifacts.

The root stands here because `artifacts` is the lowest package that raises to users;
`ninfer_jax.errors` adds the runtime's branches and re-exports these.
"""


class NinferError(Exception):
    """Base of every deliberate error; its message names the thing, the limit and the cure."""


class ArtifactError(NinferError):
    """A checkpoint or artifact is damaged, incomplete, or of a kind this version cannot read."""


class NotYetError(ArtifactError):
    """A well-formed artifact uses a format or feature that this version does not implement."""
