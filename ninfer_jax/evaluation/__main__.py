"""The command line of lm-evaluation-harness with the model `ninfer`.

python -m ninfer_jax.evaluation run --model ninfer --model_args pretrained=demo --tasks ...
"""

from __future__ import annotations

import sys


def main() -> None:
    """The harness's command line; exit code 2 where it is not installed."""
    try:
        from lm_eval.__main__ import cli_evaluate
    except ModuleNotFoundError as missing:
        print(
            f"ninfer_jax.evaluation needs {missing.name}; install the extra: pip install 'ninfer-jax[eval]'",
            file=sys.stderr,
        )
        sys.exit(2)
    import ninfer_jax.evaluation.lm_eval  # noqa: F401 - registers the model

    cli_evaluate()


if __name__ == "__main__":
    main()
