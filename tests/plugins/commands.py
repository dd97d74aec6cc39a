"""Commands of `longseq`, one per line of standard input, in one process."""

import multiprocessing
import shlex
import sys
from pathlib import Path

from longseq.tools import cli


def main() -> int:
    for line in sys.stdin:
        sys.argv = [str(Path(sys.executable).with_name("longseq")), *shlex.split(line)]  # what further processes run
        print("+", line.strip(), flush=True)
        if cli.main():
            return 1
    return 0


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")  # workers know of the plug-in what they import themselves
    sys.exit(main())
