"""Two runs never write to one folder, whoever started them, and a dead run does not block a new one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from longseq.tasks import train
from longseq.tasks.training import lock, runs
from longseq.tasks.training.lock import LOCK_FILE, is_locked, locked


def write_lock(folder: Path, **changes: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "started": "1", "job": ""} | changes
    (folder / LOCK_FILE).write_text(json.dumps(holder))
    return folder / LOCK_FILE


@pytest.mark.slow
def test_a_second_run_in_the_same_folder_is_refused_in_one_line(tiny, tmp_path):
    folder = tmp_path / "run"
    with locked(folder), pytest.raises(ValueError, match=rf"written by process {os.getpid()} on") as caught:
        train.run(tiny())
    assert "choose another output" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not folder.exists()
    train.run(tiny("trainer.fast_dev_run=true"))
    assert not (folder / LOCK_FILE).exists()


def test_a_failed_run_gives_its_folder_back(tiny, tmp_path):
    with pytest.raises(ValueError, match="batch_size"):
        train.run(tiny("recipe.batch_size=5000"))
    assert not (tmp_path / "run" / LOCK_FILE).exists()


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    for changes in ({"pid": process.pid}, {"pid": os.getpid(), "started": "1"}):
        write_lock(tmp_path, **changes)
        assert not is_locked(tmp_path)
        with locked(tmp_path):
            assert is_locked(tmp_path)
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", ['{"pid": 1, "host": "elsewhere", "started": "1"}', "", "[1]"])
def test_a_lock_of_another_host_or_of_no_one_is_refused_with_the_remedy(content, tmp_path):
    path = tmp_path / LOCK_FILE
    path.write_text(content)
    with pytest.raises(ValueError, match=rf"if it has ended, remove {path}"), locked(tmp_path):
        pass
    assert path.read_text() == content


def test_who_holds_a_lock_is_told_with_the_time_and_what_to_do(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    path = write_lock(tmp_path, pid=process.pid, started=lock._start_of(process.pid))
    os.utime(path, (1_700_000_000, 1_700_000_000))
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1_700_000_000))
    told = f"{tmp_path} is being written by process {process.pid} on {socket.gethostname()} since {since}"
    stopped = f"; it is stopped, and `kill -CONT {process.pid}` lets it go on: or end it, or choose another output"
    try:
        for number, remedy in ((None, ": wait for it, end it, or choose another output"), (signal.SIGSTOP, stopped)):
            if number is not None:
                process.send_signal(number)
                os.waitpid(process.pid, os.WUNTRACED)  # until it has stopped
            with pytest.raises(ValueError, match="is being written") as caught, locked(tmp_path):
                pass
            assert str(caught.value) == told + remedy
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_one_of_many_takes_over(tmp_path):
    """All find the dead lock at once, repeatedly."""
    program = (
        "import runpy, sys, time\nfrom pathlib import Path\n"
        "locked = runpy.run_path(sys.argv[1])['locked']\n"
        "folder, start = Path(sys.argv[2]), float(sys.argv[3])\n"
        "for trial in range(20):\n"
        "    time.sleep(max(0, start + 0.05 * trial - time.time()))\n"
        "    try:\n"
        "        with locked(folder / str(trial)):\n"
        "            (folder / str(trial) / 'in').touch(exist_ok=False)\n"
        "            time.sleep(0.02)\n"
        "            (folder / str(trial) / 'in').unlink()\n"
        "            print('held', trial)\n"
        "    except ValueError:\n"
        "        print('refused', trial)\n"
    )
    for trial in range(20):
        write_lock(tmp_path / str(trial))
    command = [sys.executable, "-c", program, lock.__file__, str(tmp_path), str(time.time() + 1)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    told = [process.communicate(timeout=60)[0].splitlines() for process in processes]
    assert all(process.returncode == 0 for process in processes)
    for trial in range(20):
        assert any(f"held {trial}" in lines for lines in told)


def test_resume_passes_over_a_run_that_is_being_continued(tiny, tmp_path):
    config = {"seed": 0, "output": str(tmp_path / "new")}
    for age, name in enumerate(("older", "newer")):
        folder = tmp_path / name
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "config.yaml").write_text(f"seed: 0\noutput: {folder}\n")
        written = {"hyper_parameters": {"config": {"seed": 0, "output": str(folder)}}}
        torch.save(written, folder / "checkpoints" / "last.ckpt")
        os.utime(folder / "checkpoints" / "last.ckpt", (1000 + age, 1000 + age))
    assert runs._newest_run(tmp_path, config) == tmp_path / "newer"
    with locked(tmp_path / "newer"):
        assert runs._newest_run(tmp_path, config) == tmp_path / "older"
        with locked(tmp_path / "older"):
            assert runs._newest_run(tmp_path, config) == tmp_path / "newer"
            (tmp_path / "older" / "metrics.json").write_text("{}")
            assert runs._newest_run(tmp_path, config) == tmp_path / "newer"


def test_a_folder_that_is_read_only_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # root may write everywhere
    with pytest.raises(ValueError, match=f"{tmp_path} is read-only: choose another output"), locked(tmp_path):
        pass
    assert not list(tmp_path.iterdir())
