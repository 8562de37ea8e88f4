"""How much memory this process may still take: of the machine, of its container, and of the limits of its shell."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

CGROUP = Path("/sys/fs/cgroup")
PROC = Path("/proc/self")
ADDRESS_SPACE = "the limit of the address space (ulimit -v)"
DATA_SIZE = "the limit of the data segment (ulimit -d)"
# Name in /proc/self/limits, name in /proc/self/status of what counts towards it, and what it is called here.
_PROCESS_LIMITS = (
    ("Max address space", "VmSize", ADDRESS_SPACE),
    ("Max data size", "VmData", DATA_SIZE),
)


class Headroom(NamedTuple):
    """Bytes that may still be taken, and what ends them."""

    num_bytes: int
    limit: str


def headroom(cgroup: Path = CGROUP, proc: Path = PROC) -> Headroom:
    """The tightest of all limits: free memory, cgroups (v2 and v1, nested ones too), and ulimit -v and -d."""
    limits = [
        Headroom(_free_bytes(), "the machine's memory"),
        *_cgroup_headroom(cgroup, proc),
        *_process_headroom(proc),
    ]
    tightest = min(limits, key=lambda limit: limit.num_bytes)
    return tightest._replace(num_bytes=max(0, tightest.num_bytes))


def _free_bytes() -> int:
    """Of the whole machine. An engine runs on Linux without psutil."""
    try:
        import psutil
    except ImportError:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    return int(psutil.virtual_memory().available)


def available_bytes() -> int:
    """Bytes that this process may still take."""
    return headroom().num_bytes


def is_address_space_limited() -> bool:
    """Whether mapped files count: with ulimit -v they do, though they take no memory of their own."""
    return any(limit.limit == ADDRESS_SPACE for limit in _process_headroom(PROC))


def gib(num_bytes: int) -> str:
    """A size for people."""
    if num_bytes < 1 << 30:
        return f"{num_bytes / (1 << 20):.0f} MiB"
    return f"{num_bytes / (1 << 30):.1f} GiB"


def _process_headroom(proc: Path) -> Iterator[Headroom]:
    """What the process's own limits leave, where there are any. Other systems than Linux aren't asked."""
    try:
        limits = (proc / "limits").read_text().splitlines()
        status = (proc / "status").read_text().splitlines()
    except OSError:
        return
    used = {line.partition(":")[0]: line.split()[1] for line in status if line.endswith(" kB")}
    for name, counted, words in _PROCESS_LIMITS:
        soft = next((line.removeprefix(name).split()[0] for line in limits if line.startswith(name)), "unlimited")
        if soft.isdecimal() and counted in used:
            yield Headroom(int(soft) - (int(used[counted]) << 10), words)


def _cgroup_headroom(cgroup: Path, proc: Path) -> Iterator[Headroom]:
    """What each memory cgroup that this process is in leaves, from its own up to the root.

        v2    0::/a/b          CGROUP/a/b
        v1    5:memory:/a/b    CGROUP/memory/a/b

    In a container the path may be the host's, which isn't to be seen here: the container's own group is the root then.
    """
    try:
        lines = (proc / "cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in [*lines, "0::/"]:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            yield from _walk(cgroup, path, _v2_headroom)
        elif "memory" in controllers.split(","):
            yield from _walk(cgroup / "memory", path, _v1_headroom)


def _walk(root: Path, path: str, read: Callable[[Path], int | None]) -> Iterator[Headroom]:
    folder = root / path.strip("/")
    for group in (folder, *folder.parents):
        if not group.is_relative_to(root):
            return
        if (left := read(group)) is not None:
            yield Headroom(left, f"the memory limit of its container (cgroup {group})")


def _v2_headroom(group: Path) -> int | None:
    return _left(group, "memory.max", "memory.current", "inactive_file")


def _v1_headroom(group: Path) -> int | None:
    return _left(group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _left(group: Path, limit_name: str, used_name: str, cache_name: str) -> int | None:
    """The group's limit less what is in use; cached files that can be dropped at once don't count as used.

    None without a limit ("max", or no such file).
    """
    try:
        limit, used = int((group / limit_name).read_text()), int((group / used_name).read_text())
    except (OSError, ValueError):
        return None
    return limit - max(0, used - _stat(group, cache_name))


def _stat(group: Path, name: str) -> int:
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), 0)
