import errno
import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer_jax import InputError
from ninfer_jax.batch import journal as journals
from ninfer_jax.batch.answers import error_line
from ninfer_jax.batch.journal import Journal


def row(i, text="x"):
    return error_line(f"batch_req_{i:032x}", f"row-{i}", "code", text)


def test_lines_are_found_again(tmp_path):
    path = tmp_path / "out"
    with Journal(path) as journal:
        for i in range(5):
            journal.add(row(i))
        journal.add(error_line("batch_err_1", None, "code", "x"))
    with Journal(path) as journal:
        assert journal.answers == {f"row-{i}": f"batch_req_{i:032x}" for i in range(5)}
        assert journal.errors == {"batch_err_1"}
        assert (journal.lines, journal.cut_bytes) == (6, 0)


def test_the_newest_line_of_a_custom_id_counts(tmp_path):
    path = tmp_path / "out"
    with Journal(path) as journal:
        journal.add(row(1))
        journal.add(row(2) | {"custom_id": "row-1"})
    with Journal(path) as journal:
        assert journal.answers == {"row-1": f"batch_req_{2:032x}"}


def test_a_file_cut_anywhere_goes_on(tmp_path):
    """Whatever is left of the file: complete lines count, the rest goes, and what is added makes it whole."""
    rows = [row(i, "é" * i) for i in range(3)]
    path = tmp_path / "out"
    with Journal(path) as journal:
        for value in rows:
            journal.add(value)
    whole = path.read_bytes()
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        with Journal(path) as journal:
            assert journal.lines == whole[:length].count(b"\n")
            assert journal.cut_bytes == length - len(whole[:length].rpartition(b"\n")[0]) - (
                journal.lines > 0
            )
            for value in rows:
                if value["custom_id"] not in journal.answers:
                    journal.add(value)
        assert path.read_bytes() == whole


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.tuples(st.text(max_size=6), st.text(max_size=9)), max_size=12),
    st.integers(0, 10_000),
    st.integers(0, 9),
)
def test_cut_and_zeroed_tails(tmp_path_factory, texts, cut, zeros):
    """Any custom_ids and texts; a tail of zeros is what some file systems leave after a loss of power."""
    path = tmp_path_factory.mktemp("journal") / "out"
    rows = [row(i, text) | {"custom_id": f"{i}{name}"} for i, (name, text) in enumerate(texts)]
    with Journal(path) as journal:
        for value in rows:
            journal.add(value)
    whole = path.read_bytes()
    path.write_bytes(whole[: cut % (len(whole) + 1)] + bytes(zeros))
    with Journal(path) as journal:
        kept = journal.lines
        assert list(journal.answers) == [value["custom_id"] for value in rows[:kept]]
        for value in rows[kept:]:
            journal.add(value)
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "content",
    [
        b"my notes", b"my notes\n", b'{"a": 1}\n', b"[]\n", b"\0\n", b"[" * 100_000 + b"\n", b"\xc3", b"\xc3\n",
        b'{"id": "batch_req_1", "custom_id": ["a"]}\n', b'{"id": "batch_req_1", "custom_id": null}\n',
    ],
)  # fmt: skip
def test_other_files_are_left_alone(tmp_path, content):
    path = tmp_path / "out"
    path.write_bytes(content)
    with pytest.raises(InputError, match="no output of a batch"):
        Journal(path)
    assert path.read_bytes() == content
    path.write_bytes(b"")
    Journal(path).__exit__(None, None, None)  # the refused one holds no lock


def test_a_character_torn_in_the_middle_is_cut_off(tmp_path):
    """Another program may write the lines again with characters as they are."""
    path = tmp_path / "out"
    lines = [json.dumps(row(i, "é"), ensure_ascii=False).encode() + b"\n" for i in range(2)]
    path.write_bytes(lines[0] + lines[1].partition(b"\xa9")[0])
    with Journal(path) as journal:
        assert journal.lines == 1
    assert path.read_bytes() == lines[0]


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, "/dev/zero"):  # the last would be read for ever
        with pytest.raises(InputError, match="is no file"):
            Journal(path)


def test_a_full_disk_leaves_a_file_that_can_be_gone_on_with(tmp_path, monkeypatch):
    """The write that fails may have been a part of a line, so nothing is written behind it."""
    path = tmp_path / "out"
    write = os.write
    with pytest.raises(OSError, match=r"No space.*out"), Journal(path) as journal:  # noqa: PT012
        journal.add(row(1))
        journal.flush()
        room = [9]

        def full(file, data):
            if not room:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(file, data[: room.pop()])

        monkeypatch.setattr(os, "write", full)
        journal.add(row(2))
        try:
            journal.flush()
        finally:
            monkeypatch.setattr(os, "write", write)
    with Journal(path) as journal:
        assert (journal.lines, journal.cut_bytes) == (1, 9)


def test_an_error_elsewhere_loses_no_line(tmp_path):
    """Of the input's file, say: the output is well, so what was finished is written."""
    path = tmp_path / "out"
    with pytest.raises(OSError, match="input"), Journal(path) as journal:  # noqa: PT012
        journal.add(row(1))
        raise OSError("input")
    with Journal(path) as journal:
        assert journal.lines == 1


def test_two_runs_on_one_output_are_refused(tmp_path):
    path = tmp_path / "out"
    with Journal(path), pytest.raises(InputError, match="another run"):
        Journal(path)
    with Journal(path):
        pass


def test_groups(tmp_path, monkeypatch):
    """One write and one fsync a group; a group ends when it is large, or old."""
    path = tmp_path / "out"
    writes, synced = [], []
    write, fsync = os.write, os.fsync
    with Journal(path) as journal:
        monkeypatch.setattr(os, "write", lambda f, d: writes.append(1) or write(f, d))
        monkeypatch.setattr(os, "fsync", lambda f: synced.append(1) or fsync(f))
        for i in range(2 * journals.GROUP_LINES):
            journal.add(row(i))
        assert (len(writes), len(synced)) == (2, 2)
        journal.add(row(999))
        journal.tick()
        assert len(writes) == 2
        monkeypatch.setattr(journals, "GROUP_SECONDS", 0.0)
        journal.tick()
        assert (len(writes), len(synced)) == (3, 3)
        assert path.read_bytes().count(b"\n") == journal.lines == 2 * journals.GROUP_LINES + 1


def test_a_short_write_is_gone_on_with(tmp_path, monkeypatch):
    path = tmp_path / "out"
    write = os.write
    with Journal(path) as journal:
        monkeypatch.setattr(os, "write", lambda f, d: write(f, d[:7]))
        journal.add(row(1))
        journal.flush()
    assert json.loads(path.read_bytes()) == row(1)
