"""Two runs never write to one folder, whoever started them, and a dead run is no hindrance."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.pool import ThreadPool
from pathlib import Path

import pytest

from longseq.tasks import runs, train
from longseq.tasks.lock import LOCK_FILE, is_locked, locked


def write_lock(folder: Path, **changes: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "started": "1", "job": ""} | changes
    (folder / LOCK_FILE).write_text(json.dumps(holder))
    return folder / LOCK_FILE


def test_a_second_run_in_the_same_folder_is_refused_in_one_line(tiny, tmp_path):
    folder = tmp_path / "run"
    with locked(folder), pytest.raises(ValueError, match=rf"written by process {os.getpid()} on") as caught:
        train.run(tiny())
    assert "choose another hydra.run.dir" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(folder.iterdir())
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


def test_one_of_many_takes_over(tmp_path):
    """All find the dead lock at once, time after time."""
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom longseq.tasks.lock import locked\n"
        "folder, end = Path(sys.argv[1]), float(sys.argv[2])\n"
        "time.sleep(max(0, end - time.time()))\n"
        "try:\n"
        "    with locked(folder):\n"
        "        (folder / 'in').touch(exist_ok=False)\n"
        "        time.sleep(0.3)\n"
        "        (folder / 'in').unlink()\n"
        "        print('held')\n"
        "except ValueError: print('refused')\n"
    )
    write_lock(tmp_path)
    command = [sys.executable, "-c", program, str(tmp_path), str(time.time() + 1.5)]
    with ThreadPool(4) as pool:
        results = pool.map(lambda _: subprocess.run(command, capture_output=True, text=True, check=True), range(4))
    assert sorted(result.stdout.strip() for result in results) in (["held"] + ["refused"] * 3,)


def test_resume_passes_over_a_run_that_is_being_continued(tiny, tmp_path):
    config = {"seed": 0, "output": str(tmp_path / "new")}
    for age, name in enumerate(("older", "newer")):
        folder = tmp_path / name
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "config.yaml").write_text(f"seed: 0\noutput: {folder}\n")
        (folder / "checkpoints" / "last.ckpt").touch()
        os.utime(folder / "checkpoints" / "last.ckpt", (1000 + age, 1000 + age))
    assert runs._newest_run(tmp_path, config) == tmp_path / "newer"
    with locked(tmp_path / "newer"):
        assert runs._newest_run(tmp_path, config) == tmp_path / "older"
        with locked(tmp_path / "older"):
            assert runs._newest_run(tmp_path, config) == tmp_path / "newer"
            (tmp_path / "older" / "metrics.json").write_text("{}")
            assert runs._newest_run(tmp_path, config) == tmp_path / "newer"


def test_a_run_that_was_killed_is_continued(tmp_path, start, command_here, tiny_overrides):
    arguments = ("train", *tiny_overrides, "recipe.epochs=6", "callbacks.checkpoint.every_n_train_steps=3")
    process = start(tmp_path, *arguments)
    while not list(tmp_path.glob("outputs/image/*/checkpoints/last.ckpt")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    (run,) = tmp_path.glob("outputs/image/*")
    second = command_here(tmp_path, *arguments, f"hydra.run.dir={run}")
    assert second.returncode == 2
    assert f"written by process {process.pid} on" in second.stderr
    assert second.stderr.count("\n") == 1
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert (run / LOCK_FILE).exists()
    resumed = command_here(tmp_path, *arguments, "resume=true")
    assert resumed.returncode == 0, resumed.stderr
    assert "continuing from" in resumed.stdout
    assert not (run / LOCK_FILE).exists()
    assert not (run / ".hydra").exists()
