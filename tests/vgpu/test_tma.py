# ruff: noqa: E501 -- kernels and rows of tables in one line
"""Boxes of tensors through shared memory, against plain indexing."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.vgpu import (
    Gpu,
    LaunchError,
    MisalignedError,
    OutOfBoundsError,
    PendingCopyError,
    Program,
    TensorMapError,
    UninitializedError,
    UnsupportedInstructionError,
    VgpuError,
)
from fa4.vgpu.driver import encode_tiled
from fa4.vgpu.tensor_map import DRIVER_TYPES, TYPES, TensorMap, decode

SCHEDULES = [("round_robin", 0), ("random", 0), ("random", 1), ("priority", 0), ("priority", 1)]
SRC, DST = 0x10000, 0x80000
DTYPES = {
    "u8": "u1",
    "u16": "u2",
    "u32": "u4",
    "s32": "i4",
    "u64": "u8",
    "s64": "i8",
    "f16": "f2",
    "f32": "f4",
    "f64": "f8",
    "bf16": ml_dtypes.bfloat16,
}

# One lane of warp 0 loads a box; another warp copies it to a second place and, as words, to the plain buffer; the lane stores it.
KERNEL = """.version 8.8
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry k(.param .align 64 .b8 source[128], .param .align 64 .b8 target[128], .param .u64 plain, .param .align 4 .b8 at[40])
.reqntid 64
{
.reg .pred %p<9>;
.reg .b32 %r<60>;
.reg .b64 %d<20>;
.shared .align 8 .b64 bar;
mov.b64 %d1, source;
cvta.param.u64 %d1, %d1;
mov.b64 %d2, target;
cvta.param.u64 %d2, %d2;
ld.param.u64 %d3, [plain];
@COORDINATES
mov.u32 %r0, %tid.x;
mov.u32 %r20, dynamic;
add.u32 %r20, %r20, @OFFSET;
add.u32 %r21, %r20, @BYTES;
setp.eq.u32 %p1, %r0, 0;
@%p1 mbarrier.init.shared::cta.b64 [bar], 1;
bar.sync 0;
setp.ne.u32 %p2, %r0, 0;
@%p2 bra WAIT;
prefetch.tensormap [%d1];
mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], @BYTES;
@LOAD
WAIT:
mbarrier.try_wait.parity.shared::cta.b64 %p3, [bar], 0;
@!%p3 bra WAIT;
shl.b32 %r1, %r0, 2;
COPY:
setp.ge.u32 %p4, %r1, @BYTES;
@%p4 bra COPIED;
add.u32 %r2, %r20, %r1;
ld.shared.u32 %r3, [%r2];
add.u32 %r4, %r21, %r1;
st.shared.u32 [%r4], %r3;
cvt.u64.u32 %d4, %r1;
add.u64 %d4, %d3, %d4;
st.global.u32 [%d4], %r3;
add.u32 %r1, %r1, 256;
bra COPY;
COPIED:
fence.proxy.async.shared::cta;
bar.sync 0;
@%p2 bra DONE;
@STORE
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
DONE:
ret;
}
"""


def tensor_kernel(rank, size, *, offset=0, operation="", load=None, store=None):
    group = "{" + ", ".join(f"%r{30 + i}" for i in range(rank)) + "}"
    targets = "{" + ", ".join(f"%r{40 + i}" for i in range(rank)) + "}"
    loads = "\n".join(f"ld.param.s32 %r{30 + i}, [at+{4 * i}];\nld.param.s32 %r{40 + i}, [at+{20 + 4 * i}];" for i in range(rank))
    load = (
        load
        or f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%r20], [%d1, {group}], [bar], %d3;"
    )
    name = (
        f"cp.reduce.async.bulk.tensor.{rank}d.global.shared::cta.{operation}.tile"
        if operation
        else f"cp.async.bulk.tensor.{rank}d.global.shared::cta.tile"
    )
    store = store or f"{name}.bulk_group [%d2, {targets}], [%r21];"
    fields = {"@COORDINATES": loads, "@OFFSET": str(offset), "@BYTES": str(size), "@LOAD": load, "@STORE": store}
    text = KERNEL
    for field, value in fields.items():
        text = text.replace(field, value)
    return text


def padded(sizes, dtype, rng):
    """A tensor (innermost first in ``sizes``) whose rows lie at multiples of 16 bytes; its buffer, view and byte strides."""
    itemsize = np.dtype(dtype).itemsize
    strides = [itemsize]
    reach = -(-sizes[0] * itemsize // 16) * 16
    for n in sizes[1:]:
        strides.append(reach)
        reach *= n
    buffer = rng.integers(0, 256, max(reach, 16), dtype=np.uint8)
    view = np.ndarray(sizes[::-1], dtype, buffer.data, 0, strides[::-1])
    return buffer, view, tuple(strides[1:])


def shift(tensor, start, box):
    """The box as plain indexing gives it: zeros outside."""
    out = np.zeros(box[::-1], tensor.dtype)
    for index in np.ndindex(*box[::-1]):
        place = tuple(i + s for i, s in zip(index, start[::-1], strict=True))
        if all(0 <= p < n for p, n in zip(place, tensor.shape, strict=True)):
            out[index] = tensor[place]
    return out


def unswizzled(image, base, span):
    """Bytes in shared memory from ``base`` on, as a dense box: the rule of the address bits, byte by byte."""
    shift_bits = {0: 0, 32: 1, 64: 2, 128: 3}[span]
    out = np.zeros_like(image)
    for i in range(len(image)):
        address = base + i
        address ^= (address >> 7 & (1 << shift_bits) - 1) << 4
        out[i] = image[address - base]
    return out


def run_boxes(map_source, map_target, buffers, starts, *, offset=0, operation="", gpu=None, **texts):
    """(image in shared memory) of one box from a map to another at two starts."""
    gpu = gpu or Gpu("sm_90a")
    plain = np.zeros(map_source.box_bytes, np.uint8)
    gpu.register_buffer(SRC, buffers[0], "source", writable=False)
    gpu.register_buffer(DST, buffers[1], "target")
    gpu.register_buffer(0x200000, plain, "plain")
    rank = map_source.rank
    text = tensor_kernel(rank, map_source.box_bytes, offset=offset, operation=operation, **texts)
    at = struct.pack("<10i", *starts[0], *[0] * (5 - rank), *starts[1], *[0] * (5 - rank))
    params = [map_source.encode(), map_target.encode(), struct.pack("<Q", 0x200000), at]
    gpu.launch(Program.parse(text), "k", (1,), (64,), 2 * map_source.box_bytes + offset + 1024, params)
    return plain


@st.composite
def boxes(draw):
    rank = draw(st.integers(1, 5))
    type_ = draw(st.sampled_from(sorted(DTYPES)))
    size = np.dtype(DTYPES[type_]).itemsize
    swizzle = draw(st.sampled_from([0, 32, 64, 128]))
    inner = draw(st.integers(1, (swizzle or 64) // 16)) * 16 // size
    box = (inner, *(draw(st.integers(1, 4)) for _ in range(rank - 1)))
    sizes = tuple(draw(st.integers(1, 2 * n + 1)) for n in box)
    start = tuple(draw(st.integers(-n, s)) for n, s in zip(box, sizes, strict=True))
    target = tuple(draw(st.integers(-n, s)) for n, s in zip(box, sizes, strict=True))
    return type_, swizzle, box, sizes, start, target, draw(st.sampled_from([0, 128, 256, 384]))


@settings(max_examples=60, deadline=None)
@given(boxes(), st.integers(0, 2**32 - 1), st.sampled_from(SCHEDULES))
def test_boxes_of_every_rank_type_and_swizzle(case, seed, schedule):
    type_, swizzle, box, sizes, start, target, offset = case
    rng = np.random.default_rng(seed)
    source_buffer, source, strides = padded(sizes, DTYPES[type_], rng)
    target_buffer, target_view, _ = padded(sizes, DTYPES[type_], rng)
    expected = target_view.copy()
    map_ = TensorMap(SRC, type_, sizes, strides, box, swizzle)
    if map_.box_bytes % 128:  # the second box would not be aligned
        map_ = replace(map_, box=(*box[:-1], 8 * box[-1])) if len(box) > 1 else replace(map_, box=(128 // map_.element_bytes,), swizzle=0)
    assert decode(map_.encode()) == map_
    gpu = Gpu("sm_90a", schedule=schedule[0], seed=schedule[1])
    image = run_boxes(map_, replace(map_, address=DST), (source_buffer, target_buffer), (start, target), offset=offset, gpu=gpu)
    box = map_.box
    brought = shift(source, start, box)
    assert np.array_equal(unswizzled(image, 1024 * 2 + offset, map_.swizzle), brought.reshape(-1).view(np.uint8)), "load"
    # What lies in the second place was copied as it lay in the first, so the store sees it at another address.
    second = unswizzled(image, 1024 * 2 + offset + map_.box_bytes, map_.swizzle).view(brought.dtype).reshape(brought.shape)
    for index in np.ndindex(*second.shape):
        place = tuple(i + s for i, s in zip(index, target[::-1], strict=True))
        if all(0 <= p < n for p, n in zip(place, expected.shape, strict=True)):
            expected[place] = second[index]
    assert np.array_equal(target_view.view(f"u{expected.dtype.itemsize}"), expected.view(f"u{expected.dtype.itemsize}")), "store"


PLAIN = TensorMap(SRC, "f32", (40, 10), (160,), (32, 8), 128)


def simple(map_=PLAIN, starts=((0, 0), (0, 0)), **options):
    source = np.arange(400, dtype=np.float32).reshape(10, 40)
    target = np.zeros((10, 40), np.float32)
    run_boxes(map_, options.pop("target", replace(map_, address=DST)), (source, target), starts, **options)
    return source, target


@pytest.mark.parametrize("delay", ["late", "early"])
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_a_copy(schedule, seed, delay):
    source, target = simple(starts=((3, 2), (-1, 8)), gpu=Gpu("sm_90a", schedule=schedule, seed=seed, delay=delay))
    expected = np.zeros_like(target)
    expected[8:10, :31] = source[2:4, 4:35]
    assert np.array_equal(target, expected)


REDUCTIONS = [
    *((op, t) for op in ("add", "min", "max") for t in ("u32", "s32", "u64", "f16", "bf16")),
    *(("add", t) for t in ("f32",)),
    *((op, t) for op in ("and", "or", "xor") for t in ("u32", "s32", "u64")),
    ("inc", "u32"),
    ("dec", "u32"),
]


@pytest.mark.parametrize(("operation", "type_"), REDUCTIONS)
def test_reductions(operation, type_):
    dtype, rng = np.dtype(DTYPES[type_]), np.random.default_rng(0)
    source, target = (rng.integers(-1000, 1000, (4, 64)).astype(dtype) for _ in range(2))
    map_ = TensorMap(SRC, type_, (64, 4), (64 * dtype.itemsize,), (128 // dtype.itemsize, 2), 0)
    before = target.copy()
    run_boxes(map_, replace(map_, address=DST), (source.view(np.uint8), target.view(np.uint8)), ((0, 1), (0, 2)), operation=operation)
    rows, columns = slice(2, 4), slice(0, 128 // dtype.itemsize)
    new, old = source[1:3, columns], before[rows, columns]
    functions = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
    wrapped = (
        {"inc": np.where(old >= new, 0, old + 1), "dec": np.where((old == 0) | (old > new), new, old - 1)}
        if operation in ("inc", "dec")
        else {}
    )
    before[rows, columns] = wrapped[operation] if wrapped else functions[operation](old, new)
    assert np.array_equal(target, before)


def test_an_address_that_wraps():
    """A map may begin far below its tensor, with coordinates that reach into it modulo 2^64."""
    low = replace(PLAIN, address=(SRC - 2**30 * 160) % 2**64, sizes=(40, 2**30 + 10))
    source, target = simple(low, starts=((0, 2**30 + 2), (0, 0)), target=replace(PLAIN, address=DST))
    assert np.array_equal(target[:8, :32], source[2:10, :32])
    with pytest.raises(OutOfBoundsError, match=r"box at .* of a tensor map at 0xffff.* are outside every buffer"):
        simple(low, starts=((0, 2**30 - 5), (0, 0)), target=replace(PLAIN, address=DST))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"address": SRC + 8}, "global address 0x10008: must be a multiple of 16"),
        ({"box": (24, 8), "type": "u8"}, "24 bytes are not a multiple of 16"),
        ({"box": (64, 8)}, "256 bytes exceed the swizzle span of 128"),
        ({"swizzle": 64}, "128 bytes exceed the swizzle span of 64"),
        ({"element_strides": (1, 2)}, "only 1 is modelled"),
        ({"interleave": 1}, "interleave 1"),
    ],
)
def test_maps_that_break_a_rule(change, message):
    simple()
    with pytest.raises(TensorMapError, match=message) as caught:
        simple(replace(PLAIN, **change), target=replace(PLAIN, address=DST))
    assert "cp.async.bulk.tensor" in caught.value.place.ptx_text
    assert (caught.value.place.warp, caught.value.place.lane) == (0, 0)


def test_rules_that_cannot_be_encoded():
    for change, message in (
        ({"box": (32, 257)}, "box size 257 of dimension 1"),
        ({"strides": (168,)}, "stride 168 of dimension 1"),
        ({"sizes": (40, 0)}, "size 0 of dimension 1"),
    ):
        assert message in replace(PLAIN, **change).problem()
    assert PLAIN.problem() == ""


class Garbage(TensorMap):
    def encode(self):
        return b"\xff" * 128


def test_bytes_that_are_no_map():
    with pytest.raises(TensorMapError, match="no tiled tensor map: control word 0xffffffff"):
        simple(Garbage(**vars(PLAIN)), target=replace(PLAIN, address=DST))


PREFETCH = "cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%d1, {{%r30, {row}}}];"
LOAD = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r20{to}], [%d1, {{%r30, %r31}}], [bar{bar}];"
STORE = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d2, {{%r40, %r41}}], [%r21{at}];"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"load": LOAD.format(to="+64", bar="")}, MisalignedError, "a box at shared address 0x840, which is not a multiple of 128"),
        ({"load": LOAD.format(to="", bar="+8")}, VgpuError, "no mbarrier was initialised"),
        (
            {"load": LOAD.format(to="", bar="").replace("[%d1, {%r30, %r31}]", "[%d1+32, {%r30, %r31}]")},
            TensorMapError,
            "must be a multiple of 64",
        ),
        (
            {"load": LOAD.format(to="", bar="").replace("2d", "1d").replace(", %r31", "")},
            TensorMapError,
            "a box with 1 coordinates of a tensor map of rank 2",
        ),
        (
            {"load": LOAD.format(to="", bar="") + PREFETCH.format(row="%r31").replace("2d", "3d")},
            UnsupportedInstructionError,
            "2 coordinates",
        ),
        ({"load": LOAD.format(to="", bar="") * 2}, PendingCopyError, "0x800: an asynchronous copy to them is on its way"),
        ({"load": LOAD.format(to="+262144", bar="")}, OutOfBoundsError, "1024 bytes at shared address 0x40800"),
        ({"store": STORE.format(at="+64")}, MisalignedError, "not a multiple of 128"),
        ({"store": STORE.format(at="+1024")}, UninitializedError, "never written"),
        ({"load": LOAD.format(to="", bar="").replace(".tile", ".tile::gather4")}, UnsupportedInstructionError, "gather4"),
        ({"load": LOAD.format(to="", bar="").replace(".tile", ".im2col")}, UnsupportedInstructionError, "no im2col"),
    ],
)
def test_misuse(options, error, message):
    clean = {"load": LOAD.format(to="", bar="") + PREFETCH.format(row="%r31"), "store": STORE.format(at="")}
    simple(**clean)
    with pytest.raises(error, match=message):
        simple(**clean | options)


def test_a_read_only_target():
    with pytest.raises(OutOfBoundsError, match="read-only"):
        simple(target=replace(PLAIN, address=SRC))


def test_a_box_that_nobody_waits_for():
    text = tensor_kernel(2, PLAIN.box_bytes)
    assert "bra WAIT;" in text
    text = text.replace("@!%p3 bra WAIT;", "").replace("mbarrier.try_wait.parity.shared::cta.b64 %p3, [bar], 0;", "")
    gpu = Gpu("sm_90a")
    for address, name in ((SRC, "source"), (DST, "target"), (0x200000, "plain")):
        gpu.register_buffer(address, np.zeros(1600, np.uint8), name)
    params = [PLAIN.encode(), replace(PLAIN, address=DST).encode(), struct.pack("<Q", 0x200000), bytes(40)]
    with pytest.raises(PendingCopyError, match="before the asynchronous copy to it has been waited for"):
        gpu.launch(Program.parse(text), "k", (1,), (64,), 4096, params)


@given(
    st.integers(1, 5).flatmap(
        lambda rank: st.builds(
            TensorMap,
            address=st.integers(0, 2**64 - 1),
            type=st.sampled_from(TYPES),
            sizes=st.tuples(*[st.integers(1, 2**32)] * rank),
            strides=st.tuples(*[st.integers(0, 2**36 - 1).map(lambda n: 16 * n)] * (rank - 1)),
            box=st.tuples(*[st.integers(1, 256)] * rank),
            swizzle=st.sampled_from([0, 32, 64, 128]),
            element_strides=st.just(()) | st.tuples(*[st.integers(2, 8)] * rank),
            interleave=st.integers(0, 2),
        )
    ),
    st.binary(min_size=64, max_size=64),
)
def test_maps_survive_encoding(map_, rest):
    """The second half of the 128 bytes is whatever was on the host's stack."""
    assert decode(map_.encode()[:64] + rest) == map_


def encode_call(map_, **change):
    """What the driver call writes for the arguments of a map."""
    kinds = {"sizes": ctypes.c_uint64, "strides": ctypes.c_uint64, "box": ctypes.c_uint32, "element_strides": ctypes.c_uint32}
    values = {k: getattr(map_, k) or (1,) * map_.rank for k in kinds}
    arrays = {k: (t * len(values[k]))(*values[k]) for k, t in kinds.items()}
    out = ctypes.create_string_buffer(128)
    numbers = {
        "type": DRIVER_TYPES.index(map_.type),
        "rank": map_.rank,
        "swizzle": (0, 32, 64, 128).index(map_.swizzle),
        "fill": 0,
    } | change
    pointers = {k: ctypes.addressof(a) for k, a in arrays.items()}
    encode_tiled(
        ctypes.addressof(out), numbers["type"], numbers["rank"], map_.address, pointers["sizes"], pointers["strides"], pointers["box"],
        pointers["element_strides"], map_.interleave, numbers["swizzle"], 0, numbers["fill"],
    )  # fmt: skip
    return out.raw


@pytest.mark.parametrize("type_", TYPES)
def test_the_driver_call_writes_the_same_map(type_):
    map_ = TensorMap(0x7F0012345670, type_, (1000, 3, 2**31, 5), (1024, 2**37, 16), (16, 3, 256, 1), 0)
    assert decode(encode_call(map_)) == map_


def test_the_driver_call_checks_its_arguments():
    map_ = TensorMap(SRC, "f16", (64, 8), (128,), (64, 8), 128)
    assert decode(encode_call(map_)) == map_
    with pytest.raises(LaunchError, match="256 bytes exceed the swizzle span"):
        encode_call(replace(map_, box=(128, 8)))
    with pytest.raises(LaunchError, match="box size 257 of dimension 1"):
        encode_call(replace(map_, box=(64, 257)))
    with pytest.raises(LaunchError, match="out-of-bounds fill 1"):
        encode_call(map_, fill=1)
