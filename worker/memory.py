"""How much memory this process may still take: of the machine, or of the container that it runs in."""

from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")


def available_bytes(cgroup: Path = CGROUP) -> int:
    """Free memory of the machine, or what the container's limit (cgroup v2) leaves, where that is less."""
    free: int = psutil.virtual_memory().available
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):  # no cgroup v2 here, or no limit ("max")
        return free
    return max(0, min(free, limit - used))


def gib(num_bytes: int) -> str:
    """A size for people."""
    if num_bytes < 1 << 30:
        return f"{num_bytes / (1 << 20):.0f} MiB"
    return f"{num_bytes / (1 << 30):.1f} GiB"
