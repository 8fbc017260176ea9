"""Tile orders: which tile of an attention a thread block computes, and when; ``docs/schedules.md`` explains them.

Pure Python, as the oracle of the device code in ``fa4.schedule.device``, which needs cutlass.
"""

from fa4.schedule.order import ORDERS, Order, Schedule, default_order, longest_first
from fa4.schedule.simulation import Simulation, list_schedule, simulate, simulate_heads
from fa4.schedule.tiles import Tile, TileProblem

__all__ = [
    "ORDERS",
    "Order",
    "Schedule",
    "Simulation",
    "Tile",
    "TileProblem",
    "default_order",
    "list_schedule",
    "longest_first",
    "simulate",
    "simulate_heads",
]
