"""The machine of the model: every number with its unit, where it comes from, and how far off it may be.

A number is measured or published, or a guess; a guess says so. Wide ranges are the honest ones: conclusions are drawn over an ensemble of
machines (``Machine.sample``), and only where they agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any

from fa4.arch import Arch, Quantity, get_arch
from fa4.errors import ModelError


@dataclass(frozen=True)
class Parameter:
    """A value in ``unit``, its source, and the range in which it plausibly lies."""

    value: float
    unit: str
    source: str
    low: float
    high: float

    def __post_init__(self) -> None:
        """Check the range."""
        if not 0 <= self.low <= self.value <= self.high:
            raise ModelError("parameter", (self.low, self.value, self.high), "must be low <= value <= high, none negative", "order them")


def fixed(value: float, unit: str, source: str) -> Parameter:
    """A number that is not in doubt."""
    return Parameter(value, unit, source, value, value)


def _of(quantity: Quantity, low: float | None = None, high: float | None = None) -> Parameter:
    """A number of ``fa4.arch``."""
    value = quantity.value
    return Parameter(value, quantity.unit, quantity.source, value if low is None else low, value if high is None else high)


_STALLS = "stall counts that ptxas puts between such instructions"
_GUESS = "guess"
_CLOCKS = "clock"
_PER_WARP = "clock/warp instruction/sub-partition"


def _guess(value: float, low: float, high: float, unit: str = _CLOCKS, source: str = _GUESS) -> Parameter:
    return Parameter(value, unit, source, low, high)


@dataclass(frozen=True)
class Machine:
    """One GPU. None: the architecture has no such unit; a kernel that needs it is refused.

    Pipes of a sub-partition, each with the clocks that a warp instruction holds it: ``fma`` (one result a lane), ``fma2`` (two, and
    integer multiplication), ``alu`` (integer, logic, compare, select), ``mufu``, ``convert`` (to 16 bits), ``uniform``, ``lsu``.
    Latencies from issue to result: ``*_latency``. Shared memory has one port for everybody, ``smem`` bytes a clock; a local load or store
    of a warp takes ``local_port`` clocks of it. ``tcgen05``, ``wgmma`` and ``mma`` are FLOP per clock and SM at 16-bit operands.
    """

    arch: str
    sms: Parameter
    clock: Parameter
    dram: Parameter
    launch: Parameter
    fma: Parameter
    mufu: Parameter
    smem: Parameter
    fma2: Parameter
    alu: Parameter
    convert: Parameter
    uniform: Parameter
    lsu: Parameter
    branch: Parameter
    fma_latency: Parameter
    alu_latency: Parameter
    mufu_latency: Parameter
    uniform_latency: Parameter
    constant_latency: Parameter
    lds_latency: Parameter
    local_port: Parameter
    local_latency: Parameter
    global_latency: Parameter
    fence: Parameter
    try_wait: Parameter
    arrive: Parameter
    wake: Parameter
    barrier: Parameter
    jitter: Parameter
    mma_latency: Parameter
    copy: Parameter
    tcgen05: Parameter | None = None
    tcgen05_done: Parameter | None = None
    tmem_load: Parameter | None = None
    tmem_load_latency: Parameter | None = None
    tmem_store: Parameter | None = None
    tmem_store_latency: Parameter | None = None
    wgmma: Parameter | None = None
    wgmma_latency: Parameter | None = None
    mma: Parameter | None = None
    tma: Parameter | None = None
    tma_latency: Parameter | None = None
    tma_store_latency: Parameter | None = None
    dsmem: Parameter | None = None

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Every number by name."""
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Parameter):
                yield f.name, value

    def need(self, name: str, why: str) -> float:
        """The value of a number that a kernel needs.

        Raises:
            ModelError: this machine has none.
        """
        value: Parameter | None = getattr(self, name)
        if value is None:
            raise ModelError("machine", self.arch, f"has no {name!r}, which {why} needs", "use the preset of the kernel's architecture")
        return value.value

    def sample(self, rng: Random) -> Machine:
        """A machine with every number drawn from its range: evenly in the logarithm, on each side of the value with equal chance."""
        drawn: dict[str, Any] = {}
        for name, p in self.parameters():
            if p.low == p.high:
                continue
            below, share = rng.random() < 0.5, rng.random()
            end = p.low if below else p.high
            drawn[name] = replace(p, value=p.value * (end / p.value) ** share)
        return replace(self, **drawn)

    def changed(self, **values: float) -> Machine:
        """Another machine with some numbers set, for questions of the form "what if".

        Raises:
            ModelError: no such number.
        """
        known = dict(self.parameters())
        for name in values:
            if name not in known:
                raise ModelError("machine", name, f"is no number of {self.arch}", f"use one of {', '.join(known)}")
        new = {
            name: replace(known[name], value=value, low=min(known[name].low, value), high=max(known[name].high, value))
            for name, value in values.items()
        }
        return replace(self, **new)  # type: ignore[arg-type]  # names are those of parameters


_GENERAL: dict[str, Any] = {
    "fma2": fixed(2, _PER_WARP, _STALLS),
    "alu": fixed(2, _PER_WARP, f"16 lanes; {_STALLS}"),
    "convert": _guess(2, 1, 2, _PER_WARP, f"{_STALLS}; issued one clock after FFMA2, so another pipe than that"),
    "uniform": _guess(1, 1, 2, _PER_WARP),
    "lsu": _guess(1, 1, 4, _PER_WARP),
    "branch": _guess(6, 2, 12),
    "fma_latency": _guess(4, 4, 5, source=_STALLS),
    "alu_latency": _guess(5, 4, 6, source=_STALLS),
    "mufu_latency": _guess(22, 14, 40, source="guess; decisive for the order that ptxas chose"),
    "uniform_latency": _guess(8, 5, 12, source=_STALLS),
    "constant_latency": _guess(30, 15, 60),
    "lds_latency": _guess(28, 22, 34, source="public microbenchmarks of Ampere to Hopper: 22 to 33"),
    "local_port": _guess(4, 1, 6, "clock of the shared-memory port", "hypothesis, from one published measurement of spills"),
    "local_latency": _guess(34, 30, 45, source="as a hit in L1"),
    "global_latency": _guess(600, 300, 900),
    "fence": _guess(20, 10, 40),
    "try_wait": _guess(20, 10, 35),
    "arrive": _guess(12, 6, 24),
    "wake": _guess(24, 12, 50),
    "barrier": _guess(24, 16, 36),
    "jitter": fixed(0.15, "share of a latency", "breaks phase locking, which hardware does not show"),
    "mma_latency": _guess(33, 24, 36, source="public microbenchmarks of Ampere"),
    "copy": _guess(64, 48, 80, "byte/clock/SM", "public microbenchmarks: L2 to one SM"),
}
"""What is taken to be alike on every architecture."""


def _common(arch: Arch) -> dict[str, Any]:
    lanes = arch.fp32_fma.value / 4
    share = arch.dram_bandwidth.value
    return {
        **_GENERAL,
        "arch": arch.name,
        "sms": _of(arch.sm_count),
        "clock": _of(arch.boost_clock),
        "dram": Parameter(0.875 * share, "byte/s", f"{arch.dram_bandwidth.source}; 7/8 of it", 0.75 * share, 0.95 * share),
        "launch": _guess(800, 400, 1500),
        "fma": fixed(32 / lanes, _PER_WARP, arch.fp32_fma.source),
        "mufu": fixed(128 / arch.exp2.value, _PER_WARP, f"{arch.exp2.source}; {_STALLS}"),
        "smem": _of(arch.smem_bandwidth, arch.smem_bandwidth.value * 0.875, arch.smem_bandwidth.value * 1.25),
        "mma": _of(arch.bf16_flop) if arch.family == "ampere" else fixed(1024, "FLOP/clock/SM", "as A100"),
    }


_TMA: dict[str, Any] = {
    "tma": _guess(64, 48, 96, "byte/clock/SM", "guess: as other traffic from L2"),
    "tma_latency": _guess(700, 500, 1000, source="guess around the latency of L2"),
    "tma_store_latency": _guess(700, 400, 1000),
    "dsmem": _guess(250, 180, 400, source="public microbenchmarks of Hopper: 180 to 250"),
}


def _ampere(name: str) -> Machine:
    return Machine(**_common(get_arch(name)))


def _hopper(name: str) -> Machine:
    arch = get_arch(name)
    return Machine(**_common(arch), **_TMA, wgmma=_of(arch.bf16_flop), wgmma_latency=_guess(30, 15, 60))


def _blackwell(name: str) -> Machine:
    arch = get_arch(name)
    rate = "byte/clock/sub-partition"
    return Machine(
        **_common(arch),
        **_TMA,
        tcgen05=_of(arch.bf16_flop),
        tcgen05_done=_guess(60, 30, 140, source="guess: from the end of a product to the mbarrier"),
        tmem_load=_guess(128, 64, 128, rate, "guess; arXiv 2512.02189 has another figure"),
        tmem_load_latency=_guess(40, 20, 100),
        tmem_store=_guess(128, 64, 128, rate),
        tmem_store_latency=_guess(20, 10, 60),
    )


_PRESETS = {"sm_80": _ampere, "sm_86": _ampere, "sm_89": _ampere, "sm_90a": _hopper, "sm_100a": _blackwell, "sm_103a": _blackwell}


def preset(arch: str) -> Machine:
    """The machine of a compile target.

    Raises:
        ModelError: there is none.
    """
    if arch not in _PRESETS:
        raise ModelError("arch", arch, "has no machine model", f"use one of {', '.join(_PRESETS)}")
    return _PRESETS[arch](arch)


def ensemble(machine: Machine, count: int, seed: int = 0) -> list[Machine]:
    """``count`` machines: the given one, then samples."""
    rng = Random(seed)
    return [machine, *(machine.sample(rng) for _ in range(count - 1))]
