"""A run begins in a folder that holds files of others only if it writes none of their names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from longseq.files import check_place
from longseq.tasks import train
from longseq.tasks.training.run_folder import check_folder, check_output

FOREIGN = {
    "config.yaml": ("model: resnet\n", ()),
    "metrics.json": ('{"accuracy": 1.0}\n', ("resume=true",)),
    "model/net.py": ("x = 1\n", ()),
    "metrics.csv": ("a,b\n", ("logger=[tensorboard,csv]",)),
    "events.out.tfevents.1.host": ("", ()),
    "unreadable.txt": ("a.jpg\n", ()),
    "worst_errors_test.csv": ("a,b\n", ()),
    "confusion_matrix_val.csv": ("a,b\n", ()),
    "learning_rates.csv": ("month,rate\n", ("recipe.learning_rate=find",)),
}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("name", FOREIGN)
def test_a_file_of_another_program_is_neither_replaced_nor_continued(name, tiny, tmp_path):
    text, words = FOREIGN[name]
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(ValueError, match=f"run holds {Path(name).parts[0]}, which no run of longseq wrote"):
        train.run(tiny(*words))
    assert contents(tmp_path / "run") == {name: text.encode()}


@pytest.mark.parametrize("resume", ["resume=true", "resume=false"])
def test_a_checkpoint_of_another_program_is_not_replaced(resume, tiny, tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    torch.save({"state_dict": {}}, tmp_path / "run" / "checkpoints" / "last.ckpt")
    before = contents(tmp_path / "run")
    with pytest.raises(ValueError, match=r"run holds checkpoints/last.ckpt, which no run of longseq wrote"):
        train.run(tiny(resume))
    assert contents(tmp_path / "run") == before


@pytest.mark.slow
def test_other_files_stay_beside_those_of_a_run(command_here, tiny_overrides, tmp_path):
    folder = tmp_path / "run"
    others = {"notes.txt": "notes", "slurm-1.out": "told", ".hydra/config.yaml": "a: 1", "metrics.csv": "a,b"}
    others |= {"checkpoints/resnet.pth": "weights", "last.ckpt": "weights", "tensorboard/notes": "notes"}
    for name, text in others.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "model").mkdir()  # empty
    (folder / "train.log").touch()  # as a shell makes it for what the command prints
    words = ("train", *tiny_overrides, "recipe.epochs=1", "output=run")
    done = command_here(tmp_path, *words, "trainer.fast_dev_run=true")
    assert done.returncode == 0, done.stderr
    done = command_here(tmp_path, *words)  # what was tried before is a run's
    assert done.returncode == 0, done.stderr
    assert {name: (folder / name).read_text() for name in others} == others
    again = command_here(tmp_path, *words)
    assert "run holds a run already; continue it with resume=true" in again.stderr
    (folder / "config.yaml").unlink()
    assert "this run is finished" in command_here(tmp_path, *words, "resume=true").stdout


def test_a_log_of_another_program_is_not_continued(tiny, tmp_path):
    log = tmp_path / "run" / "train.log"
    log.parent.mkdir()
    log.write_text("by another\n")
    config = {"output": str(log.parent), "callbacks": {}, "recipe": {}}
    with pytest.raises(ValueError, match=r"run holds train.log, which"):
        check_folder(config, log=log, tables=())
    check_folder(config, log=None, tables=())


def test_the_curve_of_a_search_is_of_a_run(tmp_path):
    (tmp_path / "learning_rates.csv").write_text("learning_rate,loss\n1e-6,2.3\n")
    (tmp_path / "learning_rates.png").touch()
    config = {"output": str(tmp_path), "callbacks": {}, "recipe": {"learning_rate": "find"}}
    check_folder(config, log=None, tables=())


@pytest.mark.parametrize("name", ["new\nline", "bell\a"])
def test_a_name_that_breaks_lines_is_refused(name, tmp_path):
    with pytest.raises(ValueError, match=r"has a character that no line shows: give another name") as refused:
        check_output(str(tmp_path / name))
    assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match=r"has a character that no line shows"):
        check_place(tmp_path / name, "output")


@pytest.mark.slow
def test_the_folder_of_the_command_takes_a_run_if_it_is_empty(command_here, tiny_overrides, tmp_path):
    (tmp_path / ".hidden").write_text("hidden")
    (tmp_path / "nohup.out").touch()
    words = ("train", *tiny_overrides, "trainer.fast_dev_run=true", "data.num_workers=0", "output=.")
    for _ in range(2):  # then it holds a run, and may take another one
        done = command_here(tmp_path, *words)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "config.yaml").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a b=c[1]{2}'", "12", "slash/", "linked"])
def test_a_run_writes_to_a_folder_of_any_name(name, command_here, tiny_overrides, tmp_path):
    (tmp_path / "place").mkdir()
    (tmp_path / "linked").symlink_to("place")
    words = ("trainer.fast_dev_run=true", "data.num_workers=0", f"output={name}")
    done = command_here(tmp_path, "train", *tiny_overrides, *words)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / name / "config.yaml").is_file()
