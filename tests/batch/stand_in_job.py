"""`ninfer batch` on a program without a device: real planner, worker and files, and answers that depend on every token.

python -m tests.batch.stand_in_job INPUT OUTPUT SECONDS
"""

import json
import signal
import sys
import time
from pathlib import Path

from artifacts import open_checkpoint
from ninfer_jax.batch import run_batch
from ninfer_jax.engine.engine import Engine
from ninfer_jax.frontend import Frontend
from tests.engine.stand_in import StandInProgram, limits

GOLDENS = Path(__file__).parent.parent / "goldens"


def stand_in_frontend():
    """The tiny checkpoint's tokenizer and template."""
    checkpoint = open_checkpoint(GOLDENS / "tiny-qwen3.5-dense", verify=False)
    return Frontend.from_resources(checkpoint.frontend, vocab_size=checkpoint.config.vocab_size)


def stand_in_engine(slow=0.0, **options):
    """An engine of four lanes; `slow` seconds a unit."""
    frontend = stand_in_frontend()
    program = StandInProgram(limits(**options), frontend.vocab_size)
    program.on_step = lambda _: time.sleep(slow)
    return Engine(None, frontend, program)


def main():
    source, output, slow = sys.argv[1], sys.argv[2], float(sys.argv[3])
    with stand_in_engine(slow) as engine:
        print("ready", flush=True)
        summary = run_batch(source, output, engine, progress=False)
    print(json.dumps(summary.to_json()), flush=True)
    sys.exit(130 if summary.interrupted else 0)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main()
