"""Does the benchmark of recording measure what it says, on a network small enough for a test?"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from wise_atta.bench.run import CHECKPOINT_SHARE

pytest.importorskip("torchvision", reason="needs torchvision: pip install 'wise-atta[vision]'")
FILE = Path(__file__).parents[2] / "benchmarks" / "recording.py"
# Blocked, so that the benchmark runs where no more is installed than it says.
SCRIPT = """
import runpy, sys
for name in ("yaml", "sklearn", "scipy", "typer", "rich", "matplotlib", "timm", "safetensors"):
    sys.modules[name] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_the_benchmark_of_recording_runs_with_little_installed(tmp_path: Path) -> None:
    small = ["--device", "cpu", "--model", "resnet18", "--size", "32", "--batch", "4", "--rounds", "2", "--steps", "2"]
    command = [sys.executable, "-c", SCRIPT, str(FILE), *small, "--out", str(tmp_path / "found.json")]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    printed = json.loads((tmp_path / "found.json").read_text())
    assert printed["updated"] == 1, "a step that is skipped is no step to compare with"
    assert printed["overhead"] == pytest.approx(printed["overhead_rows"] + printed["overhead_checkpoints"])
    share = min(printed["ms_checkpoint"] / 100 / printed["ms_alone"], CHECKPOINT_SHARE)
    assert printed["overhead_checkpoints"] == pytest.approx(share)
    assert printed["ms_alone"] > 0 and "| overhead |" in ran.stdout
