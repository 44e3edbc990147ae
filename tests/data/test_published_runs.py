"""Is the paper's experiment one command? On small data with the real folder names, from archive to run card."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from wise_atta.cli import app


@pytest.mark.parametrize(
    ("data", "domains", "model"),
    [
        ("imagenet-c", "fog,snow", "torchvision/resnet50@random"),
        ("imagenet-r", "", "torchvision/resnet50@random"),
        ("imagenet-k", "", "torchvision/vit_b_16@random"),
        ("imagenet-a", "", "torchvision/vit_b_16@random"),
    ],
)
def test_one_command_runs_a_published_benchmark(
    imagenet_folder: Path, tmp_path: Path, data: str, domains: str, model: str
) -> None:
    arguments = [
        "run",
        "--dataset",
        data,
        "--model",
        model,
        "--method",
        "wise",
        "-o",
        f"preset={data}",
        "--policy",
        "uniform",
    ]
    arguments += ["--ratio", "0.5", "--batch", "2", "--limit", "4", "--protocol", "ftta", "--device", "cpu", "--json"]
    arguments += ["--data", str(imagenet_folder), "--out", str(tmp_path / "run")]
    arguments += ["--domains", domains] if domains else []
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    card = json.loads(result.stdout)
    batches = card["results"]["batches"]
    assert batches >= 2
    assert card["results"]["labels_spent"] == batches // 2 == card["results"]["questions"]["learned"]
    assert card["provenance"]["stream"]["masked"] is (data in ("imagenet-r", "imagenet-a"))
    assert (tmp_path / "run" / "steps.parquet").exists()
