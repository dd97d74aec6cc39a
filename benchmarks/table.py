"""Write the tables of README.md from the JSON rows beside it: python benchmarks/table.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
HEAD = """# Measured results

Tables made by `python benchmarks/table.py` from the JSON rows beside this page. An empty cell was not measured.
"""


def section(result: dict[str, Any]) -> str:
    """One result as a heading, its circumstances, its table and its notes."""
    columns = list(dict.fromkeys(key for row in result["rows"] for key in row))
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines = [
        f"## {result['what']}\n",
        f"`{result['command']}`\n",
        f"{result['device']}, {versions}, {result['date']}.\n",
        "| " + " | ".join(column.replace("_", " ") for column in columns) + " |",
        "|" + "---|" * len(columns),
    ]
    for row in result["rows"]:
        lines.append("| " + " | ".join(_cell(row.get(column)) for column in columns) + " |")
    lines.append("")
    lines += [f"- {note}" for note in result.get("notes", [])]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


if __name__ == "__main__":
    results = [json.loads(path.read_text()) for path in sorted(HERE.glob("*.json"))]
    (HERE / "README.md").write_text("\n".join([HEAD, *(section(result) + "\n" for result in results)]))
