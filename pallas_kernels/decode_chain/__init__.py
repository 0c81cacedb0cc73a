"""The products between two mixers of a decode step, as one kernel."""

from pallas_kernels.decode_chain.api import chain
from pallas_kernels.decode_chain.stages import (
    ROWS,
    Add,
    Experts,
    Product,
    Result,
    Stage,
    unavailable,
)

__all__ = ["ROWS", "Add", "Experts", "Product", "Result", "Stage", "chain", "unavailable"]
