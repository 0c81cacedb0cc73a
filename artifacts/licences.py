"""Activation licences: how coarse the activations of one use of a parameter may be (ART-07)."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from artifacts.errors import ArtifactError


class Activation(StrEnum):
    """Bits of the activations that meet a weight."""

    A16 = "A16"
    A8 = "A8"
    A4 = "A4"


class Licence(StrEnum):
    """What a use permits; each licence includes everything finer."""

    A16Only = "A16Only"
    AllowA8 = "AllowA8"
    AllowA4 = "AllowA4"


_PERMITS: dict[Licence, frozenset[Activation]] = {
    Licence.A16Only: frozenset({Activation.A16}),
    Licence.AllowA8: frozenset({Activation.A16, Activation.A8}),
    Licence.AllowA4: frozenset({Activation.A16, Activation.A8, Activation.A4}),
}


def permitted_activations(licence: Licence) -> frozenset[Activation]:
    """The activations a single use may run with (ART-07)."""
    return _PERMITS[licence]


def fused_activations(licences: Iterable[Licence]) -> frozenset[Activation]:
    """What a call serving several uses may run with: the intersection (ART-07).

    Raises ArtifactError for no use at all.
    """
    sets = [_PERMITS[licence] for licence in licences]
    if not sets:
        raise ArtifactError("a fused call serves at least one use")
    return frozenset.intersection(*sets)
