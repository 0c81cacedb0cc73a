"""How Hugging Face checkpoints store the logical parameters: names, fusions and groupings
(model_math.md section 6).

Each parameter has one or more possible layouts, a layout being an ordered list of row ranges of
tensors. The layout whose tensors are there is taken; then all of them must be there, with exact
shapes, and no tensor may be left over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from artifacts.architectures.qwen3_5.config import Qwen3_5Config
from artifacts.architectures.qwen3_5.parameters import parameter_shapes
from artifacts.bindings import Binding, Part, Shape
from artifacts.errors import ArtifactError

LM_HEAD = "lm_head.weight"
EMBEDDING = "text.embed_tokens.weight"

_PREFIXES = (
    ("model.language_model.", "text."),
    ("model.visual.", "vision."),
    ("visual.", "vision."),
    ("mtp.", "mtp."),
    ("model.", "text."),
)
_BUFFERS = (".rotary_emb.inv_freq", ".rotary_pos_emb.inv_freq")
"""Tables recomputed from the config that some exports saved by accident: dropped, not bound."""

_RENAMED = {
    "input_norm": "input_layernorm.weight",
    "post_attention_norm": "post_attention_layernorm.weight",
    "linear_attn.dt_bias": "linear_attn.dt_bias",
    "linear_attn.A_log": "linear_attn.A_log",
    "mlp.router": "mlp.gate.weight",
}


@dataclass(frozen=True)
class Rows:
    """Rows `start:stop` of a tensor that must have `shape`; `tensor` is a canonical name."""

    tensor: str
    shape: Shape
    start: int
    stop: int


Layout = tuple[Rows, ...]


@dataclass(frozen=True)
class BoundTensors:
    """What `bind_tensors` found: the components, a binding for each parameter, the tensors left out
    on purpose.

    `components` are in the order text, mtp, vision; `component_of` covers every bound tensor.
    """

    components: tuple[str, ...]
    bindings: dict[str, Binding]
    component_of: dict[str, str]
    dropped: tuple[str, ...]


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """Name without its release's prefix (`text.`, `mtp.`, `vision.`, or `lm_head.weight`) -> name
    in the file.

    A name with no known prefix stays as it is. ArtifactError when two names mean the same tensor.
    """
    table: dict[str, str] = {}
    for name in names:
        canonical = next(
            (new + name[len(old) :] for old, new in _PREFIXES if name.startswith(old)), name
        )
        if canonical in table:
            raise ArtifactError(f"tensors {table[canonical]} and {name} are the same parameter")
        table[canonical] = name
    return table


def bind_tensors(config: Qwen3_5Config, shapes: Mapping[str, Shape]) -> BoundTensors:
    """Binds every parameter of the components present to the checkpoint's tensors, given by name
    and shape.

    MTP and vision are present when any of their tensors is, and are then complete.
    `config.tie_word_embeddings` must already say whether there is a head of its own (see
    `huggingface_folder`); a head tensor beside a tied embedding is dropped. Raises ArtifactError
    naming the tensor that is missing, has a wrong shape, or belongs nowhere.
    """
    names = canonical_names(shapes)
    components = tuple(
        c
        for c in ("text", "mtp", "vision")
        if c == "text" or any(n.startswith(f"{c}.") for n in names)
    )
    if "vision" in components and config.vision is None:
        first = next(names[n] for n in names if n.startswith("vision."))
        raise ArtifactError(f"tensor {first} is there, but the config has no vision_config")
    spelled = _text_prefix(shapes)
    bindings: dict[str, Binding] = {}
    component_of: dict[str, str] = {}
    for parameter, shape in parameter_shapes(config, components).items():
        layout = _choose(parameter, layouts(config, parameter, shape), names, spelled)
        for rows in layout:
            found = shapes[names[rows.tensor]]
            if found != rows.shape:
                raise ArtifactError(
                    f"tensor {names[rows.tensor]} has shape {list(found)}, "
                    f"the config needs {list(rows.shape)}"
                )
            component_of[names[rows.tensor]] = parameter.split(".", 1)[0]
        parts = tuple(Part(names[rows.tensor], rows.start, rows.stop) for rows in layout)
        bindings[parameter] = Binding(shape, parts)
    dropped = []
    for canonical, name in names.items():
        if name in component_of:
            continue
        tied_head = canonical == LM_HEAD and config.tie_word_embeddings
        if not tied_head and not canonical.endswith(_BUFFERS):
            raise ArtifactError(f"tensor {name} does not belong to this model")
        dropped.append(name)
    return BoundTensors(components, bindings, component_of, tuple(dropped))


def _choose(
    parameter: str, options: tuple[Layout, ...], names: Mapping[str, str], text_prefix: str
) -> Layout:
    """The layout that is in the checkpoint, or the first one when none is there at all."""
    present = [any(rows.tensor in names for rows in layout) for layout in options]
    chosen = options[present.index(True)] if any(present) else options[0]
    for rows in chosen:
        if rows.tensor not in names:
            others = [_spelled(layout[0].tensor, text_prefix) for layout in options[1:]]
            instead = f", nor is {others[0]} there" if others and not any(present) else ""
            raise ArtifactError(
                f"tensor {_spelled(rows.tensor, text_prefix)} is missing "
                f"(parameter {parameter}){instead}"
            )
    return chosen


def _text_prefix(names: Iterable[str]) -> str:
    nested = "model.language_model."
    return nested if any(name.startswith(nested) for name in names) else "model."


def _spelled(canonical: str, text_prefix: str) -> str:
    """The name that a missing tensor would have in this checkpoint."""
    for ours, theirs in (("text.", text_prefix), ("vision.", "model.visual.")):
        if canonical.startswith(ours):
            return theirs + canonical[len(ours) :]
    return canonical


def layouts(config: Qwen3_5Config, parameter: str, shape: Shape) -> tuple[Layout, ...]:
    """Every known way of storing one parameter, the commonest first."""
    if parameter.startswith("vision."):
        return (_whole(parameter, shape),)
    if parameter == "text.lm_head":
        return (_whole(LM_HEAD, shape),)
    pieces = parameter.split(".")
    if len(pieces) > 3 and pieces[1] == "layers":
        prefix, suffix = ".".join(pieces[:3]), ".".join(pieces[3:])
        return tuple(_layer_layouts(config, prefix, suffix, shape))
    return (_whole(f"{parameter}.weight", shape),)


def _layer_layouts(
    config: Qwen3_5Config, prefix: str, suffix: str, shape: Shape
) -> Iterator[Layout]:
    if suffix == "linear_attn.conv1d":
        channels, width = shape
        yield _whole(f"{prefix}.linear_attn.conv1d.weight", (channels, 1, width))
    elif suffix in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"):
        yield _whole(f"{prefix}.{suffix}", shape)
        yield _per_expert(f"{prefix}.mlp.experts", suffix, shape)
    else:
        yield _whole(f"{prefix}.{_RENAMED.get(suffix, suffix + '.weight')}", shape)
        if suffix.startswith("linear_attn.in_proj_"):
            yield _by_key_head(config, f"{prefix}.linear_attn", suffix.rsplit("_", 1)[1])


def _whole(tensor: str, shape: Shape) -> Layout:
    return (Rows(tensor, shape, 0, shape[0]),)


def _per_expert(prefix: str, suffix: str, shape: Shape) -> Layout:
    experts, rows, columns = shape
    gate_up = suffix.endswith("gate_up_proj")
    projections = ("gate_proj", "up_proj") if gate_up else ("down_proj",)
    one = (rows // len(projections), columns)
    return tuple(
        Rows(f"{prefix}.{e}.{projection}.weight", one, 0, one[0])
        for e in range(experts)
        for projection in projections
    )


def _by_key_head(config: Qwen3_5Config, prefix: str, what: str) -> Layout:
    """Qwen3-Next's fused projections, whose rows are grouped by key head.

    Of a key head `in_proj_qkvz` holds dk rows of q, dk of k, r*dv of v, r*dv of z, and `in_proj_ba`
    r of b, r of a, with r value heads for each key head.
    """
    heads, dk = config.linear_num_key_heads, config.linear_key_head_dim
    ratio = config.linear_num_value_heads // heads
    dv = ratio * config.linear_value_head_dim
    if what in ("qkv", "z"):
        tensor, block = f"{prefix}.in_proj_qkvz.weight", 2 * dk + 2 * dv
        ranges = [(0, dk), (dk, 2 * dk), (2 * dk, 2 * dk + dv)]
        if what == "z":
            ranges = [(2 * dk + dv, block)]
    else:
        tensor, block = f"{prefix}.in_proj_ba.weight", 2 * ratio
        ranges = [(0, ratio)] if what == "b" else [(ratio, block)]
    shape = (heads * block, config.hidden_size)
    return tuple(
        Rows(tensor, shape, head * block + start, head * block + stop)
        for start, stop in ranges
        for head in range(heads)
    )
