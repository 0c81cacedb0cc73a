"""What a prompt shares with earlier input: the opportunities and splits of a request (CAPT, EV-05)."""

from __future__ import annotations

from dataclasses import replace

from planner.checkpoints import Identity, common_tokens
from planner.world.requests import Request, Save, opportunities
from planner.world.step import Step


def prepare_saves(step: Step, request: Request) -> Request:
    """The opportunities and splits of a request, fixed once it is admitted.

    Where the prompt leaves an earlier one, at the last page boundary before, a shared entry may be
    saved although nobody asked: two different inputs have computed that far (EV-05).
    """
    if request.admitted:
        return request
    if not step.caches(request):
        return replace(request, stops=request.spec.splits)
    config, prompt = step.config, request.spec.prompt
    saves = {s.frontier: s for s in opportunities(request.spec, config.anchors, config.markers)}
    page = step.physical.layout.page_tokens
    leave = divergence(step, prompt) // page * page
    if leave and leave not in saves and leave < prompt.frontier:
        known = any(ck.frontier == leave for ck in step.physical.checkpoints.on_path(prompt))
        if not known:
            saves[leave] = Save(leave, ("shared",))
    ordered = tuple(saves[f] for f in sorted(saves))
    stops = tuple(sorted({*saves, *request.spec.splits}))
    return replace(request, saves=ordered, stops=stops)


def divergence(step: Step, prompt: Identity) -> int:
    """The longest prefix that ``prompt`` shares with an earlier input or a saved point, itself at most."""
    best = step.physical.checkpoints.shared(prompt)
    for other in step.catalog.recent:
        longer = prompt.tokens[: 4 * best + 4]
        if other.tokens.startswith(longer) and other.mode == prompt.mode:
            best = common_tokens(prompt.tokens, other.tokens)
    return min(best, prompt.frontier - 1)
