"""Frozen kernel configurations, and what they cost in shared memory as pure functions.

Importing this module loads neither torch nor cutlass: whether a request fits is answered without a compiler.
"""

from __future__ import annotations

from dataclasses import dataclass

from fa4.arch import Arch
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
