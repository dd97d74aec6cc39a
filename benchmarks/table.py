"""Write the tables of README.md from the JSON rows beside it: python benchmarks/table.py."""

from __future__ import annotations

import json
from pathlib import Path

from longseq.tools.benchmark.report import to_markdown

HERE = Path(__file__).parent
HEAD = """# Measured results

Tables made by `python benchmarks/table.py` from the JSON rows beside this page. An empty cell was not measured.
"""


if __name__ == "__main__":
    results = [json.loads(path.read_text()) for path in sorted(HERE.glob("*.json"))]
    (HERE / "README.md").write_text("\n".join([HEAD, *(to_markdown(result) + "\n" for result in results)]))
