"""Which architecture names exist, and to which entry each public one belongs (OWN-13).

An entry is a formula family, never a release: `Qwen3NextForCausalLM` runs the formulas of
`Qwen3_5MoeForCausalLM` with other tensor names, so it has no entry of its own.
"""

from __future__ import annotations

from artifacts.errors import ArtifactError, NotYetError

DENSE = "Qwen3_5ForCausalLM"
MOE = "Qwen3_5MoeForCausalLM"

KNOWN_ARCHITECTURES: dict[str, str] = {
    "Qwen3_5ForCausalLM": DENSE,
    "Qwen3_5ForConditionalGeneration": DENSE,
    "Qwen3_5MoeForCausalLM": MOE,
    "Qwen3_5MoeForConditionalGeneration": MOE,
    "Qwen3NextForCausalLM": MOE,
}
"""Hugging Face architecture name -> architecture entry."""

DRAFT_ARCHITECTURES = ("DFlashDraftModel",)
"""Hugging Face architecture names of drafts: they run beside a model, never alone."""

PLANNED_DRAFTS = ("DFlash2DraftModel",)
_PLANNED_PREFIXES = ("Qwen4Exp", *PLANNED_DRAFTS)


def normalise_architecture(name: str, where: str = "config.json") -> str:
    """The architecture entry of a Hugging Face (or already normalised) architecture name.

    Raises NotYetError for a planned architecture and ArtifactError for a draft and, listing the
    known ones, for any other. `where` is the file named in the message.
    """
    if name in KNOWN_ARCHITECTURES:
        return KNOWN_ARCHITECTURES[name]
    if name in DRAFT_ARCHITECTURES:
        raise ArtifactError(
            f"{where}: {name} is a draft, which runs beside the model it drafts for: "
            "open that model with draft=, or `ninfer convert HF_DIR OUT --draft DIR`"
        )
    if name.startswith(_PLANNED_PREFIXES):
        raise NotYetError(f"{where}: architecture {name!r} is not implemented yet")
    known = ", ".join(KNOWN_ARCHITECTURES)
    raise ArtifactError(f"{where}: unknown architecture {name!r}; known: {known}")
