"""Wrong commands: each is one line with the remedy and the exit code 2, and no file is made, changed or removed."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from shared_composition import share_composition
from wrong_folder import make_folder

from longseq.tools import cli

HERE = Path(__file__).resolve().parent
LONGSEQ = Path(sys.executable).with_name("longseq")
ERROR = "longseq: error: "


def read_commands() -> dict[str, list[tuple[str, str]]]:
    """The commands and the words of their answers by verb; those without a verb have the key `none`."""
    lines = [line for line in (HERE / "wrong_commands.txt").read_text("utf-8").splitlines() if line and line[0] != "#"]
    assert all(words.startswith("    ") for words in lines[1::2]), "a command, then words of its answer"
    found: dict[str, list[tuple[str, str]]] = {"none": []}
    for command, words in zip(lines[::2], lines[1::2], strict=True):
        verb = next((verb for verb in cli.VERBS if f"{command} ".startswith(f"{verb} ")), "none")
        found.setdefault(verb, []).append((command, words.strip()))
    return found


COMMANDS = read_commands()


def test_the_list_is_long_and_has_every_verb():
    assert COMMANDS.keys() == {*cli.VERBS, "none"}
    commands = [command for commands in COMMANDS.values() for command, _ in commands]
    assert len(set(commands)) == len(commands) >= 300
    assert all(len(commands) >= 10 for commands in COMMANDS.values())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        share_composition(patch)
        yield make_folder(tmp_path_factory.mktemp("wrong"))


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Each file and folder below, with its size and the time of its last change."""
    paths = [Path(parent, name) for parent, folders, files in os.walk(folder) for name in (*folders, *files)]
    return {str(path): (path.lstat().st_size, path.lstat().st_mtime_ns) for path in paths}


@pytest.mark.slow
@pytest.mark.parametrize("verb", COMMANDS)
def test_a_wrong_command_is_one_line_and_loses_nothing(verb, folder, command_here):
    before = contents(folder)
    wrong = {}
    for command, words in COMMANDS[verb]:
        result = command_here(folder, *shlex.split(command))
        lines = result.stderr.splitlines()
        after = contents(folder)
        changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
        one_line = len(lines) == 1 and lines[0].startswith(ERROR) and words in lines[0]
        if not one_line or result.returncode != 2 or changed:
            wrong[command] = (result.returncode, words, lines, changed)
        before = after
    assert not wrong
