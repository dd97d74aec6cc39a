"""Sweeps: where their trials write, and what is told of those that fail."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest
from omegaconf import OmegaConf

from longseq.tools import cli, search, sweeps

SMALL = (
    *("trainer=cpu", "recipe.epochs=1", "recipe.schedule.warmup_epochs=0", "+trainer.limit_train_batches=1"),
    *("+trainer.limit_val_batches=1", "data.num_workers=0", "logger=none", "model.depth=1"),
)
ERROR = "longseq: error: "


@pytest.mark.slow
def test_trials_lie_below_the_folder_that_output_names(tmp_path, command_here):
    done = command_here(tmp_path, "train", "-m", "output=my sweep", "seed=0,1", *SMALL)
    assert done.returncode == 0, done.stderr
    names = ["0_digits_longhorn", "1_digits_longhorn"]
    assert sorted(path.name for path in (tmp_path / "my sweep").iterdir() if path.is_dir()) == names
    assert all((tmp_path / "my sweep" / name / "metrics.json").is_file() for name in names)
    assert [path.name for path in tmp_path.iterdir()] == ["my sweep"]


@pytest.mark.slow
def test_a_sweep_says_at_its_end_which_trials_failed(tmp_path, command_here):
    done = command_here(tmp_path, "train", "-m", "output=sweep", "recipe.learning_rate=-1,0.01", *SMALL)
    told = [line for line in done.stderr.splitlines() if line.startswith(ERROR)]
    assert done.returncode == 2
    reason = "recipe.learning_rate=-1 must be a number of at least 0 and below 1e+30"
    assert told == [
        f"{ERROR}{reason} (trial recipe.learning_rate=-1)",
        f"{ERROR}1 of 2 trials failed: recipe.learning_rate=-1",
    ]
    assert done.stderr.splitlines()[-1] == told[-1]
    assert (tmp_path / "sweep" / "1_digits_longhorn" / "metrics.json").is_file()


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("train", ["output=FOLDER", "seed=0,1"]),
        ("train", ["-m", "output=a,b"]),
        ("train", ["-m", "output=runs/${seed}", "seed=0,1"]),
        ("train", ["-m", "seed=0,1", "hydra.sweep.dir=x"]),
        ("evaluate", ["-m", "checkpoint=FILE", "split=val,test"]),
        ("evaluate", ["checkpoint=FILE", "data.img_size=8,16"]),
        ("export", ["-m", "checkpoint=FILE", "format=onnx,pt2"]),
        ("generate", ["-m", "checkpoint=FILE", "prompt=a", "seed=0,1"]),
        ("describe", ["-m", "mixer=gla,mamba"]),
        ("predict", ["-m", "checkpoint=FILE", "input=FOLDER"]),
        ("train", ["-m", "a=[", "output=x"]),
    ],
)
def test_other_commands_stay_as_they_are(verb, words):
    flags, overrides = [word for word in words if word == "-m"], [word for word in words if word != "-m"]
    assert sweeps.prepare(verb, flags, overrides) == overrides


@pytest.mark.parametrize("begin", [("-m",), ("--multi",), ("hydra.mode=MULTIRUN",), ("hparams_search=optuna",)])
def test_all_that_begins_a_sweep_moves_the_folder(begin):
    flags, rest = [word for word in begin if word[0] == "-"], [word for word in begin if word[0] != "-"]
    assert sweeps.prepare("train", flags, [*rest, "output=F", "seed=1"]) == [*rest, "hydra.sweep.dir=F", "seed=1"]


def test_many_failed_trials_are_counted():
    trials = sweeps.Trials([])
    trials.count = 12
    trials.failed = {f"seed={seed}": f"message {seed}" for seed in range(10)}
    told = trials.describe_failures()
    assert told == f"10 of 12 trials failed: {', '.join(f'seed={seed}' for seed in range(8))} and 2 more"


STUDY = ("hparams_search=optuna", "hydra.sweeper.storage=sqlite:///s.db", "hydra.sweeper.study_name=a")


@pytest.mark.slow
def test_a_study_that_is_kept_has_a_name_and_draws_other_values_each_time(monkeypatch):
    monkeypatch.setattr(sweeps, "installed_major", {"optuna": 2, "sqlalchemy": 1}.get)
    assert sweeps.prepare("train", [], STUDY) == [*STUDY, "hydra.sweeper.sampler.seed=null"]
    seeded = [*STUDY, "hydra.sweeper.sampler.seed=3"]
    assert sweeps.prepare("train", [], seeded) == seeded
    with pytest.raises(ValueError, match=r"the same command finds by its name: add hydra.sweeper.study_name=NAME"):
        sweeps.prepare("train", [], STUDY[:2])
    monkeypatch.setattr(sweeps, "installed_major", {"optuna": 2, "sqlalchemy": 2}.get)
    with pytest.raises(ValueError, match=r"pip install 'sqlalchemy<2' 'alembic<1\.16'"):
        sweeps.prepare("train", [], STUDY)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["recipe.learning_rate=0.003"], True),
        (["+hydra.sweeper.params={model.depth: 'choice(1,2)'}", "model.depth=1"], True),
        (["model.depth=1"], False),
        (["~recipe.optimizer.weight_decay"], False),
        (["recipe.learning_rate=0.003,0.004"], False),
    ],
)
def test_a_key_that_is_given_and_not_searched_is_told(capsys, words, told):
    sweeps.prepare("train", [], ["hparams_search=optuna", *words])
    warned = f"longseq: warning: {words[-1]} is given, and so is not searched\n"
    assert capsys.readouterr().err == (warned if told else "")


@pytest.mark.slow
def test_the_searchs_own_keys_are_those_of_its_file():
    file = OmegaConf.load(Path(cli.__file__).parents[1] / "conf" / "hparams_search" / "optuna.yaml")
    assert set(sweeps.SEARCHED) == set(file.hydra.sweeper.params)
    given = ["hparams_search=optuna", "recipe.optimizer.weight_decay=0.1"]
    assert sweeps.prepare("train", [], given) == [given[0], "++recipe.optimizer.weight_decay=0.1"]


def describe(*words, metric="val/top1", direction="maximize"):
    told = {
        "hydra": {"sweeper": {"direction": direction}, "overrides": {"task": list(words)}},
        "optimized_metric": metric,
    }
    return search.describe_call(OmegaConf.create(told))


def study_of(call):
    """A study with a trial of a call."""
    study = optuna.create_study(direction="maximize")
    search.bind_study(study, call, "a")
    study.tell(study.ask(), 0.5)
    return study


@pytest.mark.slow
def test_a_study_that_is_kept_takes_trials_of_one_command_alone(capsys):
    words = ("mixer=longhorn", "seed=1", "model.depth=choice(1,2)", "output=here", "data.num_workers=0")
    study = study_of(describe(*words))
    same = describe("seed=1", "+mixer=longhorn", "model.depth=choice(2,3)", "output=there")
    search.bind_study(study, same, "a")
    for other, told in (
        (describe(*words, metric="val/loss"), "optimized_metric: val/top1 there, val/loss here"),
        (describe(*words, direction="minimize"), "hydra.sweeper.direction: maximize there, minimize here"),
        (describe(*words, "mixer=mamba"), "mixer: longhorn there, mamba here"),
        (describe(*words[1:]), "mixer: longhorn there, not given here"),
        (describe(*words, "data.img_size=8"), "data.img_size: not given there, 8 here"),
    ):
        with pytest.raises(ValueError, match=r"study_name=a has trials of another search \(" + told):
            search.bind_study(study, other, "a")
    search.bind_study(study, same, "a")  # what was refused has changed nothing
    assert not capsys.readouterr().err


@pytest.mark.slow
def test_a_study_from_before_goes_on_with_a_warning_and_one_without_values_belongs_to_nobody(capsys):
    old = optuna.create_study(direction="maximize")
    old.tell(old.ask(), 0.5)
    with pytest.raises(ValueError, match=r"search \(hydra.sweeper.direction: maximize there, minimize here\)"):
        search.bind_study(old, describe("seed=1", direction="minimize"), "a")
    search.bind_study(old, describe("seed=1"), "a")
    assert "longseq: warning: the study a does not tell of which metric" in capsys.readouterr().err
    with pytest.raises(ValueError, match="has trials of another search"):
        search.bind_study(old, describe("seed=2"), "a")
    failed = optuna.create_study(direction="maximize")
    search.bind_study(failed, describe("data.root=wrong", "seed=1"), "a")
    failed.tell(failed.ask(), state=optuna.trial.TrialState.FAIL)
    search.bind_study(failed, describe("seed=2"), "a")
    failed.tell(failed.ask(), 0.5)
    search.bind_study(failed, describe("seed=2"), "a")
    assert not capsys.readouterr().err


@pytest.mark.slow
def test_a_search_binds_the_study_that_it_keeps_before_its_first_trial(monkeypatch, capsys):
    study = study_of(describe("seed=1"))
    monkeypatch.setattr(optuna, "load_study", lambda **options: study)  # no database here
    kept = {"direction": "maximize", "storage": "sqlite:///s.db", "study_name": "a"}
    told = {"hydra": {"sweeper": kept, "overrides": {"task": ["seed=2"]}}, "optimized_metric": "val/top1"}
    with pytest.raises(SystemExit):
        search.BestTrial().on_multirun_start(OmegaConf.create(told))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{ERROR}hydra.sweeper.study_name=a has trials of another search (seed: 1 there, 2 here)")
