"""Each source's reader on a small sample of its format."""

import pytest

from scripts.demo_model import corpus, devil, jargon, novels, python_docs, wordnet
from scripts.demo_model.document import Document

NOVEL = """EMMA

VOLUME I

CHAPTER I

Emma Woodhouse, handsome,
_clever_, and rich.

VOLUME II

CHAPTER I

The end of half a
dozen years.

FINIS
A NOTE ON THE TEXT
by others
"""

PAGE = """
<section><h1><code>bisect</code> — Array<a class="headerlink" href="#x">¶</a></h1>
<p>Use <code class="docutils"><span class="pre">insort()</span></code> to
keep&nbsp;order.<br>See <em>x</em>.</p>
<div class="toctree-wrapper"><ul><li>nothing</li></ul></div>
<dl><dt class="sig">bisect.<span>bisect</span>(<em>a</em>, <em>x</em>)<a class="headerlink">¶</a></dt>
<dd><p>Locate it.</p><div class="highlight"><pre><span></span><span>if</span> a:
    <span>return</span> <span>&#39;x&#39;</span>
</pre></div></dd></dl>
<ul><li><p>one</p></li><li><p>two</p></li></ul><ol><li><p>first</p></li></ol>
<table><tr><th><p>Name</p></th><th>Use</th></tr><tr><td><code>d</code></td><td><p>day</p></td></tr></table>
<p>After.</p></section>
"""

PAGE_TEXT = """# bisect -- Array

Use `insort()` to keep order. See x.

bisect.bisect(a, x)

Locate it.

```
if a:
    return 'x'
```

- one
- two
1. first

Name | Use
`d` | day

After."""

LEXICON = """Glossary

   A

   ack

  A

   ack

   :ack: /ak/, interj.

   [common] Used to register one's presence to somebody else, with {pong} as
   the answer. See also {NAK}.

     if (x) {y}
       z

   │ a │ b │

   :arc: n.

   A thing.

  B

   bar

   :bar: n.

   Another {thing}."""


def test_chapters_are_numbered_without_the_edition():
    assert list(novels.chapters(NOVEL.splitlines())) == [
        "Emma Woodhouse, handsome, clever, and rich.",
        "The end of half a dozen years.",
    ]


def test_a_page_of_documentation():
    assert python_docs.to_text(PAGE) == PAGE_TEXT


def test_lexicon():
    found = dict(jargon.lexicon_entries(LEXICON.split("\n")))
    assert found["ack"] == (
        "ack: /ak/, interj.\n\n[common] Used to register one's presence to somebody else, with pong"
        " as the answer. See also NAK.\n\nif (x) {y}\n  z"
    )
    assert found["arc"] == "arc: n.\n\nA thing."
    assert found["bar"] == "bar: n.\n\nAnother thing."


def test_essays_are_sections_without_lists_of_contents():
    body = "   " + "Hackers say this, and more of it follows here at length. " * 9
    lines = [
        "Chapter 4. Jargon",
        "",
        "   Table of Contents",
        "",
        body,
        "Chapter 5. Short",
        "",
        "   x.",
    ]
    (found,) = jargon.essays(lines)
    assert found.name == "essay: Jargon"
    assert found.text.startswith("Jargon\n\nHackers say")


def test_dictd_entries():
    text = b"about this\nABASE, v. Low.\nB, n. See A.\n"
    index = "00databaseinfo\tA\tL\nb\ta\tN\nabase\tL\tP\nabasement\tL\tP\n"
    assert list(devil.entries(text, index)) == [
        ("abase", "ABASE, v. Low.\n"),
        ("b", "B, n. See A.\n"),
    ]
    assert devil.number("BA") == 64
    with pytest.raises(ValueError, match="substring not found"):
        devil.number("-")


def test_senses():
    line = '00976953 04 n 02 foray 0 cattle_raid 0 001 @ 00975452 n 0000 | a `sudden\' attack ; "a raid"  '
    sense = wordnet.parse_sense(line, "noun")
    assert sense == wordnet.Sense(
        "noun", 976953, ("foray", "cattle raid"), "a 'sudden' attack; \"a raid\""
    )
    assert sense.line == "foray, cattle raid (noun): a 'sudden' attack; \"a raid\""
    assert sense.meaning == "a 'sudden' attack"


@pytest.mark.parametrize(
    "line",
    [
        "  1 This software and database is being provided to you, the LICENSEE, by",
        "01580077 05 n 02 Corvus 0 genus_Corvus 0 000 | type genus of the Corvidae  ",
        "01580078 05 n 02 Tineola 0 genus_Tineola 0 000 | webbing clothes moths  ",
        "09636339 18 n 01 word 0 000 | (ethnic slur) a word  ",
    ],
)
def test_lines_left_out(line):
    assert wordnet.parse_sense(line, "noun") is None


def test_groups_have_names_of_their_own():
    senses = [wordnet.Sense("noun", i, (f"w{i:03d}",), "x") for i in range(90)]
    groups = dict(wordnet.grouped(senses))
    assert [len(group) for group in groups.values()] == [40, 40, 10]
    assert list(groups)[2] == "0003 w080 to w089"


def test_one_document_in_fifty_is_held_out():
    held = sum(Document("novels", f"chapter {i}", "").held_out for i in range(5000))
    assert 60 < held < 140
    assert Document("a", "b", "1").held_out == Document("a", "b", "2").held_out


def test_passages():
    prose = "x" * 400
    page = Document("python", "page", f"# {prose}\n\n{prose}\n\n```\n{prose}\n```\n\n{prose * 2}")
    verses = "\n".join(f"{i} {'And it came to pass. ' * 6}" for i in range(1, 4))
    bible = Document("bible", "chapter 1", f"Genesis, chapter 1\n\n{verses}")
    words = Document("wordnet", "w", prose)
    found = corpus.passages([page, bible, words], held_out=page.held_out)
    assert prose in found
    assert not page.held_out
    assert not bible.held_out
    assert [len(p) for p in found] == [400, 3 * 125 + 2]
    assert corpus.passages([page, bible, words], held_out=True) == []
