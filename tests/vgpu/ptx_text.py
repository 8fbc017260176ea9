"""Small kernels from their bodies, and a way to run them."""

from __future__ import annotations

import struct

import numpy as np

from fa4.vgpu import Gpu, Program

HEAD = """.version 8.8
.target {target}
.address_size 64
.extern .shared .align 16 .b8 dynamic[];
.visible .entry k(.param .u64 p0, .param .u64 p1, .param .u64 p2)
{{
.reg .pred %p<20>;
.reg .b16 %h<40>;
.reg .b32 %r<400>;
.reg .b64 %d<40>;
ld.param.u64 %d0, [p0];
ld.param.u64 %d1, [p1];
ld.param.u64 %d2, [p2];
mov.u32 %r0, %tid.x;
mul.wide.u32 %d10, %r0, 4;
add.u64 %d11, %d0, %d10;
add.u64 %d12, %d1, %d10;
"""

A, B, C = 0x10000, 0x40000, 0x80000


def kernel(body: str, target: str = "sm_80") -> str:
    """``%r0`` is the thread, ``%d0`` to ``%d2`` the pointers, ``%d11`` and ``%d12`` the thread's element of the first two."""
    return HEAD.format(target=target) + body + "\nret;\n}\n"


def run(body: str, *, gpu: Gpu | None = None, threads: int = 32, grid: int = 1, shared: int = 0, arrays=(None, None, None), cluster=None):
    """Run a body on three buffers of 4096 words (zeros unless given); the buffers. ``cluster`` CTAs along x."""
    gpu = gpu or Gpu()
    arrays = [np.zeros(4096, np.uint32) if a is None else a for a in arrays]
    for address, array, name in zip((A, B, C), arrays, "abc", strict=True):
        gpu.remove_buffer(address)
        gpu.register_buffer(address, array, name)
    params = [struct.pack("<Q", p) for p in (A, B, C)]
    gpu.launch(Program.parse(kernel(body)), "k", (grid,), (threads,), shared, params, cluster)
    return arrays
