"""Train the demo model from scratch: the trunk, then its MTP head and DFlash draft on the frozen trunk.

    T="python -m scripts.train_demo"
    $T trunk  --data DATA --out RUN/trunk --steps 1440
    $T trunk  --data DATA --out RUN/more --start RUN/trunk/model --steps 700 --peak 1.5e-3 --text-share 0.25
    $T drafts --data DATA --out RUN/drafts --start RUN/more/model --steps 3800 --text-share 0.25

These three made the shipped model; the second moves from text to dialogues. DATA is what `scripts.demo_data` writes. A
stage that was stopped goes on from its latest checkpoint. Each writes metrics.jsonl, loss.png and Hugging Face folders:
`model` (the third stage writes it again with the MTP head) and `draft`. `scripts.ship_demo` makes the artifact of them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ninfer_jax as nj
from ninfer_jax.models.dflash.params import draft_layout
from ninfer_jax.models.loading import cast_tree
from ninfer_jax.models.qwen3_5 import trunk
from ninfer_jax.models.qwen3_5.params import mtp_layout, parameter_layout, random_parameters
from scripts.demo_model import geometry
from scripts.demo_model.batches import Stream, Windows, read_streams, sample
from scripts.demo_model.bits import bits_per_byte
from scripts.demo_model.export import write_draft, write_trunk
from scripts.demo_model.loop import Recipe, train
from scripts.demo_model.objectives import (
    Drafts,
    cross_entropy,
    draft_loss,
    trunk_loss,
)
from scripts.demo_model.packing import read_held_out

Streams = tuple[Stream, Stream]
"""Text and dialogues."""
Metrics = dict[str, jax.Array]

LONG, SHORT = geometry.CONTEXT, 640
"""Window lengths: documents fill the whole context, dialogues mostly start at its beginning."""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("stage", choices=("trunk", "drafts"))
    parser.add_argument("--data", type=Path, required=True, help="folder of scripts.demo_data")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start", type=Path, help="trunk to go on from; drafts: the frozen trunk")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--peak", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=64, help="short dialogue windows a step")
    parser.add_argument(
        "--text-share", type=float, default=0.875, help="share of the long windows that hold text"
    )
    options = parser.parse_args(argv)
    if options.stage == "drafts" and options.start is None:
        parser.error("drafts need --start, the folder of the trunk they draft for")
    recipe = Recipe(steps=options.steps, peak=options.peak, seed=options.seed)
    run = train_trunk if options.stage == "trunk" else train_drafts
    run(options, recipe)
    plot(options.out / "metrics.jsonl", options.out / "loss.png")


def train_trunk(options: argparse.Namespace, recipe: Recipe) -> None:
    """The trunk from random weights; bfloat16 forward pass, float32 master weights."""
    config, dtype = geometry.trunk_config(), compute_dtype()
    data = (read_streams(options.data), jnp.asarray(options.text_share))
    if options.start:
        params = nj.load_model(options.start, dtype="float32").params
    else:
        params = random_parameters(parameter_layout(config, jnp.float32), recipe.seed)
    held_out = read_held_out(options.data)

    def loss(params: Any, key: jax.Array, data: Any) -> tuple[jax.Array, Metrics]:
        streams, text_share = data
        return trunk_loss(
            config, params, _batches(key, streams, options.rows, text_share), dtype
        ), {}

    @jax.jit
    def nats(params: Any, tokens: jax.Array) -> jax.Array:
        cast = cast_tree(parameter_layout(config, dtype), params)
        hidden = trunk.forward(config, cast, tokens[:, :-1])
        return cross_entropy(trunk.logits(cast, hidden), tokens[:, 1:])

    def evaluate(params: Any) -> dict[str, float]:
        score = lambda tokens: np.asarray(nats(params, tokens))  # noqa: E731
        return {f"bits_{k}": round(v, 4) for k, v in bits_per_byte(held_out, score).items()}

    params = train(recipe, params, loss, data, options.out, evaluate)
    write_trunk(options.out / "model", geometry.TRUNK, config, params)


def train_drafts(options: argparse.Namespace, recipe: Recipe) -> None:
    """MTP head and DFlash draft together, on the trunk as it ships."""
    model = nj.load_model(options.start, dtype=compute_dtype())
    config, draft_config = model.config, geometry.draft_config()
    drafts = Drafts(
        random_parameters(mtp_layout(config, jnp.float32), recipe.seed),
        _plain_norms(random_parameters(draft_layout(draft_config, jnp.float32), recipe.seed)),
    )

    def loss(drafts: Drafts, key: jax.Array, data: Any) -> tuple[jax.Array, Metrics]:
        streams, text_share, frozen = data
        rows, places = jax.random.split(key)
        total, metrics = jnp.zeros(()), {}
        batches = zip(
            ("long", "short"), _batches(rows, streams, options.rows, text_share), strict=True
        )
        for name, windows in batches:
            B, T = windows.weights.shape
            last = T - draft_config.block_size
            anchors = jax.random.randint(places, (B, T // 16), 1, last, jnp.int32)
            value, found = draft_loss(config, draft_config, frozen, drafts, windows, anchors)
            total += value
            metrics |= {f"{name}_{key}": v for key, v in found.items()}
        return total, metrics

    data = (read_streams(options.data), jnp.asarray(options.text_share), model.params)
    drafts = train(recipe, drafts, loss, data, options.out)
    trunk_params = jax.tree.map(lambda a: a.astype(jnp.float32), model.params)
    write_trunk(options.out / "model", geometry.TRUNK, config, trunk_params, drafts.mtp)
    write_draft(options.out / "draft", geometry.DRAFT, draft_config, drafts.dflash)


def compute_dtype() -> Any:
    """bfloat16, but float32 on a CPU, which has no fast bfloat16 product."""
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16


def _batches(
    key: jax.Array, streams: Streams, rows: int, text_share: jax.Array
) -> tuple[Windows, Windows]:
    """A step's windows: long ones, of text but for a share of dialogues, and as many tokens of short dialogues."""
    text, chat = streams
    coin, of_text, of_chat, short = jax.random.split(key, 4)
    long_rows = max(2, rows * SHORT // LONG)
    documents = sample(of_text, text, long_rows, LONG, anywhere=0.5)
    conversations = sample(of_chat, chat, long_rows, LONG, anywhere=0.0)
    is_text = jax.random.uniform(coin, (long_rows, 1)) < text_share
    long = jax.tree.map(lambda a, b: jnp.where(is_text, a, b), documents, conversations)
    return long, sample(short, chat, rows, SHORT, anywhere=0.0)


def _plain_norms(draft: Any) -> Any:
    """A draft's norms have plain weights: 1, not 0, leaves a value as it is."""
    names = ("context_norm", "input_norm", "post_attention_norm", "q_norm", "k_norm", "final_norm")
    return draft.replace(**{name: getattr(draft, name) + 1.0 for name in names})


def plot(metrics: Path, out: Path) -> None:
    """Draw every loss and match of a run over its steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    skip = ("step", "steps_per_second", "learning_rate", "gradient_norm")
    names = sorted({name for line in lines for name in line} - set(skip))
    figure, axes = pyplot.subplots(figsize=(9, 5))
    for name in names:
        found = [(line["step"], line[name]) for line in lines if name in line]
        axes.plot(*zip(*found, strict=True), label=name, marker="." if len(found) < 20 else None)
    axes.set_xlabel("step")
    axes.set_ylabel("nats a token, bits a byte, or share")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out, dpi=110, bbox_inches="tight")
    pyplot.close(figure)


if __name__ == "__main__":
    main()
