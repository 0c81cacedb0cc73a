"""Model artifacts: manifest, weights, front-end resources; reading, converting, verifying."""

from artifacts.architectures.dflash import DFlashConfig
from artifacts.architectures.qwen3_5 import Qwen3_5Config, Qwen3_5VisionConfig, parameter_shapes
from artifacts.architectures.registry import KNOWN_ARCHITECTURES
from artifacts.checkpoint import Checkpoint, open_checkpoint
from artifacts.converter import convert
from artifacts.description import ComponentSummary, Description, describe
from artifacts.errors import ArtifactError, NinferError, NotYetError
from artifacts.licences import Activation, Licence, fused_activations, permitted_activations
from artifacts.manifest import Manifest
from artifacts.resources import FrontendResources
from artifacts.verifier import NonFinite, VerifyReport, verify

__all__ = [
    "KNOWN_ARCHITECTURES",
    "Activation",
    "ArtifactError",
    "Checkpoint",
    "ComponentSummary",
    "DFlashConfig",
    "Description",
    "FrontendResources",
    "Licence",
    "Manifest",
    "NinferError",
    "NonFinite",
    "NotYetError",
    "Qwen3_5Config",
    "Qwen3_5VisionConfig",
    "VerifyReport",
    "convert",
    "describe",
    "fused_activations",
    "open_checkpoint",
    "parameter_shapes",
    "permitted_activations",
    "verify",
]
