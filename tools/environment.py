"""The variables of the environment that commands read: wrong values are told before a library passes over them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from longseq.tasks.training.processes import count_started_by_torchrun

TRACEBACK = "LONGSEQ_TRACEBACK"
LAUNCHES = "LONGSEQ_LAUNCHES"
CACHE = "LONGSEQ_CACHE_DIR"

# Of each variable, what it may be and the words for that. An empty one is as none.
_SWITCH = ("[01]", "0 or 1")
_COUNT = (r"\d+", "a whole number")
FORMS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys((TRACEBACK, "LONGSEQ_SELF_TEST", "LONGSEQ_CHECK_CU_SEQLENS", "TRITON_INTERPRET"), _SWITCH),
    "OMP_NUM_THREADS": (r" *0*[1-9]\d* *(, *0*[1-9]\d* *)*", "a whole number of at least 1"),
    **dict.fromkeys(("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"), _COUNT),
    "CUDA_VISIBLE_DEVICES": (
        r" *(-1|\d+|(GPU|MIG)-[\w/-]+) *(, *(-1|\d+|(GPU|MIG)-[\w/-]+) *)*,?|none|void|NoDevFiles",
        "numbers of GPUs, such as 0,1, or -1 for none",
    ),
}
# Other variables of longseq: paths, and those that its processes set for each other.
OTHERS = (LAUNCHES, CACHE, "LONGSEQ_PARENT", "LONGSEQ_COMPARISON")

OF_SEVERAL_PROCESSES = ("train", "evaluate")  # verbs that torchrun may start


def wants_traceback() -> bool:
    """True if an error is to be shown with its traceback."""
    return os.environ.get(TRACEBACK, "") not in ("", "0")


def check_environment(verb: str) -> None:
    """Raise ValueError, in one line, for a variable with a value that has no meaning, or a misspelt one of longseq."""
    for name, value in os.environ.items():
        form, words = FORMS.get(name, ("", ""))
        if form and value and not re.fullmatch(form, value):
            raise ValueError(f"{name}={value} in the environment must be {words}: correct or unset it")
        if name.startswith("LONGSEQ_") and name not in (*FORMS, *OTHERS):
            _refuse_misspelt(name)
    if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is None:
        raise ValueError("TRITON_INTERPRET=1 in the environment needs triton, which is not installed: unset it")
    if (cache := os.environ.get(CACHE)) and Path(cache).is_file():
        raise ValueError(f"{CACHE}={cache} in the environment is a file: name a folder")
    started = count_started_by_torchrun() or 1
    if started > 1 and verb not in OF_SEVERAL_PROCESSES:
        raise ValueError(
            f"torchrun has started {started} processes, and longseq {verb} is one: start it without torchrun"
        )
    launches = os.environ.get(LAUNCHES)
    if launches and verb != "benchmark tune":  # which may write it
        from longseq.kernels.launch_file import named_file, read_launches

        read_launches(Path(launches), *named_file(Path(launches)))


def _refuse_misspelt(name: str) -> None:
    """ValueError for a variable like one of longseq; others may be those of a plug-in."""
    from difflib import get_close_matches

    known = [one for one in (*FORMS, *OTHERS) if one.startswith("LONGSEQ_")]
    near = get_close_matches(name, known, n=1, cutoff=0.85)
    if near:
        raise ValueError(f"{name} in the environment is read by nothing: did you mean {near[0]}?")
