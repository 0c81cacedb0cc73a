"""The logical half of the planner: requests, catalog, scheduler, and `advance`, over the physical core."""

from planner.world.checks import check_world
from planner.world.codec import JournalError
from planner.world.commands import (
    Admitted,
    Command,
    DecodeRow,
    Ended,
    Note,
    Paused,
    PublishTable,
    Resumed,
    RunDecode,
    RunPrefill,
    RunTransfer,
)
from planner.world.config import CostModel, TransferCost, WorldConfig
from planner.world.events import (
    CacheCleared,
    Cancelled,
    Event,
    RowResult,
    Submitted,
    Tick,
    TransferFinished,
    UnitFinished,
)
from planner.world.explain import Line, explain
from planner.world.journal import Difference, Entry, Journal, Record, ReplayResult, read, replay
from planner.world.simulate import Percentiles, Report, SimulationCost, simulate
from planner.world.step import CapacityContractError, World
from planner.world.trace import TraceError, TraceRequest, load_trace, parse_trace
from planner.world.world import advance, new_world

__all__ = [
    "Admitted",
    "CacheCleared",
    "Cancelled",
    "CapacityContractError",
    "Command",
    "CostModel",
    "DecodeRow",
    "Difference",
    "Ended",
    "Entry",
    "Event",
    "Journal",
    "JournalError",
    "Line",
    "Note",
    "Paused",
    "Percentiles",
    "PublishTable",
    "Record",
    "ReplayResult",
    "Report",
    "Resumed",
    "RowResult",
    "RunDecode",
    "RunPrefill",
    "RunTransfer",
    "SimulationCost",
    "Submitted",
    "Tick",
    "TraceError",
    "TraceRequest",
    "TransferCost",
    "TransferFinished",
    "UnitFinished",
    "World",
    "WorldConfig",
    "advance",
    "check_world",
    "explain",
    "load_trace",
    "new_world",
    "parse_trace",
    "read",
    "replay",
    "simulate",
]
