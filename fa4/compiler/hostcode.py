"""Launch facts that only the generated host code knows: bytes of dynamic shared memory, found in its LLVM dialect text.

The size is computed by a compiler pass, so the traced module does not have it. The host function builds CUDA's ``cudaLaunchConfig_t``
on its stack, field by field, from constants; following those few stores is enough. What cannot be followed is left out.
"""

from __future__ import annotations

import re

_CONSTANT = re.compile(r"(%\w+) = llvm\.mlir\.constant\((-?\d+) : i\d+\)")
_SLOT = re.compile(r"(%\w+) = llvm\.getelementptr (%\w+)\[([\d, ]+)\]")
_STORE = re.compile(r"llvm\.store (%\w+), (%\w+) :")
_LOAD = re.compile(r"(%\w+) = llvm\.load (%\w+) :")
_KERNEL = re.compile(r"(%\w+) = llvm\.mlir\.addressof @kernels_(\w+) :")
_LAUNCH = re.compile(r"llvm\.call @_cudaLaunchKernelEx\((%\w+), (%\w+), ")
_FUNCTION = re.compile(r"^\s*llvm\.func ")

# Field 2 of {grid[3], block[3], dynamic shared memory, stream, attributes, count}.
_SHARED_FIELD = "0, 2"


def dynamic_shared_memory(module: str) -> dict[str, int]:
    """Bytes of dynamic shared memory per kernel, for the kernels where the size is a constant, the same at each launch."""
    found: dict[str, set[int | None]] = {}
    constants: dict[str, int] = {}
    slots: dict[str, tuple[str, str]] = {}  # pointer -> (object, field)
    memory: dict[tuple[str, str], str] = {}  # (object, field) -> value stored there
    loaded: dict[str, str] = {}  # value -> the stored value that it is
    kernels: dict[str, str] = {}
    for line in module.splitlines():
        if _FUNCTION.match(line):
            for table in (constants, slots, memory, loaded, kernels):
                table.clear()
        elif match := _CONSTANT.search(line):
            constants[match[1]] = int(match[2])
        elif match := _SLOT.search(line):
            slots[match[1]] = (loaded.get(match[2], match[2]), match[3])
        elif match := _STORE.search(line):
            memory[slots.get(match[2], (match[2], ""))] = match[1]
        elif match := _LOAD.search(line):
            value = memory.get(slots.get(match[2], (match[2], "")))
            loaded[match[1]] = loaded.get(value, value) if value else match[2]
        elif match := _KERNEL.search(line):
            kernels[match[1]] = match[2]
        elif match := _LAUNCH.search(line):
            config, kernel = loaded.get(match[1], match[1]), kernels.get(loaded.get(match[2], ""), "")
            found.setdefault(kernel, set()).add(constants.get(memory.get((config, _SHARED_FIELD), "")))
    return {kernel: size for kernel, (size, *others) in found.items() if kernel and not others and size is not None}
