"""What the libraries below a command print."""

from __future__ import annotations

import logging
import threading
import warnings

from rich.console import Console
from rich.logging import RichHandler

from longseq.tasks import report
from longseq.tasks.report import quiet_libraries


class Thread(threading.Thread):
    """Fails; a thread that `keeps` its error hands it to the main thread, as TensorBoard's does."""

    def __init__(self, *, keeps: bool) -> None:
        super().__init__()
        self.exception: OSError | None = None
        self.keeps = keeps

    def run(self) -> None:
        error = OSError("full")
        if self.keeps:
            self.exception = error
        raise error


def test_the_error_of_a_thread_is_shown_unless_the_main_thread_raises_it(monkeypatch):
    shown = []
    monkeypatch.setattr(threading, "excepthook", lambda error: shown.append(error.thread))
    before = threading.excepthook
    threads = [Thread(keeps=True), Thread(keeps=False)]
    with quiet_libraries():
        for thread in threads:
            thread.start()
            thread.join()
    assert shown == threads[1:]
    assert threading.excepthook is before


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


def test_a_line_that_the_root_logger_shows_is_shown_once(capsys, monkeypatch):
    """That of a program with `logging.basicConfig`; a file, and a level above that of the line, show nothing."""
    monkeypatch.setattr(logging.getLogger("longseq"), "level", logging.INFO)
    kernels = logging.getLogger("longseq.kernels.self_test")
    for own in (logging.StreamHandler(), RichHandler(console=Console(stderr=True), show_path=False, show_time=False)):
        logging.root.addHandler(own)
        try:
            with quiet_libraries():
                kernels.info("compiling")
                kernels.warning("slow")
                own.setLevel(logging.ERROR)
                kernels.info("again")
        finally:
            logging.root.removeHandler(own)
        error = capsys.readouterr().err
        assert [error.count(word) for word in ("compiling", "slow", "longseq: again")] == [1, 1, 1], error
        assert error.count("longseq: ") == 1


def test_a_warning_of_torch_that_asks_for_nothing_is_not_shown():
    """A run on two GPUs has it: torch waits for the other stream by itself."""
    ours = "The AccumulateGrad node's stream does not match the stream of the node that produced the incoming gradient."
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with quiet_libraries():
            warnings.warn(f"{ours} This may incur unnecessary synchronization", stacklevel=1)
            warnings.warn("another", stacklevel=1)
    assert [str(warning.message) for warning in shown] == ["another"]


def test_a_bar_that_is_not_shown_writes_nothing_with_any_version_of_rich(monkeypatch, capfd):
    stop = report.Progress.stop

    def stop_as_before(progress):
        stop(progress)
        progress.console.print()  # below 14.3, where the console is no terminal

    monkeypatch.setattr(report.Progress, "stop", stop_as_before)
    for shown in (False, True):
        with report.progress_bar("reading", 3, shown=shown) as advance:
            advance(3)
    assert capfd.readouterr() == ("", "")
