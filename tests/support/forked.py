"""`longseq` in a process of its own that is a fork of this one, which has imported already what the command imports.

The imports of a new process take six seconds of a processor. A fork gets its own arguments, environment, folder, output
and group of processes, and it has forgotten what pytest changes: it is a program to whoever starts it and reads of it.
Further processes of a run, which Lightning starts, are forks as well. Tests of the program's start do not use this.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

SCRIPT = Path(sys.executable).with_name("longseq")

# As they are before pytest records warnings: this module is imported by the first conftest.py.
_FILTERS = list(warnings.filters)
_SHOW_WARNING = warnings._showwarnmsg_impl  # type: ignore[attr-defined]


def start_fork(
    arguments: Sequence[str],
    folder: Path,
    *,
    environment: Mapping[str, str] | None = None,
    patch: Callable[[], None] = lambda: None,
    **options: Any,
) -> subprocess.Popen[str]:
    """Start `longseq ARGUMENTS` in a folder, after a call of `patch` there.

    `options` are those of `Popen`; without any the output can be read as text.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [str(SCRIPT), *arguments]
    return _fork(command, os.environ if environment is None else environment, patch, cwd=folder, **(pipes | options))


def _fork(command: list[str], environment: Mapping[str, str], patch: Callable[[], None], **options: Any) -> Any:
    environment = dict(environment)

    def become_program() -> None:
        # The call of `Popen` ends when the last of these is closed, as it would be when the program begins.
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        code = 1
        try:
            _forget_tests(command, environment)
            patch()
            code = _run()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    return subprocess.Popen(command, preexec_fn=become_program, **options)


def _run() -> int:
    from longseq.tools import cli

    try:
        return cli.main()
    except SystemExit as leaving:
        return int(leaving.code or 0)


def _forget_tests(command: list[str], environment: Mapping[str, str]) -> None:
    """Make the arguments, the environment, the streams and the warnings of this process those of a new one."""
    from hydra.core.global_hydra import GlobalHydra
    from lightning.pytorch.strategies.launchers import subprocess_script

    sys.argv = command
    sys.modules["__main__"] = types.ModuleType("__main__")  # Lightning asks it how the program was started
    os.environ.clear()
    os.environ.update(environment)
    sys.stdin = open(os.devnull)
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)
    logging.root.handlers.clear()
    for logger in list(logging.root.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", ()):
            if type(handler) is logging.StreamHandler:
                handler.setStream(sys.stderr)
    warnings._showwarnmsg_impl = _SHOW_WARNING  # type: ignore[attr-defined]
    warnings.filters[:] = _FILTERS
    warnings._filters_mutated()  # type: ignore[attr-defined]
    sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__
    GlobalHydra.instance().clear()
    subprocess_script.subprocess = types.SimpleNamespace(Popen=_fork_of_lightning)


def _fork_of_lightning(command: Sequence[Any], env: Mapping[str, str], cwd: str | None) -> Any:
    """The process of another device: `command` is Python, the program and its arguments."""
    return _fork([str(word) for word in command[1:]], env, lambda: None, cwd=cwd)
