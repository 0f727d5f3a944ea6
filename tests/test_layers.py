"""The house rules that a reader would have to trust otherwise: who imports whom, and that the library never prints."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = {room: sorted((ROOT / room).rglob("*.py")) for room in ("coli", "commands", "kernels")}
HOUSE = [path for files in FILES.values() for path in files]
# the table; Hugging Face's own variables; the copy that compiling processes are given
ENVIRONMENT = ("coli/settings.py", "coli/models/find.py", "coli/program/cache.py")
# processes of their own, whose stdout is the protocol with whoever started them
PRINTS = ("coli/program/compile.py", "coli/doctor/vulkan_devices.py")


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", HOUSE, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path):
    room, imports = path.relative_to(ROOT).parts[0], _imports(path)
    roots = {name.split(".")[0] for name in imports}
    if room == "coli":
        assert "typer" not in roots and not any(name.startswith("coli.commands") for name in imports)
        above = {name for name in imports if name.startswith("coli.server")}  # what it is started with is for the plan
        inside = path.is_relative_to(ROOT / "coli" / "server")
        assert inside or above <= {"coli.server.options", "coli.server.options.ServeOptions"}
    if room == "kernels":
        assert not roots & {"typer", "rich", "psutil", "tokenizers", "jinja2"}
        assert all(name.startswith("coli.kernels") for name in imports if name.startswith("coli"))
    if room != "commands":
        assert "rich" not in roots


@pytest.mark.parametrize("path", FILES["coli"] + FILES["kernels"], ids=lambda path: str(path.relative_to(ROOT)))
def test_the_library_never_prints_and_reads_the_environment_in_one_place(path):
    name = str(path.relative_to(ROOT))
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree))
    calls = [node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    assert "print" not in calls or name in PRINTS
    environ = [node for node in nodes if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")]
    assert not environ or name in ENVIRONMENT
