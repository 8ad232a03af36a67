"""Check README.md and docs/: links lead somewhere, Python examples run.

A link inside the repository must name a file that exists and, after `#`, a heading of that file. Every ```python block
is run, the blocks of one page in one process and in order, as process 0 of a world of one, without GPUs, so that all
machines check the same. A block that cannot run there stands after a line `<!-- not run: reason -->`; it must still be
valid Python.
"""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
PYTHON_BLOCK = re.compile(r"(<!-- not run: [^\n]+ -->\n+)?^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes from the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """List the links of a page that lead nowhere inside the repository; links to other sites are not followed."""
    broken = []
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(f"{page.relative_to(ROOT)}: {link}")
    return broken


def free_port() -> int:
    """Return a port on which nobody listens at the moment."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def program(page: Path) -> str:
    """Join the blocks of a page that are to run, each on its line of the page, so that tracebacks point there."""
    text = page.read_text()
    lines: list[str] = []
    for block in PYTHON_BLOCK.finditer(text):
        compile(block[2], str(page), "exec")
        if not block[1]:
            first_line = text.count("\n", 0, block.start(2))
            lines += [""] * (first_line - len(lines)) + block[2].splitlines()
    return "\n".join(lines)


def run_examples(page: Path) -> bool:
    """Run the examples of a page; True when there are none or they end without an error."""
    source = program(page)
    if not source.strip():
        return True
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    env = {**os.environ, **world, "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    env["CUDA_VISIBLE_DEVICES"] = ""
    runner = "import sys; exec(compile(sys.stdin.read(), sys.argv[1], 'exec'), {'__name__': '__main__'})"
    run = subprocess.run([sys.executable, "-c", runner, str(page)], input=source, text=True, cwd=ROOT, env=env)
    return run.returncode == 0


def main() -> None:
    """Check every page; exit 1 when one has a broken link or a failing example."""
    pages = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("**/*.md"))]
    broken = [link for page in pages for link in broken_links(page)]
    failing = [str(page.relative_to(ROOT)) for page in pages if not run_examples(page)]
    for link in broken:
        print(f"broken link in {link}")
    for page in failing:
        print(f"an example fails in {page}")
    print(f"{len(pages)} pages, {len(broken)} broken links, {len(failing)} pages with failing examples")
    sys.exit(1 if broken or failing else 0)


if __name__ == "__main__":
    main()
