"""Loading host code without cutlass, and calling it without a GPU, a driver or a C compiler."""

from __future__ import annotations

import dataclasses
import re
import struct
from pathlib import Path

import pytest
import torch
from compiler_helpers import REQUEST, fake_artifact, run_python

import fa4
from fa4.compiler import elf, get, link
from fa4.compiler.load import load_function
from fa4.runtime.tensors import HostTensor
from fa4.vgpu.driver import Driver

pytestmark = pytest.mark.compile


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    with fa4.settings(cache=True, cache_dir=str(tmp_path_factory.mktemp("load") / "cache")):
        return get(*REQUEST)


class Launches:
    """A stand-in for the driver that keeps each launch and the bytes of its parameters."""

    def __init__(self, sizes=(16, 16, 4)):
        self.seen = []
        self.driver = Driver(lambda request: self.seen.append((request, request.parameters(list(sizes)))), 166912)
        self.resolve = self.driver.resolve


@pytest.fixture
def vector():
    """Vectors of host memory that pass for CUDA tensors, kept alive for the test."""
    import tvm_ffi

    alive = []

    def make(size):
        alive.append(HostTensor(torch.zeros(size)))
        return tvm_ffi.from_dlpack(alive[-1]), alive[-1].tensor.data_ptr()

    return make


def test_a_call_reaches_the_launch(artifact, vector):
    launches = Launches()
    (x, x_address), (y, y_address) = vector(512), vector(512)
    load_function(artifact, launches.resolve)(x, y, 3.0)
    ((request, parameters),) = launches.seen
    facts = artifact.kernels[0]
    assert request.kernel == facts.name
    assert (request.grid, request.block, request.dynamic_shared) == ((4, 1, 1), (128, 1, 1), 512)
    assert (request.block, request.dynamic_shared) == (facts.launch.block, facts.launch.dynamic_shared)
    assert request.cluster is None
    assert facts.launch.grid is None, "it depends on the length"
    assert [struct.unpack("<Qi", data[:12]) for data in parameters[:2]] == [(x_address, 512), (y_address, 512)]
    assert struct.unpack("<f", parameters[2]) == (3.0,)
    assert [parameter.size for parameter in facts.resources.parameters] == [16, 16, 4]


def test_what_a_launch_raises_is_kept_and_fails_the_call(artifact, vector):
    def fail(_request):
        raise fa4.Fa4Error("planted")

    driver = Driver(fail, 166912)
    with pytest.raises(Exception, match="cudaErrorLaunchFailure"):
        load_function(artifact, driver.resolve)(vector(512)[0], vector(512)[0], 3.0)
    assert str(driver.error) == "planted"


def test_arguments_are_checked_before_the_launch(artifact, vector):
    launches = Launches()
    function = load_function(artifact, launches.resolve)
    x = vector(512)[0]
    with pytest.raises(TypeError, match="Expects 3 parameters"):
        function(x)
    with pytest.raises(ValueError, match="divisible by 128"):
        function(x, vector(500)[0], 1.0)
    with pytest.raises(ValueError, match="device_type=cuda"):
        function(x, torch.zeros(512), 1.0)
    assert launches.seen == []


def test_two_loads_are_independent(artifact, vector):
    both = Launches(), Launches()
    x = vector(128)[0]
    for launches in both:
        load_function(artifact, launches.resolve)(x, x, 1.0)
    assert [len(launches.seen) for launches in both] == [1, 1]


READY = """
import sys
import torch
from compiler_helpers import REQUEST
from fa4.compiler import get
from fa4.compiler.load import load_function
function = load_function(get(*REQUEST))
try:
    function()
except TypeError as error:
    print("Expects 3 parameters" in str(error), "cutlass" in sys.modules)
"""


def test_a_second_process_is_ready_to_launch_without_cutlass(artifact, folder):
    from fa4.compiler.cache import DiskCache
    from fa4.compiler.key import kernel_key

    DiskCache(folder, 1 << 30).store(kernel_key(*REQUEST), artifact)
    assert run_python(READY, folder) == "True False"


def test_text_is_not_writable_and_data_is_not_executable(artifact):
    loaded = link.LoadedObject(artifact.host_object, lambda name: 1)
    address = loaded.address(f"__tvm_ffi_{artifact.function}")
    modes = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end, mode = re.match(r"(\w+)-(\w+) (\S+)", line).groups()
        if int(start, 16) <= address < int(end, 16):
            modes["text"] = mode
        if int(start, 16) <= loaded._base + loaded._table < int(end, 16):
            modes["table"] = mode
    assert modes == {"text": "r-xp", "table": "r--p"}


def test_another_machine_is_a_clear_error(artifact):
    foreign = dataclasses.replace(artifact, toolchain=dataclasses.replace(artifact.toolchain, machine="riscv64"))
    with pytest.raises(fa4.CompileError, match="host code is for riscv64, this is"):
        load_function(foreign)


def with_other_relocations(data: bytes) -> bytes:
    """The object, with its first relocation of a kind that the loader does not know (R_X86_64_PC32)."""
    parsed = elf.Elf(data)
    section = next(s for s in parsed.sections if s.kind == elf.SHT_RELA and parsed.sections[s.info].flags & elf.SHF_EXECINSTR)
    patched = bytearray(data)
    struct.pack_into("<I", patched, section.offset + 8, 2)
    return bytes(patched)


def test_an_unknown_relocation_is_refused(artifact):
    changed = with_other_relocations(artifact.host_object)
    with pytest.raises(fa4.CompileError, match="relocation type 2 in the host object is not one that the DSL is known to emit"):
        load_function(dataclasses.replace(artifact, host_object=changed), Launches().resolve)


def test_a_symbol_that_nobody_defines_is_named(artifact):
    with pytest.raises(link.LinkError, match="_cudaLaunchKernelEx"):
        link.LoadedObject(artifact.host_object, lambda name: None)


def test_garbage_is_refused():
    for data in (b"", b"\x7fELF", b"\x7fELF\x02\x01" + bytes(100), fake_artifact().host_object):
        with pytest.raises(elf.ElfError):
            elf.Elf(data)


def test_where_the_loader_cannot_the_dsl_loads(artifact, monkeypatch, caplog):
    """The way of machines whose relocations the loader does not know, taken here by refusing every object."""

    def refuse(*_arguments):
        raise link.LinkError("planted")

    monkeypatch.setattr("fa4.compiler.load.LoadedObject", refuse)
    with caplog.at_level("INFO", logger="fa4"):
        function = load_function(artifact)
    assert "by way of cutlass: planted" in caplog.text
    with pytest.raises(TypeError, match="Expects 3 parameters"):
        function()


def test_where_neither_can_the_error_is_clear(artifact):
    broken = dataclasses.replace(artifact, host_object=b"no object")
    with pytest.raises(fa4.CompileError, match="cannot be loaded"):
        load_function(broken)
