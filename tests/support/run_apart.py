"""Runs each command of standard input, one a line, in a process of its own, and prints what came of it as JSON.

    python run_apart.py < COMMANDS

Words NAME=VALUE before a command, with a NAME in capitals, belong to its environment, as in a shell.

The processes are forks of this one, which has imported what the commands import, and end without Python's clearing up:
both would take seconds for each.
"""

from __future__ import annotations

import gc
import json
import os
import re
import shlex
import sys
import tempfile
import traceback

from longseq.tasks import evaluate, generate, predict, train  # noqa: F401  (what the commands would import)
from longseq.tools import cli, mistakes  # noqa: F401


def run(arguments: list[str]) -> None:
    """Run a command as the console script does, and end this process."""
    while arguments and re.fullmatch(r"[A-Z]+=.*", arguments[0]):
        name, _, value = arguments.pop(0).partition("=")
        os.environ[name] = value
    sys.argv = ["longseq", *arguments]
    try:
        code = cli.main()
    except SystemExit as left:
        code = int(left.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)


gc.freeze()
for command in sys.stdin.read().splitlines():
    with tempfile.TemporaryFile() as errors:
        child = os.fork()
        if not child:
            os.dup2(errors.fileno(), 2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            run(shlex.split(command))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        errors.seek(0)
        print(json.dumps([command, status, errors.read().decode()]), flush=True)
