"""Public function of chains of matrix products."""

from __future__ import annotations

import jax

from pallas_kernels.decode_chain import reference
from pallas_kernels.decode_chain.stages import Stage, check, unfit
from pallas_kernels.dispatch import Implementation, not_hopper, takes_kernel


def chain(
    stages: tuple[Stage, ...],
    first: jax.Array | None,
    residual: jax.Array,
    weights: tuple[tuple[jax.Array, ...], ...],
    layers: jax.Array,
    running: jax.Array | None = None,
    *,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array]:
    """Run the matrix products between two mixers of a decode step, one after the other.

    The RMS norm is split. A stage that adds leaves the stream times (1 + weight) and sums of its squares; the product
    after it scales its result by the stream's 1 / rms. That is `rms_norm` before the product, up to rounding.

    Args:
      stages: a product after one that adds, after a norm or after experts reads the normed stream, any other one the
        result before it. Experts read the normed stream. The last stage is a product that adds nothing.
      first: input of the first stage, [8, K]; None of a `Norm`.
      residual: [H, 8], the stream that is added to.
      weights: for each stage its stacks: [L, M, K] of a product, [L, H] of a zero-centred norm; "add" has both.
        `Experts` tells its own.
      layers: int32, for each of these stacks the index in it; may be traced.
      running: int32 [8], 1 or 0: rows with 0 choose no experts; only for `Experts`.
      implementation: see `pallas_kernels.dispatch`. "pallas" takes bfloat16 and 8 rows on compute capability 9.0, and
        sizes that fit (`stages.unfit`). It needs the whole device: while it runs, no other kernel may stay on a
        multiprocessor until this one ends.

    Returns:
      The result of the last stage, [8, N], and the residual stream as it was last added to. In the kernel rows are
      independent of each other bit for bit.

    Raises:
      ValueError: the arguments do not go together.
      NotImplementedError: "pallas" was asked for and cannot run here.
    """
    check(stages, first, residual, weights, layers, running)
    dtypes = [array.dtype for array in jax.tree.leaves((first, residual, weights))]
    hidden, rows = residual.shape
    why_not = not_hopper() or unfit(stages, hidden, rows, dtypes)
    if takes_kernel("chain", implementation, why_not):
        from pallas_kernels.decode_chain import kernel  # Mosaic, only where it is used

        return kernel.chain(stages, first, residual, weights, layers, running)
    return reference.chain(stages, first, residual, weights, layers, running)
