"""Two engines on a local Ray, one of them killed in the middle. Needs the extra `ray`."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

import ninfer_jax as nj
from ninfer_jax.ray.config import mapped
from tests.batch.lines import comparable, completion, read, write
from tests.conftest import CACHE, GOLDENS

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.eval, pytest.mark.filterwarnings("ignore")]

ENGINE = {"max_context": 320, "max_concurrency": 4, "prefill_chunk": 64}
MODEL = str(GOLDENS / "tiny-qwen3.5-dense")


@pytest.fixture(scope="module", autouse=True)
def _cluster():
    root = str(Path(nj.__file__).parent.parent)
    variables = {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(CACHE),
        "PYTHONPATH": root,
    }
    ray.init(num_cpus=3, include_dashboard=False, runtime_env={"env_vars": variables})
    yield
    ray.shutdown()


def actors(name):
    """Process ids of the actors whose class has this name."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if command.startswith(b"ray::") and name.encode() in command:
                found.append(int(entry.name))
    return found


def test_a_killed_actor_costs_no_row(tmp_path):
    lines = [completion(f"r{i}", f"Number {i}", max_tokens=100 + i % 9) for i in range(320)]
    source = write(tmp_path / "in", ["nonsense", *lines])
    output = tmp_path / "out"
    config = nj.ray.ProcessorConfig(MODEL, num_replicas=2, batch_size=16, engine=ENGINE)
    killed = []

    def kill():
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline:
            running = actors("LineReplica")
            if len(running) == 2 and output.exists() and len(output.read_bytes()) > 20_000:
                os.kill(running[0], signal.SIGKILL)
                killed.append(running[0])
                return
            time.sleep(0.02)

    thread = threading.Thread(target=kill)
    thread.start()
    summary = nj.ray.run_batch(source, output, config, progress=False)
    thread.join()
    assert killed, "no actor was there to be killed"
    assert (summary.rows, summary.answered, summary.errors, summary.remaining) == (321, 320, 1, 0)
    assert len(read(output)) == 321
    again = nj.ray.run_batch(source, output, config, progress=False)
    assert (again.done_before, again.answered) == (321, 0)
    nj.run_batch(source, tmp_path / "alone", MODEL, progress=False, **ENGINE)
    assert comparable(read(output)) == comparable(read(tmp_path / "alone"))


def test_a_row_that_kills_every_actor_ends_the_job(tmp_path):
    class Deadly:  # local, or workers would import this module
        """Ends its process at the row 5."""

        def __init__(self, config, log):
            self.log = log

        def __call__(self, table):
            if 5 in table.column("id").to_pylist():
                with self.log.open("a") as log:
                    log.write("tried\n")
                os._exit(1)
            return table

    config = nj.ray.ProcessorConfig(MODEL, batch_size=2, max_task_retries=2)
    dataset = mapped(ray.data.range(10), Deadly, config, log=tmp_path / "log")
    with pytest.raises(ray.exceptions.RayError):
        dataset.take_all()
    assert (tmp_path / "log").read_text() == "tried\n" * 3


def test_rows_in_rows_out():
    rows = [{"name": f"n{i}", "question": f"What is {i}?"} for i in range(10)]
    rows.append({"name": "bad", "question": ""})
    processor = nj.ray.build_processor(
        nj.ray.ProcessorConfig(MODEL, num_replicas=2, batch_size=4, engine=ENGINE),
        preprocess=lambda row: {
            "prompt": row["question"],
            "sampling_params": {"max_tokens": 5, "ignore_eos": True},
        },
        postprocess=lambda row: {**row, "length": row["num_generated_tokens"] or 0},
    )
    out = {row["name"]: row for row in processor(ray.data.from_items(rows)).take_all()}
    assert len(out) == 11
    assert all(out[f"n{i}"]["length"] == 5 for i in range(10))
    assert out["n3"]["question"] == "What is 3?"
    assert out["n3"]["error"] is None
    assert "empty" in out["bad"]["error"]
