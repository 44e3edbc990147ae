"""Does the project hold together as something to install, read and cite?"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import griffe
import pytest
import yaml

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run(*command: str | Path) -> str:
    """What a command printed; its own words are the failure when it fails."""
    result = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def distributions(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=!~ ]", requirement, maxsplit=1)[0].lower() for requirement in requirements}


def test_the_core_requires_torch_and_numpy_only() -> None:
    assert distributions(PROJECT["dependencies"]) == {"torch", "numpy"}


def test_importing_the_package_loads_no_optional_package() -> None:
    optional = "alembic fastapi matplotlib pyarrow pydantic ray rich sklearn sqlalchemy timm torchvision typer uvicorn"
    # torch itself is free to load what it finds, so only what the package adds to it counts.
    code = f"""
import sys, numpy, torch
before = set(sys.modules)
import wise_atta
print(*sorted(({{name.split(".")[0] for name in set(sys.modules) - before}}) & set({optional.split()!r})))
"""
    assert run("-c", code).split() == []


def test_the_citation_and_the_changelog_name_the_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert re.search(rf"^## {re.escape(PROJECT['version'])}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_the_documentation_builds_without_a_warning_and_loads_nothing_from_other_hosts(tmp_path: Path) -> None:
    # Not --quiet: with it, warnings are not counted either.
    run("-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path)
    pages = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*.html")}
    assert {"index.html", "api/wise_atta.signals/index.html", "decisions/index.html"} <= set(pages)
    loads = re.compile(r"<(?:script|img|iframe)[^>]+src=[\"']?https?:|<link[^>]+href=[\"']?https?:")
    assert [name for name, text in pages.items() if loads.search(text)] == []


def test_parameters_that_are_explained_together_have_types_of_their_own(tmp_path: Path) -> None:
    docstring = "Order.\n\n    Parameters\n    ----------\n    name, count\n        What, and how many.\n    "
    (tmp_path / "shop.py").write_text(f'def order(name: str, count: int = 2) -> None:\n    """{docstring}"""\n')
    extensions = griffe.load_extensions("dataclasses", str(ROOT / "docs" / "signatures.py"))
    shop = griffe.load("shop", search_paths=[tmp_path], extensions=extensions, docstring_parser="numpy")
    (section,) = (part for part in shop["order"].docstring.parsed if part.kind.value == "parameters")
    found = [(item.name, str(item.annotation), item.value) for item in section.value]
    assert found == [("name", "str", None), ("count", "int", "2")]


@pytest.mark.heavy
def test_the_wheel_holds_the_typed_package_and_its_licence(tmp_path: Path) -> None:
    run("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("wise_atta-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.py")}
    pages = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("pages/*.*")}
    assert pages and modules | pages | {"wise_atta/py.typed"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.startswith("tests") for name in names)


def test_every_file_that_the_architecture_page_names_exists() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    names = {name for name in re.findall(r"`([a-z_/.]+(?:\.py|/))`", text) if "…" not in name}
    package = ROOT / "src/wise_atta"
    files = {path.name for path in package.rglob("*.py")}
    missing = [
        name
        for name in sorted(names)
        if not ((package / name).exists() or (ROOT / name).exists() or ("/" not in name and name in files))
    ]
    assert len(names) > 30 and not missing
