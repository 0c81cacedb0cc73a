"""From a configuration to a layout: capacity, Host memory, options, and the one corrective rebuild."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import pytest

import ninfer_jax as nj
from ninfer_jax.config import EngineConfig
from ninfer_jax.errors import CapacityError, InputError
from ninfer_jax.models.qwen3_5.state import new_device_state
from ninfer_jax.program import startup
from ninfer_jax.program.startup import Machine, layout_spec, resolve
from ninfer_jax.program.transfers import new_arena
from planner import capacity_curve, device_reservation, page_limits

MIB, GIB = 1 << 20, 1 << 30
CPU = Machine("cpu", None, 16 * GIB)


@pytest.fixture(scope="module")
def model(goldens):
    return nj.load_model(goldens / "tiny-qwen3.5-dense")


@pytest.fixture(scope="module")
def long(model):
    """The same shapes with a context of 262,144 tokens."""
    return replace(model.config, max_position_embeddings=262144)


@pytest.mark.parametrize(
    ("capacity", "pages"), [(1000, 16), (1025, 17), (3072, 48), (999, None), (3073, None)]
)
def test_worked_example_x01(long, capacity, pages):
    """X-01: S = 1000, C = 3 gives L = 16 and M in 16..48 (CAP-02, CAP-03)."""
    config = EngineConfig(max_context=1000, max_concurrency=3, kv_capacity=capacity)
    if pages is None:
        with pytest.raises(CapacityError, match=r"16\.\.48 pages"):
            resolve(config, long, CPU)
    else:
        limits = resolve(config, long, CPU)
        assert (limits.blocks, limits.pages) == (16, pages)
        assert limits.max_context == 1000  # rounding up never raises it (CAP-09)


@pytest.mark.parametrize(("spare", "pages"), [(2, 5), (100, 6), (0, 3), (-1, None)])
def test_worked_example_x02(long, spare, pages):
    """X-02 on this model's own curve, M in 3..6: F has room for `spare` pages beyond the least (CAP-05, CAP-06)."""
    config = EngineConfig(max_context=128, max_concurrency=3)
    spec = layout_spec(config, long, 128, "float32", CPU.ram_bytes)
    assert page_limits(128, 3) == (3, 6)
    curve = capacity_curve(partial(device_reservation, spec), 3, 6)
    free = GIB + curve.b_min + spare * curve.b_step  # the headroom is 1 GiB (CAP-07)
    if pages is None:
        with pytest.raises(CapacityError, match="lower max_context"):
            resolve(config, long, replace(CPU, free_bytes=free))
        return
    for extra in (0, curve.b_step - 1):  # part of a page is no page
        limits = resolve(config, long, replace(CPU, free_bytes=free + extra))
        assert limits.pages == pages
        assert limits.reservation_bytes == curve.at(pages) <= free + extra - GIB


def test_explicit_capacity_must_fit_the_device(long):
    """CAP-03: R + B(M) <= F, and the message says what to do."""
    config = EngineConfig(max_context=128, max_concurrency=3, kv_capacity=5 * 64)
    need = resolve(config, long, CPU).reservation_bytes + GIB
    assert resolve(config, long, replace(CPU, free_bytes=need)).pages == 5
    with pytest.raises(CapacityError, match="lower kv_capacity or use automatic"):
        resolve(config, long, replace(CPU, free_bytes=need - 1))


def test_where_nothing_is_known_all_pages_or_a_quarter_of_the_ram(long):
    small = EngineConfig(max_context=4096)
    for capacity in ("auto", None):
        assert resolve(replace(small, kv_capacity=capacity), long, CPU).pages == 8 * 64
    huge = EngineConfig(max_context=262144)
    limits = resolve(huge, long, replace(CPU, ram_bytes=4 * GIB))
    assert 4096 < limits.pages < 8 * 4096
    page = limits.layout.pools[0].page_bytes
    assert GIB - page < limits.reservation_bytes <= GIB
    # One request of max_context tokens must always fit.
    assert resolve(huge, long, replace(CPU, ram_bytes=64 * MIB)).pages == 4096


def test_slots_and_host_memory_have_their_defaults(long):
    """CAP-12: H = C. CAP-13: 8 GiB and 8 images, here at most a quarter of the RAM."""
    rich = resolve(EngineConfig(max_concurrency=3), long, replace(CPU, ram_bytes=256 * GIB))
    image = rich.layout.image_bytes
    assert rich.slots == 6
    assert rich.layout.host_bytes == 8 * GIB + 8 * image
    assert resolve(EngineConfig(), long, CPU).layout.host_bytes == 4 * GIB
    chosen = EngineConfig(device_state_slots=0, host_capacity_bytes=0, max_concurrency=3)
    layout = resolve(chosen, long, CPU).layout
    assert (layout.slots, layout.host_bytes) == (3, 0)


def test_no_cache_sets_no_memory_aside(long):
    """CAT-23: checkpoint capacity 0, active needs unchanged."""
    limits = resolve(EngineConfig(cache=False), long, CPU)
    assert (limits.slots, limits.layout.host_bytes, limits.cache) == (8, 0, False)
    assert limits.pages == resolve(EngineConfig(), long, CPU).pages
    for name in ("device_state_slots", "host_capacity_bytes"):
        with pytest.raises(InputError, match=f"cache=False.*{name}"):
            EngineConfig(cache=False, **{name: 1})


def test_the_layout_is_what_is_allocated(model):
    """CAP-04: the curve comes from the arrays themselves; CAP-06: all explicit backing is in it."""
    for dtype in ("float32", "bfloat16"):
        config = EngineConfig(
            max_context=200, max_concurrency=2, device_state_slots=3, host_capacity_bytes=MIB, dtype=dtype
        )  # fmt: skip
        limits = resolve(config, model.config, CPU)
        state = jax.eval_shape(
            lambda p=limits.pages, s=limits.slots, d=dtype: new_device_state(
                model.config, pages=p, slots=s, dtype=d
            )
        )
        size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))  # noqa: E731
        layout = limits.layout
        assert size(state.kv) == (limits.pages + 1) * layout.pools[0].page_bytes
        assert size(state.images) == (limits.slots + 1) * layout.image_bytes
        rest = limits.reservation_bytes - size(state)
        # Of each row: counts, prompt, bias and logits; its table; two numbers sampled and six of the plan.
        assert rest == 2 * (13 * model.config.vocab_size + 4 * limits.blocks + 4 * 8)


def test_the_budget_limits_what_is_free(monkeypatch):
    """CAP-08: the smaller of really free memory and the rest of the budget."""

    class Device:
        platform = "gpu"

        def memory_stats(self):
            return {"bytes_in_use": 3 * GIB, "bytes_limit": 10 * GIB}

    monkeypatch.delenv(startup.BUDGET_VARIABLE, raising=False)
    assert startup.measure(Device()).free_bytes == 7 * GIB
    assert startup.measure().free_bytes is None  # the CPU does not tell
    monkeypatch.setenv(startup.BUDGET_VARIABLE, "4096")
    assert startup.measure(Device()).free_bytes == GIB
    assert startup.measure(weights=GIB).free_bytes == 3 * GIB
    monkeypatch.setenv(startup.BUDGET_VARIABLE, "20000")
    assert startup.measure(Device()).free_bytes == 7 * GIB
    monkeypatch.setenv(startup.BUDGET_VARIABLE, "4 GB")
    with pytest.raises(InputError, match=startup.BUDGET_VARIABLE):
        startup.measure()


class _Refusing:
    """A program that the device has no room for, down to a number of pages."""

    def __init__(self, most, message="RESOURCE_EXHAUSTED: Out of memory"):
        self.most, self.message, self.asked = most, message, []

    def __call__(self, model, limits, kept):
        self.asked.append(limits.pages)
        if limits.pages > self.most:
            raise jax.errors.JaxRuntimeError(self.message)
        return limits


def test_one_corrective_rebuild_of_automatic_capacity(model, monkeypatch):
    """CAP-17: at most one, it changes automatic KV only, and other errors shrink nothing."""
    options = {"max_context": 256, "max_concurrency": 4, "host_capacity_bytes": 0}
    automatic = EngineConfig(**options)

    def start(program, config):
        monkeypatch.setattr(startup, "Program", program)
        return startup.start(model, config)

    once = _Refusing(13)
    limits = start(once, automatic)
    assert once.asked == [16, 13]
    assert replace(limits, layout=None, reservation_bytes=0) == replace(
        resolve(automatic, model.config, CPU), layout=None, reservation_bytes=0
    )
    never = _Refusing(0)
    with pytest.raises(CapacityError, match=r"13 KV pages.*lower kv_capacity"):
        start(never, automatic)
    assert never.asked == [16, 13]
    for config in (
        EngineConfig(**options, kv_capacity=512),
        EngineConfig(**options | {"max_concurrency": 1}),
    ):
        refused = _Refusing(0)
        with pytest.raises(CapacityError, match="no room"):
            start(refused, config)
        assert len(refused.asked) == 1
    broken = _Refusing(0, "INTERNAL: kernel failed")
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        start(broken, automatic)
    assert len(broken.asked) == 1


def test_use_over_the_budget_is_refused(model, monkeypatch):
    """CAP-20: what counts is the actual use at the end, not an estimate."""
    config = EngineConfig(max_context=64, max_concurrency=1, host_capacity_bytes=0)
    machines = iter([CPU, replace(CPU, free_bytes=-1)])
    monkeypatch.setattr(startup, "measure", lambda weights: next(machines))
    with pytest.raises(CapacityError, match="1 B over"):
        startup.start(model, config)


def test_no_room_for_the_arena_is_a_capacity_error(monkeypatch):
    """CAP-17: and it lowers nothing else."""
    with pytest.raises(CapacityError, match="host_capacity_bytes"):
        new_arena(1 << 60)
    arena = new_arena(1000)
    assert arena.size == 1000
    assert arena.ctypes.data % 64 == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_concurrency": 0}, {"max_concurrency": 9}, {"max_concurrency": True}, {"max_context": 0},
        {"max_context": 1.5}, {"kv_capacity": -1}, {"prefill_chunk": 100}, {"dtype": "fp8"}, {"seed": -1},
        {"max_contxt": 5}, {"kv_capacity": "all"}, {"device_state_slots": -1}, {"host_capacity_bytes": 1.0},
        {"policy": "greedy"}, {"cache": 1}, {"max_queue": 0}, {"record": 3}, {"kv_capacity": True},
    ],
)  # fmt: skip
def test_a_bad_option_is_named(wrong):
    """CAP-25: and CAP-01 for max_concurrency."""
    with pytest.raises(InputError, match=next(iter(wrong))):
        EngineConfig.from_dict(wrong)


def test_context_over_the_models_limit(model, long):
    with pytest.raises(InputError, match=str(model.config.max_position_embeddings)):
        resolve(EngineConfig(max_context=300000), model.config, CPU)
    default = resolve(EngineConfig(), long, replace(CPU, platform="gpu"))
    assert (default.max_context, default.dtype) == (4096, "bfloat16")
    assert (default.prefill_chunk, default.chunk_buckets) == (2048, (64, 256, 512, 1024, 2048))
    on_cpu = resolve(EngineConfig(), long, CPU)
    assert (on_cpu.prefill_chunk, on_cpu.chunk_buckets) == (256, (64, 128, 192, 224, 256))
    short = resolve(EngineConfig(max_context=100, max_concurrency=1), long, CPU)
    assert (short.prefill_chunk, short.chunk_buckets) == (128, (64, 96, 128))
    least = resolve(EngineConfig(prefill_chunk=64), long, CPU)
    assert least.chunk_buckets == (64,)


def test_executables_are_kept_on_accelerators_only(monkeypatch, tmp_path):
    name = "jax_compilation_cache_dir"
    least = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name), getattr(jax.config, least)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        jax.config.update(name, None)
        assert startup.keep_executables() is None
        assert getattr(jax.config, name) is None
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        folder = tmp_path / "ninfer-jax" / "executables"
        assert startup.keep_executables() == folder / "units"
        assert getattr(jax.config, name) == str(folder)
        jax.config.update(name, "somewhere")
        assert startup.keep_executables() == Path("somewhere/units")
        assert getattr(jax.config, name) == "somewhere"
        jax.config.update("jax_enable_compilation_cache", False)
        assert startup.keep_executables() is None
        jax.config.update("jax_enable_compilation_cache", True)
        jax.config.update(name, "gs://bucket/cache")
        assert startup.keep_executables() is None
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
        jax.config.update(name, before[0])
        jax.config.update(least, before[1])
