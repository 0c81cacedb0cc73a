"""OWN-07: values in, values out; no jax, clock, randomness or hash order."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from planner import apply, initial, render
from planner.errors import PlannerError
from planner.persistent import IntMap
from planner.plans import Bind, Target
from planner.testing import ATOMIC, TWO_POOLS, Driver, Shadow, moves, tiny_layout

ROOT = Path(__file__).parents[2]


def walk(steps: int) -> str:
    """A digest of a long deterministic walk: every state's repr and drawing."""
    h = hashlib.sha256()
    for world in (ATOMIC, TWO_POOLS):
        state, shadow = initial(world.layout), Shadow(len(world.layout.pools))
        pick = 1
        for _ in range(steps):
            options = list(moves(world, state, shadow))
            pick = pick * 1103515245 % 2**31 + 12345
            op = options[pick % len(options)]
            try:
                after = apply(state, op)
            except PlannerError as e:
                h.update(str(e).encode())
                continue
            shadow.step(state, op, after)
            state = after
            h.update(repr(state).encode())
            h.update(render(state).encode())
    return h.hexdigest()


def test_same_in_another_process_with_another_hash_seed() -> None:
    """OWN-07, INV-13, INV-19: equal inputs give equal outputs, bit for bit."""
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]; import test_purity; print(test_purity.walk(250))"
    )
    seen = {walk(250)}
    for seed in ("1", "4242"):
        run = subprocess.run(
            [sys.executable, "-c", code, str(ROOT), str(Path(__file__).parent)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        seen.add(run.stdout.strip())
    assert len(seen) == 1


def test_no_jax() -> None:
    """OWN-07: importing the planner and its test kit loads no jax and no other package of ours."""
    code = (
        "import sys; import planner, planner.testing; "
        "bad = {m.split('.')[0] for m in sys.modules} & "
        "{'jax', 'jaxlib', 'flax', 'ninfer_jax', 'artifacts', 'pallas_kernels'}; "
        "sys.exit(bool(bad))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_sources_read_no_clock_and_draw_nothing() -> None:
    """OWN-07, CAP-14, DEV: no module of the planner imports time, random, os or threading."""
    for path in sorted((ROOT / "planner").rglob("*.py")):
        text = path.read_text()
        for module in ("time", "random", "os", "threading", "uuid", "datetime"):
            assert f"\nimport {module}\n" not in text, path
            assert f"\nfrom {module} import" not in text, path


def test_operations_leave_their_input_alone() -> None:
    """OWN-06, TX-14: an older version stays whole, whatever follows."""
    d = Driver(tiny_layout(pages=20, blocks=6, slots=6))
    versions = []
    for owner in (1, 2, 3):
        cid = d.cached(owner, 5)
        versions.append((d.state, repr(d.state)))
        d.complete(Target(Bind(owner, (6,), d.state.checkpoints.get(cid).identity, cid)))  # type: ignore[union-attr]
        d.write(d.state.sequences[-1].id, 6)
        d.finish(d.state.sequences[-1].id, owner)
    for state, text in versions:
        assert repr(state) == text


@pytest.mark.parametrize("size", [1, 31, 32, 33, 1024, 1025, 40_000])
def test_int_map_against_dict(size: int) -> None:
    """The one container agrees with a dict at every height of the tree."""
    m: IntMap[int] = IntMap()
    keys = [(i * 7919) % size for i in range(min(size, 300))]
    model: dict[int, int] = {}
    for i, k in enumerate(keys):
        m, model[k] = m.set(k, i), i
    for k in keys[::3]:
        if k in model:
            m = m.delete(k)
            del model[k]
    assert m.items() == sorted(model.items())
    assert m.values() == [v for _, v in sorted(model.items())]
    assert m.last() == max(model, default=-1)
    assert all(m.get(k) == model.get(k) for k in (*keys, size + 5, -1))
    with pytest.raises(KeyError):
        m.delete(size * 40)
    half = m.cut(size // 2)
    assert half.items() == [(k, v) for k, v in sorted(model.items()) if k < size // 2]
    empty: IntMap[int] = IntMap()
    bulk = empty.set_range(3, list(range(size)))
    assert bulk.slice(3, 3 + size) == list(range(size))
    assert bulk.slice(4, 3) == []
    assert len(bulk.cut(5)) == min(2, size)
    assert bulk == empty.set_range(3, list(range(size)))
    assert bulk != m
    assert empty.last() == -1
    assert repr(empty.set(2, 5)) == "IntMap({2: 5})"
