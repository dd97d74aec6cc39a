"""What mkdocs does for these pages in addition to its plug-ins.

Pages of the repository outside of this folder join the site, the notebook becomes a page, and the keys of the commands
and the list of operations are made from the code. Links are written as paths in the repository, where they hold as
well; here they become links between pages of the site.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
# Files of the repository, and the files of the site that show them.
JOINED = {
    "benchmarks/README.md": "measurements.md",
    "kernels/README.md": "anatomy.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "docs/notebook.ipynb": "notebook.md",
    "docs/programs/classify_text.py": "programs/classify_text.py",
    "docs/programs/continue_text.py": "programs/continue_text.py",
    "docs/programs/read_image.py": "programs/read_image.py",
    "benchmarks/imdb.png": "images/imdb.png",
    "benchmarks/mqar_vla.png": "images/mqar_vla.png",
}
LINK = re.compile(r"\]\(([^)#:]+)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie elsewhere in the repository, and the page of keys."""
    for source, page in JOINED.items():
        path = ROOT / source
        if path.suffix in (".png", ".py"):
            files.append(File.generated(config, page, abs_src_path=str(path)))
            continue
        text = notebook_page(path) if path.suffix == ".ipynb" else path.read_text()
        files.append(File.generated(config, page, content=_with_links(text, source)))
    files.append(File.generated(config, "keys.md", content=keys_page()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn the links of a page of this folder into those of the site, and list the operations."""
    name = page.file.src_uri
    if name in JOINED.values() or name == "keys.md":
        return markdown
    return _with_links(markdown.replace("<!-- operations -->", operations()), f"docs/pages/{name}")


def operations() -> str:
    """The entries of all operations, each followed by its form for one token."""
    from longseq import kernels

    names = [name for name in kernels.__all__ if callable(getattr(kernels, name)) and name[0].islower()]
    names = [name for name in names if name not in ("explain", "list_ops")]
    return "\n\n".join(f"::: {getattr(kernels, name).__module__}.{name}" for name in names)


def keys_page() -> str:
    """The keys of each command and of each task's groups, from the classes that declare them."""
    from longseq.tasks import registry
    from longseq.tasks.commands import COMMANDS
    from longseq.tools.key_help import rows_of

    parts = ["# Keys of the commands", "`longseq VERB --help` prints the same lines."]
    for verb, keys in COMMANDS.items():
        parts += [f"## longseq {verb}", _table(rows_of(keys))]
    for name in registry.own_names():
        task = registry.keys(name)
        groups = {"data": task.data, "task": task.group, "model": task.model}
        groups |= {"recipe.loss": task.loss, "recipe.augment": task.augment}
        for place, keys in groups.items():
            if isinstance(keys, type):
                parts += [f"## task={name}: {place}", _table(rows_of(keys, f"{place}."))]
    return "\n\n".join(parts) + "\n"


def _table(rows: list[tuple[str, str]]) -> str:
    escaped = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    return "\n".join(["| key=default | |", "|---|---|", *(f"| `{key}` | {text} |" for key, text in escaped)])


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
