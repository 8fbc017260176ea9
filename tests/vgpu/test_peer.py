"""flash-attn-4's own kernels, host code unchanged, on the virtual GPU: what others wrote and ran on GPUs is right there too."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import metadata

import pytest

from fa4.cli import main
from fa4.errors import BackendError
from fa4.testing import witness
from fa4.testing.compare import Comparison
from fa4.testing.witness import VERSION, Answer, Witness, witnesses
from fa4.vgpu.isa.table import WITNESSED, key_of


def installed() -> bool:
    try:
        return metadata.version("flash-attn-4") == VERSION
    except metadata.PackageNotFoundError:
        return False


needs_peer = [
    pytest.mark.compile,
    pytest.mark.vgpu,
    pytest.mark.skipif(not installed(), reason=f"flash-attn-4 {VERSION} is not installed: pip install '.[peer]'"),
]

# Three key tiles add to a query tile, and three heads to a key tile: with two the order changes nothing.
HOPPER = Witness((64, 64), "causal", (3, 1), ((70, 333),), backward=True, deterministic=True)
PAIRS = Witness((128, 128), "full", (2, 1), ((140, 270),), backward=True)
CAUSAL = Witness((64, 64), "causal", (3, 1), ((200, 333),))
# The order of sums that a semaphore keeps, and the one that nothing keeps.
MODES = [HOPPER, replace(HOPPER, deterministic=False)]
# With these everything is executed that the table of instructions says; among them a forward and a backward with CTA pairs.
CASES = {
    "sm_90a": [CAUSAL, *MODES],
    "sm_100a": [
        CAUSAL,
        PAIRS,
        replace(PAIRS, lengths=((256, 256),)),
        Witness((64, 64), "window", (3, 1), ((200, 333), (1, 300))),
        Witness((96, 96), "softcap", (2, 1), ((130, 400),), splits=2),
    ],
}
GRADIENTS = ("dq", "dk", "dv")


def differ(answers, names=GRADIENTS):
    """Whether some of the results have other bits in one answer than in another."""
    return any(len({dict(answer.digests)[name] for answer in answers}) > 1 for name in names)


def executed_by(found):
    """Keys of the instructions."""
    return {key_of(opcode) for answer in found for opcode in answer.opcodes}


def check(arch, found):
    wrong = [f"{a.witness}: {a.failure or [str(r) for r in a.results if not r.ok]}" for a in found if not a.ok]
    assert wrong == []
    family = {"sm_80": "Sm80", "sm_90a": "Sm90"}.get(arch, "Sm100")
    for answer in found:
        case = answer.witness
        assert [r.name for r in answer.results] == (["out", "lse"] + ["dq", "dk", "dv"] * case.backward) * len(case.lengths)
        assert any(f"FlashAttentionForward{family}" in kernel for kernel in answer.kernels)
        assert any(f"FlashAttentionBackward{family}" in kernel for kernel in answer.kernels) == case.backward
        assert any("FlashAttentionForwardCombine" in kernel for kernel in answer.kernels) == (case.splits > 1)
        assert answer.paired == (family == "Sm100" and in_pairs(case))


def in_pairs(case: Witness) -> bool:
    """Where flash-attn-4 uses CTA pairs: in the backward from D 128 on, in the forward without a mask or splits, beyond a block of rows."""
    if not case.pairs or case.dims[0] < 128 or case.splits > 1:
        return False
    rows = case.lengths[0][0] * case.heads[0] // case.heads[1]
    return case.backward or (
        not case.packed and case.mask in ("full", "softcap") and rows > 256 and 128 % (case.heads[0] // case.heads[1]) == 0
    )


@pytest.mark.slow
class TestOrder:
    pytestmark = needs_peer

    def test_only_the_deterministic_backward_is_the_same_under_two_schedules(self):
        """CTAs add to the gradients in the order in which they come, unless a semaphore keeps it: under schedules that show it in one.

        By default tests/test_determinism.py says so of the kernels of this project.
        """
        found = list(witness.run_witnesses("sm_90a", MODES, "priority", (1, 3, 2)))
        check("sm_90a", found)
        ordered, fast = ([answer for answer in found if answer.witness.deterministic == mode] for mode in (True, False))
        assert len(ordered) == len(fast) == 3
        assert differ(fast)
        assert not differ(ordered)
        assert not differ(found, ("out", "lse"))


@pytest.mark.slow
class TestTable:
    pytestmark = needs_peer

    def test_of_instructions_says_what_is_executed(self):
        executed = set()
        for arch, cases in CASES.items():
            found = list(witness.run_witnesses(arch, cases, "priority", (1,)))
            assert [a.witness for a in found] == cases
            check(arch, found)
            executed |= executed_by(found)
        assert executed == WITNESSED


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_103a"])
class TestMatrix:
    pytestmark = needs_peer

    def test_every_witness(self, arch, backward):
        if (arch, backward) == ("sm_80", True):
            with pytest.raises(BackendError, match="no such backward"):
                witnesses(arch, backward)
            return
        cases = witnesses(arch, backward)
        found = list(witness.run_witnesses(arch, cases))
        assert [a.witness for a in found] == cases
        check(arch, found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "backward"),
    [("sm_80", False), ("sm_90a", False), ("sm_90a", True), ("sm_100a", False), ("sm_100a", True), ("sm_103a", False)],
)
class TestZeroAlarms:
    """Kernels that run on GPUs: whatever the virtual GPU calls an error in one of them is wrong.

    The backward of sm_103a has the kernels of sm_100a.
    """

    pytestmark = needs_peer

    def test_no_witness_fails_in_twenty_schedules(self, arch, backward):
        cases = witnesses(arch, backward)
        found = list(witness.run_witnesses(arch, cases, "priority", range(20), checks="hazards"))
        assert len(found) == 20 * len(cases)
        check(arch, found)


class TestCommand:
    @pytest.mark.slow
    @pytest.mark.compile
    @pytest.mark.vgpu
    @needs_peer[-1]
    def test_verify(self, capsys, monkeypatch):
        cases = [Witness((64, 64), "causal", (3, 1), (lengths,)) for lengths in ((70, 133), (1, 150))]
        monkeypatch.setattr(witness, "witnesses", lambda arch, backward: [*cases, Witness((128, 128))])
        assert main(["verify", "--peer", "flash-attn-4", "--head-dim", "64", "--seed", "3"]) == 0
        self.assert_all_right(capsys.readouterr().out, "forward, bfloat16, sm_80 on the virtual GPU, round_robin schedule, seed 3", cases)

    @needs_peer[-1]
    def test_report_of_right_answers(self, capsys, monkeypatch):
        """Of made-up ones; that the command starts the peer is seen where it is wrong, and in the slow matrix."""
        cases = [CAUSAL, replace(CAUSAL, lengths=((1, 150),))]
        right = [Answer(case, (Comparison("out", 1e-3, 2e-3, (0, 0, 0, 0), 1.0, 0),), ("kernel",)) for case in cases]
        monkeypatch.setattr(witness, "witnesses", lambda arch, backward: [*cases, Witness((128, 128))])
        asked = []
        monkeypatch.setattr(witness, "run_witnesses", lambda *how, **more: asked.append((how, more)) or iter(right))
        command = ["verify", "--peer", "flash-attn-4", "--arch", "sm_90a", "--head-dim", "64", "--seed", "3"]
        assert main(command) == 0
        assert asked == [(("sm_90a", [replace(case, seed=3) for case in cases], "round_robin", [3]), {})]
        self.assert_all_right(capsys.readouterr().out, "forward, bfloat16, sm_90a on the virtual GPU, round_robin schedule, seed 3", cases)

    @staticmethod
    def assert_all_right(output, how, cases):
        lines = output.splitlines()
        assert lines[0] == f"flash-attn-4 {VERSION}, {how}: {len(cases)} requests"
        assert [line.split(":")[0] for line in lines[1:-1]] == ["D 64, causal, 3"] * len(cases)
        assert all("worst error" in line for line in lines[1:-1])
        assert lines[-1] == f"all {len(cases)} requests within their bounds"

    def test_a_peer_that_is_wrong(self, capfd, monkeypatch, tmp_path):
        """A package of the peer's name that answers with torch, and no kernel; with a factor; and with an error."""
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(witness, "witnesses", lambda arch, backward: [Witness((dim, dim)) for dim in (64, 128, 96)])
        (tmp_path / f"flash_attn_4-{VERSION}.dist-info").mkdir()
        (tmp_path / f"flash_attn_4-{VERSION}.dist-info" / "METADATA").write_text(f"Name: flash-attn-4\nVersion: {VERSION}\n")
        (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
        for package in ("flash_attn", "flash_attn/cute"):
            (tmp_path / package / "__init__.py").touch()
        (tmp_path / "flash_attn" / "cute" / "interface.py").write_text(FAKE)
        assert main(["verify", "--peer", "flash-attn-4", "--arch", "sm_100a", "--head-dim", "64,96,128"]) == 1
        output = capfd.readouterr().out.splitlines()
        assert output[1].startswith("WRONG D 64, full")
        assert "ok" in output[1], "right, but no kernel ran"
        assert output[2].startswith("WRONG D 128, full")
        assert "out: WRONG: worst error" in output[2]
        assert output[3].startswith("WRONG D 96, full")
        assert "KeyError: 96" in output[3]
        assert output[-1] == "3 of 3 requests failed"

    def test_a_peer_that_is_not_there(self, capsys, monkeypatch):
        def missing(name):
            raise metadata.PackageNotFoundError(name)

        monkeypatch.setattr(witness.metadata, "version", missing)
        assert main(["verify", "--peer", "flash-attn-4"]) == 2
        assert f"found none; pip install 'flash-attn-4=={VERSION}'" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (
                ["--peer", "flash-attn-4", "--direction", "backward"],
                "arch='sm_80': flash-attn-4 .* no such backward; try sm_90a, sm_100a or sm_103a",
            ),
            (["--peer", "flash-attn-4", "--arch", "sm_120"], "arch='sm_120': .* no such forward"),
            (["--peer", "flash-attn-4", "--head-dim", "65"], r"head_dim=\[65\]: .*choose from 64, 128"),
            (["--direction", "backward"], "no backward kernel for sm_80 yet"),
        ],
    )
    def test_bad_arguments(self, arguments, message, capsys):
        assert main(["verify", *arguments]) == 2
        assert re.search(message, capsys.readouterr().err)


FAKE = """
from types import SimpleNamespace
from fa4.testing import torch_attention
utils = SimpleNamespace()
factors = {64: 1, 128: 1.1}
def flash_attn_func(q, k, v, return_lse, num_splits, deterministic, **options):
    assert q.is_cuda
    out, lse = torch_attention(q, k, v, **options)
    return out * factors[q.shape[3]], lse, None
"""
