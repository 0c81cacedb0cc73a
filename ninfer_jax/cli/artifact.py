"""`ninfer convert`, `inspect` and `verify`."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

import artifacts

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def convert(
    source: Annotated[Path, typer.Argument(help="Hugging Face checkpoint folder.")],
    out: Annotated[Path, typer.Argument(help="Folder to create.")],
    name: Annotated[str | None, typer.Option(help="Public name of the model.")] = None,
    draft: Annotated[
        Path | None, typer.Option(help="Folder of a DFlash draft made for this model.")
    ] = None,
) -> None:
    """Convert a Hugging Face checkpoint into a model artifact."""
    with _Bytes("converting") as progress:
        path = artifacts.convert(source, out, name, draft=draft, progress=progress)
    print(path)


def inspect(
    model: Annotated[Path, typer.Argument(help="Artifact or Hugging Face folder.")],
    as_json: Json = False,
) -> None:
    """Show what a model folder holds, without reading weights."""
    description = artifacts.describe(model)
    if as_json:
        print(json.dumps(description.to_json()))
        return
    table = Table("component", "parameters", "elements", "bytes", "formats", title=description.name)
    for name, part in description.components.items():
        formats = ", ".join(f"{k} {v:,}" for k, v in part.nbytes_by_format.items())
        table.add_row(
            name, f"{part.parameters:,}", f"{part.elements:,}", f"{part.nbytes:,}", formats
        )
    console = Console(soft_wrap=True)
    console.print(f"{description.path}: {description.kind}, {description.architecture}")
    console.print(table)
    for key, value in description.config.items():
        console.print(f"  {key} = {value}", highlight=False)


def verify(
    model: Annotated[Path, typer.Argument(help="Artifact or Hugging Face folder.")],
    as_json: Json = False,
) -> None:
    """Check hashes, shapes, coverage and values of a model folder; exit code 1 if a value is not finite."""
    with _Bytes("verifying") as progress:
        report = artifacts.verify(model, progress=progress)
    if as_json:
        print(json.dumps(dataclasses.asdict(report) | {"ok": report.ok}, default=str))
    else:
        hashed = f"{report.files_hashed} of {report.files} files hashed"
        print(
            f"{report.path}: {report.architecture}, {report.parameters} parameters in {report.objects} objects, "
            f"{report.nbytes:,} bytes, {hashed}"
        )
        for name, bad in report.nonfinite.items():
            print(f"{name}: {bad.nan} NaN, {bad.inf} infinite")
        print("ok" if report.ok else "some values are not finite")
    if not report.ok:
        sys.exit(1)


class _Bytes:
    """A progress bar on stderr for a `(done, total)` callback; silent where stderr is no terminal."""

    def __init__(self, title: str) -> None:
        self._bar = tqdm(desc=title, unit="B", unit_scale=True, leave=False, disable=None)

    def __enter__(self) -> _Bytes:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def __call__(self, done: int, total: int) -> None:
        self._bar.total = total
        self._bar.update(done - self._bar.n)
