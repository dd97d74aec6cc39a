"""Output into a terminal that stays, and into one that is closed."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from longseq.tools.terminal import outlive_terminals

outlive_terminals()
print("part of a line", end="")
sys.stdin.readline()
for number in range(3):
    print(number)
    print(number, file=sys.stderr, flush=True)
open("done", "w").close()
"""


@pytest.mark.parametrize("options", [(), ("-u",)], ids=["buffered", "unbuffered"])
def test_output_outlives_its_terminal_and_comes_as_python_sends_it(options, tmp_path):
    ours, its = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, *options, "-c", PROGRAM], cwd=tmp_path, stdin=subprocess.PIPE, stdout=its, stderr=its
    )
    os.close(its)
    if options:  # else the text waits for the end of its line, and the terminal is gone before the program begins
        assert os.read(ours, 100) == b"part of a line"
    os.close(ours)
    process.communicate(b"\n", timeout=60)
    assert process.returncode == 0
    assert (tmp_path / "done").exists()
