"""The products between two mixers of a decode step, as one kernel."""

from pallas_kernels.decode_chain.api import chain
from pallas_kernels.decode_chain.stages import ROWS, Add, Product, Result, unavailable

__all__ = ["ROWS", "Add", "Product", "Result", "chain", "unavailable"]
