"""How an op picks its implementation: None always works, a named one that cannot run says why."""

from __future__ import annotations

from typing import Literal

Implementation = Literal["reference", "pallas"] | None


def pick(
    op: str, implementation: Implementation, *, pallas_unavailable: str
) -> Literal["reference"]:
    """Resolve `implementation` for an op whose only implementation so far is the reference.

    Args:
      op: name of the op, for the message.
      implementation: None (best available), "reference" or "pallas".
      pallas_unavailable: why "pallas" cannot run.

    Raises:
      NotImplementedError: "pallas" was asked for and cannot run.
      ValueError: the name is unknown.
    """
    if implementation in (None, "reference"):
        return "reference"
    if implementation == "pallas":
        raise NotImplementedError(f"{op}: implementation='pallas' cannot run: {pallas_unavailable}")
    raise ValueError(
        f"{op}: implementation={implementation!r} is unknown; use None, 'reference' or 'pallas'"
    )


NO_KERNEL_YET = "no GPU kernel has been written for this op yet; use None or 'reference'"
