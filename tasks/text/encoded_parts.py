"""Encoding of the parts of the input into a file each, in this process or in several.

The processes are new ones, not forks: they share no threads with this process and do not run its program. Therefore the
module imports little.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from longseq.tasks.text.documents import Document, Fractions, encode
from longseq.tasks.text.sources import Columns, Malformed, Part, read_part
from longseq.tasks.text.tokenizer import tokenizer_from_dict

# Lines and files that could not be read, of a part and of all, whose places a manifest holds: it is read by each run.
KEPT = 10_000


def encode_part(
    index: int, part: Part, columns: Columns, tokenizer: Mapping[str, Any], fractions: Fractions, partial: Path
) -> None:
    """Write the tokens of a part, and then its counts: a part that has counts is complete."""
    counts: Counter[str] = Counter(documents=0, empty=0, malformed=0)
    malformed: list[Malformed] = []

    def documents() -> Iterator[Document]:
        for one in read_part(part, columns):
            if isinstance(one, Malformed):
                counts["malformed"] += 1
                if len(malformed) < KEPT:
                    malformed.append(one)
            elif one.is_empty:
                counts["empty"] += 1
            else:
                counts["documents"] += 1
                yield one

    encoded = encode(documents(), tokenizer_from_dict(tokenizer), fractions)
    with encoded_path(partial, index).open("wb") as file:
        np.savez(file, **encoded._asdict())
    told = told_path(partial, index)
    unfinished = told.with_suffix(".partial")
    unfinished.write_text(json.dumps({"counts": counts, "malformed": malformed}), encoding="utf-8")
    os.replace(unfinished, told)


def encode_side_by_side(waiting: Sequence[int], job: Mapping[str, Any], partial: Path, processes: int) -> Iterator[int]:
    """Encode the parts `waiting` of a job in several processes; yields the number of each part that is done.

    `job` holds the arguments of `encode_part` for all parts. Raises the OSError or ValueError of a process, and
    ValueError if one is killed.
    """
    path = partial / "job.json"
    path.write_text(json.dumps(job), encoding="utf-8")
    # There are as many processes as cores: each process's libraries use one thread.
    single = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", f"from {__name__} import work; work({str(path)!r})"]
    started = [
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8", env=os.environ | single
        )
        for _ in range(processes)
    ]
    rest = iter(waiting)
    try:
        with selectors.DefaultSelector() as answers:
            for process in started:
                assert process.stdout is not None
                answers.register(process.stdout, selectors.EVENT_READ, process)
            while answers.get_map():
                for key, _ in answers.select():
                    process = key.data
                    if not (line := process.stdout.readline()):
                        raise _ended(process, processes)
                    answer = json.loads(line)
                    if "error" in answer:
                        raise OSError(*answer["error"])
                    if "mistake" in answer:
                        raise ValueError(answer["mistake"])
                    if "done" in answer:
                        yield answer["done"]
                    index = next(rest, None)
                    if index is None:
                        answers.unregister(process.stdout)
                        process.stdin.close()
                    else:
                        process.stdin.write(f"{index}\n")
                        process.stdin.flush()
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait()
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                stream.close()


def _ended(process: subprocess.Popen[str], processes: int) -> Exception:
    """The reason why a process ended early: a signal, or an error, whose traceback it has written."""
    if process.wait() >= 0:
        return RuntimeError("a process that encodes has failed: its traceback stands above")
    return ValueError(
        "a process that encodes was killed, most likely for want of memory: the same command goes on, with "
        f"processes={max(1, processes // 2)}"
    )


def work(path: str) -> None:
    """Encode the parts whose numbers come on standard input; write each number to standard output when done."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the first one ends this one
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    parts, columns = [Part(*part) for part in job["parts"]], Columns(*job["columns"])
    _answer(ready=True)
    for line in sys.stdin:
        index = int(line)
        try:
            encode_part(index, parts[index], columns, job["tokenizer"], job["fractions"], Path(path).parent)
        except OSError as error:
            _answer(error=[error.errno, error.strerror or str(error), error.filename])
            return
        except ValueError as error:
            _answer(mistake=str(error))
            return
        _answer(done=index)


def _answer(**told: Any) -> None:
    print(json.dumps(told), flush=True)


def encoded_path(partial: Path, index: int) -> Path:
    """The arrays of a part: the fields of `Encoded`."""
    return partial / f"{index:06}.npz"


def told_path(partial: Path, index: int) -> Path:
    """The counts of a part."""
    return partial / f"{index:06}.json"


def read_array(partial: Path, index: int, name: str) -> np.ndarray:
    """One of the arrays of a part."""
    with np.load(encoded_path(partial, index)) as arrays:
        return arrays[name]
