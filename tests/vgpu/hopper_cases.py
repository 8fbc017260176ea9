# ruff: noqa: E501 -- kernels in one line
"""What sm_90a has beyond single instructions of a thread, as small kernels with what must come out, for the virtual GPU and real ones.

A kernel gets three buffers, see ``ptx_text``: ``a`` it reads, ``b`` it writes, ``c`` has a tensor map of ``a`` where the case has one.
Nothing here depends on the order in which anything happens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from ptx_text import kernel

from fa4.vgpu.tensor_map import TensorMap

TARGET = "sm_90a"
WORDS = 1024


@dataclass(frozen=True)
class HopperCase:
    """``expected`` gives the first words of ``b`` from those of ``a``, which ``source`` made; ``map_`` is a tensor map without its address."""

    name: str
    body: str
    expected: Callable[[np.ndarray], np.ndarray]
    threads: int = 32
    ctas: int = 1  # one cluster
    source: Callable[[], np.ndarray] = lambda: np.random.default_rng(0).integers(0, 2**32, WORDS, dtype=np.uint32)
    map_: TensorMap | None = None

    def __str__(self) -> str:
        return self.name

    def ptx(self) -> str:
        """The module."""
        cluster = f".reqnctapercluster {self.ctas}, 1, 1\n{{" if self.ctas > 1 else "{"
        return kernel(self.body, TARGET).replace("{", cluster, 1)

    def arrays(self, address: int) -> list[np.ndarray]:
        """``a``, ``b`` and ``c``, where ``a`` will lie at ``address``."""
        third = np.zeros(WORDS, np.uint32)
        if self.map_ is not None:
            third[:32] = np.frombuffer(replace(self.map_, address=address).encode().ljust(128, b"\0"), np.uint32)
        return [self.source(), np.full(WORDS, 0xFFFFFFFF, np.uint32), third]

    def check(self, arrays: list[np.ndarray]) -> None:
        """What is in the buffers after the launch."""
        expected = np.ascontiguousarray(self.expected(self.source())).view(np.uint32).reshape(-1)
        assert np.array_equal(arrays[1][: expected.size], expected), self.name
        assert (arrays[1][expected.size :] == 0xFFFFFFFF).all(), self.name


def wait(barrier: str = "bar", scope: str = "") -> str:
    """All threads wait for phase 0 of an mbarrier."""
    return f"WAIT:\nmbarrier.try_wait.parity{scope}.shared::cta.b64 %p9, [{barrier}], 0;\n@!%p9 bra WAIT;\n"


BARRIER = ".shared .align 8 .b64 bar;\n.shared .align 1024 .b8 tile[4096];\nmov.u32 %r20, tile;\nmov.u32 %r21, bar;\nshl.b32 %r22, %r0, 2;\nadd.u32 %r23, %r20, %r22;\nsetp.eq.u32 %p1, %r0, 0;\n"
"""%r20 the tile, %r21 the mbarrier, %r23 the thread's word of the tile, %p1 thread 0."""

CLUSTER_SYNC = "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n"
OTHER = "mov.u32 %r30, %cluster_ctarank;\nxor.b32 %r31, %r30, 1;\nmapa.shared::cluster.u32 %r32, %r23, %r31;\nmapa.shared::cluster.u32 %r33, %r21, %r31;\nmapa.shared::cluster.u32 %r34, %r20, %r31;\nmad.wide.u32 %d12, %r30, 128, %d12;\n"
"""The other CTA of the pair: %r32 the thread's word, %r33 the mbarrier, %r34 the tile. Results of a CTA follow those of the first."""


def init(count: int) -> str:
    """Thread 0 makes the mbarrier."""
    return BARRIER + f"@%p1 mbarrier.init.shared::cta.b64 [bar], {count};\n"


FRESH = "fence.mbarrier_init.release.cluster;\nbar.sync 0;\n"
COPY_OUT = "ld.shared.u32 %r40, [%r23];\nst.global.u32 [%d12], %r40;\n"
FILL = "mad.lo.u32 %r1, %r0, 3, 7;\nst.shared.u32 [%r23], %r1;\nfence.proxy.async;\nbar.sync 0;\n"
STORED = "@%p1 cp.async.bulk.commit_group;\n@%p1 cp.async.bulk.wait_group 0;\n"
BULK_STORE = "cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r20], 256;\n"
BULK_ADD = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%d1], [%r20], 256;\n"


def matrix_words() -> np.ndarray:
    """Small integers as float16: A of 64 by 16 and B of 8 by 16, in core matrices of 8 rows of 16 bytes, K fastest, as descriptors say."""
    a, b = factors()
    words = np.zeros(WORDS, np.uint32)
    packed = [x.astype(np.float16).reshape(-1, 8, 2, 8).transpose(0, 2, 1, 3).reshape(-1) for x in (a, b)]
    both = np.concatenate(packed).view(np.uint32)
    words[: both.size] = both
    return words


def factors() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(1)
    return generator.integers(-8, 9, (64, 16)).astype(np.float32), generator.integers(-8, 9, (8, 16)).astype(np.float32)


def product(_: np.ndarray) -> np.ndarray:
    """A B^T, as the accumulators of a warpgroup hold it: 4 words a thread (PTX ISA 9.7.15.5.1.1)."""
    a, b = factors()
    d, out = a @ b.T, np.zeros((128, 4), np.float32)
    for thread in range(128):
        for k in range(4):
            out[thread, k] = d[16 * (thread // 32) + thread % 32 // 4 + 8 * (k // 2), 2 * (thread % 4) + k % 2]
    return out


WGMMA = """
ld.global.u32 %r1, [%d11];
st.shared.u32 [%r23], %r1;
ld.global.u32 %r1, [%d11+512];
st.shared.u32 [%r23+512], %r1;
ld.global.u32 %r1, [%d11+1024];
st.shared.u32 [%r23+1024], %r1;
ld.global.u32 %r1, [%d11+1536];
st.shared.u32 [%r23+1536], %r1;
ld.global.u32 %r1, [%d11+2048];
st.shared.u32 [%r23+2048], %r1;
fence.proxy.async;
bar.sync 0;
cvt.u64.u32 %d20, %r20;
and.b64 %d20, %d20, 0x3ffff;
shr.u64 %d20, %d20, 4;
or.b64 %d20, %d20, 0x0000001000080000;
add.u64 %d21, %d20, 128;
setp.ne.u32 %p2, 0, 1;
mov.u32 %r50, 0;
mov.u32 %r51, 0;
mov.u32 %r52, 0;
mov.u32 %r53, 0;
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r50, %r51, %r52, %r53}, %d20, %d21, %p2, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
mul.wide.u32 %d13, %r0, 16;
add.u64 %d13, %d1, %d13;
st.global.v4.u32 [%d13], {%r50, %r51, %r52, %r53};
"""


def box_map(swizzle: int) -> TensorMap:
    """8 rows of 32 words; a row of the box is what the swizzle spans, or 64 bytes."""
    return TensorMap(address=0, type="u32", sizes=(32, 8), strides=(128,), box=((swizzle or 64) // 4, 8), swizzle=swizzle)


def boxed(swizzle: int) -> Callable[[np.ndarray], np.ndarray]:
    """The box at column 4, row 3, as shared memory holds it: zeros beyond the tensor; units of 16 bytes exchanged in periods of 8 rows of 128."""

    def expected(a: np.ndarray) -> np.ndarray:
        width = (swizzle or 64) // 4
        tensor, box = a[:256].reshape(8, 32), np.zeros((8, width), np.uint32)
        inside = tensor[3:, 4 : 4 + width]
        box[:5, : inside.shape[1]] = inside
        units, out = box.reshape(-1, 4), np.zeros((2 * width, 4), np.uint32)
        for unit in range(2 * width):
            out[unit ^ (unit >> 3 & (swizzle // 16 - 1 if swizzle else 0))] = units[unit]
        return out

    return expected


def tensor_load(swizzle: int) -> HopperCase:
    body = (
        init(1)
        + FRESH
        + "mov.u32 %r41, 4;\nmov.u32 %r42, 3;\n"
        + f"@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], {box_map(swizzle).box_bytes};\n"
        + "@%p1 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r20], [%d2, {%r41, %r42}], [%r21];\n"
        + wait()
        + COPY_OUT
    )
    return HopperCase(f"TMA load, swizzle {swizzle}", body, boxed(swizzle), box_map(swizzle).box_bytes // 4, map_=box_map(swizzle))


def tensor_store() -> HopperCase:
    """The map is of ``a``, so what comes out is read back from there."""
    body = (
        BARRIER
        + FILL
        + "mov.u32 %r41, 0;\nmov.u32 %r42, 0;\n"
        + "@%p1 cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d2, {%r41, %r42}], [%r20];\n"
        + STORED
        + "fence.proxy.async;\nbar.sync 0;\nshr.u32 %r43, %r0, 4;\nshl.b32 %r43, %r43, 4;\nadd.u32 %r43, %r43, %r0;\nmul.wide.u32 %d13, %r43, 4;\nadd.u64 %d13, %d0, %d13;\nld.global.u32 %r40, [%d13];\nst.global.u32 [%d12], %r40;\n"
    )
    return HopperCase("TMA store", body, lambda a: 3 * np.arange(128, dtype=np.uint32) + 7, 128, map_=box_map(0))


MATRIX = "shl.b32 %r2, %r0, 4;\nadd.u32 %r2, %r20, %r2;\nshl.b32 %r3, %r0, 2;\nadd.u32 %r4, %r3, 1;\nadd.u32 %r5, %r3, 2;\nadd.u32 %r6, %r3, 3;\n"
MATRIX_OUT = "bar.sync 0;\nld.shared.v4.u32 {%r50, %r51, %r52, %r53}, [%r2];\nmul.wide.u32 %d13, %r0, 16;\nadd.u64 %d13, %d1, %d13;\nst.global.v4.u32 [%d13], {%r50, %r51, %r52, %r53};\n"


def stored_matrices(trans: bool) -> Callable[[np.ndarray], np.ndarray]:
    """Four matrices of 8 by 8: word i of thread t has elements (t/4, 2(t%4)) and the next of matrix i, or of its transpose."""

    def expected(_: np.ndarray) -> np.ndarray:
        words = np.arange(128, dtype=np.uint32).reshape(32, 4)
        halves = np.stack([words & 0xFFFF, words >> 16], -1).astype(np.uint16)
        matrices = np.zeros((4, 8, 8), np.uint16)
        for thread in range(32):
            for i in range(4):
                matrices[i, thread // 4, 2 * (thread % 4) : 2 * (thread % 4) + 2] = halves[thread, i]
        return np.ascontiguousarray(matrices.transpose(0, 2, 1) if trans else matrices)

    return expected


def words(function: Callable[[np.ndarray], np.ndarray], n: int) -> Callable[[np.ndarray], np.ndarray]:
    """A result that depends on the thread only."""
    return lambda _: function(np.arange(n)).astype(np.uint32)


HOPPER_CASES = [
    HopperCase(
        "elect.sync",
        "elect.sync %r1|%p1, 0xffffffff;\nmov.u32 %r2, %laneid;\nsetp.eq.u32 %p2, %r1, %r2;\nxor.pred %p3, %p1, %p2;\nselp.u32 %r3, 1, 0, %p3;\nselp.u32 %r4, 1, 0, %p1;\nredux.sync.add.u32 %r5, %r4, 0xffffffff;\nshl.b32 %r5, %r5, 1;\nor.b32 %r3, %r3, %r5;\nst.global.u32 [%d12], %r3;",
        words(lambda t: 0 * t + 2, 32),
    ),
    HopperCase(
        "mbarrier of a CTA",
        init(64) + FRESH + "st.shared.u32 [%r23], %r0;\nmbarrier.arrive.shared::cta.b64 %d5, [bar];\n" + wait() + "xor.b32 %r24, %r22, 128;\nadd.u32 %r24, %r20, %r24;\nld.shared.u32 %r40, [%r24];\nst.global.u32 [%d12], %r40;",
        words(lambda t: t ^ 32, 64),
        64,
    ),
    HopperCase(
        "mbarrier.test_wait with a token, pending_count",
        init(33) + FRESH + "mbarrier.arrive.shared::cta.b64 %d5, [bar];\n@%p1 mbarrier.arrive.shared::cta.b64 %d6, [bar];\nWAIT:\nmbarrier.test_wait.shared::cta.b64 %p9, [bar], %d5;\n@!%p9 bra WAIT;\nst.global.u32 [%d12], %r0;",
        words(lambda t: t, 32),
    ),
    HopperCase(
        "bulk load",
        init(1) + FRESH + "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 256;\n@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r20], [%d0], 256, [%r21];\n" + wait() + COPY_OUT,
        lambda a: a[:64],
        64,
    ),
    HopperCase("bulk store", BARRIER + FILL + "@%p1 " + BULK_STORE + STORED, words(lambda t: 3 * t + 7, 64), 64),
    HopperCase("bulk reduction", BARRIER + "st.global.u32 [%d12], %r0;\n" + FILL + "@%p1 " + BULK_ADD + STORED, words(lambda t: 4 * t + 7, 64), 64),
    HopperCase(
        "distributed shared memory",
        BARRIER + OTHER + "mad.lo.u32 %r1, %r30, 1000, %r0;\nst.shared.u32 [%r23], %r1;\n" + CLUSTER_SYNC + "ld.shared::cluster.u32 %r40, [%r32];\ngetctarank.shared::cluster.u32 %r41, %r32;\nmad.lo.u32 %r40, %r41, 100000, %r40;\nst.global.u32 [%d12], %r40;\n" + CLUSTER_SYNC,
        words(lambda t: np.where(t < 32, 101000 + t, t - 32), 64),
        ctas=2,
    ),
    HopperCase(
        "arrivals from another CTA",
        init(32) + "fence.mbarrier_init.release.cluster;\n" + OTHER + CLUSTER_SYNC + "st.shared::cluster.u32 [%r32], %r0;\nmbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r33];\n" + wait(scope=".acquire.cluster") + COPY_OUT + CLUSTER_SYNC,
        words(lambda t: t % 32, 64),
        ctas=2,
    ),
    HopperCase(
        "st.async",
        init(1) + "fence.mbarrier_init.release.cluster;\n@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 128;\n" + OTHER + CLUSTER_SYNC + "mad.lo.u32 %r1, %r30, 1000, %r0;\nst.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r32], %r1, [%r33];\n" + wait() + COPY_OUT + CLUSTER_SYNC,
        words(lambda t: np.where(t < 32, 1000 + t, t - 32), 64),
        ctas=2,
    ),
    HopperCase(
        "red.async",
        init(1) + "fence.mbarrier_init.release.cluster;\n@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 128;\nst.shared.u32 [%r23], 5;\n" + OTHER + CLUSTER_SYNC + "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r34], %r0, [%r33];\n" + wait() + "ld.shared.u32 %r40, [%r20];\nst.global.u32 [%d12], %r40;\n" + CLUSTER_SYNC,
        words(lambda t: 0 * t + 5 + 31 * 16, 64),
        ctas=2,
    ),
    HopperCase("stmatrix", BARRIER + MATRIX + "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r2], {%r3, %r4, %r5, %r6};\n" + MATRIX_OUT, stored_matrices(False)),
    HopperCase("stmatrix, transposed", BARRIER + MATRIX + "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%r2], {%r3, %r4, %r5, %r6};\n" + MATRIX_OUT, stored_matrices(True)),
    HopperCase("setmaxnreg", "setmaxnreg.dec.sync.aligned.u32 64;\nsetmaxnreg.inc.sync.aligned.u32 72;\nst.global.u32 [%d12], %r0;", words(lambda t: t, 128), 128),
    HopperCase("griddepcontrol", "griddepcontrol.wait;\ngriddepcontrol.launch_dependents;\nst.global.u32 [%d12], %r0;", words(lambda t: t, 32)),
    HopperCase("wgmma", BARRIER + WGMMA, product, 128, source=matrix_words),
    *map(tensor_load, (0, 32, 64, 128)),
    tensor_store(),
]  # fmt: skip
