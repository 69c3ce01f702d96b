"""Excerpts of texts that were not trained on, as JSONL: ``{"text", "domain"}``.

    python -m firesteel.train.excerpts --out DIR --source code=FOLDER --source prose=FOLDER

The same folders and seed give the same lines. An excerpt starts behind an empty line (code: at a top-level
definition where there is one) and ends at a line end.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from random import Random

from firesteel.train.corpus import texts

STARTS = {"code": re.compile(r"\n\n(?=(?:def|class|@)\b)"), "prose": re.compile(r"\n\n(?=[A-Z])")}


def excerpt(text: str, start: re.Pattern[str], chars: int, rng: Random) -> str | None:
    """One excerpt of at most ``chars`` characters, or None if the text is too short."""
    places = [m.end() for m in start.finditer(text) if m.end() + chars <= len(text)]
    if not places:
        return None
    at = rng.choice(places)
    cut = text[at : at + chars]
    return cut[: cut.rindex("\n") + 1] if cut.count("\n") > 1 else None


def excerpts(folder: Path, kind: str, count: int, chars: int, seed: int = 11) -> list[dict[str, str]]:
    """``count`` excerpts drawn over all files under ``folder``, none twice."""
    rng, found, seen = Random(f"{kind}-{seed}"), [], set()
    files = list(texts(folder))
    for _ in range(50 * count):
        number = rng.randrange(len(files))
        cut = excerpt(files[number], STARTS[kind], chars, rng)
        if cut is None or cut[:200] in seen:
            continue
        seen.add(cut[:200])
        found.append({"text": cut, "domain": kind})
        if len(found) == count:
            return found
    raise SystemExit(f"--count {count}: {folder} gives only {len(found)}; lower --count or --chars")


def main(argv: Sequence[str] | None = None) -> None:
    """Write DIR/NAME.jsonl for every source."""
    args = argparse.ArgumentParser(prog="firesteel train excerpts", description="unseen texts as JSONL")
    args.add_argument("--out", type=Path, required=True)
    args.add_argument("--source", action="append", required=True, help="NAME=FOLDER; NAME is code or prose")
    args.add_argument("--count", type=int, default=64)
    args.add_argument("--chars", type=int, default=1600)
    opt = args.parse_args(argv)
    for source in opt.source:
        kind, folder = source.split("=", 1)
        lines = [
            json.dumps(e, ensure_ascii=False) for e in excerpts(Path(folder), kind, opt.count, opt.chars)
        ]
        (opt.out / f"{kind}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{kind}: {len(lines)} excerpts")


if __name__ == "__main__":
    main()
