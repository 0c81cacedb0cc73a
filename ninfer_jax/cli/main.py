"""`ninfer`: answers on stdout, progress and statistics on stderr, exit code 2 for a user's mistake."""

from __future__ import annotations

import sys

import typer

from ninfer_jax.cli import artifact, batch, planner, scoring, text
from ninfer_jax.errors import NinferError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Exact, reproducible inference for hybrid language models.",
)
app.command()(text.generate)
app.command()(text.chat)
app.command()(scoring.score)
app.command()(scoring.perplexity)
app.command()(batch.batch)
app.command()(artifact.convert)
app.command()(artifact.inspect)
app.command()(artifact.verify)
app.command()(planner.simulate)
app.command()(planner.explain)


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except (NinferError, OSError) as error:
        print(f"ninfer: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("ninfer: interrupted", file=sys.stderr)
        sys.exit(130)
