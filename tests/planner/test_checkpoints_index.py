"""`Checkpoints` finds by owner, by leases and by path what going through all of them finds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.checkpoints import Checkpoint, Checkpoints, Identity, identity

MODES = ("", "other")
texts = st.text("ab", max_size=5)


def path(text: str, mode: str) -> Identity:
    return identity([ord(c) for c in text], mode=mode)


points = st.builds(
    lambda cid, text, mode, holders, readers: Checkpoint(
        cid, path(text, mode), 0, (), tuple(sorted(holders)), readers
    ),
    st.integers(1, 8),
    texts,
    st.sampled_from(MODES),
    st.sets(st.integers(0, 4), min_size=1),
    st.integers(0, 2),
)


def common(a: Identity, b: Identity) -> int:
    same = 0
    while same < min(a.frontier, b.frontier) and a.prefix(same + 1) == b.prefix(same + 1):
        same += 1
    return same


@given(st.lists(st.one_of(points, st.integers(1, 8)), max_size=20), texts, st.sampled_from(MODES))
def test_indexes_follow_from_the_checkpoints(
    changes: list[Checkpoint | int], text: str, mode: str
) -> None:
    """A number deletes. Earlier values stay what they were."""
    cks, model = Checkpoints(), dict[int, Checkpoint]()
    versions = [(cks, dict(model))]
    for change in changes:
        if isinstance(change, Checkpoint):
            cks, model[change.id] = cks.put(change), change
        elif change in model:
            cks = cks.delete(change)
            del model[change]
        else:
            with pytest.raises(KeyError):
                cks.delete(change)
        versions.append((cks, dict(model)))
    prompt = path(text, mode)
    for found, want in versions:
        assert found.items() == sorted(want.items())
        assert found.values() == [ck for _, ck in sorted(want.items())]
        assert len(found) == len(want)
        assert found.read == tuple(sorted(cid for cid, ck in want.items() if ck.readers))
        for owner in range(6):
            owned = tuple(sorted(cid for cid, ck in want.items() if owner in ck.holders))
            assert found.owned(owner) == owned
        begins = [ck for ck in want.values() if ck.identity.prefix_of(prompt)]
        assert list(found.on_path(prompt)) == sorted(begins, key=lambda ck: (-ck.frontier, -ck.id))
        same_mode = [ck.identity for ck in want.values() if ck.identity.mode == mode]
        assert found.shared(prompt) == max((common(prompt, i) for i in same_mode), default=0)


def test_tokens_that_are_ordered_by_their_bytes() -> None:
    """Token 256 is the bytes 0 1 0 0 and stands before token 1: a path is found in any such order."""
    line = [1, 256, 65_536, 2, 257]
    cks = Checkpoints()
    for n in range(len(line) + 1):
        cks = cks.put(Checkpoint(n + 1, identity(line[:n]), 0, (), (1,)))
        cks = cks.put(Checkpoint(n + 11, identity([*line[:n], 255, 3]), 0, (), (1,)))
    assert [ck.id for ck in cks.on_path(identity(line))] == [6, 5, 4, 3, 2, 1]
    assert [ck.id for ck in cks.on_path(identity([1, 256, 255, 3, 4]))] == [13, 3, 2, 1]
    assert cks.shared(identity([1, 256, 255, 9])) == 3
