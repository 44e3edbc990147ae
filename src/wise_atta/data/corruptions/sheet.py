"""The sheet of all corruptions: one picture under each of them, at three severities.

python -m wise_atta.data.corruptions.sheet docs/img/corruptions.jpg
python -m wise_atta.data.corruptions.sheet sheet.png --picture my.jpg
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from wise_atta.data.corruptions import CORRUPTIONS, EXTRA, corrupt
from wise_atta.errors import MissingExtra

_SIZE, _TILE, _LABEL, _GAP = 224, 128, 16, 4
_SEVERITIES = (1, 3, 5)
_BLOCKS = 2


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path, help="the sheet, a .jpg or .png")
    parser.add_argument("--picture", type=Path, help="any picture; by default scikit-image's cat, which is CC0")
    chosen = parser.parse_args(argv)
    try:
        from PIL import Image, ImageDraw, ImageOps

        if chosen.picture:
            picture = Image.open(chosen.picture).convert("RGB")
        else:
            picture = Image.fromarray(importlib.import_module("skimage.data").chelsea())
    except ImportError as error:
        raise MissingExtra(f"{error}: a sheet needs Pillow, and scikit-image where --picture is not given") from error
    clean = torch.from_numpy(np.array(ImageOps.fit(picture, (_SIZE, _SIZE)))).permute(2, 0, 1)[None].contiguous()
    names = ["no corruption", *CORRUPTIONS, *EXTRA]
    rows = -(-len(names) // _BLOCKS)
    wide, tall = len(_SEVERITIES) * (_TILE + _GAP) + _GAP * 4, _TILE + _LABEL + _GAP
    sheet = Image.new("RGB", (_BLOCKS * wide, rows * tall), "white")
    pen = ImageDraw.Draw(sheet)
    for number, name in enumerate(names):
        left, top = number // rows * wide + _GAP, number % rows * tall
        shown = _SEVERITIES if number else (0,)
        title = f"{name}, severities {', '.join(map(str, shown))}" if number else name
        pen.text((left, top + 2), title, fill="black")
        for place, severity in enumerate(shown):
            result = corrupt(clean, name, severity, ids=["sheet"]) if severity else clean
            tile = Image.fromarray(result[0].permute(1, 2, 0).numpy()).resize((_TILE, _TILE), Image.Resampling.LANCZOS)
            sheet.paste(tile, (left + place * (_TILE + _GAP), top + _LABEL))
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(chosen.out, quality=85)
    return 0


if __name__ == "__main__":
    sys.exit(main())
