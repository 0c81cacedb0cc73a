"""Deep exploration of small worlds: python -m planner.testing [--states N] [--world NAME]."""

import argparse
import json

from planner.testing.drive import Driver, populated
from planner.testing.explorer import explore
from planner.testing.worlds import ATOMIC, TINY, TWO_POOLS

WORLDS = {"tiny": TINY, "atomic": ATOMIC, "two_pools": TWO_POOLS}


def main() -> None:
    """Explore every world from the empty and from the populated state; print one line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--states", type=int, default=1_000_000, help="distinct states per search")
    parser.add_argument("--world", choices=WORLDS, action="append", help="default: all")
    args = parser.parse_args()
    for name in args.world or WORLDS:
        for start in (Driver(WORLDS[name].layout), populated(WORLDS[name])):
            found = explore(WORLDS[name], args.states, start=(start.state, start.shadow))
            print(
                json.dumps(
                    {
                        "world": name,
                        "from": "populated" if len(start.state.checkpoints) else "empty",
                        "states": found.states,
                        "depth": found.depth,
                        "edges": found.edges,
                        "overlapping": found.overlapping,
                        "complete": found.complete,
                    }
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
