"""What is published of a table or figure: a table, its cards, the series and pictures of figures, the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from wise_atta.bench.paper import tables
from wise_atta.bench.paper.draw import figure
from wise_atta.bench.paper.gather import Gathered, Run
from wise_atta.bench.record import write_cards, write_json, write_text

PAPER = "paper-data"


def publish(gathered: Gathered, out: Path) -> list[Path]:
    """Write `table.md`, `cards.json`, `tuned.json`, what a figure needs as `series.json`, and the figure.

    The folder is `out`, the setting, and the name: `wise-atta paper show NAME FOLDER` prints it again from there. Tuned
    options are written apart, so that the command in the table runs the same again.
    """
    folder = out / (gathered.on or PAPER) / gathered.item.name
    table, cards, tuned = (folder / name for name in ("table.md", "cards.json", "tuned.json"))
    files = [table, cards]
    if gathered.tuned:
        write_json(tuned, {method: {"best": options} for method, options in gathered.tuned.items()})
        files.append(tuned)
    named = tuned if gathered.tuned else None
    made = f"Made by `{tables.command(gathered, tuned=named)}`.\n"
    write_text(table, f"{tables.text(gathered, tuned=named)}\n{made}")
    write_cards(cards, [run.card for run in gathered.runs])
    series = {str(run.card["digest"]): kept for run in gathered.runs if (kept := _kept(gathered, run))}
    if series:
        write_text(folder / "series.json", json.dumps(series) + "\n")
        files.append(folder / "series.json")
    return [*files, *draw(gathered, folder)]


def _kept(gathered: Gathered, run: Run) -> dict[str, Any]:
    if gathered.item.draw == "tenths" and run.tenths is not None:
        return {"tenths": run.tenths}
    if gathered.item.draw == "queries" and run.queries is not None:
        return {"queries": run.queries}
    return {}


def draw(gathered: Gathered, folder: Path) -> list[Path]:
    """Draw a figure as `NAME.png`, `NAME.svg` and `NAME.html`; nothing where there is nothing to draw."""
    drawn = figure(gathered)
    return [] if drawn is None else drawn.write(folder, gathered.item.name)


def facts(gathered: Gathered) -> dict[str, Any]:
    """What `show` prints, for programs."""
    item = gathered.item
    return {
        "name": item.name,
        "label": item.label,
        "title": item.title,
        "on": gathered.on,
        "reference": item.reference,
        "cells": [
            {
                "row": cell.row.name,
                "place": cell.spot.name,
                "paper": item.number(cell.row.name, cell.spot.name)
                if gathered.on is None
                else tables.paper_mean(gathered, cell.row.name, cell.spot.name),
                "ours": cell.values(),
                "nudged": cell.nudged,
                "labels": cell.values(result="labels_spent"),
            }
            for cell in gathered.cells.values()
        ],
        "left_out": [reason for cell in gathered.cells.values() for reason in cell.left_out],
        "missing": tables.missing_commands(gathered),
    }
