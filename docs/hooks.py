"""What mkdocs does for these pages beside its plug-ins.

Pages of the repository outside of this folder join the site, and the notebook becomes a page. Links between them are
written as paths in the repository, where they hold as well; here they become links between pages of the site.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

HERE = Path(__file__).parent
ROOT = HERE.parent
# Files of the repository, and the pages of the site that show them.
JOINED = {
    "benchmarks/README.md": "measurements.md",
    "kernels/README.md": "anatomy.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "docs/notebook.ipynb": "notebook.md",
    "benchmarks/mqar_vla.png": "images/mqar_vla.png",
}
LINK = re.compile(r"\]\(([^)#:]+)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie elsewhere in the repository."""
    for source, page in JOINED.items():
        path = ROOT / source
        if path.suffix == ".png":
            files.append(File.generated(config, page, abs_src_path=str(path)))
            continue
        text = notebook_page(path) if path.suffix == ".ipynb" else path.read_text()
        files.append(File.generated(config, page, content=_with_links(text, source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn the links of a page of this folder into those of the site."""
    return (
        markdown if page.file.src_uri in JOINED.values() else _with_links(markdown, f"docs/pages/{page.file.src_uri}")
    )


def _with_links(text: str, source: str) -> str:
    """A text with links that are relative to its file `source` as links between pages of the site."""

    def find(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[1]))
        page = JOINED.get(target, target.removeprefix("docs/pages/"))
        return f"]({page}{link[2] or ''})"

    return LINK.sub(find, text)


def notebook_page(path: Path) -> str:
    """A notebook as Markdown: its text, its code and what the code put out."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        else:
            parts.append(f"```python\n{source}\n```")
            parts += [_show(output) for output in cell["outputs"]]
    return "\n\n".join(parts) + "\n"


def _show(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        return f'<img alt="What the code drew" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">'
    text = "".join(output.get("text") or data.get("text/plain", ""))
    return f"```text\n{text.rstrip()}\n```"
