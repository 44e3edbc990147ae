"""Which pages follow from files on disk? One a method, one a decision, and one a module, from its docstrings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PACKAGE = Path(__file__).parent.parent / "src" / "wise_atta"


def modules() -> list[str]:
    """Dotted names of the public modules, the package itself first."""
    files = sorted(path.relative_to(PACKAGE.parent) for path in PACKAGE.rglob("*.py"))
    names = [path.parent.parts if path.name == "__init__.py" else path.with_suffix("").parts for path in files]
    return sorted(".".join(parts) for parts in names if not any(part.startswith("_") for part in parts))


def page(module: str) -> str:
    return f"api/{module}.md"


def api() -> list[Any]:
    """The navigation of the API: a module is an entry, a package a section that opens with its own page."""
    root, *rest = modules()
    entries: list[Any] = [{root: page(root)}]
    sections: dict[str, list[Any]] = {}
    for module in rest:
        room, _, inner = module.removeprefix(f"{root}.").partition(".")
        if (PACKAGE / room).is_dir():
            if room not in sections:
                sections[room] = []
                entries.append({room: sections[room]})
            sections[room].append({inner: page(module)} if inner else page(module))
        else:
            entries.append({room: page(module)})
    return entries


def on_config(config: MkDocsConfig) -> None:
    nav: list[Any] = config.nav or []
    for entry in nav:
        for title, folder, pattern in (("Methods", "methods", "*.md"), ("Decisions", "decisions", "[0-9]*.md")):
            if isinstance(entry, dict) and title in entry:
                pages = sorted((Path(config.docs_dir) / folder).glob(pattern))
                entry[title] += [f"{folder}/{path.name}" for path in pages]
    config.nav = [*nav, {"API": api()}]


def on_files(files: Files, config: MkDocsConfig) -> None:
    for module in modules():
        files.append(File.generated(config, page(module), content=f"::: {module}\n"))
