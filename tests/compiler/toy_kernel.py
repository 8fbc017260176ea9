"""A kernel small enough to compile in a tenth of a second; follows the protocol of fa4's own."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import cutlass.memory as memory
from cutlass import Float32, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from toy_config import ToyConfig


class Toy:
    """y[i] = a * factor * x[i], reversed within each block by way of shared memory."""

    def __init__(self, problem, config: ToyConfig) -> None:
        self.problem = problem
        self.config = config
        self.name = f"toy_{problem.head_dim}"

    def compile_arguments(self):
        def vector():
            return make_fake_tensor(Float32, (cute.sym_int(divisibility=self.config.threads),), (1,), assumed_align=16)

        return vector(), vector(), Float32(1), make_fake_stream(use_tvm_ffi_env_stream=True)

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, a: Float32, stream: cuda.CUstream):
        threads = self.config.threads
        self.kernel(x, y, a).launch(grid=[cute.size(x) // threads, 1, 1], block=[threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor, a: Float32):
        threads = self.config.threads
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        if const_expr(self.config.broken):
            raise ValueError("planted fault")
        shared = memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout(threads), 128)
        i = block * threads + thread
        shared[thread] = x[i] * a * Float32(self.config.factor)
        cute.arch.sync_threads()
        y[i] = shared[threads - 1 - thread]
