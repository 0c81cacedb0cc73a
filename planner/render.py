"""`render(state)`: a state as text: pages by holder, slots, Host extents."""

from __future__ import annotations

from planner import kv
from planner.host import Extent
from planner.kv import NO_HOST, History, Pool
from planner.physical import PhysicalState


def render(s: PhysicalState) -> str:
    """A drawing for people and error reports; equal states give equal text."""
    lines = [f"revision {s.revision}"]
    for k, pool in enumerate(s.pools):
        lines += _pool(s, k, pool)
    lines += _slots(s) + _host(s) + _checkpoints(s)
    t = s.transaction
    if t is not None:
        lines.append(
            f"transaction {t.id} {t.plan.target.kind} {t.stage}/{t.phase}: "
            f"{len(t.work.copies)} copies, held {list(t.held)}{', cancelled' * t.cancelled}"
        )
    return "\n".join(lines)


def _runs(ids: list[int]) -> str:
    """3 4 5 9 -> 3-5 9; 0 (not on the Device) prints as a dot."""
    out: list[list[int]] = []
    for g in ids:
        if out and ((g and g == out[-1][1] + 1) or g == out[-1][1] == 0):
            out[-1][1] = g
            out[-1][2] += 1
        else:
            out.append([g, g, 1])
    return " ".join(
        (f".x{n}" if n > 1 else ".") if not a else (f"{a}-{b}" if b > a else str(a))
        for a, b, n in out
    )


def _pool(s: PhysicalState, k: int, pool: Pool) -> list[str]:
    lines = [
        f"pool {pool.name}: {pool.allocated} allocated + {pool.reserved} reserved + "
        f"{kv.available(pool)} available = {pool.capacity} pages of {pool.page_tokens} tokens"
    ]
    for h in pool.histories.values():
        lines.append(f"  history {h.id}: {_history(s, k, pool, h)}")
    return lines


def _history(s: PhysicalState, k: int, pool: Pool, h: History) -> str:
    pages = h.pages.values()
    parts = [f"blocks {h.base}..{h.blocks}"]
    if h.parent:
        parts.append(f"on {h.parent}[0..{h.base}]")
    if pages:
        parts.append(f"pages {_runs([p.device for p in pages])}")
    on_host = sum(p.host != NO_HOST for p in pages)
    if on_host:
        parts.append(f"{on_host} on Host")
    holders = [f"ck{cid}@{f}" for f, cid in h.refs] + [f"fork {c}[0..{b}]" for b, c in h.children]
    writer = next((q for q in s.sequences if q.id == h.sequence), None)
    if writer is not None:
        holders.append(f"seq{writer.id} row {writer.rows[k]} writes at {writer.frontiers[k]}")
    return ", ".join(parts) + "; held by " + (", ".join(holders) or "nobody")


def _slots(s: PhysicalState) -> list[str]:
    cells = []
    for i, iid in enumerate(s.states.slots, start=1):
        im = s.states.images.get(iid)
        if im is None:
            cells.append(f"{i}:free")
            continue
        where = f"@{im.position}" if im.position >= 0 else "@" + _position(s, im.writer)
        cells.append(f"{i}:image {iid}{where}{'' if im.ready else ' (no content yet)'}")
    return ["slots " + " | ".join(cells)]


def _position(s: PhysicalState, writer: int) -> str:
    q = next((q for q in s.sequences if q.id == writer), None)
    return f"{q.position} seq{q.id}" if q else "reserved"


def _host(s: PhysicalState) -> list[str]:
    owned: list[tuple[Extent, str]] = [(e, "free") for e in s.arena.free]
    for pool in s.pools:
        for h in pool.histories.values():
            for b, p in h.pages.items():
                if p.host != NO_HOST:
                    what = f"{pool.name} history {h.id} block {b} x{p.host_columns}"
                    owned.append((Extent(p.host, pool.page_bytes), what))
    owned += [(im.host, f"image {iid}") for iid, im in s.states.images.items() if im.host]
    if s.transaction:
        owned += [(e, "in flight") for e in s.transaction.work.extents]
    cells = [f"[{e.offset},{e.offset + e.size}) {what}" for e, what in sorted(owned)]
    return ["host " + (" ".join(cells) or "none")]


def _checkpoints(s: PhysicalState) -> list[str]:
    return [
        f"checkpoint {cid}@{ck.frontier}: image {ck.image}, owners {list(ck.holders)}"
        f"{f', {ck.readers} reader(s)' if ck.readers else ''}"
        for cid, ck in s.checkpoints.items()
    ]
