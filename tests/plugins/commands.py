"""Commands of `longseq`, one per line of standard input, in one process; one that is told to end does not end them."""

import multiprocessing
import shlex
import signal
import sys
from pathlib import Path

from longseq.tools import cli


def main() -> int:
    for line in sys.stdin:
        sys.argv = [str(Path(sys.executable).with_name("longseq")), *shlex.split(line)]  # what further processes run
        print("+", line.strip(), flush=True)
        try:
            code = cli.main()
        except SystemExit as left:
            code = 0 if left.code == 128 + signal.SIGTERM else int(left.code or 0)
        if code:
            return code
    return 0


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")  # workers know of the plug-in what they import themselves
    sys.exit(main())
