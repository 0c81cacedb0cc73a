"""Put a trained demo model together as the shipped artifact.

    python -m scripts.ship_demo --run RUN/drafts --data DATA --out artifacts/demo

RUN/drafts holds `model` and `draft` of `scripts.train_demo drafts`, DATA the tokenizer and data card of
`scripts.demo_data`. The artifact carries the text trunk, the MTP head and the DFlash draft.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from artifacts import convert


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    ship(options.run, options.data, options.out)


def ship(run: Path, data: Path, out: Path) -> None:
    """Convert to `out`, which must not be there yet or be empty, and copy the data card beside it."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "ninfer-demo"
        shutil.copytree(run / "model", folder)
        shutil.copytree(data / "tokenizer", folder, dirs_exist_ok=True)
        convert(folder, out, "ninfer-demo", draft=run / "draft")
    shutil.copy(data / "DATA_CARD.md", out / "DATA_CARD.md")


if __name__ == "__main__":
    main()
