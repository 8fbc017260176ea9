"""Architecture records: lookup, consistency with published peaks, the roofline of a tile, and the generated page."""

from __future__ import annotations

import dataclasses
import importlib.util
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from fa4.arch import ARCHS, Arch, Quantity, arch_for_capability, forward_tile_cycles, get_arch
from fa4.errors import BackendError

ROOT = Path(__file__).resolve().parents[1]
NAMES = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a"]
UNITS = {
    "SM",
    "Hz",
    "byte",
    "register",
    "thread",
    "block",
    "lane",
    "column",
    "FLOP/clock/SM",
    "result/clock/SM",
    "FMA/clock/SM",
    "byte/clock/SM",
    "byte/s",
    "FLOP/s",
}
# Published fp32 peak in FLOP/s (data sheets and whitepapers; an FMA counts as two).
FP32_PEAKS = {
    "sm_80": 19.5e12,
    "sm_86": 38.7e12,
    "sm_89": 91.6e12,
    "sm_90a": 66.9e12,
    "sm_100a": 75e12,
    "sm_103a": 75e12,
    "sm_120a": 125e12,
}


def quantities(arch: Arch) -> dict[str, Quantity]:
    values = {field.name: getattr(arch, field.name) for field in dataclasses.fields(arch)}
    return {name: value for name, value in values.items() if isinstance(value, Quantity)}


def per_second(arch: Arch, per_clock: Quantity) -> float:
    return float(arch.sm_count) * float(arch.boost_clock) * float(per_clock)


def reproduces_peak(arch: Arch) -> bool:
    return per_second(arch, arch.bf16_flop) == pytest.approx(float(arch.bf16_peak), rel=0.05)


def test_names_are_keys_and_complete():
    assert list(ARCHS) == NAMES
    assert all(arch.name == name for name, arch in ARCHS.items())


def test_records_cannot_be_changed():
    with pytest.raises(TypeError):
        ARCHS["sm_1"] = ARCHS["sm_80"]  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        ARCHS["sm_80"].part = "other"  # type: ignore[misc]


@pytest.mark.parametrize("name", NAMES)
def test_every_quantity_has_unit_and_source(name):
    for field, quantity in quantities(ARCHS[name]).items():
        assert quantity.unit in UNITS, field
        assert len(quantity.source) > 15, field
        whole = quantity.unit not in {"Hz", "byte/s", "FLOP/s"}
        assert not whole or int(quantity) == quantity.value, field


@pytest.mark.parametrize("name", NAMES)
def test_published_bf16_peak_is_reproduced(name):
    assert reproduces_peak(ARCHS[name])


def test_peak_check_notices_the_half_rate_of_geforce_parts():
    arch = ARCHS["sm_86"]
    assert not reproduces_peak(dataclasses.replace(arch, bf16_flop=dataclasses.replace(arch.bf16_flop, value=512)))


@pytest.mark.parametrize("name", NAMES)
def test_published_fp32_peak_is_reproduced(name):
    # Independent of the tensor figures. Data-center Hopper and Blackwell quote it at a clock up to 8% above the one under tensor load.
    ratio = 2 * per_second(ARCHS[name], ARCHS[name].fp32_fma) / FP32_PEAKS[name]
    lower = 0.92 if name in {"sm_90a", "sm_100a", "sm_103a"} else 0.99
    assert lower <= ratio <= 1.01


def test_published_exp2_rates_are_reproduced():
    h100 = ARCHS["sm_90a"]
    assert per_second(h100, h100.exp2) == pytest.approx(3.9e12, rel=0.02)  # FlashAttention-3
    ratio = float(ARCHS["sm_103a"].exp2) / float(ARCHS["sm_100a"].exp2)
    assert ratio == pytest.approx(10024 / 4943, rel=0.02)  # NVIDIA's MUFU.EX2 measurement on GB300 and GB200


@pytest.mark.parametrize("name", NAMES)
def test_limits_are_consistent(name):
    arch = ARCHS[name]
    assert int(arch.smem_per_sm) - int(arch.smem_per_block) == 1024, "1 KB is reserved per block"
    assert int(arch.threads_per_sm) % 128 == 0
    has_tmem = int(arch.tmem_lanes) * int(arch.tmem_columns) * 4
    assert has_tmem == (256 * 1024 if arch.family == "blackwell" else 0)


@pytest.mark.parametrize("name", NAMES)
def test_name_and_capability_agree(name):
    arch = ARCHS[name]
    assert name.rstrip("a") == f"sm_{arch.capability[0]}{arch.capability[1]}"
    assert get_arch(name) is arch
    assert arch_for_capability(arch.capability) is arch
    assert pickle.loads(pickle.dumps(arch)) == arch


@pytest.mark.parametrize("name", ["sm_90", "sm_100", "sm_103", "sm_120"])
def test_missing_suffix_says_what_to_write(name):
    with pytest.raises(BackendError, match=f"write '{name}a'") as caught:
        get_arch(name)
    assert (caught.value.argument, caught.value.value) == ("arch", name)


@pytest.mark.parametrize(
    ("name", "guess"), [("sm100a", "sm_100a"), ("SM_90A", "sm_90a"), ("sm_80a", "sm_80"), ("sm-86", "sm_86"), ("90a", "sm_90a")]
)
def test_misspelling_gets_a_suggestion(name, guess):
    with pytest.raises(BackendError, match=f"did you mean '{guess}'"):
        get_arch(name)


@pytest.mark.parametrize("name", ["", "hopper", 90, (9, 0), None, ["sm_80"]])
def test_unknown_name_lists_what_is_known(name):
    with pytest.raises(BackendError, match="known: sm_80, sm_86, sm_89, sm_90a, sm_100a, sm_103a, sm_120a") as caught:
        get_arch(name)
    assert caught.value.value == name


@pytest.mark.parametrize(
    ("capability", "rule"),
    [
        ((7, 5), "8.0 or higher"),
        ((8, 7), "excludes Tegra"),
        ((9, 1), r"\(sm_90a\) run on exactly one"),
        ((10, 1), r"\(sm_100a, sm_103a\) run on exactly one"),
        ((12, 1), r"\(sm_120a\) run on exactly one"),
        ((11, 0), "no compile target"),
    ],
)
def test_capability_without_record_is_refused(capability, rule):
    with pytest.raises(BackendError, match=rule) as caught:
        arch_for_capability(capability)
    assert caught.value.value == f"{capability[0]}.{capability[1]}"
    assert "10.3 (sm_103a)" in caught.value.remedy


def test_forward_tile_is_the_published_roofline():
    tile = forward_tile_cycles(ARCHS["sm_100a"], 128, 128, 128)
    assert (tile.mma, tile.smem, tile.exp) == (1024, 768, 1024)
    tile = forward_tile_cycles(ARCHS["sm_100a"], 128, 128, 64)
    assert (tile.mma, tile.exp) == (512, 1024)
    assert forward_tile_cycles(ARCHS["sm_103a"], 128, 128, 128).exp == 512


@pytest.mark.parametrize("m", [128, 256])
@pytest.mark.parametrize("n", [128, 256])
@pytest.mark.parametrize("d", [64, 128, 192])
def test_shared_memory_formula_of_flash_attention_4(m, n, d):
    assert forward_tile_cycles(ARCHS["sm_100a"], m, n, d).smem == 3 * m * n * d / 8192


def test_exponentials_take_half_the_matmul_time_on_hopper():
    # FlashAttention-3, on head dim 128: exponentials can take 50% of the clocks of the matmuls.
    tile = forward_tile_cycles(ARCHS["sm_90a"], 128, 128, 128)
    assert tile.exp / tile.mma == 0.5
    assert tile.smem is None


def test_import_is_light():
    code = "import sys, fa4.arch; print(*sorted({'torch', 'cutlass', 'numpy', 'difflib'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


def load_page_module():
    spec = importlib.util.spec_from_file_location("_architectures", ROOT / "docs" / "_architectures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_is_current():
    page = (ROOT / "docs" / "architectures.md").read_text(encoding="utf-8")
    assert page == load_page_module().architectures_page(), "write architectures_page() to docs/architectures.md"


def test_page_follows_the_records(monkeypatch):
    module = load_page_module()
    arch = ARCHS["sm_80"]
    changed = dataclasses.replace(arch, l2=Quantity(41 * 1024 * 1024, "byte", "a planted source"))
    monkeypatch.setattr(module, "ARCHS", {**ARCHS, "sm_80": changed})
    page = module.architectures_page()
    number = module.sources().index("a planted source") + 1
    assert f"| L2, MB | 41 [{number}] |" in page
    assert f"\n{number}. a planted source.\n" in page
