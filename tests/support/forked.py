"""Run `longseq` in a fork of this process, without the six CPU seconds of imports in a new one.

A fork gets its own arguments, environment, folder and streams, and loses what pytest changed, so that it behaves as a
program. The further processes of a run on several devices, which Lightning starts, are forks as well.
"""

from __future__ import annotations

import io
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
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(sys.executable).with_name("longseq")


def run_longseq() -> int:
    """Run `longseq` with the arguments of this process and return its exit code."""
    from longseq.tools import cli

    return cli.main()


def start_fork(
    arguments: Sequence[str | Path],
    folder: Path,
    *,
    environment: Mapping[str, str] | None = None,
    run: Callable[[], int | None] = run_longseq,
    **options: Any,
) -> subprocess.Popen[str]:
    """Start `longseq ARGUMENTS`, or another function that returns an exit code, in a folder.

    `options` are passed to `Popen`; by default the output can be read as text.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [str(SCRIPT), *map(str, arguments)]
    return _fork(command, os.environ if environment is None else environment, run, cwd=folder, **(pipes | options))


def start_others_as_forks(patch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """Make a module that starts `python PROGRAM ARGUMENTS`, where the program is `longseq`, start forks instead."""

    def popen(command: Sequence[Any], *, env: Mapping[str, str], **options: Any) -> Any:
        return _fork([str(word) for word in command[1:]], env, run_longseq, **options)

    patch.setattr(module, "subprocess", types.SimpleNamespace(**{**vars(subprocess), "Popen": popen}))


def _fork(command: list[str], environment: Mapping[str, str], run: Callable[[], int | None], **options: Any) -> Any:
    environment = dict(environment)

    def become_program() -> None:
        # `Popen` returns when the last of these is closed, as it would when a new program begins.
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        code = 1
        try:
            _forget_tests(command, environment)
            code = run() or 0
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    return subprocess.Popen(command, preexec_fn=become_program, **options)


def _forget_tests(command: list[str], environment: Mapping[str, str]) -> None:
    """Reset arguments, environment, streams, logs and warnings as in a new process."""
    from hydra.core.global_hydra import GlobalHydra
    from lightning.pytorch.strategies.launchers import subprocess_script

    sys.argv = command
    sys.modules["__main__"] = types.ModuleType("__main__")  # Lightning reads how the program was started
    os.environ.clear()
    os.environ.update(environment)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)))
    errors = io.BufferedWriter(io.FileIO(2, "w", closefd=False))
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(errors, errors="backslashreplace", line_buffering=True)
    logging.root.handlers.clear()
    for logger in list(logging.root.manager.loggerDict.values()):
        for handler in list(getattr(logger, "handlers", ())):
            if type(handler).__module__.startswith("_pytest."):  # it writes to a file that is closed now
                logger.handlers.remove(handler)
            elif type(handler) is logging.StreamHandler:
                handler.stream = sys.stderr  # setStream would flush the old one, which may be closed
    warnings.resetwarnings()
    for category in (ImportWarning, ResourceWarning, PendingDeprecationWarning, DeprecationWarning):
        warnings.simplefilter("ignore", category)
    warnings.showwarning = _show_warning
    sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__
    GlobalHydra.instance().clear()
    start_others_as_forks(pytest.MonkeyPatch(), subprocess_script)


def _show_warning(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
    (file or sys.stderr).write(warnings.formatwarning(message, category, filename, lineno, line))
