"""The documentation site without building it: nothing is left out, and nothing that is named is missing."""

import ast
import dataclasses
import logging
import re
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import dynamicemb

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INCLUDE = re.compile(r"^```\{include\} (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARKER = re.compile(r'^:(?:start-after|end-before): "(.*)"$', re.MULTILINE)
DESCRIBED = re.compile(r"^\s*\.\. (?:auto|py:)\w+:: ([\w.]+)", re.MULTILINE)
# Where users find what the package itself does not hand on.
PUBLIC_MODULES = ("batched_dynamicemb_tables", "dump_load", "embedding_admission", "get_planner", "incremental_dump")
PUBLIC_MODULES += ("planner", "shard")

pages = sorted(DOCS.glob("**/*.md"))
guides = sorted((DOCS / "how-to").glob("[!i]*.md"))


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(DOCS)) for path in paths]


def entries(page: Path) -> list[Path]:
    """List the pages that the tables of contents of a page name."""
    lines = [line for block in TOCTREE.findall(page.read_text()) for line in block.splitlines()]
    return [(page.parent / f"{line}.md").resolve() for line in lines if line and not line.startswith(":")]


def listed_in(module: str) -> list[str]:
    """Return `__all__` of a module that is read, not imported: some take seconds."""
    path = ROOT / "dynamicemb" / module
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    (names,) = [
        ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return names


def test_every_page_is_in_one_table_of_contents() -> None:
    listed = [entry for page in pages for entry in entries(page)]
    assert sorted(set(listed)) == sorted(listed)
    assert set(listed) == set(pages) - {DOCS / "index.md"}


def test_every_page_can_be_reached_from_the_first() -> None:
    reached = [DOCS / "index.md"]
    for page in reached:
        reached += [entry for entry in entries(page) if entry not in reached]
    assert sorted(reached) == pages


def test_every_public_name_is_in_the_reference() -> None:
    described = {name for page in (DOCS / "reference").glob("*.md") for name in DESCRIBED.findall(page.read_text())}
    public = {f"dynamicemb.{name}" for name in dynamicemb.__all__}
    for module in PUBLIC_MODULES:
        public |= {f"dynamicemb.{module}.{name}" for name in listed_in(module)}
    # What the package and one of its modules both have is described once.
    in_package = {name.rsplit(".", 1)[-1] for name in described if name.count(".") == 1}
    missing = {name for name in public - described if name.rsplit(".", 1)[-1] not in in_package}
    assert not missing, f"no page of docs/reference describes {sorted(missing)}"


@pytest.mark.parametrize("page", pages, ids=names(pages))
def test_included_sections_exist_and_have_a_link_for_github(page: Path) -> None:
    text = page.read_text()
    for path, options in INCLUDE.findall(text):
        source = (page.parent / path).resolve()
        lines = source.read_text().splitlines()
        markers = MARKER.findall(options)
        assert markers and all(lines.count(marker) == 1 for marker in markers), (path, markers)
        assert re.search(rf"^On GitHub: .*\({re.escape(path)}", text, re.MULTILINE), "GitHub shows no included text"


@pytest.mark.parametrize("guide", guides, ids=names(guides))
def test_guides_are_short_and_complete(guide: Path) -> None:
    text = guide.read_text()
    assert len(text.splitlines()) <= 80
    assert len(re.findall("^```python$", text, re.MULTILINE)) == 1
    assert "assert " in text and "not run" not in text
    assert "](../reference/" in text


def test_the_settings_of_the_site_can_be_read_without_sphinx(monkeypatch: pytest.MonkeyPatch) -> None:
    # Settings change the process that reads them; tests that come later need its GPUs.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(logging.getLogger(), "handlers", [*logging.getLogger().handlers])
    monkeypatch.setitem(sys.modules, "sphinx", None)
    settings = runpy.run_path(str(DOCS / "conf.py"))
    assert settings["nitpicky"] is True
    assert settings["release"] == dynamicemb.__version__
    assert "suppress_warnings" not in settings


def test_what_the_site_needs_is_an_extra_of_its_own() -> None:
    # Python 3.10 has no reader of TOML.
    project = (ROOT / "pyproject.toml").read_text()
    extras = {
        name: re.search(rf"^{name} = \[\n(.*?)^\]$", project, re.MULTILINE | re.DOTALL) for name in ("dev", "docs")
    }
    wanted = {name: set(re.findall(r'"([\w-]+)', extra[1])) for name, extra in extras.items() if extra}
    assert {"sphinx", "myst-parser", "furo"} <= wanted["docs"]
    assert not wanted["docs"] & wanted["dev"]
    assert '".[dev,docs]"' in (ROOT / "tools" / "setup.py").read_text()


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """What the site adds to the pages; skips where Sphinx is not installed."""
    pytest.importorskip("sphinx")
    monkeypatch.syspath_prepend(str(DOCS))
    return __import__("_site")


def test_links_to_readme_lead_to_the_page_that_includes_the_section(site: ModuleType) -> None:
    source = ["[a](../README.md#install), [b](../README.md), [c](../README.md#install)\n"]
    site.adapt_page(SimpleNamespace(srcdir=DOCS), "page", source)
    assert source == ["[a](getting-started/installation.md), [b](index.md), [c](getting-started/installation.md)\n"]
    source = ["On GitHub: [a](../../README.md#install).\n\n[b](../../README.md#what-works)"]
    site.adapt_page(SimpleNamespace(srcdir=DOCS), "how-to/page", source)
    assert source == ["\n[b](../what-works.md)"]
    with pytest.raises(ValueError, match="page links to section 'work-on-it' of README, which no page includes"):
        site.adapt_page(SimpleNamespace(srcdir=DOCS), "page", ["[a](../README.md#work-on-it)"])


def test_links_to_markdown_outside_of_the_pages_become_paths(site: ModuleType) -> None:
    source = ["[a study](../benchmarks/studies/README.md#x), [b](how-to/expiry.md#y), [c](./random.md)"]
    site.adapt_page(SimpleNamespace(srcdir=DOCS), "page", source)
    assert source == ["a study (`benchmarks/studies/README.md`), [b](how-to/expiry.md#y), [c](./random.md)"]


def test_every_section_of_readme_that_has_a_page_is_included_there(site: ModuleType) -> None:
    for section, page in site.README_SECTIONS.items():
        heading = section.replace("-", " ")
        included = [marker.lower() for marker in MARKER.findall((DOCS / page).read_text())]
        assert f"## {heading}" in included or not section


def test_fields_of_a_dataclass_have_entries_with_type_and_default(site: ModuleType) -> None:
    @dataclasses.dataclass
    class Options:
        ttl: float | None = None
        names: list[str] = dataclasses.field(default_factory=list)

    lines = [
        "Options.",
        "",
        "Attributes:",
        "    ttl: seconds, as in::",
        "",
        "            ttl = 3",
        "",
        "        or so.",
    ]
    lines += ["    names: of tables.", "", "More."]
    site.describe_fields(None, "class", "Options", Options, None, lines)
    text = """Options.


.. attribute:: ttl
   :type: float | None
   :value: None

   seconds, as in::

       ttl = 3

   or so.

.. attribute:: names
   :type: list[str]

   of tables.


More."""
    assert "\n".join(lines) == text
