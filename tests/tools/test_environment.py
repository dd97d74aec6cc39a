"""Variables of the environment: a value without a meaning is one line, and names of any letters are kept or told."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from wrong_folder import make_folder

import longseq
from longseq.tools import environment

ROOT = Path(longseq.__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("OMP_NUM_THREADS", "foo", "OMP_NUM_THREADS=foo in the environment must be a whole number of at least 1"),
        ("OMP_NUM_THREADS", "0", "OMP_NUM_THREADS=0 in the environment must be a whole number of at least 1"),
        ("CUDA_VISIBLE_DEVICES", "foo", "CUDA_VISIBLE_DEVICES=foo in the environment must be numbers of GPUs"),
        ("TRITON_INTERPRET", "true", "TRITON_INTERPRET=true in the environment must be 0 or 1"),
        ("LONGSEQ_SELF_TEST", "off", "LONGSEQ_SELF_TEST=off in the environment must be 0 or 1"),
        ("LONGSEQ_CHECK_CU_SEQLENS", "yes", "LONGSEQ_CHECK_CU_SEQLENS=yes in the environment must be 0 or 1"),
        ("LONGSEQ_TRACEBACK", "yes", "LONGSEQ_TRACEBACK=yes in the environment must be 0 or 1"),
        (
            "LONGSEQ_SELFTEST",
            "0",
            "LONGSEQ_SELFTEST in the environment is read by nothing: did you mean LONGSEQ_SELF_T",
        ),
        ("LONGSEQ_CACHE_DIR", __file__, f"LONGSEQ_CACHE_DIR={__file__} in the environment is a file: name a folder"),
        ("LONGSEQ_LAUNCHES", "nowhere.json", "LONGSEQ_LAUNCHES=nowhere.json cannot be read"),
        ("LONGSEQ_LAUNCHES", __file__, f"LONGSEQ_LAUNCHES={__file__} cannot be read"),
        ("LOCAL_RANK", "foo", "LOCAL_RANK=foo in the environment must be a whole number"),
        ("WORLD_SIZE", "two", "WORLD_SIZE=two in the environment must be a whole number"),
    ],
)
def test_a_value_without_a_meaning_is_one_line(tmp_path, monkeypatch, command_here, name, value, words):
    monkeypatch.setenv(name, value)
    done = command_here(tmp_path, "describe")
    assert done.returncode == 2
    assert done.stderr.startswith(f"longseq: error: {words}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("CUDA_VISIBLE_DEVICES", value) for value in ("", "0", "0,1", "-1", "GPU-8932f937-d72c", "none", "0,")),
        *(("CUDA_VISIBLE_DEVICES", value) for value in ("MIG-GPU-8932f937/1/0", "0, 1")),
        *(("OMP_NUM_THREADS", value) for value in ("1", "4,2", " 8 ")),
        ("LONGSEQ_TRACEBACK", "0"),
        ("LONGSEQ_OF_A_PLUGIN", "anything"),
        ("LONGSEQ_CACHE_DIR", "new/folder"),
    ],
)
def test_other_values_are_taken(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    environment.check_environment("train")
    assert not environment.wants_traceback()


def test_the_file_that_a_command_may_write_need_not_be_there(monkeypatch):
    monkeypatch.setenv("LONGSEQ_LAUNCHES", "nowhere.json")
    environment.check_environment("benchmark tune")


def test_all_variables_that_the_package_reads_are_known():
    folders = (ROOT / name for name in ("longseq", "kernels", "tasks", "tools"))
    text = "".join(path.read_text("utf-8") for folder in folders for path in folder.rglob("*.py"))
    named = set(re.findall(r"LONGSEQ_[A-Z_]+", text)) - {"LONGSEQ_"}
    assert named == {name for name in (*environment.FORMS, *environment.OTHERS) if name.startswith("LONGSEQ_")}


# Runs commands, one in each line of the input, and tells their exit codes.
PROGRAM = """
import shlex, sys
from longseq.tools import cli

codes = []
for line in sys.stdin.read().splitlines():
    sys.argv = ["longseq", *shlex.split(line)]
    try:
        codes.append(cli.main())
    except SystemExit as left:
        codes.append(left.code)
    print("next command", file=sys.stderr)
print(codes)
"""


@pytest.mark.slow
def test_files_are_utf8_whatever_the_locale(tmp_path):
    """Both in one new program of Python's plainest locale, whose imports take most of the time."""
    make_folder(tmp_path)
    (tmp_path / "photos" / "Zürich.png").write_bytes((tmp_path / "photos" / "a.png").read_bytes())
    for name in ("Brot", "Käse"):
        (tmp_path / "food" / "train" / name).mkdir(parents=True)
        for number in range(12):
            Image.new("RGB", (8, 8), (number, 0, 9)).save(tmp_path / "food" / "train" / name / f"ä{number}.png")
    words = ("data=image_folder", "data.root=food", "data.img_size=8", "data.num_workers=0", "model.depth=1")
    words += ("recipe=cifar10", "recipe.epochs=1", "recipe.batch_size=4", "+trainer.limit_train_batches=1")
    words += ("recipe.schedule.warmup_epochs=0", "trainer=cpu", "logger=none", "output=run")
    train = f"train {' '.join(words)}"
    commands = ("predict checkpoint=run.ckpt input=photos output=told.csv", train, f"{train}/süß logger=tensorboard")
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input="\n".join(commands),
        cwd=tmp_path,
        env={**{name: value for name, value in os.environ.items() if name != "PYTHONIOENCODING"}, **plain},
        capture_output=True,
        text=True,
        check=False,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    predicted, trained, named, _ = done.stderr.split("next command\n")
    assert done.stdout.splitlines()[-1] == "[0, 0, 2]", (predicted, trained, named)
    with (tmp_path / "told.csv").open(encoding="utf-8", newline="") as file:
        assert {Path(row["path"]).name for row in csv.DictReader(file)} == {"a.png", "Zürich.png"}
    for written in ("worst_errors_val.csv", "confusion_matrix_val.csv"):
        assert "Käse" in (tmp_path / "run" / written).read_text(encoding="utf-8"), written
    told = "a name of a file has letters that this locale does not have: set PYTHONUTF8=1 in the environment"
    assert named.splitlines()[-1] == f"longseq: error: {told}"


@pytest.mark.slow
def test_torchrun_starts_verbs_of_several_processes(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for verb in ("train", "evaluate"):
        environment.check_environment(verb)
    for verb in ("predict", "benchmark kernels"):
        with pytest.raises(
            ValueError, match=f"^torchrun has started 2 processes, and longseq {verb} is one: start it "
        ):
            environment.check_environment(verb)
    monkeypatch.setenv("WORLD_SIZE", "1")
    environment.check_environment("predict")
