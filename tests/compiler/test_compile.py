from __future__ import annotations

import dataclasses
import gc
import json
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
from compiler_helpers import REQUEST, run_python
from toy_config import ToyConfig, toy_problem

import fa4
from fa4 import dispatch
from fa4.compiler import toolchain
from fa4.compiler.artifact import from_parts
from fa4.compiler.compile import compile_kernel
from fa4.compiler.cubin import parse_cubin, parse_ptxas_log
from fa4.compiler.elf import SHF_EXECINSTR, Elf
from fa4.compiler.hostcode import dynamic_shared_memory
from fa4.compiler.ptx import SourceLine, line_table, relative_paths

compiling = pytest.mark.compile


@pytest.fixture(scope="module")
def artifact():
    return compile_kernel(*REQUEST)


@pytest.fixture(scope="module")
def with_lines():
    return compile_kernel(*REQUEST, line_info=True)


@compiling
def test_an_artifact_is_plain_data(artifact):
    again = from_parts(json.loads(json.dumps(artifact.metadata())), artifact.files())
    assert again == artifact
    assert artifact.arch == "sm_80"
    assert artifact.source == "toy_kernel:Toy"
    assert artifact.problem["head_dim"] == 64
    assert artifact.config == {"threads": 128, "factor": 2.0, "broken": False}
    assert artifact.toolchain == toolchain.current()
    assert ".target sm_80" in artifact.ptx


@compiling
def test_resources_agree_with_what_ptxas_and_the_ptx_say(artifact, with_lines):
    assert artifact.ptxas_log == ""
    assert artifact.kernels == with_lines.kernels
    artifact = with_lines
    (kernel,) = artifact.kernels
    resources = kernel.resources
    assert f".entry {kernel.name}(" in artifact.ptx
    used = re.search(r"Used (\d+) registers.*?(\d+) bytes cmem\[0\]", artifact.ptxas_log)
    assert (resources.registers, resources.constant) == tuple(map(int, used.groups()))
    assert (resources.stack, resources.spill_stores, resources.spill_loads) == (0, 0, 0)
    sizes = re.findall(r"\.param \.align \d+ \.b8 \w+\[(\d+)\]|\.param \.(?:u|f|b)(\d+)", artifact.ptx)
    assert [p.size for p in resources.parameters] == [int(array or int(scalar) // 8) for array, scalar in sizes]
    assert (kernel.launch.block, kernel.launch.cluster, kernel.launch.grid, kernel.launch.dynamic_shared) == ((128, 1, 1), None, None, 512)


@compiling
def test_nothing_is_made_that_nobody_uses(monkeypatch):
    """No copy of the host code for this process, whatever this machine's GPU; and no search for garbage among what stays."""
    from cutlass.base_dsl.compiler import Compiler

    on, compile_module = [], Compiler.compile
    monkeypatch.setattr(Compiler, "jit", lambda *_, **__: pytest.fail("host code was generated twice"))
    monkeypatch.setattr(Compiler, "compile", lambda *args, **named: on.append(gc.isenabled()) or compile_module(*args, **named))
    gc.enable()
    assert compile_kernel(toy_problem(), ToyConfig(threads=32), "sm_100a").host_object
    assert on == [False]
    assert gc.isenabled()


@compiling
def test_every_architecture_in_one_process():
    for arch in ("sm_86", "sm_90a", "sm_100a"):
        artifact = compile_kernel(toy_problem(), ToyConfig(threads=64), arch)
        assert f".target {arch}" in artifact.ptx
        assert artifact.kernels[0].launch.dynamic_shared == 256
        assert artifact.kernels[0].resources.registers > 0


@compiling
def test_line_information_leaves_the_machine_code_alone(artifact, with_lines):

    def code(cubin):
        elf = Elf(cubin)
        return [elf.content(s) for s in elf.sections if s.flags & SHF_EXECINSTR]

    assert code(with_lines.cubin) == code(artifact.cubin) != []
    assert with_lines.cubin != artifact.cubin
    assert artifact.line_table() == ()
    source = Path(__file__).with_name("toy_kernel.py").read_text().splitlines()
    rows = with_lines.line_table()
    assert all(row.file.endswith("tests/compiler/toy_kernel.py") for row in rows)
    assert not any(row.file.startswith(str(Path(fa4.__file__).parents[1])) for row in rows), "no path depends on where the package lies"
    texts = [source[row.line - 1] for row in rows]
    assert any("cute.arch.sync_threads()" in text for text in texts)
    barrier = with_lines.ptx.splitlines().index(next(line for line in with_lines.ptx.splitlines() if "bar.sync" in line)) + 1
    nearest = max((row for row in rows if row.ptx_line < barrier), key=lambda row: row.ptx_line)
    assert "sync_threads" in source[nearest.line - 1]


AGAIN = """
import hashlib
from compiler_helpers import REQUEST
from fa4.compiler.compile import compile_kernel
artifact = compile_kernel(*REQUEST)
print(*(hashlib.sha256(data).hexdigest() for data in artifact.files().values()))
"""


@compiling
def test_ptx_cubin_and_host_object_are_identical_across_processes(artifact, folder):
    import hashlib

    expected = [hashlib.sha256(data).hexdigest() for data in artifact.files().values()]
    assert run_python(AGAIN, folder, PYTHONHASHSEED="7").split() == expected


@compiling
def test_host_code_is_for_the_baseline_of_the_machine(artifact, tmp_path):
    """No AVX: the cache may be shared by unlike CPUs. Wide constants give AVX-512 away without a disassembler."""
    wide = {".rodata.cst32", ".rodata.cst64"}
    assert wide.isdisjoint(section.name for section in Elf(artifact.host_object).sections)
    if artifact.toolchain.machine == "x86_64" and shutil.which("objdump"):
        path = tmp_path / "host.o"
        path.write_bytes(artifact.host_object)
        listing = subprocess.run(["objdump", "-d", str(path)], capture_output=True, text=True, check=True).stdout
        assert "xmm" in listing, "the check sees vector code"
        assert not re.search(r"[yz]mm|\tv[a-z]+ ", listing)


@compiling
def test_nothing_is_left_in_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with_space = tmp_path / "temporary folder"
    with_space.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(with_space))
    compile_kernel(toy_problem(32), ToyConfig(), "sm_80")
    assert [path for path in tmp_path.rglob("*") if path != with_space] == []


@compiling
def test_threads_take_turns(artifact):
    """Two compiles at once would end the process."""
    found = []
    threads = [threading.Thread(target=lambda: found.append(compile_kernel(*REQUEST))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [artifact] * 3


@compiling
def test_what_does_not_compile_is_a_clear_error():
    with pytest.raises(fa4.CompileError, match=r"toy_kernel:Toy does not compile for sm_80, .*broken=True.*planted fault") as caught:
        compile_kernel(toy_problem(), ToyConfig(broken=True), "sm_80")
    assert "planted fault" in str(caught.value.__cause__)
    with pytest.raises(fa4.BackendError, match="sm_1"):
        compile_kernel(toy_problem(), ToyConfig(), "sm_1")
    with pytest.raises(fa4.UnsupportedError, match="there is no sideways kernel"):
        compile_kernel(dataclasses.replace(toy_problem(), direction="sideways"), ToyConfig(), "sm_80")


@compiling
@pytest.mark.parametrize("field", ["dsl", "flavour"])
def test_a_compiler_other_than_the_one_in_the_key_is_refused(monkeypatch, field):
    tools = toolchain.current()
    monkeypatch.setattr(toolchain, "current", lambda: dataclasses.replace(tools, **{field: "other"}))
    with pytest.raises(fa4.CompileError, match=r"is loaded, where .*other.* was found"):
        compile_kernel(*REQUEST)


def test_an_unknown_machine_is_a_clear_error(monkeypatch):
    tools = toolchain.current()
    monkeypatch.setattr(toolchain, "current", lambda: dataclasses.replace(tools, machine="riscv64"))
    with pytest.raises(fa4.CompileError, match="host code for riscv64 is not supported; compile on one of x86_64, aarch64"):
        compile_kernel(*REQUEST)


def test_spills_are_read_from_the_log():
    log = """ptxas info    : Compiling entry function 'a' for 'sm_80'
ptxas info    : Function properties for a
ptxas         .     88 bytes stack frame, 144 bytes spill stores, 132 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers
ptxas info    : Function properties for b
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"""
    assert parse_ptxas_log(log) == {"a": (144, 132), "b": (0, 0)}
    assert parse_ptxas_log("") == {}


def test_a_host_object_is_no_cubin():
    with pytest.raises(ValueError, match="not a 64-bit"):
        parse_cubin(b"nothing")


def host_code(size: str) -> str:
    return f"""
  llvm.func @host() {{
    %8 = {size}
    %11 = llvm.alloca %6 x !llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)> : (i32) -> !llvm.ptr
    %17 = llvm.getelementptr %11[0, 2] : (!llvm.ptr) -> !llvm.ptr
    llvm.store %8, %17 : i64, !llvm.ptr
    %23 = llvm.alloca %6 x !llvm.array<1 x ptr> : (i32) -> !llvm.ptr
    %24 = llvm.getelementptr %23[0, 0] : (!llvm.ptr) -> !llvm.ptr
    llvm.store %11, %24 : !llvm.ptr, !llvm.ptr
    %67 = llvm.getelementptr %23[0, 0] : (!llvm.ptr) -> !llvm.ptr
    %68 = llvm.load %67 : !llvm.ptr -> !llvm.ptr
    %81 = llvm.mlir.addressof @kernels_one_0 : !llvm.ptr
    %82 = llvm.load %81 : !llvm.ptr -> !llvm.ptr
    %83 = llvm.call @_cudaLaunchKernelEx(%68, %82, %71) : (!llvm.ptr, !llvm.ptr, !llvm.ptr) -> i32
"""


def test_shared_memory_is_known_where_it_is_a_constant():
    constant = host_code("llvm.mlir.constant(4096 : i64) : i64")
    assert dynamic_shared_memory(constant) == {"one_0": 4096}
    assert dynamic_shared_memory(host_code("llvm.mul %1, %2 : i64")) == {}
    other = host_code("llvm.mlir.constant(1 : i64) : i64")
    assert dynamic_shared_memory(constant + other) == {}, "two launches that disagree"
    assert dynamic_shared_memory(constant + other.replace("one_0", "two_0")) == {"one_0": 4096, "two_0": 1}


def test_paths_outside_the_package_stay():
    ptx = '\t.loc\t1 5 2\n\t.loc 2 7 1\n\t.file\t1 "/site/fa4/kernels/a.py"\n\t.file\t2 "/home/user/mod.py"\n'
    assert line_table(relative_paths(ptx, Path("/site"))) == (
        SourceLine(1, "fa4/kernels/a.py", 5, 2),
        SourceLine(2, "/home/user/mod.py", 7, 1),
    )


@compiling
def test_the_ampere_forward_kernel():
    from fa4.config import AmpereForwardConfig
    from fa4.problem import AttentionProblem

    problem = AttentionProblem("forward", "bfloat16", 64, 64, causal=True)
    artifact = compile_kernel(problem, AmpereForwardConfig(tile_m=64, tile_n=32, stages=1, threads=128), "sm_80")
    assert artifact.source == dispatch.IMPLEMENTATIONS["forward", "ampere"]
    (kernel,) = artifact.kernels
    assert kernel.launch.block == (128, 1, 1)
    assert kernel.launch.dynamic_shared == 2 * (64 * 64 + 2 * 32 * 64)
    assert "mma.sync" in artifact.ptx
    assert os.sep not in artifact.function
