from __future__ import annotations

import ast
import dataclasses
import functools
import math
import re
import sys
import time

import numpy as np
import pytest
import torch
from compiler_helpers import REQUEST, run_python
from toy_config import ToyConfig, toy_problem

import fa4
from fa4 import dispatch
from fa4._settings import compiler_environment
from fa4.compiler import get, key, plain, sources, toolchain
from fa4.compiler.key import function_key, kernel_key
from fa4.modifier import DeviceFunction
from fa4.problem import AttentionProblem

# --- every element of a key ---


def other(value):
    if isinstance(value, bool):
        return not value
    if value is None:
        return DeviceFunction(lambda *arguments: arguments[0])
    return value + 1 if isinstance(value, int) else (not value[0], value[1]) if isinstance(value, tuple) else value + "x"


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(AttentionProblem) if f.name != "direction"])
def test_each_field_of_the_problem_counts(field):
    problem = toy_problem()
    changed = dataclasses.replace(problem, **{field: other(getattr(problem, field))})
    assert kernel_key(changed, ToyConfig(), "sm_80") != kernel_key(*REQUEST)


def test_config_arch_and_options_count():
    keys = {
        kernel_key(*REQUEST),
        kernel_key(toy_problem(), ToyConfig(threads=64), "sm_80"),
        kernel_key(toy_problem(), ToyConfig(factor=2.5), "sm_80"),
        kernel_key(toy_problem(), ToyConfig(factor=2), "sm_80"),
        kernel_key(toy_problem(), ToyConfig(), "sm_86"),
        kernel_key(*REQUEST, line_info=True),
    }
    assert len(keys) == 6


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(toolchain.Toolchain)])
def test_each_part_of_the_toolchain_counts(field, monkeypatch):
    before = kernel_key(*REQUEST)
    tools = toolchain.current()
    monkeypatch.setattr(toolchain, "current", lambda: dataclasses.replace(tools, **{field: getattr(tools, field) + "x"}))
    assert kernel_key(*REQUEST) != before


def test_the_format_counts(monkeypatch):
    before = kernel_key(*REQUEST)
    monkeypatch.setattr(key, "FORMAT", key.FORMAT + 1)
    assert kernel_key(*REQUEST) != before


def test_the_kernel_class_counts(monkeypatch):
    before = kernel_key(*REQUEST)
    monkeypatch.setitem(dispatch.IMPLEMENTATIONS, ("toy", "ampere"), "toy_kernel:OtherToy")
    assert kernel_key(*REQUEST) != before


def key_with(monkeypatch, name, value):
    """As a process would compute it that started with this variable."""
    with monkeypatch.context() as patch:
        patch.setenv(name, value)
        compiler_environment.cache_clear()
        try:
            return kernel_key(*REQUEST)
        finally:
            compiler_environment.cache_clear()


def test_compiler_variables_count_and_harmless_ones_do_not(monkeypatch):
    before = kernel_key(*REQUEST)
    for name in ("CUTE_DSL_LOG_LEVEL", "CUTE_DSL_DUMP_DIR", "CUTE_DSL_KEEP", "HOME"):
        assert key_with(monkeypatch, name, "1") == before
    names = ("CUTE_DSL_ENABLE_ASSERTIONS", "CUTE_DSL_COMPILER_OPT", "CUTE_DSL_LINEINFO", "CUTE_DSL_SOMETHING_NEW")
    keys = {key_with(monkeypatch, name, value) for name in names for value in ("1", "2")}
    assert len(keys - {before}) == 8


def test_a_variable_set_too_late_for_the_dsl_does_not_count(monkeypatch):
    """The DSL reads its variables once: a kernel compiled afterwards is the same, and must not be stored as another."""
    before = kernel_key(*REQUEST)
    monkeypatch.setenv("CUTE_DSL_ENABLE_ASSERTIONS", "1")
    assert kernel_key(*REQUEST) == before


def test_a_miss_compiles_again(compiles):
    get(*REQUEST)
    get(toy_problem(), ToyConfig(threads=64), "sm_80")
    get(*REQUEST, line_info=True)
    get(*REQUEST)
    assert len(compiles) == 3


def test_what_varies_at_run_time_is_not_in_the_key():
    """Case 43: lengths, batch, scale and the rest of a call's numbers are options, which no key takes."""
    assert {f.name for f in dataclasses.fields(AttentionProblem)} == {
        *("direction", "dtype", "head_dim", "head_dim_v", "causal", "window", "softcap", "deterministic"),
        "score_mod",
        "mask_mod",
    }


def test_a_key_is_the_same_in_every_process(folder):
    code = "from compiler_helpers import REQUEST; from fa4.compiler.key import kernel_key; print(kernel_key(*REQUEST))"
    keys = {run_python(code, folder, PYTHONHASHSEED=seed) for seed in ("1", "2")}
    assert keys == {kernel_key(*REQUEST)}


def test_a_key_imports_neither_cutlass_nor_torch_and_is_fast(folder, record_property):
    code = """
import sys, time
from compiler_helpers import REQUEST
from fa4.compiler.key import function_key, kernel_key
start = time.perf_counter(); kernel_key(*REQUEST); first = time.perf_counter() - start
start = time.perf_counter(); kernel_key(*REQUEST); again = time.perf_counter() - start
function_key(lambda score, q, k: score * 2)
print("cutlass" in sys.modules, "torch" in sys.modules, first, again)
"""
    cutlass, torch_, first, again = run_python(code, folder).split()
    assert (cutlass, torch_) == ("False", "False")
    record_property("first_key_ms", float(first) * 1e3)
    record_property("later_key_ms", float(again) * 1e3)


def test_a_lookup_in_memory_is_reported(compiles, record_property):
    get(*REQUEST)
    request = (toy_problem(), ToyConfig(), "sm_80")
    start = time.perf_counter()
    for _ in range(10_000):
        get(*request)
    record_property("lookup_us", (time.perf_counter() - start) * 1e2)
    assert len(compiles) == 1


# --- sources ---


def package(tmp_path, monkeypatch, **files):
    folder = tmp_path / "scanned"
    for name, text in {"__init__": "", **files}.items():
        path = folder.joinpath(*name.split("__in__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for cached in (sources._file, sources._top_level, sources.source_digest):
        cached.cache_clear()
    return folder


def test_imports_are_followed_without_importing(tmp_path, monkeypatch):
    package(
        tmp_path,
        monkeypatch,
        kernel="raise SystemExit\nimport os, torch\nfrom . import helper\nfrom scanned.deep import tile\ndef f():\n from .late import x\n",
        helper="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from scanned import types_only\nelse:\n    import scanned.other\n",
        late="import fa4.problem\n",
        other="",
        types_only="",
        unused="",
        deep__in____init__="",
        deep__in__tile="from ..helper import y\n",
    )
    found = set(sources.source_files(("scanned.kernel",)))
    own = {"kernel", "helper", "late", "other", "deep", "deep.tile"}
    assert {"scanned", *(f"scanned.{name}" for name in own), "fa4", "fa4.problem", "fa4.modifier", "fa4.errors"} == found
    assert "scanned" not in sys.modules


@pytest.mark.parametrize("changed", ["kernel", "helper"])
def test_a_changed_source_changes_the_digest_and_an_unused_one_does_not(tmp_path, monkeypatch, changed):
    files = {"kernel": "from scanned import helper", "helper": "x = 1", "unused": ""}
    folder = package(tmp_path, monkeypatch, **files)
    before = sources.source_digest(("scanned.kernel",))
    (folder / "unused.py").write_text("x = 2")
    sources.source_digest.cache_clear()
    assert sources.source_digest(("scanned.kernel",)) == before
    (folder / f"{changed}.py").write_text(files[changed] + "\n")
    sources.source_digest.cache_clear()
    assert sources.source_digest(("scanned.kernel",)) != before


def test_sources_of_a_kernel_include_the_compiler_that_shapes_its_artifact():
    found = sources.source_files(("toy_kernel", "fa4.compiler.compile"))
    assert {"toy_kernel", "fa4.compiler.compile", "fa4.compiler.artifact", "fa4.dispatch"} <= set(found)
    ampere = set(sources.source_files(("fa4.kernels.ampere.forward.kernel",)))
    assert {"fa4.kernels.ampere.forward.mma", "fa4.kernels.common.online_softmax", "fa4.config"} <= ampere
    assert "fa4.cli" not in ampere


def imported(tree):
    return [ast.dump(node) for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]


def test_the_quick_scan_finds_what_a_whole_parse_finds(request):
    quick = 0
    for path in [*(request.config.rootpath / "fa4").rglob("*.py"), *(request.config.rootpath / "tests").rglob("*.py")]:
        source = path.read_text()
        quick += sources._import_lines(source) is not None
        assert set(imported(ast.parse(source))) <= set(imported(sources._parse(source))), path
    assert quick > 50


@pytest.mark.parametrize(
    "source",
    [
        "x = 1; import a",
        "if x: import a",
        "import a; import b",
        "from a import (  # why (\n    b,  # c)\n    c,\n)",
        "from a \\\n    import b",
        "from a import b, \\\n    c",
        "def f():\n    # import a\n    import b  # import c",
        'def f():\n    """\n    from here import there, and\n    """\n    import b',
        "try:\n    import a\nexcept ImportError:\n    import b as a",
        "x = 'import a'",
        "x = '#'; import a",
        "",
    ],
)
def test_the_quick_scan_is_not_fooled(source):
    assert set(imported(ast.parse(source))) <= set(imported(sources._parse(source)))


def test_unreadable_sources_are_a_clear_error(tmp_path, monkeypatch):
    package(tmp_path, monkeypatch, broken="def f(:\n    x = 1; import y\n")
    with pytest.raises(fa4.CompileError, match=r"broken\.py cannot be parsed"):
        sources.source_digest(("scanned.broken",))
    with pytest.raises(fa4.CompileError, match=r"module scanned\.missing has no source file"):
        sources.source_digest(("scanned.missing",))


# --- user functions ---

SLOPE = 0.5
TABLE = {"a": (1, 2)}


def uses_global(score, q, k):
    return score * SLOPE


def calls_another(score, q, k):
    return uses_global(score, q, k) + TABLE["a"][0]


def recursive(n):
    return 1 if n == 0 else n * recursive(n - 1)


def with_default(score, q, k, slope=0.5, *, bias=1):
    return score * slope + bias


def closure_over(value):
    return lambda score, q, k: (score, value)


@dataclasses.dataclass(frozen=True)
class Alibi:
    slope: float

    def __call__(self, score, q, k):
        return score - self.slope * (q - k)


def test_two_lambdas_on_one_line_differ():
    f, g = (lambda s, q, k: s + 1, lambda s, q, k: s + 2)  # fmt: skip
    assert function_key(f) != function_key(g)
    h, i = (lambda s, q, k: s + q, lambda s, q, k: s + k)  # fmt: skip
    assert len({function_key(each) for each in (f, g, h, i)}) == 4


def test_equal_functions_have_one_key():
    assert function_key(lambda s, q, k: s * 2) == function_key(lambda s, q, k: s * 2)
    assert function_key(closure_over(3)) == function_key(closure_over(3))


@pytest.mark.parametrize(("name", "value"), [("SLOPE", 0.25), ("SLOPE", 1), ("TABLE", {"a": (1, 3)})])
def test_a_changed_global_changes_the_key_also_of_callers(monkeypatch, name, value):
    before = function_key(calls_another)
    monkeypatch.setitem(globals(), name, value)
    assert function_key(calls_another) != before


def test_a_mutated_global_changes_the_key(monkeypatch):
    before = function_key(calls_another)
    monkeypatch.setitem(TABLE, "a", (5, 2))
    assert function_key(calls_another) != before


def test_tracing_a_function_does_not_change_its_key():
    """The DSL puts code with its own branches in the place of a function's when it first traces it."""
    import cutlass.cute as cute
    from cutlass.base_dsl.dsl import BaseDSL

    @cute.jit
    def positive(x):
        return x if x > 1 else -x

    before, code = function_key(positive), positive.__wrapped__.__code__
    BaseDSL._preprocess_and_replace_code(positive.__wrapped__)
    assert positive.__wrapped__.__code__ is not code
    assert function_key(positive) == before


def test_a_changed_default_changes_the_key(monkeypatch):
    before = function_key(with_default)
    monkeypatch.setattr(with_default, "__defaults__", (0.75,))
    assert (after := function_key(with_default)) != before
    monkeypatch.setattr(with_default, "__kwdefaults__", {"bias": 2})
    assert function_key(with_default) not in (before, after)


DIFFERENT = [
    *((0.0, -0.0), (1, 1.0), (1, True), ((1, 2), [1, 2]), ({1}, {1, 2}), (b"a", "a"), (None, False), (range(3), range(4)), (1j, 2j)),
    *((torch.float16, torch.bfloat16), (np.float32(1), np.float64(1)), (math.sin, math.cos), (torch, math), (int, float)),
    *((Alibi(1.0), Alibi(2.0)), (uses_global, with_default), (float("nan"), float("inf")), ({"a": 1, "b": 2}, {"b": 2, "a": 1})),
]


@pytest.mark.parametrize("values", DIFFERENT)
def test_closure_values_are_told_apart(values):
    first, second = map(closure_over, values)
    assert function_key(first) != function_key(second)
    assert function_key(first) == function_key(closure_over(values[0]))


def test_a_closure_variable_changed_in_place_changes_the_key():
    value = 1

    def f(score, q, k):
        return score + value

    before = function_key(f)
    value = 2
    assert function_key(f) != before


def test_nested_code_partials_methods_and_wrappers_count():
    def outer(n):
        def f(score, q, k):
            return [score + n for _ in range(3)]

        return f

    assert function_key(outer(1)) != function_key(outer(2))
    assert function_key(functools.partial(with_default, slope=1)) != function_key(functools.partial(with_default, slope=2))
    assert function_key(Alibi(1.0).__call__) != function_key(Alibi(2.0).__call__)
    assert function_key(functools.lru_cache(uses_global).__wrapped__) == function_key(uses_global)
    assert function_key(recursive) == function_key(recursive)


def test_a_method_of_a_captured_class_counts():
    def make(offset):
        @dataclasses.dataclass(frozen=True)
        class Shift:
            by: int

            def __call__(self, x):
                return x + self.by + offset

        return Shift(1)

    assert function_key(closure_over(make(1))) != function_key(closure_over(make(2)))


class Opaque:
    pass


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(2), r"closure value is a torch\.Tensor.*capture numbers or tuples of numbers.*tolist"),
        (np.zeros(2), r"closure value is a numpy\.ndarray.*tolist"),
        (Opaque(), r"closure value is a .*Opaque, which cannot be part of a compile key; capture plain data, functions or a dataclass"),
        (open, None),
        (sys.stdout, r"closure value is a .*capture plain data"),
        (sys.modules["toy_config"], r"closure value is a module.*import what you use from it by name"),
        ([[Opaque()]], r"closure value\[0\]\[0\] is a .*Opaque"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_keyed_says_what_and_how_to_fix_it(value, message):
    if message is None:
        function_key(closure_over(value))
        return
    with pytest.raises(fa4.CompileError, match=message):
        function_key(closure_over(value))


def test_a_value_that_contains_itself_is_refused():
    loop: list = []
    loop.append(loop)
    with pytest.raises(fa4.CompileError, match="nested too deeply, or contains itself"):
        function_key(closure_over(loop))


def test_case_44_changed_functions_compile_again(compiles):
    """The same request object, with a function whose global changed, must not find what was compiled before."""

    @dataclasses.dataclass(frozen=True)
    class WithFunction:
        score_mod: object

    config = WithFunction(uses_global)
    first = get(toy_problem(), config, "sm_80")
    assert get(toy_problem(), config, "sm_80") is first
    global SLOPE
    SLOPE, before = 0.125, SLOPE
    try:
        second = get(toy_problem(), config, "sm_80")
        assert second != first
        assert get(toy_problem(), config, "sm_80") is second
    finally:
        SLOPE = before
    assert get(toy_problem(), config, "sm_80") is first
    assert len(compiles) == 2


def test_a_function_is_found_inside_data():
    assert plain.contains_function(plain.plain((1, [uses_global])))
    assert plain.contains_function(plain.plain(functools.partial(uses_global)))
    assert not plain.contains_function(plain.plain((1, ["function"], {"function": 1})))


# --- the toolchain ---


def test_the_range_of_dsl_versions_is_that_of_the_package(request):
    text = (request.config.rootpath / "pyproject.toml").read_text()
    low, high = re.search(r'"nvidia-cutlass-dsl>=([\d.]+),<([\d.]+)"', text).groups()
    assert tuple(map(int, low.split("."))) == toolchain.DSL_AT_LEAST
    assert tuple(map(int, high.split("."))) == toolchain.DSL_BELOW


@pytest.fixture
def tools(monkeypatch):
    toolchain.current.cache_clear()
    yield monkeypatch
    toolchain.current.cache_clear()


@pytest.mark.parametrize("version", ["4.8.0", "4.9.0", "5.0", "4.9.0.dev1"])
def test_another_dsl_is_a_clear_error(tools, version):
    tools.setattr(toolchain, "_version", lambda name: version)
    with pytest.raises(
        fa4.CompileError, match=rf"nvidia-cutlass-dsl {version} is installed, fa4 needs at least 4.8.1, below 4.9; pip install"
    ):
        toolchain.current()


def test_a_missing_dsl_is_a_clear_error(tools):
    with pytest.raises(fa4.CompileError, match="no-such-thing is not installed; pip install no-such-thing"):
        toolchain._version("no-such-thing")


def make_flavours(tmp_path, *majors):
    for major in majors:
        (tmp_path / f"_cutlass_ir.cu{major}.cpython-311-x86_64-linux-gnu.so").touch()


@pytest.mark.parametrize(("driver", "flavour"), [(None, "cu13"), (12, "cu12"), (13, "cu13"), (14, "cu13")])
def test_the_flavour_is_the_newest_that_the_driver_supports(tools, tmp_path, driver, flavour):
    make_flavours(tmp_path, 12, 13)
    tools.setattr(toolchain, "_libraries", lambda: tmp_path)
    tools.setattr(toolchain, "_driver_major", lambda: driver)
    assert toolchain.current().flavour == flavour


def test_a_driver_too_old_and_an_empty_installation_are_clear_errors(tools, tmp_path):
    tools.setattr(toolchain, "_libraries", lambda: tmp_path)
    with pytest.raises(fa4.CompileError, match="no compiler library in"):
        toolchain.current()
    make_flavours(tmp_path, 13)
    tools.setattr(toolchain, "_driver_major", lambda: 12)
    with pytest.raises(fa4.CompileError, match="the driver supports CUDA 12, the installed nvidia-cutlass-dsl needs CUDA 13"):
        toolchain.current()


def test_an_unknown_flavour_works_and_says_so(tools, tmp_path, caplog):
    make_flavours(tmp_path, 14)
    tools.setattr(toolchain, "_libraries", lambda: tmp_path)
    tools.setattr(toolchain, "_driver_major", lambda: None)
    assert toolchain.current().flavour == "cu14"
    assert "flavour cu14 is new to fa4" in caplog.text


@pytest.mark.compile
def test_the_flavour_found_is_the_one_that_the_dsl_loads():
    import cutlass

    assert toolchain.current().flavour == f"cu{cutlass.CUDA_VERSION.major}"
    assert toolchain.current().dsl == cutlass.__version__
    assert toolchain.runtime_library().exists()
