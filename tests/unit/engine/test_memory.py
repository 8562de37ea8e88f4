"""How much memory a process may still take, read from made-up folders of /proc and /sys/fs/cgroup."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from worker.memory import gib, headroom

MIB = 1 << 20
UNLIMITED_V1 = 9223372036854771712


def write(folder: Path, **files: object) -> None:
    """`memory_max=1` writes the file memory.max."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("memory_", "memory.", 1)).write_text(f"{value}\n")


def proc_of(folder: Path, cgroup: str = "0::/\n", **limits: int) -> Path:
    """A /proc/self: its cgroups, and soft limits with 100 MiB of address space and 50 MiB of data in use."""
    soft = {"Max address space": limits.get("address", "unlimited"), "Max data size": limits.get("data", "unlimited")}
    lines = [f"{name:<26}{value!s:<21}{'unlimited':<21}bytes" for name, value in soft.items()]
    write(
        folder / "proc",
        limits="\n".join(["Limit                     Soft Limit           Hard Limit           Units", *lines]),
        status=f"Name:\tpython\nVmSize:\t  {100 << 10} kB\nVmData:\t   {50 << 10} kB",
        cgroup=cgroup,
    )
    return folder / "proc"


def test_without_limits_the_machine_s_free_memory_counts(tmp_path: Path) -> None:
    room = headroom(tmp_path / "cgroup", proc_of(tmp_path))
    assert room.num_bytes > 0
    assert room.limit == "the machine's memory"


def test_a_container_s_limit_counts_less_what_is_used_and_can_not_be_dropped(tmp_path: Path) -> None:
    group = tmp_path / "cgroup"
    write(group, memory_max=200 * MIB, memory_current=150 * MIB, memory_stat=f"anon 1\ninactive_file {30 * MIB}")
    room = headroom(group, proc_of(tmp_path))
    assert room.num_bytes == 80 * MIB
    assert "container" in room.limit


@pytest.mark.parametrize("tight", ["pod", "pod/box", ""])
def test_the_tightest_of_nested_groups_counts(tmp_path: Path, tight: str) -> None:
    group = tmp_path / "cgroup"
    for path in ("pod/box", "pod", ""):
        limit = (100 if path == tight else 300) * MIB
        write(group / path, memory_max=limit, memory_current=40 * MIB)
    assert headroom(group, proc_of(tmp_path, "0::/pod/box\n")).num_bytes == 60 * MIB


@pytest.mark.parametrize("tight", ["docker/box", "docker", ""])
def test_groups_of_the_first_version_are_read_too(tmp_path: Path, tight: str) -> None:
    group = tmp_path / "cgroup"
    for path in ("docker/box", "docker", ""):
        write(
            group / "memory" / path,
            memory_limit_in_bytes=100 * MIB if path == tight else UNLIMITED_V1,
            memory_usage_in_bytes=90 * MIB,
            memory_stat=f"inactive_file 1\ntotal_inactive_file {20 * MIB}",
        )
    lines = "11:cpu,cpuacct:/docker/box\n5:memory:/docker/box\n1:name=systemd:/docker/box\n0::/docker/box\n"
    assert headroom(group, proc_of(tmp_path, lines)).num_bytes == 30 * MIB


def test_a_path_of_the_host_that_is_not_seen_here_leads_to_the_container_s_own_group(tmp_path: Path) -> None:
    write(tmp_path / "one" / "memory", memory_limit_in_bytes=100 * MIB, memory_usage_in_bytes=60 * MIB)
    write(tmp_path / "two", memory_max=100 * MIB, memory_current=60 * MIB)
    lines = "5:memory:/kubepods/pod7/abc\n0::/../../elsewhere\n"
    for group in (tmp_path / "one", tmp_path / "two"):
        assert headroom(group, proc_of(tmp_path, lines)).num_bytes == 40 * MIB


def test_a_group_that_uses_more_than_it_may_leaves_nothing(tmp_path: Path) -> None:
    write(tmp_path / "cgroup", memory_max=100, memory_current=200)
    assert headroom(tmp_path / "cgroup", proc_of(tmp_path)).num_bytes == 0


def test_the_shell_s_limits_of_address_space_and_data_count(tmp_path: Path) -> None:
    room = headroom(tmp_path / "cgroup", proc_of(tmp_path, address=150 * MIB))
    assert room == (50 * MIB, "the limit of the address space (ulimit -v)")
    room = headroom(tmp_path / "cgroup", proc_of(tmp_path, address=150 * MIB, data=60 * MIB))
    assert room == (10 * MIB, "the limit of the data segment (ulimit -d)")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems have no /proc")
def test_a_real_limit_is_seen() -> None:
    code = "from worker.memory import headroom; print(*headroom(), sep='|')"
    run = subprocess.run(
        [sys.executable, "-c", code],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (300 * MIB, 300 * MIB)),
        capture_output=True,
        text=True,
        check=True,
    )
    num_bytes, words = run.stdout.strip().split("|")
    assert 0 < int(num_bytes) < 300 * MIB
    assert words == "the limit of the address space (ulimit -v)"


def test_sizes_are_told_in_mebibytes_up_to_a_gibibyte() -> None:
    assert (gib(600 * MIB), gib(1536 * MIB)) == ("600 MiB", "1.5 GiB")
