"""Cleaning: what typesetting adds goes, what the author broke stays broken."""

from scripts.demo_model import clean


def test_tidy():
    text = "\n\n‘a’ “b”—c…\u00a0d\u00ad\tE\u0301 \x07x \r\n\n\n\ny\u200b \n"
    assert clean.tidy(text) == "'a' \"b\"--c... d É x\n\ny"
    assert clean.tidy("") == ""


def test_prose_is_unwrapped():
    lines = ["It is a truth universally", "acknowledged.", "", "He came", "   and went."]
    assert clean.unwrap(lines) == "It is a truth universally acknowledged.\n\nHe came\n\nand went."


def test_a_hyphen_ends_a_line():
    lines = ["said Brillat-", "Savarin--", "he dined -- ", "twice"]
    assert clean.join(lines) == "said Brillat-Savarin--he dined -- twice"


def test_verse_keeps_its_lines_and_its_author():
    lines = ["    Blow, blow --", "      O'er Ceylon,", "    Where all", " " * 60 + "Bishop Sheber"]
    assert clean.unwrap(lines) == "Blow, blow --\n  O'er Ceylon,\nWhere all\n-- Bishop Sheber"


def test_an_indented_letter_is_prose():
    lines = [
        '     "I have just had the honour of',
        "     receiving your letter, for",
        "     which.",
    ]
    assert clean.unwrap(lines) == '"I have just had the honour of receiving your letter, for which.'


def test_unmark():
    assert clean.unmark("_You_ want to tell my_name_here, _so there_.") == (
        "You want to tell my_name_here, so there."
    )
