"""Which runs do the tests look at? Folders written by hand, so that every number in them is known."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wise_atta.bench.experiment import Experiment
from wise_atta.bench.record import pack_bits, pack_numbers, write_json, write_parquet
from wise_atta.bench.runs import Run, read


def with_head(bundle: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Write a bundle anew whose runs, names and cards were changed, whatever comes of it."""
    with zipfile.ZipFile(bundle) as old:
        parts = {name: old.read(name) for name in old.namelist()}
    head = json.loads(parts["bundle.json"])
    change(head)
    parts["bundle.json"] = json.dumps(head).encode()
    with zipfile.ZipFile(bundle, "w") as new:
        for name, part in parts.items():
            new.writestr(name, part)


def made(
    folder: Path,
    wrong: Sequence[Sequence[bool]] | NDArray[np.bool_],
    *,
    picked: Mapping[int, Sequence[int]] | None = None,
    pictures: NDArray[np.int64] | None = None,
    domains: Sequence[str] | None = None,
    stream_seed: int = 0,
    pixels: str | None = "pixels",
    weights: str = "weights",
    **fields: Any,
) -> Run:
    """Write a finished run with these mistakes (batch by sample) and questions (places by batch), and read it back."""
    experiment = Experiment.parse(
        {"data": "digits+c", "batch": len(wrong[0]), **fields, "stream": {"seed": stream_seed}}
    )
    count = sum(len(batch) for batch in wrong)
    order = np.arange(count) if pictures is None else pictures
    names = [f"p{number}" for number in range(int(order.max()) + 1)]
    steps: list[dict[str, Any]] = []
    queries: list[dict[str, Any]] = []
    start = spent = 0
    asked: set[int] = set()
    for number, bad in enumerate(wrong):
        here, chosen = order[start : start + len(bad)], list((picked or {}).get(number, ()))
        start, spent = start + len(bad), spent + len(chosen)
        asked |= {int(here[place]) for place in chosen}
        domain = "one" if domains is None else domains[number]
        steps.append(
            {
                "batch": number + 1,
                "domain": domain,
                "samples": len(bad),
                "wrong": int(np.sum(bad)),
                "error": float(np.mean(bad)),
                "hits": pack_bits([not one for one in bad]),
                "picked": pack_bits([place in chosen for place in range(len(bad))]) if chosen else "",
                "pictures": pack_numbers(here.tolist()),
                "logits": 1.0,
                "utility": 0.5,
                "threshold": 0.5,
                "asked": len(chosen),
                "learned": len(chosen),
                "spent": spent,
                "entropy": 0.25,
                "ms": 1.0,
                "tripped": None,
            }
        )
        queries += [{"id": f"{number}-{place}", "batch": number + 1, "domain": domain} for place in chosen]
    bad_flat = np.concatenate([np.asarray(batch, dtype=bool) for batch in wrong])
    kept = ~np.isin(order, list(asked))
    ratio = fields.get("ratio")
    by_domain = {
        name: 100 * float(np.mean([row["error"] for row in steps if row["domain"] == name]))
        for name in dict.fromkeys(row["domain"] for row in steps)
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_parquet(folder / "steps.parquet", steps)
    write_parquet(folder / "queries.parquet", queries)
    write_parquet(folder / "pictures.parquet", [{"picture": name} for name in names])
    write_json(
        folder / "card.json",
        {
            "card_version": 1,
            "digest": experiment.digest,
            "experiment": experiment.model_dump(mode="json"),
            "results": {
                "error": 100 * float(bad_flat.mean()),
                "error_never_asked": 100 * float(bad_flat[kept].mean()) if kept.any() else None,
                "samples": count,
                "by_domain": by_domain,
                "batches": len(steps),
                "labels_spent": spent,
                "labels_allowed": None if ratio is None else int(ratio * len(steps)),
                "questions": {"asked": spent},
                "forwards": len(steps),
                "backwards": len(steps),
                "seconds": 1.0,
                "peak_memory": None,
                "resumed": False,
            },
            "first_batch": {"digest": "0", "logits": [[1.0]]},
            "provenance": {
                "model": {"name": "digits", "weights_hash": weights},
                "stream": {
                    "spec": experiment.spec().to_dict(),
                    "digest": experiment.spec().digest,
                    "samples": count,
                    "batches": len(steps),
                    "fingerprint": "fingerprint",
                    "pixels": pixels,
                },
                "versions": {"torch": "2"},
                "device": "cpu",
                "threads": 1,
                "deterministic": True,
            },
        },
    )
    return read(folder)
