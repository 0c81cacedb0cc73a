"""The products between two mixers of a decode step, as one kernel."""

from pallas_kernels.decode_chain.kernel import ROWS, Add, Product, Result, chain, unavailable

__all__ = ["ROWS", "Add", "Product", "Result", "chain", "unavailable"]
