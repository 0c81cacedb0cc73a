"""The products between two mixers of a decode step, as one kernel."""

from pallas_kernels.decode_chain.api import chain
from pallas_kernels.decode_chain.stages import ROWS, Experts, Norm, Product, Stage, unfit

__all__ = ["ROWS", "Experts", "Norm", "Product", "Stage", "chain", "unfit"]
