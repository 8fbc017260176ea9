"""Frozen kernel configurations, and what they cost in shared memory as pure functions.

Importing this module loads neither torch nor cutlass: whether a request fits is answered without a compiler.
"""

from __future__ import annotations

from dataclasses import dataclass

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
        for name, (ok, rule, remedy) in rules.items():
            if not ok:
                raise ArgumentError(name, getattr(self, name), rule, remedy)


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

    Pairs, since sm_100a has multiply-adds on two numbers at once. ``degree`` is that of the polynomial, see ``fa4.emulate_exp``.

    Raises:
        ArgumentError: a number out of range.
    """

    emulated: int = 0
    period: int = 16
    degree: int = 3

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.period < 1:
            raise ArgumentError("period", self.period, "must be at least 1", "use 16")
        if not 0 <= self.emulated <= self.period:
            raise ArgumentError("emulated", self.emulated, f"must be from 0 to period, {self.period}", "use 0 to emulate nothing")
        if not 1 <= self.degree <= 6:
            raise ArgumentError("degree", self.degree, "there are polynomials of degree 1 to 6", "use 3")

    @property
    def share(self) -> float:
        """Emulated share, 0 to 1."""
        return self.emulated / self.period

    def emulates(self, pair: int) -> bool:
        """Whether the pair of columns with this index, from 0, is emulated."""
        return (pair + 1) * self.emulated // self.period > pair * self.emulated // self.period


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
    ring; ``registers`` per thread of the softmax, correction and other warps. A row's reference moves when a score exceeds it by more than
    ``rescale_threshold`` (log2 units; 0: at every growth). ``rescale`` says how O follows: "branch" skips the multiplication where no row
    of a warp moved, "select" multiplies by 1 there, without a vote or a branch. With ``o_over_q`` O leaves through the shared memory of Q.
    ``exp2`` says which exponentials go to the multiply-add units. ``order`` is one of ``fa4.schedule.ORDERS``; in the persistent one
    ``ctas`` CTAs share the tiles. Heads whose K and V fit ``l2_budget`` bytes take turns.

    With ``cta_pair`` two CTAs of a cluster multiply together (PTX ISA, ``cta_group::2``): each has ``q_tiles`` query tiles of its own, and
    half of every K tile's keys and of every V tile's columns, which the tensor cores of both read.

    With ``pack_heads`` above 1, a power of two, the rows of a tile are pairs of a position and one of the query heads that share a key
    head, heads fastest: 128 / pack_heads positions. A group has at most that many heads; places of fewer heads are empty.
    """

    stages: int
    q_tiles: int = 2
    tile_n: int = 128
    registers: tuple[int, int, int] = (192, 80, 48)
    rescale_threshold: float = 8.0
    rescale: str = "branch"
    o_over_q: bool = False
    exp2: Exp2Policy = Exp2Policy()
    order: str = "single"
    ctas: int = 148
    l2_budget: int = 63 << 20
    cta_pair: bool = False
    pack_heads: int = 1

    def __post_init__(self) -> None:
        """Refuse what the hardware cannot do."""
        softmax, correction, other = self.registers
        used = WARP * 4 * (2 * softmax + correction + other)
        rules = {
            "stages": (self.stages >= 2, "K and V of a tile are in the ring at once", "use 2 or more"),
            "q_tiles": (self.q_tiles in (1, 2), "tensor memory holds S and O of at most two tiles", "use 1 or 2"),
            "tile_n": (self.tile_n == 128, "P is stored in quarters of 32 keys", "use 128"),
            "registers": (
                used <= 65536 and all(count % 8 == 0 and 24 <= count <= 256 for count in self.registers),
                f"128 x (2 x {softmax} + {correction} + {other}) = {used} of 65536, each a multiple of 8 from 24 to 256",
                "for example (192, 80, 48)",
            ),
            "pack_heads": (self.pack_heads in PACKS, "whole positions fill a tile of 128 rows", f"use one of {PACKS}"),
            "ctas": (self.ctas >= 1 and self.ctas % self.cluster == 0, "a grid is whole clusters", f"use a multiple of {self.cluster}"),
            "rescale_threshold": (0 <= self.rescale_threshold <= 8, "P must stay small in 16 bits", "use 0 to 8"),
            "rescale": (self.rescale in RESCALES, f"must be one of {', '.join(RESCALES)}", "use branch"),
        }
        for name, (ok, rule, remedy) in rules.items():
            if not ok:
                raise ArgumentError(name, getattr(self, name), rule, remedy)

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
    size = rest + ELEMENT_BYTES * (rows * (max(d, dv) if config.o_over_q else d) + config.stages * keys * max(d, dv) + output)
    arithmetic = (
        f"{rest} + (Q {rows} x {d} + {config.stages} stages x {keys} x {max(d, dv)} + O {output // dv} x {dv}) x {ELEMENT_BYTES} "
        f"= {size} bytes"
    )
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
