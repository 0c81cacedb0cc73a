"""The logical half of the planner: requests, catalog, scheduler, and `advance`, over the physical core."""

from planner.world.checks import check_world
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
from planner.world.step import CapacityContractError, World
from planner.world.world import advance, new_world

__all__ = [
    "Admitted",
    "CacheCleared",
    "Cancelled",
    "CapacityContractError",
    "Command",
    "CostModel",
    "DecodeRow",
    "Ended",
    "Event",
    "Note",
    "Paused",
    "PublishTable",
    "Resumed",
    "RowResult",
    "RunDecode",
    "RunPrefill",
    "RunTransfer",
    "Submitted",
    "Tick",
    "TransferCost",
    "TransferFinished",
    "UnitFinished",
    "World",
    "WorldConfig",
    "advance",
    "check_world",
    "new_world",
]
