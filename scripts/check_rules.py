"""List the rules of contracts.md's planner and engine areas (AREAS) that no test cites.

usage: python scripts/check_rules.py [--verbose]

A test cites a rule by naming it (KV-36, KV-28..30) in a file under tests/. Rules whose whole
meaning lies in another package stand in ELSEWHERE with the reason; once that package cites them,
their entry should go. Exit code 1 when a rule is neither cited nor explained.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Number of rules of each area (contracts.md, section 3).
AREAS = {
    "CAP": 26, "KV": 47, "ST": 14, "HOST": 10, "CK": 14, "TX": 21, "CAT": 24, "SRC": 19,
    "CAPT": 13, "EV": 9, "RC": 17, "SCH": 18, "PR": 10, "UN": 11, "ENG": 12, "INV": 21,
}  # fmt: skip

STARTUP = (
    "start-up of the device program (ninfer_jax/program); the planner gives formula and layout"
)
ELSEWHERE = {
    "CAP-16": "no calibration program: the compiler tells what executables need (program.startup)",
    "CAP-18": "there is one placement candidate (program.startup)",
    "CAP-23": "serve warm-up through the public engine",
    "CAP-26": STARTUP,
    "KV-40": "fields of the StateImage and workspace, declared by the model",
    "KV-41": "views that kernels read (pallas_kernels, program)",
    "KV-42": "checks of kernel wrappers (pallas_kernels)",
    "KV-44": "rope and MRoPE inputs of attention (models)",
    "ST-12": "expert weight copies (models, moe)",
    "CAT-24": "names only; here endpoint, input, anchor, shared",
    "SRC-06": "not built: one generic cost model; nothing is calibrated by hardware or model",
    "CAPT-09": "not built: the prefix grid, opt-in and off under inc",
    "CAPT-10": "not built: automatic long anchors, opt-in and off under inc",
    "CAPT-11": "not built: the raw prompt-end anchor, opt-in and off by default",
    "CAPT-12": "not built: the endpoint anchor, opt-in and off under inc",
    "SCH-05": "not built: no Control unit; a forced token replaces a sampled one (engine.settlement)",
    "SCH-09": "a permission that is not used: without a free lane a request holds no source",
    "PR-09": "not built: no drafts (MTP, DFlash) and no vision in the engine",
    "PR-10": "tests/engine/test_preemption.py, tests/gpu/test_engine.py: preempted equals unpreempted",
    "UN-09": "not built: accepted spans of speculative decoding",
    "UN-10": "a forced token replaces a sampled one (engine.settlement, tests/engine/test_chat.py)",
    "ENG-02": "places of the outer queue (tests/engine/test_worker.py)",
    "ENG-03": "abandoned handles (tests/engine/test_worker.py)",
    "ENG-09": "failure cleanup (tests/engine/test_worker.py)",
    "ENG-12": "the bounded queue (tests/engine/test_worker.py)",
}

CITE = re.compile(r"\b([A-Z]+)-(\d\d)(?:\.\.(\d\d))?")


def cited() -> dict[str, set[str]]:
    """Rule -> test files that name it; a chain like KV-28, 29 counts only the full names."""
    out: dict[str, set[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for area, first, last in CITE.findall(path.read_text()):
            for n in range(int(first), int(last or first) + 1):
                out.setdefault(f"{area}-{n:02d}", set()).add(path.name)
    return out


def main() -> int:
    """Print what is missing; the list is empty when all is well."""
    found = cited()
    rules = [f"{area}-{n:02d}" for area, count in AREAS.items() for n in range(1, count + 1)]
    missing = [r for r in rules if r not in found and r not in ELSEWHERE]
    stale = [r for r in ELSEWHERE if r in found]
    if "--verbose" in sys.argv:
        for r in rules:
            print(r, ", ".join(sorted(found.get(r, ()))) or f"elsewhere: {ELSEWHERE.get(r, '?')}")
    for r in missing:
        print(f"{r}: no test cites it")
    for r in stale:
        print(f"{r}: is cited by a test now; delete its entry in ELSEWHERE")
    print(f"{len(rules) - len(missing) - len(ELSEWHERE)} cited, {len(ELSEWHERE)} elsewhere, "
          f"{len(missing)} missing", file=sys.stderr)  # fmt: skip
    return bool(missing)


if __name__ == "__main__":
    raise SystemExit(main())
