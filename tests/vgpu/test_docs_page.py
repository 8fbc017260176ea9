from __future__ import annotations

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


@pytest.mark.compile
@pytest.mark.vgpu
@pytest.mark.parametrize("kind", ["", "order-", "profile-"])
def test_examples_print_what_the_page_says(tmp_path, kind):
    text = (DOCS / "virtual-gpu.md").read_text()
    code, output = (re.search(rf"<!-- {kind}{name} -->\n```\w*\n(.*?)```", text, re.DOTALL)[1] for name in ("example", "output"))
    file = tmp_path / "example.py"
    file.write_text(code)
    command = [sys.executable, "-c", f"import sys, runpy; sys.path[:0] = [{str(DOCS.parent)!r}]; runpy.run_path({str(file)!r})"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == output, done.stderr


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
