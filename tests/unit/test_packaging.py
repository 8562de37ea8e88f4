"""What is installed is this checkout, and what is built has everything that runs."""

import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("kernels", "model", "ops", "scheduler", "worker")


@pytest.mark.parametrize("name", PACKAGES)
def test_the_package_is_that_of_this_checkout(name: str) -> None:
    """Another distribution has a package called `kernels`, too."""
    spec = find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).resolve() == ROOT / name / "__init__.py"


def test_the_wheel_holds_every_file_that_runs(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        built = {name for name in archive.namelist() if ".dist-info/" not in name}
        archive.extractall(tmp_path / "unpacked")
    files = {
        path.relative_to(ROOT).as_posix()
        for name in PACKAGES
        for path in (ROOT / name).rglob("*")
        if path.suffix in (".py", ".lua", ".json") and "__pycache__" not in path.parts
    }
    assert built == files
    code = "import worker.streams.scripts as s; print(s.__file__); [s._Script(name) for name in s.SCRIPT_NAMES]"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "unpacked")},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.stdout.startswith(str(tmp_path / "unpacked"))
