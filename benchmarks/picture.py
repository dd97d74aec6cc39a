"""Draw the picture of the README, training speed by the length of a sequence, from language_models.json.

python benchmarks/picture.py

A star marks a mixer whose layer or kernels have changed since the measurement.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from table import Row, find_later_changes, read

HERE = Path(__file__).parent
FILE = HERE.parent / "docs" / "pages" / "images" / "speed.svg"
COLORS = {
    "attention": "#6b7280",
    "deltanet": "#0f766e",
    "gsa": "#b45309",
    "longhorn": "#1d4ed8",
    "vla": "#a21caf",
}
WIDTH, HEIGHT = 760, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 130, 46, 52  # margins around the plot
MOST = 200_000  # tokens per second at the upper edge
STEP = 50_000
APART = 17  # the least distance of two labels, in pixels


def read_rows() -> dict[str, dict[int, Row]]:
    """The rows of each mixer, by the length of a sequence."""
    rows: dict[str, dict[int, Row]] = {name: {} for name in COLORS}
    for row in read("language_models")["rows"]:
        if row["task"] == "text" and row.get("mixer") in rows and not (row.get("recompute") or row.get("compile")):
            rows[row["mixer"]][row["tokens"]] = row
    return rows


def draw() -> str:
    """The picture as the text of an SVG file."""
    rows = read_rows()
    speeds = {name: {length: row["training_tokens_per_s"] for length, row in own.items()} for name, own in rows.items()}
    changed = {name for name, own in rows.items() if any(find_later_changes(row, "speed") for row in own.values())}
    lengths = sorted({length for own in speeds.values() for length in own})
    low, high = math.log2(lengths[0]), math.log2(lengths[-1])

    def across(length: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (math.log2(length) - low) / (high - low)

    def down(speed: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * speed / MOST

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'font-family="Helvetica, Arial, sans-serif" font-size="14">',
        "<title>Training speed of language models by the length of a sequence</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="26" font-size="15" font-weight="bold" fill="#111827">'
        "Training tokens per second of language models of one chassis, one H200</text>",
    ]
    for speed in range(0, MOST + 1, STEP):
        y = down(speed)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#e5e7eb"/>')
        parts.append(_text(LEFT - 8, y + 5, f"{speed // 1000}k", "end"))
    for length in lengths:
        parts.append(_text(across(length), HEIGHT - BOTTOM + 22, f"{length:,}", "middle"))
    axis = "tokens of a sequence, 32,768 tokens a step" + ("; * changed since" if changed else "")
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, axis, "middle"))
    places = _spread({name: down(own[lengths[-1]]) for name, own in speeds.items()})
    for name, own in speeds.items():
        points = [(across(length), down(own[length])) for length in lengths]
        line = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        dashes = ' stroke-dasharray="6 4"' if name == "attention" else ""
        parts.append(f'<path d="M{line}" fill="none" stroke="{COLORS[name]}" stroke-width="2.5"{dashes}/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{COLORS[name]}"/>' for x, y in points]
        label = f"{name} *" if name in changed else name
        parts.append(_text(WIDTH - RIGHT + 12, places[name] + 5, label, "start", COLORS[name]))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(x: float, y: float, words: str, anchor: str, color: str = "#374151") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{words}</text>'


def _spread(places: Mapping[str, float]) -> dict[str, float]:
    """The heights of labels, moved down where two would overlap."""
    moved: dict[str, float] = {}
    last = -math.inf
    for name, y in sorted(places.items(), key=lambda item: item[1]):
        last = moved[name] = max(y, last + APART)
    return moved


if __name__ == "__main__":
    FILE.write_text(draw())
