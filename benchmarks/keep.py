"""Save rows of a benchmark in this folder: python benchmarks/keep.py RESULT.json NAME [KEY=VALUE ...]

Rows of RESULT.json replace the rows of NAME.json for the same call or model. The other rows remain, with their older
circumstances, and so do the title and the notes, which are written by hand. KEY=VALUE is added to each row
(recompute=mixer). A new NAME gets the content of RESULT.json. Then: python benchmarks/table.py
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ABOUT: tuple[str, ...] = ("task", "model", "mixer", "pixels", "tokens", "document_tokens", "batch", "recompute")
ABOUT = (*ABOUT, "op", "variant", "shape", "dtype", "implementation", "call")
ABOUT = (*ABOUT, "part", "decode", "repeats", "compile", "together", "then", "gpu")


def subject(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """The call or model of a row."""
    return tuple(row.get(key) for key in ABOUT)


def merge(kept: Mapping[str, Any], result: Mapping[str, Any], words: Mapping[str, str]) -> dict[str, Any]:
    """The saved result, with rows of the new result in place of its own; other new rows follow at the end."""
    given = [{**row, **words} for row in result["rows"]]
    fresh = {subject(row): row for row in given}
    if len(fresh) < len(given):
        raise ValueError("two rows of the result are for the same call or model: ABOUT lacks what tells them apart")
    rows = [fresh.pop(subject(row), row) for row in kept["rows"]]
    stayed = any(row in kept["rows"] for row in rows)
    command = f"{kept['command']}; {result['command']}" if stayed else result["command"]
    known = result["command"] in kept["command"].split("; ")
    return {**kept, "command": kept["command"] if known else command, "rows": [*rows, *fresh.values()]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("name")
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    file, result = HERE / f"{options.name}.json", json.loads(options.result.read_text())
    kept = json.loads(file.read_text()) if file.is_file() else {**result, "rows": []}
    merged = merge(kept, result, dict(word.split("=", 1) for word in options.words))
    file.write_text(json.dumps(merged, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
