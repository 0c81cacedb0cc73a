"""The documentation of Python 3.11, a document a page."""

from __future__ import annotations

import html.parser
import re
from collections.abc import Iterator
from pathlib import Path

from scripts.demo_model import clean, debian
from scripts.demo_model.document import Document

ROOT = "usr/share/doc/python3.11/html/"
PAGES = re.compile(
    r"(c-api|distutils|extending|faq|howto|install|installing|library|reference|tutorial|using)"
    r"/[\w.-]+\.html|glossary\.html"
)
"""Prose; not what lists changes, symbols, pages or licences."""
BODY = re.compile(r'<div class="body" role="main">(.*?)<div class="clearer">', re.DOTALL)
TIGHT = re.compile(r"^( *(?:-|\d+\.) [^\n]*)\n\n(?= *(?:-|\d+\.) )", re.MULTILINE)
"""Items of one line each, which need no blank lines between."""
LEAST = 300
"""Characters below which a page is only links."""


def documents(cache: Path) -> Iterator[Document]:
    """The pages in the order of their paths.

    Raises:
        PackageError: the package cannot be had.
    """
    deb = debian.fetch(debian.PYTHON_DOCS, cache)
    pages = {
        name.removeprefix(ROOT): data
        for name, data in debian.files(deb, lambda path: path.startswith(ROOT))
        if PAGES.fullmatch(name.removeprefix(ROOT))
    }
    for name, data in sorted(pages.items()):
        if name.endswith("/index.html"):
            continue
        body = BODY.search(data.decode("utf-8"))
        text = to_text(body[1]) if body else ""
        if len(text) >= LEAST:
            yield Document("python", name.removesuffix(".html"), text)


def to_text(page: str) -> str:
    """A page of Sphinx's HTML as plain text in the manner of Markdown: headings behind `#`, code in
    fences, names in backticks, items behind `-`, signatures on lines of their own."""
    parser = _Text()
    parser.feed(page)
    parser.close()
    return TIGHT.sub(r"\1\n", clean.tidy(parser.text()))


HEADINGS = {f"h{level}": "#" * level + " " for level in range(1, 7)}
BLOCKS = frozenset(
    {"p", "div", "dl", "dt", "dd", "ul", "ol", "li", "table", "tr", "section", "blockquote",
     "aside", "figure", *HEADINGS}
)  # fmt: skip
VOID = frozenset({"br", "hr", "img", "input", "col", "wbr", "meta", "link"})
DROPPED_TAGS = frozenset({"script", "style", "nav", "svg"})
DROPPED_CLASSES = frozenset(
    {"headerlink", "contents", "topic", "linenos", "toctree-wrapper", "availability"}
)
LITERAL = frozenset({"code", "kbd", "samp"})


class _Text(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._out: list[str] = []  # blocks, each text without newlines at its ends
        self._line: list[str] = []
        self._lead = ""
        self._dropped = 0  # depth inside something dropped
        self._pre = 0
        self._quiet = 0  # depth inside dt or a heading, where names need no backticks
        self._lists: list[int | None] = []
        self._cells = 0
        self._row = False

    def text(self) -> str:
        self._flush()
        return "\n".join(self._out)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        classes = set((dict(attrs).get("class") or "").split())
        if tag in VOID:
            if tag == "br" and not self._dropped:
                self._line.append("\n" if self._pre else " ")
            return
        if self._dropped or tag in DROPPED_TAGS or classes & DROPPED_CLASSES:
            self._dropped += 1
            return
        if tag == "pre":
            self._flush()
            self._pre += 1
            return
        if tag in ("td", "th"):
            if self._cells:
                self._line.append(" | ")
            self._cells += 1
            self._row = True
            return
        if tag in BLOCKS and not self._row:
            self._flush()
        if tag == "tr":
            self._cells = 0
        if tag in ("ul", "ol"):
            self._lists.append(None if tag == "ul" else 0)
        elif tag == "li":
            self._item()
        elif tag in HEADINGS:
            self._lead = HEADINGS[tag]
            self._quiet += 1
        elif tag == "dt":
            self._quiet += 1
        elif tag in LITERAL:
            self._tick()

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        if self._dropped:
            self._dropped -= 1
            return
        if tag == "pre":
            self._code()
            self._pre -= 1
            return
        if tag == "tr":
            self._row = False
            self._flush(blank=False)
        elif tag == "table":
            self._out.append("")
        elif tag in BLOCKS and not self._row:
            self._flush()
        if tag in HEADINGS or tag == "dt":
            self._quiet -= 1
        elif tag in ("ul", "ol"):
            self._lists.pop()
        elif tag in LITERAL:
            self._tick()

    def handle_data(self, data: str) -> None:
        if not self._dropped:
            self._line.append(data)

    def _tick(self) -> None:
        if not self._quiet and not self._pre:
            self._line.append("`")

    def _item(self) -> None:
        depth = "  " * (len(self._lists) - 1)
        if self._lists and self._lists[-1] is not None:
            self._lists[-1] += 1
            self._lead = f"{depth}{self._lists[-1]}. "
        else:
            self._lead = f"{depth}- "

    def _flush(self, blank: bool = True) -> None:
        text = re.sub(r"\s+", " ", "".join(self._line)).strip()
        self._line = []
        if text:
            self._out.append(self._lead + text + ("\n" if blank else ""))
            self._lead = ""

    def _code(self) -> None:
        code = "".join(self._line).strip("\n")
        self._line = []
        if code:
            self._out.append(f"```\n{code}\n```\n")
