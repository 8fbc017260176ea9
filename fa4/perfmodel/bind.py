"""Steps of a schedule with the numbers of a machine: what the loop of the replay works on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fa4.errors import ModelError
from fa4.perfmodel.actions import Actions
from fa4.perfmodel.machine import Machine
from fa4.perfmodel.schedule import PIPES, Schedule, Step

Bound = tuple[Any, ...]
"""(pipe, clocks held, stall, waits, sets, frees, latency, action, number of the step)."""

_REGISTER_BYTES = 128
"""Of a warp."""


def bind(schedule: Schedule, machine: Machine, actions: Actions) -> list[Bound]:
    """Every step of the table.

    Raises:
        ModelError: the machine lacks a unit that a step needs.
    """
    return [_bound(i, step, machine, actions) for i, step in enumerate(schedule.table)]


def _bound(number: int, step: Step, machine: Machine, actions: Actions) -> Bound:
    hold, latency = _hold(step, machine), _latency(step, machine)
    stall = float(step.stall) + (machine.branch.value if step.taken else 0.0)
    return PIPES.index(step.pipe), hold, stall, step.waits, step.sets, step.frees, latency, _action(step, actions), number


def _hold(step: Step, machine: Machine) -> float:
    if step.pipe in ("none", "other"):
        return 1.0
    if step.pipe == "tmem load":
        return step.work * _REGISTER_BYTES / machine.need("tmem_load", "tcgen05.ld")
    if step.pipe == "tmem store":
        return step.work * _REGISTER_BYTES / machine.need("tmem_store", "tcgen05.st")
    if step.pipe == "mma":
        return 4 * step.work / machine.need("mma", "mma.sync")
    value: float = getattr(machine, step.pipe).value
    return value


def _latency(step: Step, machine: Machine) -> float:
    if step.latency == "tmem load":
        return _hold(step, machine) + machine.need("tmem_load_latency", "tcgen05.ld")
    if step.latency == "tmem store":
        return _hold(step, machine) + machine.need("tmem_store_latency", "tcgen05.st")
    if not step.latency:
        return 0.0
    found = getattr(machine, step.latency, None)
    if found is None:
        raise ModelError("machine", machine.arch, f"has no {step.latency!r}, which {step.text or step.pipe} needs", "use another preset")
    value: float = found.value
    return value


def _action(step: Step, actions: Actions) -> Callable[..., float] | None:
    if step.spill:
        return actions.local
    if step.text == "tensor stores":
        return actions.tensor_stores
    if step.pipe == "tmem store":
        return actions.tensor_store
    if step.events:
        return actions.event
    if step.latency == "lds_latency" and step.pipe == "lsu":
        return actions.shared(step.work, True)
    if step.text.startswith("STS"):
        return actions.shared(step.work, False)
    return None
