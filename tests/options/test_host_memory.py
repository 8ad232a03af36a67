"""How much memory the host has, read from made-up trees."""

from pathlib import Path

import pytest

from dynamicemb.host_memory import available_host_memory, require_host_memory

KIB = 1024


def tree(root: Path, files: dict[str, str]) -> tuple[Path, Path]:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "proc", root / "groups"


SYSTEM = {"proc/meminfo": "MemTotal: 900 kB\nMemAvailable: 700 kB\n", "proc/self/cgroup": "0::/a/b\n"}


def limited(folder: str, most: str, used: int, files: int = 0) -> dict[str, str]:
    stat = f"anon 1\ninactive_file {files}\nactive_file 0\n"
    return {
        f"groups/{folder}memory.max": f"{most}\n",
        f"groups/{folder}memory.current": f"{used}\n",
        f"groups/{folder}memory.stat": stat,
    }


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/meminfo": "MemTotal: 900 kB\n"}, None),
        ({"proc/meminfo": SYSTEM["proc/meminfo"]}, 700 * KIB),
        (SYSTEM, 700 * KIB),
        (SYSTEM | limited("a/b/", "max", 5), 700 * KIB),
        (SYSTEM | limited("a/b/", str(300 * KIB), 100 * KIB), 200 * KIB),
        # What caches files is given back.
        (SYSTEM | limited("a/b/", str(300 * KIB), 100 * KIB, 60 * KIB), 260 * KIB),
        # The strictest of the groups above counts, and the root's, which a container sees as its own.
        (SYSTEM | limited("a/b/", str(300 * KIB), 0) | limited("a/", str(99 * KIB), 0), 99 * KIB),
        (SYSTEM | limited("", str(98 * KIB), 0), 98 * KIB),
        (SYSTEM | limited("a/", str(98 * KIB), 99 * KIB), 0),
        (SYSTEM | {"proc/self/cgroup": "3:memory:/a\n"}, 700 * KIB),
    ],
)
def test_available_memory(tmp_path: Path, files: dict[str, str], expected: int | None) -> None:
    assert available_host_memory(*tree(tmp_path, files)) == expected


def test_this_host_has_memory() -> None:
    available = available_host_memory()
    assert available is None or available > 2**20
    require_host_memory(1)
    if available is not None:
        with pytest.raises(MemoryError, match="bytes are needed and"):
            require_host_memory(2**60)
