"""The jinja environment of chat templates: immutable, sandboxed, and with limits on what one
rendering may use."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context

MAX_OUTPUT = 64 * 1024 * 1024
"""Characters that one rendering may produce, and that one string inside it may have."""
MAX_STEPS = 2_000_000
"""Steps of all loops of one rendering together; one `range` alone is bounded by jinja's sandbox."""
_MAX_BITS = 4096  # of an integer
_WIDE = re.compile(r"\d{7}|\*")  # widths of a %-format that would fill memory
_BUDGET = "_loop_budget"


class GenerationBlock(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}`, by which Hugging Face finds the assistant's
    tokens: just its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """The block as a call of its body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    @staticmethod
    def _body(caller: Callable[[], str]) -> str:
        return caller()


@dataclass
class _Budget:
    left: int = MAX_STEPS

    def spend(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise SecurityError(f"more than {MAX_STEPS} steps of loops")


@jinja2.pass_context
def _counted(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    budget = context[_BUDGET]
    for item in items:
        budget.spend()
        yield item


class TemplateSandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Sandbox with bounded strings, powers, loops and output."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[jinja2.ext.loopcontrols, GenerationBlock],
        )
        self.filters["_counted"] = _counted

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        # Nothing in a compiled loop can be intercepted, so what every loop iterates over is wrapped
        # beforehand.
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(jinja2.nodes.For)):
            counted = jinja2.nodes.Filter(loop.iter, "_counted", [], [], None, None)
            loop.iter = counted.set_lineno(loop.lineno).set_environment(self)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """The operators by which a short template could ask for unbounded memory or time."""
        if isinstance(left, int) and isinstance(right, int):
            bits = {"**": left.bit_length() * right, "*": left.bit_length() + right.bit_length()}
            if bits.get(operator, 0) > _MAX_BITS:
                raise SecurityError(f"an integer of more than {_MAX_BITS} bits")
        if operator == "*":
            for items, times in ((left, right), (right, left)):
                if isinstance(items, str | list | tuple) and isinstance(times, int):
                    _bound(len(items) * times)
        if operator == "+" and isinstance(left, str | list) and isinstance(right, str | list):
            _bound(len(left) + len(right))
        if operator == "%" and isinstance(left, str) and _WIDE.search(left):
            raise SecurityError(f"too wide a format: {left!r}")
        return super().call_binop(context, operator, left, right)

    def render_limited(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        """The template's output. Raises SecurityError when a limit is exceeded, and whatever the
        template raises."""
        size = 0
        pieces = []
        for piece in template.generate({**variables, _BUDGET: _Budget()}):
            size += len(piece)
            _bound(size)
            pieces.append(piece)
        return "".join(pieces)


def _bound(size: int) -> None:
    if size > MAX_OUTPUT:
        raise SecurityError(f"more than {MAX_OUTPUT} characters")
