"""Predicted cycles: a kernel is executed once on the virtual GPU, and what it did is replayed in a model of an SM.

    with fa4.vgpu.attach("sm_100a") as gpu:
        gpu.observer = recorder = Recorder()
        ...                                              # compile and call a CuTe-DSL function
    trace = recorder.traces[-1]
    schedule = sass_schedule(trace)                      # the order that ptxas chose; ptx_schedule(trace) needs no machine code
    report = replay(trace, schedule, preset("sm_100a"))  # cycles, what was busy, who waited where

``fa4 model`` does this for attention, extrapolates to whole problems, and gives intervals over an ensemble of machines. What to believe
of it is said in docs/performance-model.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fa4.perfmodel.compare import Interval, ratio, verdict
    from fa4.perfmodel.extrapolate import Sample, TileCost, fit, makespan
    from fa4.perfmodel.list_schedule import ptx_schedule
    from fa4.perfmodel.machine import Machine, Parameter, ensemble, preset
    from fa4.perfmodel.machine_schedule import sass_schedule
    from fa4.perfmodel.prediction import Prediction, predict
    from fa4.perfmodel.recording import Recording, Request, record
    from fa4.perfmodel.report import Report
    from fa4.perfmodel.schedule import Schedule
    from fa4.perfmodel.simulation import replay
    from fa4.perfmodel.timeline import write_timeline
    from fa4.perfmodel.trace import Recorder, Trace

_HOME = {
    "compare": "Interval ratio verdict",
    "extrapolate": "Sample TileCost fit makespan",
    "machine": "Machine Parameter ensemble preset",
    "list_schedule": "ptx_schedule",
    "machine_schedule": "sass_schedule",
    "prediction": "Prediction predict",
    "recording": "Recording Request record",
    "report": "Report",
    "schedule": "Schedule",
    "simulation": "replay",
    "timeline": "write_timeline",
    "trace": "Recorder Trace",
}
_MODULES = {name: module for module, names in _HOME.items() for name in names.split()}

__all__ = [
    "Interval",
    "Machine",
    "Parameter",
    "Prediction",
    "Recorder",
    "Recording",
    "Report",
    "Request",
    "Sample",
    "Schedule",
    "TileCost",
    "Trace",
    "ensemble",
    "fit",
    "makespan",
    "predict",
    "preset",
    "ptx_schedule",
    "ratio",
    "record",
    "replay",
    "sass_schedule",
    "verdict",
    "write_timeline",
]


def __getattr__(name: str) -> Any:
    """Names are imported on first use: some need torch."""
    if name not in _MODULES:
        raise AttributeError(f"module 'fa4.perfmodel' has no attribute {name!r}")
    return getattr(import_module(f"fa4.perfmodel.{_MODULES[name]}"), name)
