"""A kernel that applies the device code to a vector, four elements per thread: ``out[i] = exp2(x[i])``."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from fa4.emulate_exp.device import emulated_exp2, emulated_exp2_pair

THREADS = 128
PER_THREAD = 4


class Exp2Probe:
    def __init__(self, problem, config) -> None:
        self.problem = problem
        self.config = config
        self.name = f"exp2_{config.degree}_{config.form}"

    def compile_arguments(self):
        def vector():
            return make_fake_tensor(Float32, (cute.sym_int(divisibility=PER_THREAD * THREADS),), (1,), assumed_align=16)

        return vector(), vector(), make_fake_stream()

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
        self.kernel(x, out).launch(grid=[cute.size(x) // (PER_THREAD * THREADS), 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, out: cute.Tensor):
        config = self.config
        first = PER_THREAD * (cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0])
        for k in cutlass.range_constexpr(0, PER_THREAD, 2):
            i = first + k
            if const_expr(config.form == "copy"):
                out[i], out[i + 1] = x[i], x[i + 1]
            elif const_expr(config.form == "mufu"):
                out[i], out[i + 1] = cute.math.exp2(x[i], fastmath=True), cute.math.exp2(x[i + 1], fastmath=True)
            elif const_expr(config.pair):
                out[i], out[i + 1] = emulated_exp2_pair(x[i], x[i + 1], config.degree, config.form, config.continuous)
            else:
                out[i] = emulated_exp2(x[i], config.degree, config.form, config.continuous)
                out[i + 1] = emulated_exp2(x[i + 1], config.degree, config.form, config.continuous)
