"""CK rules: exact identity, completeness, placement, ledgers, readers."""

import dataclasses

import numpy as np
import pytest

from planner import checkpoint, identity, is_complete, is_device_ready, ledger_frontier
from planner.checkpoints import EMPTY, Checkpoint, Identity, MediaSpan
from planner.errors import BusyError, HandleError, IdentityError, IllegalError
from planner.operations import apply
from planner.physical import checkpoints_of
from planner.plans import Bind, Capture, Edge, ImageRef, PageRange, Target
from planner.retention import EndReader, Finish, LeaseReader, Release, Retain
from planner.testing import Driver, tiny_layout, token
from planner.transactions import assess


def driver(**changes: int) -> Driver:
    return Driver(
        tiny_layout(**({"pages": 12, "blocks": 6, "rows": 3, "slots": 4, "host": 12} | changes))
    )


def full() -> Identity:
    positions = np.arange(24, dtype=np.int32).reshape(8, 3)
    return identity(
        range(8),
        types=[0, 0, 1, 1, 1, 0, 0, 0],
        positions=positions,
        spans=[MediaSpan(2, 3, b"cat")],
        rope_delta=-2,
        mode="thinking",
        splits=[6],
    )


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": identity([0, 1, 2, 3, 4, 9]).tokens},
        {"types": bytes(6)},
        {"positions": bytes(72)},
        {"spans": (MediaSpan(2, 3, b"dog"),)},
        {"mode": "plain"},
        {"splits": (5,)},
        {"axes": 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_field_decides(change: dict[str, object]) -> None:
    """CK-04, CK-05, INV-06: one differing field is no hit; an equal one is."""
    prompt = full()
    saved = prompt.prefix(6)
    assert saved.prefix_of(prompt)
    assert not dataclasses.replace(saved, **change).prefix_of(prompt)  # type: ignore[arg-type]
    assert dataclasses.replace(saved, **change).digest() != saved.digest()  # type: ignore[arg-type]


def test_identity_edges() -> None:
    """CK-04: spans are never cut; a longer saved prefix is no hit; rope_delta counts at the end."""
    prompt = full()
    for cut in (3, 4):
        with pytest.raises(IdentityError, match="cuts the media span"):
            prompt.prefix(cut)
    assert not identity(range(4)).prefix_of(prompt)  # ends inside the span
    assert not prompt.prefix_of(prompt.prefix(6))
    assert not dataclasses.replace(prompt, rope_delta=7).prefix_of(prompt)
    assert EMPTY.prefix_of(prompt.prefix(0)) is False  # other axes and mode
    assert EMPTY.prefix_of(identity([1]))
    with pytest.raises(IdentityError, match="prefix 9"):
        prompt.prefix(9)
    with pytest.raises(IdentityError, match="equal counts"):
        identity([1, 2], types=[0])


def test_digest_only_shortlists() -> None:
    """CK-05: equal digests are required of equal identities, adoption still compares everything."""
    assert full().digest() == full().digest()
    d = driver()
    cid = d.cached(1, 3)
    forged = identity([9, 9, 9])
    with pytest.raises(IdentityError, match="no exact prefix"):
        assess(d.state, Target(Bind(2, (4,), forged, cid)))


def test_checkpoint_is_one_execution() -> None:
    """CK-01, INV-05: state, coverage of every pool and identity come from one sequence."""
    d = driver(backend=12)
    q = d.bind(1, 6)
    d.write(q.id, 5, 4)
    cid = d.finish(q.id, 1)
    ck = checkpoint(d.state, cid)
    assert ck.frontier == 5
    assert [p.frontier for p in ck.prefixes] == [5, 4]
    tokens = np.frombuffer(ck.identity.tokens, "<i4").tolist()
    assert tokens == [token(q.id, p) for p in range(5)]


def test_equal_tokens_are_not_equal_content() -> None:
    """CK-06: two computations of one text stay two contents; nothing is joined by tokens."""
    d = driver()
    a, b = d.bind(1, 2), d.bind(2, 2)
    d.write(a.id, 2)
    d.write(b.id, 2)
    same = identity([5, 6])
    first = apply(d.state, Finish(a.id, 1, same))
    second = apply(first, Finish(b.id, 2, same))
    one, two = (ck for _, ck in second.checkpoints.items())
    assert one.identity == two.identity
    assert one.image != two.image
    assert one.prefixes[0].history != two.prefixes[0].history


def test_placement_is_free_identity_is_not() -> None:
    """CK-02, CK-03, CK-07: parts live apart and stay complete; ready needs the Device."""
    d = driver()
    cid = d.cached(1, 5)
    ck = checkpoint(d.state, cid)
    hid = ck.prefixes[0].history
    assert is_device_ready(d.state, cid)
    d.complete(Target(demote=(PageRange(0, hid, 1, 2),)))
    assert (is_complete(d.state, cid), is_device_ready(d.state, cid)) == (True, False)
    d.complete(Target(demote=(ImageRef(ck.image),)))
    assert (is_complete(d.state, cid), is_device_ready(d.state, cid)) == (True, False)
    assert checkpoint(d.state, cid) == ck


def test_incomplete_replicas_are_no_source() -> None:
    """CK-12, CK-02: content in flight is not complete, and a hand-broken point is refused."""
    d = driver()
    cid = d.cached(1, 5)
    ck = checkpoint(d.state, cid)
    image = d.state.states.images.get(ck.image)
    assert image is not None
    half = d.state.states._replace(
        images=d.state.states.images.set(ck.image, image._replace(ready=False))
    )
    broken = d.state._replace(states=half)
    assert not is_complete(broken, cid)
    with pytest.raises(IllegalError, match="CK-12"):
        assess(broken, Target(Bind(1, (6,), ck.identity, cid)))


def test_ledger() -> None:
    """CK-08, CK-09: one committed token is ahead of the computed ones; endpoints may have none."""
    d = driver()
    q = d.bind(1, 4)
    d.write(q.id, 3)
    d.run(Finish(q.id, 1, d.identity(q.id), next_input=42))
    ck = checkpoint(d.state, d.state.result.published)  # type: ignore[union-attr]
    assert (ck.frontier, ledger_frontier(ck), ck.next_input) == (3, 4, 42)
    assert ledger_frontier(ck._replace(next_input=-1)) == 3


def test_frontiers_keep_their_own_meaning() -> None:
    """CK-10, KV-03: a bind takes every pool at its own saved frontier; nothing is derived."""
    d = driver(backend=12)
    q = d.bind(1, 6)
    d.write(q.id, 5, 2)
    cid = d.finish(q.id, 1)
    again = d.bind(2, 6, cid)
    assert (again.frontiers, again.position) == ((5, 2), 5)


def test_readers_and_owners() -> None:
    """CK-11: owners keep content restorable, a reader lease keeps the replica where it is."""
    d = driver()
    cid = d.cached(1, 5)
    ck = checkpoint(d.state, cid)
    d.run(LeaseReader(cid))
    with pytest.raises(BusyError, match="reader lease"):
        apply(d.state, Release((Edge(1, cid),)))
    for item in (ImageRef(ck.image), PageRange(0, ck.prefixes[0].history, 0, 1)):
        with pytest.raises(BusyError, match="being read"):
            assess(d.state, Target(demote=(item,)))
    with pytest.raises(BusyError, match="leased to a reader"):
        assess(d.state, Target(Bind(1, (6,), ck.identity, cid, (Edge(1, cid),))))
    d.run(EndReader(cid))
    with pytest.raises(HandleError, match="no reader"):
        apply(d.state, EndReader(cid))
    d.run(Release((Edge(1, cid),)))
    with pytest.raises(HandleError, match="gone"):
        checkpoint(d.state, cid)


def test_owner_edges() -> None:
    """CK-11, CAT-11: edges are exact; an owner that holds nothing cannot release."""
    d = driver()
    cid = d.cached(1, 5)
    with pytest.raises(HandleError, match="does not hold"):
        apply(d.state, Release((Edge(2, cid),)))
    with pytest.raises(HandleError, match="already holds"):
        apply(d.state, Retain(cid, 1))
    d.run(Retain(cid, 2))
    assert checkpoints_of(d.state, 2) == (cid,)


def test_last_replica_goes_only_with_its_point() -> None:
    """CK-14, INV-07: Device or Host copies are given up only while another complete one stands."""
    d = driver(host=3)
    cid = d.cached(1, 5)
    ck = checkpoint(d.state, cid)
    with pytest.raises(IllegalError, match="lose the state"):
        assess(d.state, Target(drop_host=(ImageRef(ck.image),)))
    d.complete(Target(demote=(PageRange(0, ck.prefixes[0].history, 0, 1),)))
    with pytest.raises(IllegalError, match="only on Host"):
        assess(d.state, Target(drop_host=(PageRange(0, ck.prefixes[0].history, 0, 1),)))
    assert checkpoint(d.state, cid) == ck


def test_uncommitted_suffix_is_no_restore_point() -> None:
    """CK-09, SPEC-02: a point covers what was committed, never the provisional rest."""
    d = driver()
    q = d.bind(1, 6)
    d.write(q.id, 3)
    d.complete(Target(Capture(q.id, 1, d.identity(q.id))))
    d.write(q.id, 6)
    cid = checkpoints_of(d.state, 1)[0]
    assert [p.frontier for p in checkpoint(d.state, cid).prefixes] == [3]


def test_reuse_is_semantic() -> None:
    """CK-13: nothing in a checkpoint depends on how its prefill was split."""
    assert set(Checkpoint._fields) == {
        "id", "identity", "image", "prefixes", "holders", "readers", "next_input",
    }  # fmt: skip
    whole, split = driver(), driver()
    q = whole.bind(1, 6)
    whole.write(q.id, 6)
    p = split.bind(1, 6)
    for n in (1, 4, 6):
        split.write(p.id, n)
    ends = whole.finish(q.id, 1), split.finish(p.id, 1)
    a, b = checkpoint(whole.state, ends[0]), checkpoint(split.state, ends[1])
    assert (a.identity, a.prefixes, a.image) == (b.identity, b.prefixes, b.image)
