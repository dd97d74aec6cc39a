"""Wrong commands: each is one line with the remedy and the exit code 2, and no file is made, changed or removed."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked import run_longseq, start_fork
from shared_composition import stop_sharing
from wrong_folder import make_folder

from longseq.tools import cli
from longseq.tools.mistakes import explain

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

# What new programs run, too. Most of their time are imports, and most mistakes are found before torch is imported: in
# the words of the command in a third of a second of a processor, in the files of the configuration in half a second.
FOUND_BY_THE_WORDS = (
    *("trian", "-x", "probe", "mixer=gla"),
    *("train hydra.job.chdir=true", "train recipe.epochs==5", "evaluate checkpoint = run.ckpt"),
    *("predict run.ckpt photos", "prepare text.txt tokens", "convert lm new", "describe deltanet"),
    "benchmark kernels tune",
)
FOUND_BY_THE_FILES = (
    *("train data=nothing", "train mixer=GLA", "train --epochs 5", "evaluate ckpt=run.ckpt"),
    *("generate checkpoint=lm prompt=a --temperature 0", "prepare image input=. output=new sise=256"),
    *("harness --tasks piqa", "compare --mixers gla", "export checkpoint=run.ckpt --opset 17"),
    "benchmark files workers=4",
)
FOUND_WITH_TORCH = ("train recipe.epochs=0", "evaluate checkpoint=torn.ckpt")  # seven seconds each


def test_the_list_is_long_and_has_every_verb():
    assert COMMANDS.keys() == {*cli.VERBS, "none"}
    commands = [command for commands in COMMANDS.values() for command, _ in commands]
    assert len(set(commands)) == len(commands) >= 300
    assert all(len(commands) >= 10 for commands in COMMANDS.values())


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where documents become tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, cache: None) -> Path:
    return make_folder(tmp_path_factory.mktemp("wrong"))


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
    assert not wrong, "\n".join(map(str, wrong.items()))


@pytest.mark.slow
@pytest.mark.parametrize("commands", [FOUND_BY_THE_WORDS, FOUND_BY_THE_FILES, FOUND_WITH_TORCH])
def test_a_new_program_ends_with_the_same_line_and_code(commands, folder):
    told = {command: words for verb in COMMANDS.values() for command, words in verb}
    # Matplotlib has its list of fonts in the cache, and says so where it has to make the list.
    environment = {name: value for name, value in os.environ.items() if name != "XDG_CACHE_HOME"}
    before = contents(folder)
    for command in commands:
        words = [LONGSEQ, *shlex.split(command)]
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 2, (command, done.stderr)
        assert done.stdout == "", command
        assert done.stderr.startswith(ERROR), (command, done.stderr)
        assert done.stderr.count("\n") == 1, (command, done.stderr)
        assert told[command] in done.stderr, (command, done.stderr)
    assert contents(folder) == before


@pytest.mark.slow
def test_a_bad_value_of_a_sweep_is_one_line_and_leaves_nothing(folder):
    def run_unshared():
        stop_sharing()
        return run_longseq()

    before = contents(folder)
    words = ("train", "-m", "callbacks=early_stopping", "callbacks.early_stopping.patience=-1", "mixer=gla,longhorn")
    process = start_fork(words, folder, run=run_unshared)
    _, errors = process.communicate()
    assert process.returncode == 2, errors
    assert errors == f"{ERROR}callbacks.early_stopping.patience=-1 must be a whole number of at least 0\n"
    assert contents(folder) == before


@pytest.mark.slow
def test_a_file_whose_name_is_bytes_is_named_as_any_other():
    gone = FileNotFoundError(2, "No such file or directory", b"run/events")  # TensorBoard's, in a folder that is gone
    assert explain(gone, "train", []) == "no such file or folder: run/events"


def test_what_a_command_reads_is_not_overwritten_by_what_it_writes(folder, command_here):
    (folder / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    result = command_here(folder, "generate", "checkpoint=lm", "input=prompts.jsonl", "output=prompts.jsonl")
    assert result.stderr.startswith(f"{ERROR}output=prompts.jsonl is what the command reads")
    assert (folder / "prompts.jsonl").read_text() == '{"prompt": "a"}\n'


@pytest.mark.slow
def test_a_part_of_the_data_without_a_batch_is_one_line(tmp_path, command_here):
    words = ("trainer=cpu", "data.num_workers=0", "logger=none", "model.depth=1", "output=run")
    done = command_here(tmp_path, "train", *words, "+trainer.limit_val_batches=0.001", "recipe.epochs=1")
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2
    assert last.startswith(f"{ERROR}You requested to check 0.001 of the `val_dataloader`")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("typed", [True, False])
def test_a_person_who_gives_a_key_twice_is_told_which_value_counts(tmp_path, command_here, monkeypatch, typed):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: typed)
    words = ("describe", "--cfg", "job", "seed=1", "mixer=gla", "seed=2", "mixer=gla")
    done = command_here(tmp_path, *words)
    assert done.returncode == 0
    assert done.stderr == "longseq: warning: seed is given 2 times: seed=2 counts, and not seed=1\n" * typed


def test_flags_may_stand_among_the_keys(folder, command_here):
    result = command_here(folder, "predict", "top_k=3", "--cfg", "job", "device=cpu")
    assert result.returncode == 0
    assert "top_k: 3" in result.stdout
