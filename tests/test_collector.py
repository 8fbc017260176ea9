"""The switch of the collector, and that parsing uses it; compiling: compiler/test_compile.py."""

from __future__ import annotations

import gc
import threading

import pytest

from fa4._collector import no_collection
from fa4.vgpu import Program, PtxSyntaxError, program


@pytest.fixture(autouse=True)
def collector():
    was_on = gc.isenabled()
    yield
    (gc.enable if was_on else gc.disable)()


@pytest.mark.parametrize("on", [True, False])
def test_blocks_leave_the_collector_as_they_found_it(on):
    (gc.enable if on else gc.disable)()
    with no_collection():
        with pytest.raises(ZeroDivisionError), no_collection():
            raise ZeroDivisionError
        assert not gc.isenabled(), "the outer block is still open"
    assert gc.isenabled() == on


def test_blocks_of_threads_may_overlap():
    """The first to open is the first to end: the collector stays off for the other, then comes back."""
    gc.enable()
    inside, leave = threading.Event(), threading.Event()

    def other():
        with no_collection():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with no_collection():
        thread.start()
        assert inside.wait(10)
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_parsing_is_such_a_block(monkeypatch):
    """Also where it fails."""
    gc.enable()
    seen, parse = [], program.parse
    monkeypatch.setattr(program, "parse", lambda text: seen.append(gc.isenabled()) or parse(text))
    Program.parse(".version 8.8\n.target sm_80\n.address_size 64\n")
    with pytest.raises(PtxSyntaxError):
        Program.parse("nonsense")
    assert seen == [False, False]
    assert gc.isenabled()
