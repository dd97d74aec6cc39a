"""What the libraries below a command print."""

from __future__ import annotations

import logging
import warnings

from longseq.tasks.report import quiet_libraries


def test_the_lines_of_kernels_are_shown_and_those_of_other_modules_are_not(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger("longseq"), "level", logging.INFO)  # as while train.log is written
    kernels, other = logging.getLogger("longseq.kernels.self_test"), logging.getLogger("longseq.tasks.other")
    before = logging.getLogger("longseq.kernels").level
    with quiet_libraries():
        with quiet_libraries():  # as where one command calls another
            kernels.info("compiling")
            kernels.warning("slow")
        kernels.debug("detail")
        other.info("written")
    kernels.info("later")
    assert capsys.readouterr() == ("", "longseq: compiling\nlongseq: warning: slow\n")
    assert logging.getLogger("longseq.kernels").level == before


def test_a_warning_of_torch_that_asks_for_nothing_is_not_shown():
    """A run on two GPUs has it: torch waits for the other stream by itself."""
    ours = "The AccumulateGrad node's stream does not match the stream of the node that produced the incoming gradient."
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with quiet_libraries():
            warnings.warn(f"{ours} This may incur unnecessary synchronization", stacklevel=1)
            warnings.warn("another", stacklevel=1)
    assert [str(warning.message) for warning in shown] == ["another"]
