"""The sources that the tests stand in: a checkout of the repository, or an unpacked sdist, which holds no links."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# The files and folders at the top of a checkout, and those that setuptools adds to an sdist.
TOP = {
    ".ci",
    ".github",
    ".gitignore",
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "LICENSE",
    "MANIFEST.in",
    "README.md",
    "benchmarks",
    "conf",
    "docs",
    "kernels",
    "longseq",
    "pyproject.toml",
    "tasks",
    "tests",
    "tools",
}
ADDED = {"PKG-INFO", "setup.cfg"}

UNPACKED = (ROOT / "PKG-INFO").is_file() and not (ROOT / ".git").exists()

needs_links = pytest.mark.skipif(
    UNPACKED, reason="an unpacked sdist has no links longseq/conf, kernels, tasks and tools, which this test is about"
)
