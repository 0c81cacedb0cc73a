"""One scheduler cycle (SCH-01): settle what ended, save, recover, permit, admit, launch."""

from __future__ import annotations

from dataclasses import replace

from planner.errors import BusyError, ShortageError
from planner.physical import sequence
from planner.plans import Plan, Target
from planner.retention import Release
from planner.transactions import assess
from planner.units import Launch, Reserve, RowTokens
from planner.world import binding, pausing, saving
from planner.world.commands import DecodeRow, RunDecode, RunPrefill
from planner.world.eviction import FOREVER, Gaps, Rights, relieve
from planner.world.requests import Resident, chunk_end, token_at
from planner.world.step import CapacityContractError, Job, Step, Unit, UnitRow

DEPTH = 2
"""Units of one request in flight: the next is launched before the last one's results are read."""


def run(step: Step) -> None:
    """Repeat until nothing changes that could let more run, then force progress if there is none."""
    for _ in range(8 * (step.physical.layout.concurrency + 2)):
        if not _round(step):
            break
    settle(step)
    if step.units or step.job is not None or not len(step.requests):
        return
    _force(step)


def _round(step: Step) -> bool:
    """One pass; True: something changed, so that another pass may achieve more."""
    changed = settle(step)
    if _slot_is_free(step):
        changed |= _end_drained(step)
        changed |= _end_cancelled(step)
        changed |= _pause_drained(step)
    if _slot_is_free(step):
        changed |= _save(step)
    if _slot_is_free(step) and step.recover:
        changed |= _recover(step)
    changed |= settle(step)
    decode, prefill = _permits(step)
    changed |= any(r.pausing and not r.units for r in step.residents)
    if _slot_is_free(step) and step.scan:
        changed |= _scan(step)
    launched = _launch(step, decode, prefill)
    return changed and not launched


def _slot_is_free(step: Step) -> bool:
    """Whether a transaction may start now; one that ended without copies is adopted first (TX-01)."""
    settle(step)
    return step.physical.transaction is None


def settle(step: Step) -> bool:
    """Adopt the result of the transaction that ended."""
    job, result = step.job, step.physical.result
    if job is None or step.physical.transaction is not None:
        return False
    assert result is not None
    step.job = None
    committed = result.outcome == "committed"
    if job.kind == "bind":
        if committed:
            binding.adopt(step, job, result)
            saving.rebalance(step)
        else:
            binding.abort_bind(step, job, result.outcome)
    elif job.kind == "capture":
        if committed:
            saving.captured(step, job, result)
        else:
            step.note(job.request, "skipped", f"save at {job.save.frontier}: {result.outcome}")
    elif job.kind == "pause":
        resident = step.resident(job.request)
        assert resident is not None
        if committed:
            pausing.leave(step, resident, "snapshot", result.published, job.holder)
            return True
    if not committed and result.outcome.endswith("failed"):
        step.demote = False
    step.capacity_event()
    return True


# Ends


def _end_drained(step: Step) -> bool:
    done = [r for r in step.residents if r.ending and not r.units]
    for resident in done:
        saving.finish(step, resident)
    return bool(done)


def _end_cancelled(step: Step) -> bool:
    """Requests that were cancelled while they waited or were paused; one that is bound since ends as a resident."""
    if not step.cancelled:
        return False
    requests = [step.requests.get(ticket) for ticket in sorted(set(step.cancelled))]
    step.cancelled = ()
    done = [r for phase in ("waiting", "paused") for r in requests if r and r.phase == phase]
    for request in done:
        binding.end_without_lane(step, request)
    return bool(done)


def _pause_drained(step: Step) -> bool:
    for resident in step.residents:
        if resident.pausing and not resident.units and not resident.ending:
            pausing.pause(step, resident)
            return True
    return False


def _save(step: Step) -> bool:
    for resident in step.residents:
        if resident.units or resident.ending or resident.pausing:
            continue
        if saving.due(step, resident) is not None:
            saving.save(step, resident)
            return True
    return False


# Permits


def _permits(step: Step) -> tuple[list[Resident], Resident | None]:
    """The rows that may decode now, and the one that may prefill, each with its pages reserved."""
    frozen = _frozen(step)
    decode: list[Resident] = []
    prefill: list[Resident] = []
    for r in step.residents:
        if r.ending or r.pausing or r.sequence in frozen:
            continue
        if r.position < r.prompt_length - 1:
            if not r.units and saving.due(step, r) is None:
                prefill.append(r)
        elif _may_decode(step, r):
            decode.append(r)
    decode = _reserve_all(step, decode)
    for r in _rotation(step, prefill):
        if _permit(step, r, _prefill_end(step, r)):
            return decode, r
    return decode, None


def _frozen(step: Step) -> tuple[int, ...]:
    """Sequences that the open transaction holds still (TX-18)."""
    return step.physical.transaction.frozen if step.physical.transaction else ()


def _may_decode(step: Step, r: Resident) -> bool:
    if r.position < r.replay:
        return len(r.units) < DEPTH
    if r.asked >= r.max_tokens or len(r.units) >= DEPTH:
        return False
    if r.units and r.committed < r.synchronous:
        return False
    return r.position != r.prompt_length - 1 or saving.due(step, r) is None


def _prefill_end(step: Step, r: Resident) -> int:
    return chunk_end(step.request(r.request), r.position, step.config.prefill_chunk, r.replay)


def _rotation(step: Step, rows: list[Resident]) -> list[Resident]:
    """The recovering row first, then round robin by ticket (SCH-17)."""
    if len(rows) < 2:
        return rows
    first = [r for r in rows if sequence(step.physical, r.sequence).recovery >= 0]
    rest = [r for r in rows if r not in first]
    return first + sorted(rest, key=lambda r: (r.request <= step.turn, r.request))


def _blocked_by_transaction(step: Step, r: Resident) -> bool:
    """A fork's first unit and an open transaction exclude each other (ST-07)."""
    return r.read_slot != r.write_slot and step.physical.transaction is not None


def _reserve_all(step: Step, rows: list[Resident]) -> list[Resident]:
    rows = [r for r in rows if not _blocked_by_transaction(step, r)]
    if not rows:
        return rows
    pools = len(step.physical.pools)
    wanted = tuple(RowTokens(r.sequence, (r.position + 1,) * pools) for r in rows)
    try:
        step.apply(Reserve(wanted))
    except ShortageError:
        return [r for r in rows if _permit(step, r, r.position + 1)]
    return rows


def _permit(step: Step, r: Resident, tokens: int) -> bool:
    """Reserve one row's unit; on shortage reclaim at once, start a move, or choose a victim (SCH-10)."""
    if _blocked_by_transaction(step, r):
        return False
    row = RowTokens(r.sequence, (tokens,) * len(step.physical.pools))
    for _ in range(2):
        try:
            step.apply(Reserve((row,)))
        except ShortageError as shortage:
            if not _make_room(step, r, dict(shortage.gaps)):
                return False
        else:
            return True
    return False


def _make_room(step: Step, r: Resident, gaps: Gaps) -> bool:
    """True: capacity is free now. False: the row waits, for a release that is under way or for others."""
    if step.physical.transaction is not None or any(o.ending or o.pausing for o in step.residents):
        return False
    rights = Rights(reused_before=FOREVER, waiters=0, snapshots=r.request, demote=step.demote)
    relief = relieve(step, gaps, rights)
    if relief is None:
        _choose_victim(step, r)
        return False
    if not relief.demote:
        edges = tuple(e for e in relief.release if step.holds(e))
        binding.give_up(step, edges, r.request)
        step.apply(Release(edges))
        binding.commit_release(step, edges)
        step.capacity_event()
        return True
    try:
        plan = assess(step.physical, Target(None, release=relief.release, demote=relief.demote))
    except BusyError:
        return False
    if isinstance(plan, Plan):
        binding.give_up(step, relief.release, r.request)
        binding.start(step, plan, Job("demote", r.request))
        return settle(step)
    step.demote = False  # what was to be moved finds no place between what is there: delete instead
    return _make_room(step, r, gaps)


def _choose_victim(step: Step, r: Resident) -> None:
    """The oldest resident may pause the youngest; anybody else waits for it (SCH-10, SCH-11)."""
    if any(o.request < r.request for o in step.residents):
        return
    for victim in reversed(step.residents):
        recovering = sequence(step.physical, victim.sequence).recovery >= 0
        if victim.request > r.request and not recovering:
            step.put_resident(victim._replace(pausing=r.request))
            return


# Recovery and admission


def _recover(step: Step) -> bool:
    """The oldest paused request tries its full recovery, once for each capacity event (SCH-13, SCH-15)."""
    step.recover = False
    if not step.paused:
        return False
    if any(sequence(step.physical, r.sequence).recovery >= 0 for r in step.residents):
        return False  # one recovery permit at a time (SCH-17)
    request = step.request(step.paused[0])
    oldest = all(r.request > request.id for r in step.residents)
    rights = Rights(
        reused_before=FOREVER,
        waiters=request.id if oldest else None,
        snapshots=request.id if oldest else None,
        demote=step.demote,
    )
    if binding.free_lanes(step) and binding.try_bind(step, request, rights, all_sources=oldest):
        return True
    busy = any(r.pausing or r.ending for r in step.residents)
    if oldest and step.residents and not busy:
        youngest = step.residents[-1]
        step.put_resident(youngest._replace(pausing=request.id))
        step.recover = True
        return True
    return False


def _scan(step: Step) -> bool:
    """Inspect the head of the queue and at most C later requests (SCH-06..09)."""
    concurrency = step.physical.layout.concurrency
    for ticket in step.waiting[: concurrency + 1]:
        request = step.requests.get(ticket)
        if request is None or request.phase != "waiting":
            continue
        rights = Rights(reused_before=FOREVER, waiters=request.id, demote=step.demote)
        if not binding.free_lanes(step):
            break
        if binding.try_bind(step, request, rights):
            return True
        step.note(ticket, "blocked", "no state slot or pages for its first unit yet")
        if step.request(ticket).bypassed >= concurrency:
            break  # its credit is used up: nobody younger passes (SCH-06)
    step.scan = False
    return False


def _force(step: Step) -> None:
    """Nothing runs and nothing will release anything: the oldest must go on, whatever it costs (SCH-16)."""
    if step.residents:
        raise CapacityContractError(
            f"request {step.residents[0].request} has no legal unit: every page that others could give "
            "up is gone; raise kv_capacity or lower max_context"
        )
    tickets = sorted((*step.waiting, *step.paused))
    if not tickets:
        return
    request = step.request(tickets[0])
    rights = Rights(reused_before=FOREVER, waiters=0, snapshots=0, demote=False)
    if not binding.try_bind(step, request, rights, all_sources=True):
        raise CapacityContractError(
            f"request {request.id} cannot become resident although nothing else runs; raise "
            "kv_capacity or device_state_slots"
        )
    run(step)


# Launch


def _launch(step: Step, decode: list[Resident], prefill: Resident | None) -> bool:
    """Launch the decode batch and one prefill chunk of the rows that hold permits (SCH-02)."""
    decode = [r for r in decode if not _lost_permit(step, r)]
    if decode:
        _launch_decode(step, decode)
    if prefill is not None and not _lost_permit(step, prefill):
        _launch_prefill(step, prefill)
        return True
    return bool(decode)


def _lost_permit(step: Step, r: Resident) -> bool:
    """A row that was chosen to pause, or whose fork may not settle now, sits this cycle out."""
    now = step.resident(r.request)
    return (
        now is None
        or bool(now.pausing)
        or r.sequence in _frozen(step)
        or _blocked_by_transaction(step, r)
    )


def _launch_decode(step: Step, rows: list[Resident]) -> None:
    pools = len(step.physical.pools)
    unit = step.physical.next_id
    step.apply(Launch(tuple(RowTokens(r.sequence, (r.position + 1,) * pools) for r in rows)))
    page = step.physical.layout.page_tokens
    orders: list[DecodeRow] = []
    entries: list[UnitRow] = []
    for r in rows:
        position, replay = r.position, r.position < r.replay
        index = position - r.prompt_length
        token = r.last_prompt_token if index < 0 else -1
        if 0 <= 4 * index < len(r.outputs):
            token = token_at(r.outputs, index)
        if position // page >= r.blocks:
            r = step.publish_table(r, r.blocks)
        orders.append(
            DecodeRow(r.request, r.lane, position, token, r.read_slot, r.write_slot, replay)
        )
        entries.append(UnitRow(r.request, r.sequence, position + 1, replay))
        step.put_resident(
            r._replace(
                position=position + 1,
                asked=r.asked if replay else r.asked + 1,
                units=(*r.units, unit),
                read_slot=r.write_slot,
            )
        )
    step.units = (*step.units, Unit(unit, "decode", tuple(entries)))
    step.commands.append(RunDecode(unit, tuple(orders)))


def _launch_prefill(step: Step, r: Resident) -> None:
    end = _prefill_end(step, r)
    unit = step.physical.next_id
    step.apply(Launch((RowTokens(r.sequence, (end,) * len(step.physical.pools)),)))
    page = step.physical.layout.page_tokens
    if -(-end // page) > r.blocks:
        r = step.publish_table(r, r.blocks)
    replay = end <= r.replay
    step.commands.append(
        RunPrefill(
            unit, r.request, r.lane, r.position, end - r.position, r.read_slot, r.write_slot, replay
        )
    )
    step.units = (
        *step.units,
        Unit(unit, "prefill", (UnitRow(r.request, r.sequence, end, replay),)),
    )
    step.put_resident(r._replace(position=end, units=(unit,), read_slot=r.write_slot))
    step.turn = r.request


def cancel(step: Step, ticket: int) -> None:
    """Mark a request; it ends at its next stable boundary (ENG-06)."""
    request = step.requests.get(ticket)
    if request is None:
        return
    step.put(replace(request, cancelled=True))
    resident = step.resident(ticket)
    if resident is None:
        step.cancelled = (*step.cancelled, ticket)
    elif not resident.ending:
        step.put_resident(resident._replace(ending="cancelled"))
