"""Hugging Face transformers on the shapes of `bench_gpu`: decode tokens/s of one row and prefill; prints one JSON line.

    python -m scripts.bench_gpu_huggingface [--models 0.8B,4B] [--device cuda]

Its own process, since two frameworks do not share a device's memory well. Models are made of the public geometries with
random bfloat16 weights, through transformers' own generate loop (eager, as `generate` runs by default).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from ninfer_jax.models.geometries import GEOMETRIES

CONTEXT, STEPS = 2048, 24


def build(name: str, device: str) -> Any:
    """A random model of a public geometry."""
    import torch
    from transformers.models.qwen3_5 import configuration_qwen3_5, modeling_qwen3_5

    c = GEOMETRIES[name]
    same = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings",
        "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
        "linear_num_value_heads",
    )  # fmt: skip
    rope = {
        "rope_type": "default",
        "rope_theta": c.rope_theta,
        "partial_rotary_factor": c.rotary_dim / c.head_dim,
        "mrope_section": list(c.mrope_section),
    }
    config = configuration_qwen3_5.Qwen3_5TextConfig(
        **{field: getattr(c, field) for field in same},
        layer_types=list(c.layer_types),
        rope_parameters=rope,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = modeling_qwen3_5.Qwen3_5ForCausalLM(config)
    return model.eval()


def measure(name: str, device: str) -> dict[str, Any]:
    import torch

    model = build(name, device)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 1000, (1, CONTEXT), generator=generator).to(device)

    def generate(steps: int) -> float:
        begin = time.perf_counter()
        model.generate(ids, max_new_tokens=steps, min_new_tokens=steps, do_sample=False)
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    with torch.no_grad():
        generate(2)
        first = min(generate(1) for _ in range(2))
        rate = (STEPS - 1) / (generate(STEPS) - first)
    return {
        "model": name,
        "decode_tokens_per_s": round(rate, 1),
        "prefill_2048_ms": round(first * 1e3, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="0.8B,4B")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    import torch
    import transformers

    rows = [measure(name, args.device) for name in args.models.split(",")]
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"versions": versions, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
