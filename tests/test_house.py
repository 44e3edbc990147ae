"""Does the code keep to its budgets, and are they counted right?"""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[1] / "benchmarks" / "house.py"


@pytest.fixture(scope="module")
def house() -> ModuleType:
    spec = importlib.util.spec_from_file_location("house", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["house"] = module  # a dataclass looks its module up
    spec.loader.exec_module(module)
    return module


SOURCE = '''
"""A module."""

class Shop:
    """Sells."""

    def order(self, name, *names, count=1, **more):
        """Order.

        Some more words.
        """
        # a comment
        for one in names:
            if one and count or more:
                return [n for n in more if n] if name else None
        try:
            return 1
        except ValueError:
            return {
                "a": 1,
            }
'''


def test_lines_of_code_leave_out_docstrings_and_comments(house: ModuleType) -> None:
    assert house.code_lines(SOURCE) == 11


def test_a_function_is_measured_by_branches_length_and_parameters(house: ModuleType) -> None:
    ((name, function),) = house.functions(ast.parse(SOURCE))
    assert name == "Shop.order"
    # for, if, and, or, if else, for, if, except
    assert house.complexity(function) == 9
    assert house.length(function) == 11
    assert house.parameters(function) == 2


def test_prose_is_counted_without_code_and_tables(house: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Two words\n\n| a | b |\n| - | - |\n\n```python\nx = 1\n```\n\nthree more words\n<!-- not these -->\n"
    )
    assert house.words([page]) == 6  # the mark of the heading is one


def test_a_check_fails_where_a_budget_is_exceeded(tmp_path: Path) -> None:
    package = tmp_path / "src" / "wise_atta"
    package.mkdir(parents=True)
    (tmp_path / "README.md").write_text("Words.\n")
    command = [sys.executable, str(FILE), "--check", "--root", str(tmp_path)]
    (package / "fine.py").write_text("def f(a):\n    return a\n")
    assert subprocess.run(command, capture_output=True).returncode == 0
    taken = ", ".join(f"a{number}" for number in range(13))
    (package / "large.py").write_text(f"def f({taken}):\n    return a0\n")
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert "large.py:1 f: 13 parameters" in result.stdout


def test_the_calls_of_a_batch_are_counted_for_every_kind() -> None:
    result = subprocess.run([sys.executable, str(FILE.with_name("calls.py"))], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    counts = {line[:20].strip(): [int(one) for one in line[20:].split()] for line in result.stdout.splitlines()[1:]}
    assert list(counts) == ["labelled, plain", "unlabelled, plain", "labelled, fp32", "unlabelled, fp32"]
    assert all(files < named < frames < calls > changes for named, frames, files, calls, changes in counts.values())
    assert counts["labelled, plain"][0] <= 120, "a batch can be followed by a reader"


def test_the_code_keeps_to_its_budgets() -> None:
    result = subprocess.run([sys.executable, str(FILE), "--check"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
