"""One request to one artifact, for any architecture, on any machine, with or without a GPU."""

from __future__ import annotations

import json
import re
import shlex
import tempfile
import threading
from dataclasses import asdict, dataclass, is_dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import fa4
from fa4 import dispatch
from fa4._collector import no_collection
from fa4.compiler import toolchain
from fa4.compiler.artifact import Artifact, Dim3, Kernel, Launch
from fa4.compiler.cubin import parse_cubin, parse_ptxas_log
from fa4.compiler.hostcode import dynamic_shared_memory
from fa4.compiler.ptx import relative_paths
from fa4.errors import CompileError, Fa4Error
from fa4.problem import AttentionProblem

# The DSL keeps its state in module globals: two compiles at once end the process.
_LOCK = threading.Lock()

_ROOT = Path(fa4.__file__).parents[1]
_FACTS = "cutlass_launch_facts"
_EXACT = re.compile(r"exact_(\w+)_dim = array<i64: (\d+), (\d+), (\d+)>")
_TIMING = re.compile(r"^ptxas info\s*: Compile time.*\n?", re.MULTILINE)


@dataclass(frozen=True)
class Target:
    """What to compile with and for: ``source`` is a kernel class, "module:Class"."""

    arch: str
    source: str
    options: str


def compile_kernel(problem: AttentionProblem, config: Any, arch: str, line_info: bool = False) -> Artifact:
    """Compile the kernel of a request, on demand with a line table. Threads take turns.

    Raises:
        CompileError: the toolchain is not usable, or the DSL refuses the kernel; its own error is the cause.
        UnsupportedError: there is no kernel for the request.
    """
    source = dispatch.kernel(problem, arch)
    tools = toolchain.current()
    if tools.machine not in toolchain.HOST_TARGETS:
        raise CompileError(f"host code for {tools.machine} is not supported; compile on one of {', '.join(toolchain.HOST_TARGETS)}")
    with _LOCK, tempfile.TemporaryDirectory(prefix="fa4-") as folder, no_collection():
        try:
            return _compile(problem, config, Target(arch, source, toolchain.options(line_info)), Path(folder))
        except Fa4Error:
            raise
        except Exception as error:  # the DSL raises many types, and so may a kernel while it is traced
            raise CompileError(f"{source} does not compile for {arch}, {problem}, {config}: {type(error).__name__}: {error}") from error


def _compile(problem: AttentionProblem, config: Any, target: Target, folder: Path) -> Artifact:
    import cutlass
    import cutlass.cute as cute

    tools = toolchain.current()
    loaded = cutlass.__version__, f"cu{cutlass.CUDA_VERSION.major}"
    if loaded != (tools.dsl, tools.flavour):  # the artifact would be kept under a wrong key
        raise CompileError(f"cutlass {loaded} is loaded, where {tools.dsl, tools.flavour} was found; install one nvidia-cutlass-dsl only")
    module, name = target.source.split(":")
    kernel = getattr(import_module(module), name)(problem, config)
    facts: dict[str, dict[str, Dim3]] = {}
    remarks = folder / "remarks"
    where = f"--gpu-arch {target.arch} --dump-dir {shlex.quote(str(folder))}"
    if "remarks" in target.options:
        where += f" --remark-output {shlex.quote(str(remarks))}"
    compiled = cute.compile(
        kernel,
        *kernel.compile_arguments(),
        options=f"{target.options} {where}",
        no_jit_engine=True,  # the host code is exported and loaded from the artifact; nothing runs this process's copy
        trace_finalize_hooks=lambda _owner, traced, _name: facts.update(_launch_facts(traced)),
    )
    ptx, cubin = compiled.__ptx__, compiled.__cubin__
    if not isinstance(ptx, str) or not isinstance(cubin, bytes):  # the DSL answers with a file name where it lost the file
        raise CompileError(f"the DSL returned no PTX or no cubin for {target.arch}")
    log = _TIMING.sub("", _ptxas_output(remarks))
    return Artifact(
        function=kernel.name,
        kernels=_kernels(cubin, log, facts, str(compiled.ir_module)),
        ptx=relative_paths(ptx, _ROOT),
        cubin=cubin,
        host_object=_host_object(compiled, kernel.name, folder / "host.o"),
        source=target.source,
        problem=_summary(problem),
        config=_summary(config),
        arch=target.arch,
        toolchain=tools,
        options=target.options,
        ptxas_log=log,
    )


def _host_object(compiled: Any, name: str, path: Path) -> bytes:
    """Host code with tvm-ffi's calling convention, for the baseline of this kind of machine.

    ``compiled.export_to_c`` would generate code for the CPU at hand (AVX-512 where it has it); the DSL's exporter for its other
    calling convention takes a target, and works on this module just as well.
    """
    from cutlass.cutlass_dsl import tvm_ffi_provider

    internal = f"__tvm_ffi_{compiled.function_name}"
    module = tvm_ffi_provider.get_export_module(compiled.ir_module, f"__cute_internal_{name}", preserve_symbols={internal})
    tvm_ffi_provider.rename_tvm_ffi_function(module, compiled.function_name, name)
    return object_code(module, f"__tvm_ffi_{name}", path)


def object_code(module: Any, function: str, path: Path) -> bytes:
    """The relocatable object file of a compiled module; ``path`` is where the DSL may write it."""
    from cutlass._mlir._mlir_libs import _cutlass_ir

    triple, cpu = toolchain.HOST_TARGETS[toolchain.current().machine]
    exporter: Any = _cutlass_ir._mlirExecutionEngine
    exporter.dump_object_file_pic(module, str(path), function, opt_level=2, host_triple=triple, host_cpu=cpu, host_features="")
    return path.read_bytes()


def compiling() -> bool:
    """Whether ``compile_kernel`` is at work: hooks that others set in the DSL must leave its compiles alone."""
    return _LOCK.locked()


def _kernels(cubin: bytes, log: str, facts: dict[str, dict[str, Dim3]], host_code: str) -> tuple[Kernel, ...]:
    spills = parse_ptxas_log(log)
    shared = dynamic_shared_memory(host_code)
    kernels = []
    for name, resources in parse_cubin(cubin).items():
        # What ptxas says comes with a line table only; but a thread without local memory has nowhere to spill to.
        stores, loads = spills.get(name, (None, None) if resources.stack else (0, 0))
        launch = Launch(dynamic_shared=shared.get(name), **facts.get(name, {}))
        kernels.append(Kernel(name, launch, replace(resources, spill_stores=stores, spill_loads=loads)))
    return tuple(sorted(kernels, key=lambda kernel: kernel.name))


def _launch_facts(module: Any) -> dict[str, dict[str, Dim3]]:
    """Block, cluster and grid of each kernel in a traced module, where the DSL could prove that they are fixed."""
    from cutlass._mlir import ir

    facts: dict[str, dict[str, Dim3]] = {}

    def visit(operation: Any) -> Any:
        if _FACTS in operation.attributes:
            found = {
                match[1]: (int(match[2]), int(match[3]), int(match[4])) for match in _EXACT.finditer(str(operation.attributes[_FACTS]))
            }
            facts[operation.attributes["sym_name"].value] = found
            return ir.WalkResult.SKIP  # what is inside has none
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit, ir.WalkOrder.PRE_ORDER)
    return facts


def _ptxas_output(remarks: Path) -> str:
    """What ptxas printed, out of the DSL's remark file (YAML; a quoted scalar in which ' is doubled)."""
    if not remarks.exists():
        return ""
    scalars = re.findall(r"- Remark:\s+'((?:[^']|'')*)'", remarks.read_text())
    return "\n".join(scalar.replace("''", "'").removeprefix("ptxas output: ").strip() for scalar in scalars)


def _summary(value: Any) -> Any:
    """A problem or a config for people to read, as JSON data; functions by name."""
    fields = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    return json.loads(json.dumps(fields, default=lambda other: getattr(other, "__qualname__", type(other).__qualname__)))
