"""Can a reference be read alone? It imports torch and its neighbours, and the pages show it as it is."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted((ROOT / "src" / "wise_atta" / "reference").glob("*.py"))
METHODS = sorted((ROOT / "docs" / "methods").glob("*.md"))


def imported(program: Path) -> set[str]:
    """Modules that a program imports, torch and the references by their full names, all others by their roots."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(program.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names.add(node.module or "")
    return {name.partition(".")[0] if not name.startswith("wise_atta.reference.") else name for name in names}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_reference_needs_torch_alone(program: Path) -> None:
    others = {name for name in imported(program) if not name.startswith("wise_atta.reference.")}
    assert others - sys.stdlib_module_names <= {"torch"}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_reference_can_be_held_in_the_head(program: Path) -> None:
    assert len(program.read_text().splitlines()) <= 260


def functions(program: Path) -> dict[str, str]:
    """First and last line of every function, as "first:last"."""
    nodes = [node for node in ast.walk(ast.parse(program.read_text())) if isinstance(node, ast.FunctionDef)]
    firsts = {node.name: min([node.lineno, *(d.lineno for d in node.decorator_list)]) for node in nodes}
    return {node.name: f"{firsts[node.name]}:{node.end_lineno}" for node in nodes}


@pytest.mark.parametrize("page", METHODS, ids=lambda path: path.stem)
def test_a_method_page_opens_with_its_reference(page: Path) -> None:
    """The lines of whole functions: where this fails after a change of the reference, put in the new numbers."""
    section = page.read_text().partition("## The program\n")[2].partition("\n## ")[0]
    lines = functions(ROOT / "src" / "wise_atta" / "reference" / page.name.replace(".md", ".py"))
    shown = ["select", "run"] if page.stem == "wise" else ["run"]
    expected = [f"src/wise_atta/reference/{page.stem}.py:{lines[name]}" for name in shown]
    assert re.findall(r'^--8<-- "(.+)"$', section, re.MULTILINE) == expected
    assert re.findall(r"^## .*", page.read_text(), re.MULTILINE)[0] == "## The program"
