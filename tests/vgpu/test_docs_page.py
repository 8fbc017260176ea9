from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from instruction_cases import CASES
from ptx_text import run

from fa4.vgpu import Gpu, UnsupportedInstructionError
from fa4.vgpu.isa import ENDINGS, FORMS
from fa4.vgpu.isa.table import UNSUPPORTED, instruction_page

DOCS = Path(__file__).parents[2] / "docs"
TESTS = Path(__file__).parent


def test_instruction_page_is_current():
    assert (DOCS / "virtual-gpu-instructions.md").read_text() == instruction_page(), "run python docs/build.py"


RUN = """
import runpy, sys
for file in sys.argv[1:]:
    runpy.run_path(file)
    print("end of example")
"""


@pytest.mark.compile
@pytest.mark.vgpu
def test_examples_print_what_the_page_says(tmp_path):
    """One process runs all, which need the same modules."""
    text = (DOCS / "virtual-gpu.md").read_text()
    files, expected = [], ""
    for kind in ("", "order-", "profile-"):
        code, output = (re.search(rf"<!-- {kind}{name} -->\n```\w*\n(.*?)```", text, re.DOTALL)[1] for name in ("example", "output"))
        files.append(tmp_path / f"{kind}page" / "example.py")  # outputs name the file
        files[-1].parent.mkdir()
        files[-1].write_text(code)
        expected += output + "end of example\n"
    environment = {**os.environ, "PYTHONPATH": str(DOCS.parent)}
    done = subprocess.run([sys.executable, "-c", RUN, *files], capture_output=True, text=True, check=False, env=environment)
    assert done.stdout == expected, done.stderr


@pytest.mark.parametrize(("name", "form", "example"), UNSUPPORTED, ids=lambda text: text.split("[")[0])
def test_what_is_not_supported_is_refused(name, form, example):
    assert example.startswith(name)
    with pytest.raises(UnsupportedInstructionError) as caught:
        run(example, gpu=Gpu("sm_100a", unwritten="nan"))
    assert caught.value.place.ptx_text == example


def test_every_instruction_has_a_section_and_a_test():
    text = "\n".join(path.read_text() for path in [*TESTS.glob("test_*.py"), TESTS / "ptx_text.py"]) + "\n".join(
        case.code for case in CASES
    )
    without_effect = {"prefetch", "prefetchu", "discard", "applypriority", "createpolicy", "pmevent"}
    missing = []
    for form in (*FORMS.values(), *ENDINGS.values()):
        assert re.match(r"9\.7\.\d+", form.section), form
        assert form.forms, form
        if form.name not in without_effect and not re.search(rf"(\b|\\n){form.name}[.;]", text):
            missing.append(form.name)
    assert missing == []
