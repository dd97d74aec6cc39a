"""Two runs never write to one folder, whoever started them."""

from __future__ import annotations

import pytest

from longseq.tasks import train
from longseq.tasks.training import runs
from longseq.tasks.training.runs import LOCK_FILE, locked


@pytest.fixture(autouse=True)
def no_patience(monkeypatch):
    monkeypatch.setattr(runs, "_PATIENCE", 0)


@pytest.mark.slow
def test_a_second_run_in_the_same_folder_is_refused(tiny, tmp_path):
    folder = tmp_path / "run"
    with locked(folder), pytest.raises(ValueError, match=f"another process is writing to {folder}"):
        train.run(tiny())
    assert not folder.exists()
    train.run(tiny("trainer.fast_dev_run=true"))
    assert not (folder / LOCK_FILE).exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a b=c[1]{2}'", "linked"])
def test_a_run_writes_to_a_folder_of_any_name(name, command_here, tiny_overrides, tmp_path):
    (tmp_path / "place").mkdir()
    (tmp_path / "linked").symlink_to("place")
    words = ("trainer.fast_dev_run=true", "data.num_workers=0", f"output={name}")
    done = command_here(tmp_path, "train", *tiny_overrides, *words)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / name / "config.yaml").is_file()
