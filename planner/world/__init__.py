"""The logical half of the planner: requests, catalog, scheduler, and `advance`, over the physical core."""

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

__all__ = [
    "Admitted",
    "CacheCleared",
    "Cancelled",
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
    "WorldConfig",
]
