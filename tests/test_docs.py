"""Generated pages are current, links lead somewhere, and the repository speaks of the project alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fa4 import _settings
from fa4.errors import ArgumentError
from fa4.support_table import support_page

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_support_table_is_current():
    assert (ROOT / "docs" / "support.md").read_text() == support_page(), "run python docs/build.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_and_images_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), target


def test_readme_commands_are_where_ci_looks_for_them():
    text = (ROOT / "README.md").read_text()
    for name, command in (("demo", "pip install . && fa4 demo"), ("tests", "pip install '.[test]' && pytest -n auto")):
        assert f"<!-- {name} -->\n```bash\n{command}\n```\n" in text


def test_api_page_names_every_setting_and_error():
    text = (ROOT / "docs" / "api.md").read_text()
    for name in _settings.Settings.__dataclass_fields__:
        assert f"`{name}`" in text
    for error in [ArgumentError, *ArgumentError.__subclasses__()]:
        assert f"| `{error.__name__}` |" in text


def test_every_decision_is_listed():
    index = (ROOT / "docs" / "index.md").read_text()
    for record in (ROOT / "docs" / "decisions").glob("*.md"):
        assert f"decisions/{record.name}" in index
