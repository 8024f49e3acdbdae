"""A small stand-in for the official files of IMDb."""

from __future__ import annotations

from pathlib import Path


def write_reviews(folder: Path, train: int = 20, test: int = 3) -> Path:
    """aclImdb/ in the official layout, so many reviews of each class."""
    for part, count in (("train", train), ("test", test)):
        for kind in ("neg", "pos"):
            place = folder / "aclImdb" / part / kind
            place.mkdir(parents=True)
            for number in range(count):
                (place / f"{number}_7.txt").write_text(f"{kind} {part} {number}<br /><br />naïve", encoding="utf-8")
    (folder / "aclImdb/train/unsup").mkdir()
    (folder / "aclImdb/train/unsup/0_0.txt").write_text("without a label")
    return folder
