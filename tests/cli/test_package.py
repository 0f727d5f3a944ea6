"""The wheel: one top-level name, every room in it, nothing else; and the command line works from it alone."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from coli.models.find import NANO
from tests.conftest import clean_env

ROOT = Path(__file__).resolve().parents[2]
ROOMS = {"coli": "coli", "commands": "coli/commands", "kernels": "coli/kernels", "shaders": "coli/shaders"}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this checkout, built in a copy so that no old build folder leaks into it."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for room in ROOMS:
        shutil.copytree(ROOT / room, source / room, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--disable-pip-version-check",
         "--wheel-dir", str(out), "."],
        cwd=source, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "importable" not in done.stdout + done.stderr, "setuptools found data that looks like an unlisted package"
    (path,) = out.glob("*.whl")
    return path


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def test_one_top_level_name(wheel: Path) -> None:
    assert {name.split("/")[0] for name in names(wheel) if ".dist-info/" not in name} == {"coli"}


def test_every_room_and_every_asset_is_in_it(wheel: Path) -> None:
    packed = {name for name in names(wheel) if ".dist-info/" not in name}
    sources = {
        f"{inside}/{path.relative_to(ROOT / room).as_posix()}"
        for room, inside in ROOMS.items()
        for path in (ROOT / room).rglob("*")
        if path.suffix in (".py", ".spv", ".comp")
    }
    assets = {f"coli/assets/nano/{path.name}" for path in NANO.iterdir()}
    assert {"coli/commands/app.py", "coli/kernels/linear.py", "coli/assets/nano/model.safetensors"} <= packed
    assert packed == sources | assets


def test_the_command_line_runs_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """Unpacked alone and put before the checkout: other packages still come from this environment."""
    site, work = tmp_path / "site", tmp_path / "work"
    work.mkdir()
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check",
         "--target", str(site), str(wheel)],
        check=True,
    )  # fmt: skip
    env = clean_env(PYTHONPATH=str(site))

    def coli(*arguments: str) -> str:
        done = subprocess.run([sys.executable, str(site / "bin" / "coli"), *arguments], cwd=work, env=env, text=True,
                              stdin=subprocess.DEVNULL, capture_output=True, timeout=240)  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = "import coli.commands.app, coli.kernels; print(coli.commands.app.__file__, coli.kernels.__file__)"
    found = subprocess.run([sys.executable, "-c", where], cwd=work, env=env, text=True, capture_output=True, check=True)
    assert all(path.startswith(str(site)) for path in found.stdout.split())
    assert coli("--version").startswith("coli ")
    assert "COLI_CTX" in coli("env")
    assert str(site / "coli" / "assets" / "nano") in coli("info")
    assert coli("run", "--max-tokens", "8", "-q", "Tell me a short story about a fox.").strip()
