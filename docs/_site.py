"""What the site adds to the pages: links from names to the reference, fields of dataclasses, sections of README."""

import dataclasses
import os
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.inspect import object_description
from sphinx.util.nodes import make_refnode
from sphinx.util.typing import stringify_annotation

# A page of the site, and an anchor on it.
Place = tuple[str, str]

# README is no page of the site. Its sections are included in these pages.
README_LINK = re.compile(r"\]\((?:\.\./)+README\.md(?:#([\w-]+))?\)")
README_SECTIONS = {
    "": "index.md",
    "install": "getting-started/installation.md",
    "try-it": "getting-started/installation.md",
    "a-table-on-its-own": "getting-started/first-table.md",
    "a-table-in-torchrec": "getting-started/torchrec.md",
    "what-to-expect": "getting-started/torchrec.md",
    "what-works": "what-works.md",
}
# GitHub does not include anything, so a link stands beside an include.
ONLY_ON_GITHUB = re.compile(r"^On GitHub: .*\n", re.MULTILINE)
# Other Markdown files of the repository are no pages either; their path stands there instead of a link.
FILE_LINK = re.compile(r"\[([^\]]*)\]\(([\w./-]+\.md)(?:#[\w-]+)?\)")

WITHOUT_OWNER = {"class", "data", "exception", "function"}
# Their fields and methods are known by name on all pages. Names that two of them share are nobody's.
KNOWN_OWNERS = {
    "BatchedDynamicEmbeddingTablesV2",
    "DumpHandle",
    "DynamicEmbParameterConstraints",
    "DynamicEmbTableOptions",
    "TableReport",
}


def adapt_page(app: Sphinx, page: str, source: list[str]) -> None:
    """Turn links to sections of README into links to the pages that include them."""

    def page_of(link: re.Match[str]) -> str:
        section = link[1] or ""
        if section not in README_SECTIONS:
            raise ValueError(
                f"{page} links to section {section!r} of README, which no page includes; see README_SECTIONS"
            )
        return f"]({'../' * page.count('/')}{README_SECTIONS[section]})"

    def path_of(link: re.Match[str]) -> str:
        path = Path(os.path.normpath(Path(app.srcdir, page).parent / link[2]))
        if path.is_relative_to(app.srcdir):
            return link[0]
        return f"{link[1]} (`{path.relative_to(Path(app.srcdir).parent)}`)"

    text = README_LINK.sub(page_of, ONLY_ON_GITHUB.sub("", source[0]))
    text = FILE_LINK.sub(path_of, text)
    source[0] = text


def describe_fields(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Give each field of a dataclass an entry of its own, with type, default and anchor.

    Example: ``Attributes:``, ``    ttl: seconds.`` become ``.. attribute:: ttl``, ``   :type: float | None``,
    ``   :value: None``, an empty line and ``   seconds.``
    """
    if what != "class" or not dataclasses.is_dataclass(value) or "Attributes:" not in lines:
        return
    fields = {field.name: field for field in dataclasses.fields(value)}
    begin = lines.index("Attributes:")
    end = next((i for i in range(begin + 1, len(lines)) if lines[i] and not lines[i].startswith(" ")), len(lines))
    entries = []
    for line in lines[begin + 1 : end]:
        entry = re.fullmatch(r"    (\w+): (.*)", line)
        if entry and entry[1] in fields:
            field = fields[entry[1]]
            entries += ["", f".. attribute:: {field.name}", f"   :type: {stringify_annotation(field.type, 'smart')}"]
            if field.default is not dataclasses.MISSING:
                entries.append(f"   :value: {object_description(field.default)}")
            entries += ["", f"   {entry[2]}"]
        else:
            # A description goes on, 8 columns to the right.
            entries.append(line[5:])
    lines[begin:end] = [*entries, ""]


def tidy_reference(app: Sphinx, document: nodes.document) -> None:
    """Take the examples of docstrings for Python, and leave the module away where a class stands before a name."""
    if not app.env.docname.startswith("reference/"):
        return
    for block in document.findall(nodes.literal_block):
        block.setdefault("language", "python")
    for description in document.findall(addnodes.desc):
        if description["objtype"] in ("method", "property"):
            for prefix in list(description[0].findall(addnodes.desc_addname)):
                prefix.parent.remove(prefix)


def described(app: Sphinx) -> dict[str, Place]:
    """Return where the reference describes code: names, and for what can be called ``name()``.

    Members of a class are there by their name alone where it has an underscore, and so can mean nothing else.
    """
    found: dict[str, set[Place]] = defaultdict(set)
    certain: dict[str, Place] = {}
    for path, _, kind, page, anchor, _ in app.env.domains["py"].get_objects():
        *_, owner, name = ("", *path.split("."))
        if kind in WITHOUT_OWNER:
            certain[name] = certain[f"{name}()"] = (page, anchor)
        elif owner in KNOWN_OWNERS and kind == "method":
            found[f"{name}()"].add((page, anchor))
        if owner in KNOWN_OWNERS and kind in ("attribute", "method") and ("_" in name or name == "ttl"):
            found[name].add((page, anchor))
    return {name: next(iter(places)) for name, places in found.items() if len(places) == 1} | certain


def resolve_alias(app: Sphinx, env: Any, node: Any, shown: nodes.Node) -> nodes.Node | None:
    """Find what type hints call by the module that defines it under its public name."""
    place = described(app).get(node.get("reftarget", "").rsplit(".", 1)[-1])
    if node.get("refdomain") != "py" or place is None:
        return None
    return make_refnode(app.builder, node["refdoc"], *place, shown)


def link_names(app: Sphinx, document: nodes.document, page: str) -> None:
    """Turn names of the package that stand in a text as code into links."""
    places = described(app)
    for literal in list(document.findall(nodes.literal)):
        place = places.get(literal.astext())
        if place is not None and not isinstance(literal.parent, nodes.reference | nodes.title):
            literal.replace_self(make_refnode(app.builder, page, *place, literal.deepcopy()))


def setup(app: Sphinx) -> dict[str, bool]:
    """Tell Sphinx about all of it."""
    app.connect("source-read", adapt_page)
    # Before napoleon reads the sections.
    app.connect("autodoc-process-docstring", describe_fields, priority=100)
    app.connect("doctree-read", tidy_reference)
    app.connect("missing-reference", resolve_alias)
    app.connect("doctree-resolved", link_names)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
