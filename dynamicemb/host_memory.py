"""How much memory the host still has to give."""

from pathlib import Path


def require_host_memory(num_bytes: int) -> None:
    """Raise unless the host has so much memory to give.

    Linux promises more than it has, and ends the process that takes it at its word.

    Raises:
        MemoryError: it has less.
    """
    available = available_host_memory()
    if available is not None and num_bytes > available:
        raise MemoryError(f"{num_bytes} bytes are needed and {available} available")


def available_host_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return how many bytes this process may still take, by the system and its control groups; None if unknown.

    Args:
        proc: where the system tells of itself.
        cgroups: where control groups (version 2) are.
    """
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
    try:
        own = (proc / "self" / "cgroup").read_text().splitlines()
        group = next(line[3:].strip("/") for line in own if line.startswith("0::"))
    except (OSError, StopIteration):
        return available
    folder = cgroups / group
    for limited in (folder, *folder.parents):
        if not limited.is_relative_to(cgroups):
            break
        try:
            limit = int((limited / "memory.max").read_text())
            used = int((limited / "memory.current").read_text())
        except (OSError, ValueError):
            # No limit: the root has no such file, others say "max".
            continue
        available = min(available, max(0, limit - used + _reclaimable(limited)))
    return available


def _reclaimable(folder: Path) -> int:
    """Return the bytes of a control group that are copies of files."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("inactive_file ", "active_file ")))
    except (OSError, ValueError):
        return 0
