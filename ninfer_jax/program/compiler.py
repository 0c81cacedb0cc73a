"""How units are compiled: XLA's options by platform."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

import jax
from jax.stages import Compiled, Lowered

OPTIONS: dict[str, dict[str, str | bool]] = {
    "cpu": {
        # XLA's older code for fusions, gone with jax 0.11, is 10 to 40% faster on these units and compiles faster.
        "xla_cpu_use_fusion_emitters": False,
        # A library's code for single products only: a call for a sum costs 10 us, more than the sums of a step take.
        "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
    },
    "gpu": {
        # A loop over layers reads its weights in place where the product takes a slice of the stack; Triton's does not.
        "xla_gpu_enable_dynamic_slice_fusion": True,
        "xla_gpu_enable_triton_gemm": False,
        # A graph whose kernels form one line starts sooner than one with branches, which a step has no use for.
        "xla_gpu_command_buffer_scheduling_mode": "SERIALIZE",
    },
}
"""They change how fast units are and nothing else."""

_LOG = logging.getLogger("ninfer_jax")
_UNKNOWN: set[str] = set()


def compiled(lowered: Lowered, options: Mapping[str, str | bool]) -> Compiled:
    """Compile with those options that this XLA has: it refuses others, and their names come and go with its versions.

    Raises:
      jax.errors.JaxRuntimeError: XLA failed, or an option has a value that it does not take.
    """
    while True:
        known = {name: value for name, value in options.items() if name not in _UNKNOWN}
        try:
            return lowered.compile(known)
        except jax.errors.JaxRuntimeError as error:
            unknown = re.search(r"No such compile option: '(\w+)'", str(error))
            if unknown is None or unknown[1] not in known:
                raise
            if unknown[1] not in _UNKNOWN:
                _LOG.info("jax %s has no option %s; left out", jax.__version__, unknown[1])
            _UNKNOWN.add(unknown[1])
