"""``fa4 vgpu mutate``, on a kernel of some lines."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest

from fa4.cli import main, vgpu
from fa4.compiler import lookup
from fa4.vgpu import Gpu
from fa4.vgpu.capture import Capture

sys.path.insert(0, str(Path(__file__).parents[1] / "vgpu"))
from ptx_text import run

pytestmark = pytest.mark.vgpu

BODY = """
mov.u32 %r1, dynamic;
mad.lo.u32 %r2, %r0, 4, %r1;
xor.b32 %r3, %r0, 32;
mad.lo.u32 %r3, %r3, 4, %r1;
st.shared.u32 [%r2], %r0;
bar.sync 0;
ld.shared.u32 %r4, [%r3];
st.global.u32 [%d11], %r4;
bar.sync 0;
"""


@pytest.fixture
def capture(monkeypatch):
    gpu = Gpu("sm_90a", unwritten="nan")
    gpu.captures = []
    run(BODY, gpu=gpu, threads=64, shared=512)
    monkeypatch.setattr(vgpu, "_own", lambda arguments: gpu.captures[0])
    return gpu.captures[0]


@pytest.mark.usefixtures("capture")
def test_mutate_and_resume(capsys, tmp_path):
    file = tmp_path / "verdicts.jsonl"
    command = ["vgpu", "mutate", "--schedules", "2", "--resume", str(file)]
    assert main(command) == 0
    output = capsys.readouterr().out
    assert "checks 'isa'" in output
    assert re.search(r"equivalent: barrier removed at PTX line \d+: bar.sync 0;", output)
    assert output.splitlines()[-1] == "0 of 4 executed mutants survived (0.0%)"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["outcome"] for row in rows] == ["caught", "equivalent", "equivalent", "equivalent"]
    rows[0]["outcome"], rows[0]["how"] = "survived", "as the file says"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(command) == 1
    assert "1 of 4 executed mutants survived (25.0%)" in capsys.readouterr().out
    assert main([*command, "--most", "30"]) == 0
    capsys.readouterr()
    assert main(["vgpu", "mutate", "--schedules", "1", "--resume", str(file)]) == 0, "of other schedules"
    assert len(file.read_text().splitlines()) == 8


def test_a_capture_as_a_file(capture, tmp_path):
    capture.save(tmp_path / "launch.npz")
    assert Capture.load(tmp_path / "launch.npz") == capture


@pytest.mark.usefixtures("capture")
def test_report(capsys):
    assert main(["vgpu", "report", "--roles", "even:1,odd:1", "--lines", "2"]) == 0
    assert "roles\n  role  warps" in capsys.readouterr().out
    assert main(["vgpu", "report", "--roles", "even:1,odd:1", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [role["role"] for role in data["roles"]] == ["even", "odd"]
    assert sum(wait["executed"] for wait in data["waits"]) == 2 * 2
    assert [(work["wavefronts"], work["ideal"]) for work in data["shared"]] == [(2, 2), (2, 2)]
    assert main(["vgpu", "report", "--roles", "all:5"]) == 2
    assert "5 names, but k has 2 warps" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["vgpu", "report", "--roles", "softmax"])
    assert "not NAME:WARPS" in capsys.readouterr().err


@pytest.mark.compile
def test_report_of_the_blackwell_forward(capsys):
    """Roles do what they are named for, nothing is computed or stored twice, and no access of shared memory has a conflict."""
    lookup.forget()
    roles = "softmax 0:4,softmax 1:4,correction:4,MMA:1,load:1,epilogue:1,idle:1"
    command = ["vgpu", "report", "--arch", "sm_100a", "--lengths", "256,256", "--config", "ctas=1", "--roles", roles, "--json"]
    assert main(command) == 0  # of one CTA, which the tests of the performance model compile too
    assert [line_info for *_, line_info in lookup._requests] == [True], "one kernel, and with a line table"
    data = json.loads(capsys.readouterr().out)
    assert {work["role"] for work in data["products"]} == {"MMA"}
    assert sum(work["flop"] for work in data["products"]) == 4 * 256 * 256 * 64
    copied = Counter()
    for work in data["bulk"]:
        copied[work["kind"], work["role"]] += work["bytes"]
    assert copied["store", "epilogue"] == 2 * 256 * 64
    assert copied["load", "load"] == 2 * 64 * (256 + 2 * 256)
    assert len(copied) == 2
    assert sum(work["wavefronts"] for work in data["shared"]) == sum(work["ideal"] for work in data["shared"]) > 0
    by_role = {role["role"]: role for role in data["roles"]}
    assert by_role["MMA"]["share"] > by_role["correction"]["share"] > 0
    assert by_role["softmax 0"]["by_class"]["ex2"] > 0 == by_role["MMA"]["by_class"].get("ex2", 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "12"], "not SQ,SK"),
        (["--head-dim", "1,2,3"], "not D or D,DV"),
        (["--config", "stages"], "not NAME=VALUE"),
        (["--direction", "backward"], "no backward kernel"),
        (["--config", "cta_pair=true"], "config='cta_pair': a AmpereForwardConfig has no such setting; choose from tile_m, tile_n"),
        (["--arch", "sm_100a", "--config", "exp2=99"], "emulated=99"),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) if message.startswith("not ") else nullcontext():
        assert main(["vgpu", "mutate", *arguments]) == 2
    assert message in capsys.readouterr().err
