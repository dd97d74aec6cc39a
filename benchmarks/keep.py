"""Keep rows of `longseq benchmark` beside this page: python benchmarks/keep.py RESULT.json NAME [KEY=VALUE ...]

Rows of RESULT.json replace those of NAME.json that are about the same call or model; the others stay, as older as they
are, and so do the title and the notes, which are written by hand. KEY=VALUE is added to each row (recompute=mixer). A
NAME that is new is written as RESULT.json is. Then: python benchmarks/table.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ABOUT = ("task", "model", "mixer", "pixels", "tokens", "batch", "recompute", "op", "variant", "shape", "dtype")
ABOUT = (*ABOUT, "implementation", "call")


def subject(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a row is about."""
    return tuple(row.get(key) for key in ABOUT)


def merge(kept: Mapping[str, Any], result: Mapping[str, Any], words: Mapping[str, str]) -> dict[str, Any]:
    """The kept result with the rows of another in place of its own, at their places; new ones behind them."""
    fresh = {subject(row): row for row in ({**row, **words} for row in result["rows"])}
    rows = [fresh.pop(subject(row), row) for row in kept["rows"]]
    stayed = any(row in kept["rows"] for row in rows)
    command = f"{kept['command']}; {result['command']}" if stayed else result["command"]
    known = result["command"] in kept["command"].split("; ")
    return {**kept, "command": kept["command"] if known else command, "rows": [*rows, *fresh.values()]}


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    source, name, *words = sys.argv[1:]
    file, result = HERE / f"{name}.json", json.loads(Path(source).read_text())
    kept = json.loads(file.read_text()) if file.is_file() else {**result, "rows": []}
    merged = merge(kept, result, dict(word.split("=", 1) for word in words))
    file.write_text(json.dumps(merged, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
