"""Frozen kernel configurations, and what they cost in shared memory as pure functions.

Importing this module loads neither torch nor cutlass: whether a request fits is answered without a compiler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fa4.arch import Arch, get_arch
from fa4.errors import ArgumentError, UnsupportedError

ELEMENT_BYTES = 2
WARP = 32


def padded_head_dim(head_dim: int) -> int:
    """Columns that a head dim takes in shared memory: whole k16 steps of mma.sync, which are also whole ldmatrix x4 loads."""
    return -(-head_dim // 16) * 16


def swizzle_columns(columns: int) -> int:
    """Columns of the swizzle atom of a row of ``columns``, a multiple of 16: the widest of 64, 32 and 16 that divides it.

    Eight rows of an atom of 128, 64 or 32 bytes, swizzled, lie in different banks for the eight row reads of one ldmatrix.
    """
    return next(width for width in (64, 32, 16) if columns % width == 0)


Rule = tuple[bool, str, str]
"""Whether a value keeps a rule, the rule, and what would."""


def _check_rules(config: object, rules: dict[str, Rule]) -> None:
    for name, (ok, rule, remedy) in rules.items():
        if not ok:
            raise ArgumentError(name, getattr(config, name), rule, remedy)


def _register_rule(registers: tuple[int, int, int], remedy: str, firsts: int = 2) -> Rule:
    """Four warpgroups share the registers of an SM: ``firsts`` of the first role, one of the second, the rest of others."""
    first, second, other = registers
    used = 4 * WARP * (firsts * first + second + (3 - firsts) * other)
    others = f"{other}" if firsts == 2 else f"2 x {other}"
    rule = f"128 x ({firsts} x {first} + {second} + {others}) = {used} of 65536, each a multiple of 8 from 24 to 256"
    return used <= 65536 and all(count % 8 == 0 and 24 <= count <= 256 for count in registers), rule, remedy


@dataclass(frozen=True)
class AmpereForwardConfig:
    """Tiles of the Ampere forward kernel.

    ``tile_m`` queries and ``tile_n`` keys per tile; ``stages`` tiles of K and V in the ring; ``threads`` per block, whose warps share the
    queries. With one stage the loads of K and V take turns: V arrives during S = Q K^T, the next K during the softmax and O += P V.
    """

    tile_m: int
    tile_n: int
    stages: int
    threads: int

    def __post_init__(self) -> None:
        """Refuse tiles that the instructions cannot cover."""
        rules = {
            "threads": (
                self.threads in (64, 128, 256, 512),
                "8 rows of 8 chunks are copied at once, and warps halve tiles",
                "use 64 to 512",
            ),
            "tile_m": (
                self.tile_m > 0 and self.tile_m % (self.threads // WARP * 16) == 0,
                "every warp takes m16 blocks of queries",
                f"use a multiple of {self.threads // WARP * 16}",
            ),
            "tile_n": (self.tile_n > 0 and self.tile_n % 16 == 0, "P V takes k16 blocks of keys", "use a multiple of 16"),
            "stages": (self.stages >= 1, "the ring holds at least one tile", "use 1 or more"),
        }
        _check_rules(self, rules)


@dataclass(frozen=True)
class SharedMemory:
    """Bytes of shared memory and the arithmetic they come from."""

    size: int
    arithmetic: str


def ampere_forward_shared_memory(config: AmpereForwardConfig, head_dim: int, head_dim_v: int) -> SharedMemory:
    """Shared memory of one block: Q, the ring of K and V, and later O, which reuses all of it."""
    d, dv = padded_head_dim(head_dim), padded_head_dim(head_dim_v)
    m, n, stages = config.tile_m, config.tile_n, config.stages
    inputs = ELEMENT_BYTES * (m * d + stages * n * (d + dv))
    output = ELEMENT_BYTES * m * dv
    arithmetic = (
        f"max(Q {m} x {d} + {stages} stages x {n} x (K {d} + V {dv}), O {m} x {dv}) x {ELEMENT_BYTES} bytes "
        f"= max({inputs}, {output}) = {max(inputs, output)} bytes"
    )
    return SharedMemory(max(inputs, output), arithmetic)


def check_ampere_forward(config: AmpereForwardConfig, head_dim: int, head_dim_v: int, arch: Arch) -> None:
    """Raise UnsupportedError, with the arithmetic, where a block does not fit the shared memory of ``arch``."""
    need = ampere_forward_shared_memory(config, head_dim, head_dim_v)
    limit = int(arch.smem_per_block)
    if need.size > limit:
        raise UnsupportedError(
            "config", config, f"{need.arithmetic}, but {arch.name} has {limit} per block", "use smaller tiles or fewer stages"
        )


@dataclass(frozen=True)
class Exp2Policy:
    """Which part of a row's exponentials is emulated: ``emulated`` of every ``period`` pairs of columns, evenly spread.

    Pairs, since sm_100a has multiply-adds on two numbers at once. ``degree`` is that of the polynomial, see ``fa4.emulate_exp``. None of
    the first ``after`` pairs of a period is emulated.

    Raises:
        ArgumentError: a number out of range.
    """

    emulated: int = 0
    period: int = 16
    degree: int = 3
    after: int = 0

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.period < 1:
            raise ArgumentError("period", self.period, "must be at least 1", "use 16")
        if not 0 <= self.after < self.period:
            raise ArgumentError("after", self.after, f"must be from 0 to below period, {self.period}", "use 0 to begin with the first pair")
        most = self.period - self.after
        if not 0 <= self.emulated <= most:
            raise ArgumentError("emulated", self.emulated, f"must be from 0 to period - after, {most}", "use 0 to emulate nothing")
        if not 1 <= self.degree <= 6:
            raise ArgumentError("degree", self.degree, "there are polynomials of degree 1 to 6", "use 3")

    @property
    def share(self) -> float:
        """Emulated share, 0 to 1."""
        return self.emulated / self.period

    def emulates(self, pair: int) -> bool:
        """Whether the pair of columns with this index, from 0, is emulated."""
        number, rest = pair % self.period - self.after, self.period - self.after
        return number >= 0 and (number + 1) * self.emulated // rest > number * self.emulated // rest


ROW_TILE = 128
"""Rows in a block of the kernels before and after a backward; what they prepare and read is padded to a multiple of it."""


def _check_row_threads(threads: int) -> None:
    if threads not in (64, 128, 256, 512, 1024):
        raise ArgumentError("threads", threads, "8 lanes a row cover 128 rows in whole passes", "use 64 to 1024")


@dataclass(frozen=True)
class PreprocessConfig:
    """The kernel before a backward: ``threads`` per block, and whether lse has a gradient."""

    dlse: bool = False
    threads: int = 256

    def __post_init__(self) -> None:
        """Refuse threads that do not cover the rows."""
        _check_row_threads(self.threads)


@dataclass(frozen=True)
class PostprocessConfig:
    """The kernel after a backward: ``threads`` per block."""

    threads: int = 256

    def __post_init__(self) -> None:
        """Refuse threads that do not cover the rows."""
        _check_row_threads(self.threads)


STAY = ("persistent", "dynamic")
"""Those of ``fa4.schedule.ORDERS`` in which a CTA computes several tiles."""
PAIR_COLUMNS = 32
"""N of ``tcgen05.mma`` with ``cta_group::2`` and M = 256 is a multiple of this (PTX ISA, "Matrix shape")."""
TMEM_COLUMNS = 512
TMEM_LANES = 128
RESCALES = ("branch", "select")
PACKS = tuple(1 << i for i in range(8))
"""How many heads may share the rows of a tile."""


@dataclass(frozen=True)
class BlackwellForwardConfig:
    """Tiles and budgets of the Blackwell forward kernel.

    ``q_tiles`` tiles of 128 queries per CTA take turns on the tensor cores; ``tile_n`` keys per tile; ``stages`` tiles of K or V in the
    ring; ``registers`` per thread of the softmax, correction and other warps, among them those that a single query tile leaves idle. A
    row's reference moves when a score exceeds it by more than ``rescale_threshold`` (log2 units; 0: at every growth). ``rescale`` says
    how O follows: "branch" skips the multiplication where no row of a warp moved, "select" multiplies by 1 there, without a vote or a
    branch. O += P V begins when P of ``early_keys`` of the keys is there. With ``o_over_q`` O leaves through the shared memory of Q.
    ``exp2`` says which exponentials go to the multiply-add units. ``order`` is one of ``fa4.schedule.ORDERS``; in the persistent one
    ``ctas`` CTAs share the tiles, in the dynamic one as many as there is room for. Heads whose K and V fit ``l2_budget`` bytes take turns.

    With ``cta_pair`` two CTAs of a cluster multiply together (PTX ISA, ``cta_group::2``): each has ``q_tiles`` query tiles of its own, and
    half of every K tile's keys and of every V tile's columns, which the tensor cores of both read.

    With ``v_apart`` the ring has two slots for K and one, of its size, for V, instead of ``stages`` for both.

    With ``pack_heads`` above 1, a power of two, the rows of a tile are pairs of a position and one of the query heads that share a key
    head, heads fastest: 128 / pack_heads positions. A group has at most that many heads; places of fewer heads are empty.
    """

    stages: int
    q_tiles: int = 2
    tile_n: int = 128
    registers: tuple[int, int, int] = (192, 80, 48)
    rescale_threshold: float = 8.0
    rescale: str = "branch"
    early_keys: int = 96
    o_over_q: bool = False
    exp2: Exp2Policy = Exp2Policy()
    order: str = "single"
    ctas: int = 148
    l2_budget: int = 63 << 20
    cta_pair: bool = False
    pack_heads: int = 1
    v_apart: bool = False

    def __post_init__(self) -> None:
        """Refuse what the hardware cannot do."""
        rules = {
            "stages": (self.stages >= 2, "K and V of a tile are in the ring at once", "use 2 or more"),
            "q_tiles": (self.q_tiles in (1, 2), "tensor memory holds S and O of at most two tiles", "use 1 or 2"),
            "tile_n": (self.tile_n == 128, "P is stored in quarters of 32 keys", "use 128"),
            "early_keys": (self.early_keys in (32, 64, 96), "P is stored in quarters of 32 keys", "use 32, 64 or 96"),
            "registers": _register_rule(self.registers, "for example (192, 80, 48)", self.q_tiles),
            "pack_heads": (self.pack_heads in PACKS, "whole positions fill a tile of 128 rows", f"use one of {PACKS}"),
            "v_apart": (not self.v_apart or (self.stages == 3 and not self.cta_pair), "K has two slots and V one", "use stages=3, no pair"),
            "ctas": (self.ctas >= 1 and self.ctas % self.cluster == 0, "a grid is whole clusters", f"use a multiple of {self.cluster}"),
            "rescale_threshold": (0 <= self.rescale_threshold <= 8, "P must stay small in 16 bits", "use 0 to 8"),
            "rescale": (self.rescale in RESCALES, f"must be one of {', '.join(RESCALES)}", "use branch"),
        }
        _check_rules(self, rules)

    @property
    def cluster(self) -> int:
        """CTAs that multiply together."""
        return 2 if self.cta_pair else 1

    @property
    def positions(self) -> int:
        """Query positions of a query tile."""
        return TMEM_LANES // self.pack_heads


@dataclass(frozen=True)
class Columns:
    """First columns in tensor memory of S (and P, in the same place) and of O, by query tile; ``end`` is one past the last."""

    S: tuple[int, ...]
    O: tuple[int, ...]  # noqa: E741  # the paper's name
    end: int
    arithmetic: str


def blackwell_columns(config: BlackwellForwardConfig, head_dim_v: int) -> Columns:
    """The map of tensor memory."""
    tiles, n, dv = config.q_tiles, config.tile_n, padded_head_dim(head_dim_v)
    end = tiles * (n + dv)
    arithmetic = f"{tiles} x (S {n} + O {dv}) = {end} columns of tensor memory"
    return Columns(tuple(i * n for i in range(tiles)), tuple(tiles * n + i * dv for i in range(tiles)), end, arithmetic)


def blackwell_forward_shared_memory(config: BlackwellForwardConfig, head_dim: int, head_dim_v: int) -> SharedMemory:
    """Shared memory of one CTA: barriers (1 KB), row statistics, Q, the ring of K and V (of a pair each has half a tile), and O."""
    d, dv, rows = padded_head_dim(head_dim), padded_head_dim(head_dim_v), config.q_tiles * TMEM_LANES
    output = 0 if config.o_over_q else rows * dv
    keys, rest = config.tile_n // config.cluster, 1024 * (1 + config.q_tiles)
    ring, ring_text = config.stages * keys * max(d, dv), f"{config.stages} stages x {keys} x {max(d, dv)}"
    if config.v_apart:
        ring, ring_text = 2 * keys * max(d, dv) + keys * dv, f"2 K x {keys} x {max(d, dv)} + V {keys} x {dv}"
    size = rest + ELEMENT_BYTES * (rows * (max(d, dv) if config.o_over_q else d) + ring + output)
    arithmetic = f"{rest} + (Q {rows} x {d} + {ring_text} + O {output // dv} x {dv}) x {ELEMENT_BYTES} = {size} bytes"
    return SharedMemory(size, arithmetic)


def check_blackwell_forward(config: BlackwellForwardConfig, head_dim: int, head_dim_v: int) -> None:
    """Raise UnsupportedError, with the arithmetic, where head dims do not fit a configuration."""
    columns = blackwell_columns(config, head_dim_v)
    need = blackwell_forward_shared_memory(config, head_dim, head_dim_v)
    limit = int(get_arch("sm_100a").smem_per_block)
    problems = {
        f"head_dim_v {head_dim_v} needs {columns.arithmetic}, which has {TMEM_COLUMNS}": columns.end > TMEM_COLUMNS,
        f"head_dim {head_dim} needs {need.arithmetic} of shared memory, of {limit}": need.size > limit,
        f"head_dim_v {head_dim_v} takes {padded_head_dim(head_dim_v)} columns, and a pair's product has a multiple of {PAIR_COLUMNS}": (
            config.cta_pair and padded_head_dim(head_dim_v) % PAIR_COLUMNS != 0
        ),
    }
    for reason, wrong in problems.items():
        if wrong:
            raise UnsupportedError("config", config, reason, "use fewer stages, o_over_q, or no pair")


# What needs least. Made here, once: torch.compile, which traces the question below, cannot make them.
_TWO_STAGES = BlackwellForwardConfig(stages=2)
_TWO_STAGES_O_OVER_Q = BlackwellForwardConfig(stages=2, o_over_q=True)


def blackwell_forward_refusal(head_dim: int, head_dim_v: int) -> str | None:
    """Why the Blackwell forward kernel does not serve these head dims, with the arithmetic; None where it does."""
    columns = blackwell_columns(_TWO_STAGES, head_dim_v)
    if columns.end > TMEM_COLUMNS:
        return f"head_dim_v {head_dim_v} needs {columns.arithmetic}, which has {TMEM_COLUMNS}"
    need = blackwell_forward_shared_memory(_TWO_STAGES_O_OVER_Q, head_dim, head_dim_v)
    limit = int(get_arch("sm_100a").smem_per_block)
    return f"head_dim {head_dim} needs {need.arithmetic} of shared memory, of {limit}" if need.size > limit else None


@dataclass(frozen=True)
class Needed:
    """Which gradients somebody wants; work for the others is left out."""

    dq: bool = True
    dk: bool = True
    dv: bool = True

    @property
    def scores(self) -> bool:
        """Whether the gradient of the scores is needed, for dq or dk."""
        return self.dq or self.dk

    @property
    def names(self) -> str:
        """Those that are, one after the other."""
        return "".join(name for name in ("dq", "dk", "dv") if getattr(self, name))


@dataclass(frozen=True)
class BlackwellBackwardConfig:
    """Tiles and budgets of the Blackwell backward kernel: a CTA holds 128 keys and goes through tiles of 128 queries.

    ``stages`` tiles of Q are in shared memory at once; ``registers`` per thread of the compute warps, the warps that add dQ, and others.
    ``order`` is one of ``fa4.schedule.ORDERS``, without those in which a CTA computes several tiles. Heads whose Q and dO fit
    ``l2_budget`` bytes take turns.

    With ``cta_pair`` two CTAs of a cluster multiply together (PTX ISA, ``cta_group::2``): each has 128 keys of its own and half of every
    operand that both multiply by, and adds half of each dQ tile, summed over the keys of both. Work for gradients that are not ``needed``
    is left out. ``exp2`` says which part of P is emulated, of a thread's 64 queries.
    """

    stages: int
    registers: tuple[int, int, int] = (144, 152, 72)
    order: str = "single"
    l2_budget: int = 63 << 20
    cta_pair: bool = False
    needed: Needed = Needed()
    exp2: Exp2Policy = Exp2Policy()

    def __post_init__(self) -> None:
        """Refuse what the hardware cannot do."""
        rules = {
            "needed": (self.needed.names != "", "a kernel computes some gradient", "use Needed()"),
            "stages": (self.stages in (1, 2), "S of the next tile is computed before dK of this one, and no more", "use 1 or 2"),
            "cta_pair": (not self.cta_pair or self.stages == 1, "S and dK of a pair have halves of Q of their own", "use stages=1"),
            "registers": _register_rule(self.registers, "for example (144, 152, 72)"),
            "order": (self.order not in STAY, "K and V of a CTA stay where dK and dV leave from", "use 'single', 'lpt' or 'spt'"),
        }
        _check_rules(self, rules)

    @property
    def cluster(self) -> int:
        """CTAs that multiply together."""
        return 2 if self.cta_pair else 1


ROW_SLOTS = 2
"""Query tiles whose lse and delta are in shared memory at once."""


class Strides(NamedTuple):
    """From the first column of the first half of a tile's queries to that of the second one."""

    p: int
    dp: int
    ds: int
    within: int = 32
    """From dP of the first 32 queries of a half to that of the others."""


@dataclass(frozen=True)
class BackwardColumns:
    """First columns in tensor memory of what the backward computes; ``end`` is one past the last.

    Each half of the queries, of which a compute warpgroup has one, has 64 columns of S and 32 of P, and 64 of dP with 32 of dS in them:
    ``second`` says how far from those of the first half. P lies where the warpgroup itself has read S. ``parts``: columns of a CTA's dQ
    that are handed over at a time. ``dq_apart``: dQ keeps clear of dS, so that it is computed before dK.

    ``serial``: there is no room for S, dP and dQ, so that one tile is done with before the next begins. Of dP the first half has columns of
    its own. The other takes those of S between the parts of P, once both warpgroups have read it. Of a pair each CTA has half of the rows
    that dP is multiplied by, so that half of dP is 32 queries of each warpgroup.
    """

    S: int
    dP: int  # noqa: N815  # the paper's names
    dV: int  # noqa: N815
    dK: int  # noqa: N815
    dQ: int  # noqa: N815
    end: int
    arithmetic: str
    second: Strides
    parts: tuple[int, ...]
    serial: bool
    dq_apart: bool


def backward_columns(head_dim: int, head_dim_v: int, cta_pair: bool = False) -> BackwardColumns:
    """The map of tensor memory: dV, dK, then S and dP side by side where that leaves dQ clear of S; dQ at the end, over dP if it must.

    Where it does not (``serial``), dP begins behind S and goes on in it. dQ comes last, from S on: the next S follows its first part.

    A CTA of a pair has half of a dQ tile, folded: half of its columns. They lie in S between the parts of P, or from S on.
    """
    d, dv, tile = padded_head_dim(head_dim), padded_head_dim(head_dim_v), TMEM_LANES
    quarter, S, mine = tile // 4, dv + d, d // 2 if cta_pair else d
    serial = S + 2 * tile > TMEM_COLUMNS or (mine > 2 * quarter if cta_pair else S + tile + d > TMEM_COLUMNS)
    dP, needed = S + tile, max(mine, tile + tile // 2) if serial else 2 * tile
    what = "dQ, or S and half of dP," if serial else "S and dP"
    arithmetic = f"dV {dv} + dK {d} + {what} {needed} = {S + needed} columns of tensor memory"
    if serial and cta_pair:
        second = Strides(3 * quarter, quarter, quarter, -3 * quarter)
        return BackwardColumns(S, dP, 0, dv, S, S + needed, arithmetic, second, (mine,), True, False)
    if serial:
        second, parts = Strides(3 * quarter, -3 * quarter, -3 * quarter), (tile, d - tile) if d > tile else (d,)
        return BackwardColumns(S, dP, 0, dv, S, S + needed, arithmetic, second, parts, True, False)
    if cta_pair:
        dQ, second = S + quarter, Strides(3 * quarter, 2 * quarter, 3 * quarter)
        return BackwardColumns(S, dP, 0, dv, dQ, S + needed, arithmetic, second, (mine,), False, True)
    dQ, second = TMEM_COLUMNS - d, Strides(2 * quarter, 2 * quarter, 2 * quarter)
    return BackwardColumns(S, dP, 0, dv, dQ, S + needed, arithmetic, second, (d,), False, dQ >= dP + 3 * quarter)


def serial_pair(config: BlackwellBackwardConfig, head_dim: int, head_dim_v: int) -> bool:
    """Whether a pair has no room to overlap tiles."""
    return config.cta_pair and backward_columns(head_dim, head_dim_v, True).serial


def backward_chunk(config: BlackwellBackwardConfig, head_dim: int, head_dim_v: int) -> int:
    """Columns of dQ that a warp adds at a time: all of D 64, less where there is no room for so many, least in a pair.

    Where tiles are serial in a pair half of its columns, and one such place.
    """
    d, dv = padded_head_dim(head_dim), padded_head_dim(head_dim_v)
    if serial_pair(config, head_dim, head_dim_v):
        return d // 4
    most = 16 if config.cta_pair else 64 if max(d, dv) <= TMEM_LANES and d == TMEM_LANES // 2 else 32
    return next(n for n in (64, 32, 16) if n <= most and d % n == 0)


def backward_shared_memory(config: BlackwellBackwardConfig, head_dim: int, head_dim_v: int) -> SharedMemory:
    """Shared memory of one CTA: barriers, lse and delta (3 KB), K, V, the tiles of Q, one of dO, dS, and two chunks of dQ.

    Of a pair each CTA has half of the rows of Q and dO, for S and dP, half of their columns, for dK and dV, half of the columns of the K of
    both, for dQ, half of the rows of the dS of both, and what it sends of its own. Where tiles are serial the halves of Q take turns, and
    those of dO, and what it sends lies where dQ is before it is added.
    """
    d, dv, n, chunk = padded_head_dim(head_dim), padded_head_dim(head_dim_v), TMEM_LANES, backward_chunk(config, head_dim, head_dim_v)
    if serial_pair(config, head_dim, head_dim_v):
        staging = max(4 * n * chunk, ELEMENT_BYTES * n * n // 2)
        size = 3072 + ELEMENT_BYTES * n * (d + dv + d // 2 + dv // 2 + n + d) + staging
        text = f"3072 + {n} x (K {d} + V {dv} + Q {d // 2} + dO {dv // 2} + dS {n} + K of both {d}) x {ELEMENT_BYTES} + dQ {staging}"
        return SharedMemory(size, f"{text} = {size} bytes")
    more = d + n // 2 if config.cta_pair else 0
    size = 3072 + ELEMENT_BYTES * n * (d + dv + config.stages * d + dv + n + more) + 2 * 4 * n * chunk
    arithmetic = (
        f"3072 + {n} x (K {d} + V {dv} + {config.stages} stages x Q {d} + dO {dv} + dS {n}"
        f"{f' + K of both {d} + dS to send {n // 2}' if more else ''}) x {ELEMENT_BYTES} + 2 x dQ {n} x {chunk} x 4 = {size} bytes"
    )
    return SharedMemory(size, arithmetic)


def check_blackwell_backward(config: BlackwellBackwardConfig, head_dim: int, head_dim_v: int) -> None:
    """Raise UnsupportedError, with the arithmetic, where head dims do not fit a configuration."""
    columns = backward_columns(head_dim, head_dim_v, config.cta_pair)
    need = backward_shared_memory(config, head_dim, head_dim_v)
    limit = int(get_arch("sm_100a").smem_per_block)
    dims = tuple(map(padded_head_dim, (head_dim, head_dim_v)))
    problems = {
        f"head_dim {head_dim}, head_dim_v {head_dim_v} need {columns.arithmetic}, which has {TMEM_COLUMNS}": columns.end > TMEM_COLUMNS,
        f"head_dim {head_dim} needs {need.arithmetic} of shared memory, of {limit}": need.size > limit,
        f"head_dim {head_dim} leaves no room to overlap tiles; {columns.arithmetic}": columns.serial and config.stages > 1,
        f"head dims {dims} are no multiples of {PAIR_COLUMNS}: a pair has half of the columns": (
            config.cta_pair and any(dim % PAIR_COLUMNS for dim in dims)
        ),
    }
    for reason, wrong in problems.items():
        if wrong:
            raise UnsupportedError("config", config, reason, "use fewer stages, or no pair")


_LEAST_BACKWARD = BlackwellBackwardConfig(stages=1), BlackwellBackwardConfig(stages=2)


def blackwell_backward_refusal(head_dim: int, head_dim_v: int) -> str | None:
    """Why the Blackwell backward kernel does not serve these head dims, with the arithmetic; None where it does."""
    least = _LEAST_BACKWARD[0 if backward_columns(head_dim, head_dim_v).serial else 1]
    try:
        check_blackwell_backward(least, head_dim, head_dim_v)
    except UnsupportedError as error:
        return error.rule
    return None
