"""Compiled units on disk: a start that finds its own neither traces, lowers nor compiles.

JAX's compilation cache saves compiling only, and for Mosaic GPU kernels lowering takes most of the time. So an entry is
found here without lowering, by a name that must tell everything that decides the code:

- the units' sources: every Python file of `PACKAGES`, of which JAX's own decide how kernels are lowered;
- the versions of the compiled packages (jaxlib, plugins, CUDA libraries) and of the client, and Python's;
- the devices: platform, kind, processors, compute capability, id (on CPU also the name of the machine);
- JAX's configuration, environment variables that JAX, XLA and Mosaic read, the compiler options;
- the unit: its name, and what the caller says it depends on (model, layout, dtype);
- its arguments: tree, shapes, dtypes, memory layouts, shardings.

Sources must not differ from what this process imported, so nothing is loaded or kept if one changed less than 10 s
before this module was imported, or since. Not seen is what a process changes in modules, what it sets around a start by
private means of JAX, and another CUDA toolkit or driver under the same version.

Entries are pickles: loading one may run code. They are kept in a folder of the user's own, mode 0700; one that others
own or may write to is not used. Any number of processes may share it.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import pickle
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from importlib import metadata, resources
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jax.stages import Compiled, Wrapped

from ninfer_jax.program import compiler

PACKAGES = ("artifacts", "jax", "ninfer_jax", "pallas_kernels", "planner")
"""Packages whose sources decide what a unit computes and how."""
LIMIT_BYTES = 4 << 30
"""Most bytes of entries; those that were used longest ago are removed."""

_VERSIONS = ("flax", "jax", "ml-dtypes", "ml_dtypes", "numpy", "nvidia")
_DEVICE = ("id", "platform", "device_kind", "core_count", "compute_capability")
_VARIABLES = ("JAX_", "LIBTPU_", "MOSAIC_", "NVIDIA_TF32", "TF_", "XLA_")
_SETTLED_SECONDS = 10
_IMPORTED = time.time()
_SWITCHING = threading.Lock()
_LOG = logging.getLogger("ninfer_jax")


class Unit(NamedTuple):
    """A jitted function, and the arrays or shapes that it is compiled for."""

    function: Wrapped
    args: tuple[Any, ...]


def compiled(
    units: Mapping[str, Unit],
    device: jax.Device,
    options: dict[str, str | bool],
    depends_on: Any,
    folder: Path | None,
) -> dict[str, Compiled]:
    """Executables of the units, from `folder` as far as they are there; others are compiled, and kept there.

    Nothing about the folder is an error: what cannot be used or kept is logged, and compiled.

    Args:
      units: by name; a name stands for one function, whatever else it depends on is in `depends_on`.
      device: the device of all arguments.
      options: XLA's, for all units.
      depends_on: what the functions close over, with a `repr` that tells all of it.
      folder: None compiles all and keeps nothing.
    """
    paths = {} if folder is None else _paths(units, device, options, depends_on, folder)
    with ThreadPoolExecutor() as pool:
        found = zip(paths, pool.map(lambda path: _load(path, device), paths.values()), strict=True)
        loaded = {name: unit for name, unit in found if unit is not None}
    missing = len(loaded) < len(units)
    with (
        _no_compilation_cache() if paths and missing else nullcontext(),
        ThreadPoolExecutor() as pool,
    ):
        # Compilation releases the interpreter lock: a unit compiles while the next is lowered.
        compiling = {
            name: pool.submit(compiler.compiled, unit.function.lower(*unit.args), options)
            for name, unit in units.items()
            if name not in loaded
        }
        new = {name: unit.result() for name, unit in compiling.items()}
    if folder is not None:
        _LOG.info("executables: %d loaded, %d compiled", len(loaded), len(new))
    if paths and missing:
        _keep({paths[name]: unit for name, unit in new.items()})
    return {name: loaded[name] if name in loaded else new[name] for name in units}


@contextmanager
def _no_compilation_cache() -> Iterator[None]:
    """Switch JAX's cache off, for all threads: serialized again, what it gives loads, and then fails to run."""
    with _SWITCHING:
        before = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
        try:
            jax.config.update("jax_enable_compilation_cache", False)
            compilation_cache.reset_cache()  # it asks once only
            yield
        finally:
            jax.config.update("jax_enable_compilation_cache", before)
            compilation_cache.reset_cache()


def _paths(
    units: Mapping[str, Unit],
    device: jax.Device,
    options: dict[str, str | bool],
    depends_on: Any,
    folder: Path,
) -> dict[str, Path]:
    """The file of each unit; none where nothing can be kept."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise PermissionError(f"{folder} must be this user's, and no other may write to it")
        common = (_sources(), _environment(device), sorted(options.items()), repr(depends_on))
    except OSError as error:
        _LOG.warning("executables are not kept on disk: %s", error)
        return {}
    out = {}
    for name, unit in units.items():
        key = repr((*common, name, _described(unit.args)))
        out[name] = folder / f"{name.replace('/', '-')}-{hashlib.sha256(key.encode()).hexdigest()}"
    return out


@functools.cache
def _sources() -> str:
    """A digest of the sources of `PACKAGES`, as they were imported.

    Raises:
      OSError: there are none, or one may have changed since.
    """
    digest = hashlib.sha256()
    for package in PACKAGES:
        root = Path(str(resources.files(package)))
        files = sorted(root.rglob("*.py"))
        if not files:
            raise FileNotFoundError(f"{package} has no sources to tell its executables by")
        for path in files:
            content = path.read_bytes()
            if path.stat().st_ctime > _IMPORTED - _SETTLED_SECONDS:
                raise OSError(f"{path} changed as this process started, or since; start again")
            digest.update(f"{package}/{path.relative_to(root)} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


def _environment(device: jax.Device) -> tuple[Any, ...]:
    """What decides the code of every unit, other than sources, options and models."""
    config = jax.config.values
    return (
        sys.version,
        platform.machine(),
        # Code for a CPU fits the machine it was compiled on.
        platform.node() if device.platform == "cpu" else None,
        (jax.__version__, jax.lib.__version__),
        sorted(
            f"{d.name} {d.version}"
            for d in metadata.distributions()
            if str(d.name).lower().startswith(_VERSIONS)
        ),
        device.client.platform_version,
        device.id,
        [[getattr(d, name, None) for name in _DEVICE] for d in jax.local_devices()],
        # As a `with` block may have set it, where the name can be read so.
        sorted((name, repr(getattr(jax.config, name, config[name]))) for name in config),
        sorted(item for item in os.environ.items() if item[0].startswith(_VARIABLES)),
    )


def _described(args: tuple[Any, ...]) -> str:
    leaves, tree = jax.tree.flatten(args)
    told = ("shape", "dtype", "weak_type", "committed", "format", "sharding")
    return f"{tree} {[tuple(repr(getattr(x, name, None)) for name in told) for x in leaves]}"


def _load(path: Path, device: jax.Device) -> Compiled | None:
    """The executable in a file, or None; a file that cannot be used is removed."""
    try:
        entry = path.read_bytes()
        digest, content = entry[:32], entry[32:]
        if hashlib.sha256(content).digest() != digest:
            raise ValueError("the file is damaged")
        serialized, in_tree, out_tree = pickle.loads(content)
        unit = serialize_executable.deserialize_and_load(
            serialized, in_tree, out_tree, device.client, [device]
        )
    except FileNotFoundError:
        return None
    except Exception as error:  # whatever it is, the unit can be compiled
        _LOG.warning("%s is not used and is compiled anew: %s", path, error)
        with suppress(OSError):
            path.unlink()
        return None
    with suppress(OSError):
        os.utime(path)
    return unit


def _keep(units: Mapping[Path, Compiled]) -> None:
    """Write executables to their files, then remove what is over the limit."""
    try:
        for path, unit in units.items():
            content = pickle.dumps(serialize_executable.serialize(unit))
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                file.write(hashlib.sha256(content).digest() + content)
            os.replace(file.name, path)
        (folder,) = {path.parent for path in units}
        _trim(folder)
    except Exception as error:  # the units run all the same
        _LOG.warning("executables are not kept on disk: %s", error)


def _trim(folder: Path) -> None:
    entries = []
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # another process may trim as well
            status = path.stat()
            entries.append((status.st_mtime_ns, status.st_size, path))
    total = 0
    for _, size, path in sorted(entries, reverse=True):
        total += size
        if total > LIMIT_BYTES:
            path.unlink(missing_ok=True)
