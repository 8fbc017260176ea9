"""Reports on real kernels, and on what is missing."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

import fa4
from fa4.inspection import nvdisasm, text
from fa4.inspection.report import report

pytestmark = pytest.mark.compile
ROOT = Path(fa4.__file__).parents[1]


def test_resources(full):
    used = full.resources
    assert 32 < used.registers <= 255
    assert (used.spill_stores, used.spill_loads, used.stack) == (0, 0, 0)
    assert used.threads == full.config["threads"]
    assert used.static_shared == 0
    assert used.dynamic_shared == 2 * 64 * (full.config["tile_m"] + 2 * full.config["stages"] * full.config["tile_n"])
    assert used.blocks_per_sm >= 1


def test_every_instruction_is_counted_once(full):
    assert full.histogram.total == len(full.code.instructions) == sum(row.instructions for row in full.source_lines)
    assert full.histogram.other == {}, "a new instruction: give it a class"
    assert full.ptx_histogram.other == {}
    for loop in full.loops:
        assert loop.histogram.total == len(loop.addresses) == sum(row.instructions for row in loop.source_lines)


def test_main_loop_has_the_products_of_a_tile(full, causal):
    """mma.sync m16n8k16 is 16 x 8 x 16 products; a trip multiplies tile_m x tile_n x 64 twice, shared among the warps."""
    for shown in (full, causal):
        config = shown.config
        products = 2 * config["tile_m"] * config["tile_n"] * 64 // (16 * 8 * 16) // (config["threads"] // 32)
        assert shown.main_loop.histogram["mma"] == products
        assert {loop.histogram["mma"] for loop in shown.loops} == {products}
        assert len(shown.loops) == 2, "with a mask and without"
        assert shown.main_loop == min(shown.loops, key=lambda loop: loop.histogram.total)
    # One exp2 for each of a thread's scores, and two per row and n8 block at most for the rescaling.
    scores = full.config["tile_m"] * full.config["tile_n"] // full.config["threads"]
    assert scores <= full.main_loop.histogram["mufu"] <= scores + scores // 8


def test_main_loop_where_one_warp_issues_the_products(blackwell):
    """tcgen05.mma takes 16 of K: a trip multiplies two query tiles with a key tile of 128, in D 64 and in the keys. Loops in it wait."""
    assert blackwell.main_loop.histogram["mma"] == 2 * (64 + 128) // 16
    assert blackwell.histogram.other == blackwell.ptx_histogram.other == {}


@pytest.mark.slow
def test_causal_on_blackwell(compile_cache):
    """Its loops with and without a mask, with their lines."""
    with fa4.settings(cache=True, cache_dir=compile_cache):
        found = fa4.inspect(head_dim=64, arch="sm_100a", causal=True)
    assert found.main_loop.histogram["mma"] == 2 * (64 + 128) // 16
    assert found.histogram.other == found.ptx_histogram.other == {}
    assert found.histogram["mma"] == found.ptx_histogram["mma"]
    assert found.resources.spill_stores == found.resources.spill_loads == 0
    placed = [row for row in found.source_lines if row.file is not None]
    assert sum(row.instructions for row in placed) > 0.95 * found.histogram.total
    assert any(row.file == "fa4/kernels/blackwell/forward/softmax.py" for row in placed)


def test_sass_and_ptx_agree_on_the_products(full, blackwell):
    assert blackwell.histogram["mma"] == blackwell.ptx_histogram["mma"]
    assert full.histogram["mma"] == full.ptx_histogram["mma"]
    assert full.histogram["ldmatrix"] == full.ptx_histogram["ldmatrix"]


def test_lines_point_to_real_lines_of_kernel_files(full):
    placed = [row for row in full.source_lines if row.file is not None]
    assert sum(row.instructions for row in placed) > 0.95 * full.histogram.total
    for row in placed:
        lines = (ROOT / row.file).read_text().splitlines()
        assert row.file.startswith("fa4/kernels/")
        assert row.text == lines[row.line - 1].strip() != ""
    by_kind = {(i.kind, i.file) for i in full.code.instructions}
    assert ("mma", "fa4/kernels/ampere/forward/mma.py") in by_kind
    assert ("mufu", "fa4/kernels/common/online_softmax.py") in by_kind


def test_annotated_has_every_instruction_with_its_source(full):
    lines = full.annotated.splitlines()
    assert sum("/*" in line for line in lines) == full.histogram.total
    assert sum(line.startswith("|") for line in lines) == sum(loop.histogram.total for loop in full.loops)
    assert sum(line == "// loop, depth 1" for line in lines) == 2
    product = next(i for i, line in enumerate(lines) if "HMMA" in line)
    source = next(line for line in reversed(lines[:product]) if line.startswith("// fa4"))
    assert source.startswith("// fa4/kernels/ampere/forward/mma.py:")
    assert "cute.gemm" in source


def test_text_is_what_was_compiled(full):
    assert full.kernel in full.ptx
    assert full.kernel in full.sass
    assert full.sass.count("HMMA") == full.histogram["mma"]


def test_repr_is_a_short_summary(full, causal):
    shown = repr(full)
    assert shown == str(full)
    assert shown.startswith("forward bfloat16 head dim 64 sm_80\n")
    for part in (
        f"registers per thread     {full.resources.registers}",
        "0 bytes stored",
        "blocks per SM",
        "tensor-core products",
        "(main)",
    ):
        assert part in shown
    assert len(shown.splitlines()) < 40
    assert max(map(len, shown.splitlines())) <= 140
    assert repr(causal).startswith("forward bfloat16 head dim 64 causal sm_80\n")


def test_json_round_trip(full):
    data = full.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["resources"]["registers"] == full.resources.registers
    assert data["code"]["histogram"]["counts"] == full.histogram.counts
    assert len(data["code"]["instructions"]) == full.histogram.total


def test_a_report_is_frozen(full):
    with pytest.raises(FrozenInstanceError):
        full.ptx = ""


def test_compare(full, causal):
    comparison = full.compare(causal)
    assert comparison
    changed = {(row.section, row.name): row.right - row.left for row in comparison.differences if isinstance(row.left, int)}
    assert changed["SASS", "integer"] > 0, "a causal kernel has limits to compute"
    for (section, name), change in changed.items():
        if section == "SASS":
            assert change == causal.histogram[name] - full.histogram[name] != 0
    shown = str(comparison)
    assert shown.startswith("left:  forward bfloat16 head dim 64 sm_80\nright: forward bfloat16 head dim 64 causal sm_80\n")
    assert "SASS: integer" in shown
    assert comparison.to_dict()["differences"][0].keys() == {"section", "name", "left", "right"}


def test_compare_with_itself_finds_nothing(full):
    comparison = full.compare(full)
    assert not comparison
    assert "no difference" in str(comparison)


def test_compare_shows_what_one_side_does_not_know(full):
    other = replace(full, resources=replace(full.resources, blocks_per_sm=None, limited_by=None))
    assert "resources: blocks_per_sm" in str(full.compare(other))


def test_window_and_softcap_matter_by_presence_only(compile_cache):
    """Only the requests are compared: the compiler is replaced."""
    seen = []

    def get(problem, *_rest, **_options):
        seen.append(problem)
        raise fa4.CompileError("stop")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fa4.inspection.report.get", get)
        for options in ({"window_size": (128, 0), "softcap": 5}, {"window_size": (7, 0), "softcap": 30.0}, {"causal": True}):
            with pytest.raises(fa4.CompileError):
                fa4.inspect(head_dim=64, arch="sm_80", **options)
    assert seen[0] == seen[1] != seen[2]
    assert (seen[0].window, seen[0].causal, seen[0].softcap) == ((True, False), True, True)


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        ({"arch": "sm_90"}, fa4.BackendError, "write 'sm_90a'"),
        ({"arch": "sm_81"}, fa4.BackendError, "known: sm_80"),
        ({"arch": None}, fa4.BackendError, "not a known compile target"),
        ({"head_dim": 0}, fa4.UnsupportedError, "head_dim 0 must be a multiple of 8 from 8 to 256"),
        ({"head_dim": 512}, fa4.UnsupportedError, "head_dim 512"),
        ({"head_dim_v": 12}, fa4.UnsupportedError, "head_dim_v 12"),
        ({"head_dim": 64.0}, fa4.DtypeError, "head_dim=64.0: must be an integer"),
        ({"head_dim": "64"}, fa4.DtypeError, "must be an integer"),
        ({"dtype": "float32"}, fa4.UnsupportedError, "dtype float32"),
        ({"dtype": "int8"}, fa4.UnsupportedError, "dtype int8"),
        ({"direction": "sideways"}, fa4.ArgumentError, "direction='sideways'"),
        ({"window_size": (1, 2, 3)}, fa4.ArgumentError, "window_size"),
        ({"softcap": -1.0}, fa4.ArgumentError, "softcap"),
        ({"softcap": float("nan")}, fa4.ArgumentError, "softcap"),
    ],
    ids=str,
)
def test_bad_input(request_, error, message):
    with pytest.raises(error, match=message):
        fa4.inspect(**{"head_dim": 64, "arch": "sm_80"} | request_)


def test_without_nvdisasm_the_rest_is_there(compile_cache, full, no_nvdisasm):
    with fa4.settings(cache=True, cache_dir=compile_cache):
        shown = fa4.inspect(head_dim=64, arch="sm_80")
    assert (shown.ptx, shown.resources, shown.ptx_histogram) == (full.ptx, full.resources, full.ptx_histogram)
    for name in ("sass", "histogram", "loops", "main_loop", "annotated", "source_lines"):
        with pytest.raises(fa4.InspectionError, match=r"pip install 'fa4\[inspect\]'"):
            getattr(shown, name)
    assert "pip install 'fa4[inspect]'" in repr(shown)
    assert "tensor-core products" in repr(shown)
    assert json.loads(json.dumps(shown.to_dict()))["code"] is None
    assert shown.compare(full).differences == ()


def test_nvdisasm_on_path_is_found(no_nvdisasm):
    assert nvdisasm.find() is None
    program = no_nvdisasm / "nvdisasm"
    program.write_text("#!/bin/sh\necho Cuda tools, release 13.0, V13.0.85\n")
    program.chmod(0o700)
    assert nvdisasm.find() == program
    assert nvdisasm.version() == "V13.0.85"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("#!/bin/sh\necho 'unknown architecture' >&2; exit 3\n", "cannot read this: unknown architecture; a newer one may"),
        ("#!/bin/sh\nexit 3\n", "exit status 3"),
        ("not a program", "does not run"),
    ],
)
def test_an_nvdisasm_that_fails(no_nvdisasm, script, message):
    program = no_nvdisasm / "nvdisasm"
    program.write_text(script)
    program.chmod(0o700)
    with pytest.raises(fa4.InspectionError, match=message):
        nvdisasm.disassemble(b"")


def test_not_a_cubin():
    with pytest.raises(fa4.InspectionError, match="cannot read this"):
        nvdisasm.disassemble(b"not a cubin")


def test_an_artifact_of_several_kernels_is_refused(compile_cache):
    from fa4 import tuning
    from fa4.arch import get_arch
    from fa4.compiler import get
    from fa4.problem import AttentionProblem

    problem = AttentionProblem("forward", "bfloat16", 64, 64)
    with fa4.settings(cache=True, cache_dir=compile_cache):
        artifact = get(problem, tuning.config(problem, get_arch("sm_80")), "sm_80", line_info=True)
    with pytest.raises(fa4.UnsupportedError, match="a report covers one kernel"):
        report(replace(artifact, kernels=artifact.kernels * 2))
    renamed = replace(artifact.kernels[0], name="elsewhere")
    assert "shows no function 'elsewhere'" in report(replace(artifact, kernels=(renamed,))).code_error


def test_tables_without_machine_code(full):
    assert "no loops" in text.loop_table(replace(full.code, loops=()))
    assert "not classified (PTX): frob 1" in text.histogram_table(None, replace(full.ptx_histogram, other={"frob": 1}))
    unknown = replace(full.resources, spill_stores=None, blocks_per_sm=None, threads=None)
    assert "not reported" in text.resource_table(unknown)
    assert "decided at run time" in text.resource_table(unknown)
