"""Output into terminals and pipes that stay, and into those that are closed."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from longseq.tools.terminal import outlive_readers

outlive_readers()
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


COMMAND = "import sys; from longseq.tools.cli import main; sys.exit(main())"


@pytest.mark.slow
def test_a_command_runs_where_the_standard_streams_are_closed(tmp_path):
    words = [sys.executable, "-c", COMMAND, "describe", "list=mixers"]
    whole = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    closed = ["sh", "-c", '"$@" <&- 2>&- >printed', "sh", *words]
    assert subprocess.run(closed, cwd=tmp_path, check=False).returncode == 0
    assert (tmp_path / "printed").read_text() == whole
    closed[2] = '"$@" <&- >&- 2>&-'
    assert subprocess.run(closed, cwd=tmp_path, check=False).returncode == 0


TALK = """
import sys
from longseq.tools import cli, terminal

def talk():
    REQUIRE
    print("a line" * 10_000)
    print("written to the end", file=open("done", "w"))
    print("a warning", file=sys.stderr)
    return CODE

cli._run = talk
sys.exit(cli.main())
"""


def run_unread(program, folder, *arguments, together=False):
    """Run a program whose output nobody reads, and maybe not its messages either: its exit code and its messages."""
    reader, writer = os.pipe()
    os.close(reader)
    errors = subprocess.STDOUT if together else subprocess.PIPE
    command = [sys.executable, "-c", program, *arguments]
    result = subprocess.run(command, cwd=folder, stdout=writer, stderr=errors, text=True, check=False)
    os.close(writer)
    return result.returncode, result.stderr


@pytest.mark.parametrize("word", ["--help", "--version"])
def test_a_short_output_that_nobody_reads_is_no_error(word, tmp_path):
    assert run_unread(COMMAND, tmp_path, word) == (141, "")


@pytest.mark.parametrize(("code", "together"), [(0, False), (0, True), (2, False)])
def test_a_command_comes_to_its_end_where_its_reader_is_gone(code, together, tmp_path):
    program = TALK.replace("REQUIRE", "pass").replace("CODE", str(code))
    told = None if together else "a warning\n"
    assert run_unread(program, tmp_path, together=together) == (code or 141, told)
    assert (tmp_path / "done").read_text() == "written to the end\n"


def test_output_that_needs_a_reader_ends_with_it(tmp_path):
    program = TALK.replace("REQUIRE", "terminal.require_reader()").replace("CODE", "0")
    code, told = run_unread(program, tmp_path)
    assert (code, told.splitlines()[-1]) == (1, "BrokenPipeError: [Errno 32] Broken pipe")
    assert "Exception ignored" not in told
    assert not (tmp_path / "done").exists()
