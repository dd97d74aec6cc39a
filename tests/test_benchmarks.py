"""The scripts of benchmarks/: runs that continue, images that are those of the command, tables that are their rows'."""

from __future__ import annotations

import concurrent.futures
import json
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from forked import start_others_as_forks
from hydra import compose, initialize_config_module
from PIL import Image

from longseq import mixers
from longseq.kernels import dispatch
from longseq.tasks import comparison_runs
from longseq.tasks.image import data, sources
from longseq.tasks.image.data import ImageDataModule
from longseq.tasks.image.datasets import TrainingBatches
from longseq.tasks.text import prepare
from longseq.tools.benchmark.report import format_mean
from longseq.tools.benchmark.work import TINY

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def script(monkeypatch):
    """Imports a script of benchmarks/ by its name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))

    def find(name: str) -> ModuleType:
        return __import__(name)

    return find


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """CIFAR-10 with noise for images: three of each of two classes for training, one for the test."""
    root = tmp_path_factory.mktemp("cifar10")
    generator = np.random.default_rng(0)
    for part, count in (("train", 3), ("val", 1)):
        for name in ("cat", "dog"):
            (root / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(0, 256, (32, 32, 3), np.uint8)
                Image.fromarray(pixels).save(root / part / name / f"{number}.png")
    return root


def training_batches(script, root: Path) -> TrainingBatches:
    words = ("experiment=image/cifar10", f"data.root={root}", "data.val_fraction=0.34", "recipe.batch_size=2")
    config = script("augmented").find_overrides(words, ["data.num_workers=0", "seed=3"], root)
    return ImageDataModule.from_config(config, batch_size=2).train_dataloader().dataset


# Modules that the scripts share.
SHARED = ("byte_text", "command")
SCRIPTS = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.stem not in SHARED)


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """Runs a script with arguments as a command does, and returns what it says; an error that it raises is raised."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)

    def run(name: str, *words: str) -> str:
        path = ROOT / "benchmarks" / f"{name}.py"
        monkeypatch.setattr(sys, "argv", [str(path), *words])
        left = ""
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            left = end.code if isinstance(end.code, str) else ""
        return capsys.readouterr().out + left

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_prints_its_usage(call, name):
    pytest.importorskip("matplotlib")
    assert f"python benchmarks/{name}.py" in call(name, "--help")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "told"),
    [
        *((f"{name}{words}", "torch sees n") for name, words in {
            "counted_launches": "", "first_calls": "", "generation_memory": " out.json deltanet", "image_steps": "",
            "image_decoding": " folder", "kernel_versions": " made.json no", "loss_curves": " folder",
            "trainer_speed": " out.json name 3 task=lm", "vim_recipe": "",
        }.items()),
        ("augmented data=no.npz folder=made", "No such file"),
        ("cifar10_data pack no made", "no"),
        ("cifar10_data unpack no made.npz", "no: cifar10.json is not there"),
        ("comparison no", "no.json: No such file"),
        ("comparison no.json name title", "no.json: No such file"),
        ("conversion no made.json", "no: No such file"),
        ("image_shards no out.json", "no: No such file"),
        ("keep no.json name", "no.json: No such file"),
        ("kept_bytes no", "'no'"),
        ("language_mixers no no name title", "results.json: No such file"),
        ("lattice_language_model no", "no holds 0 .txt files"),
        ("lengths no", "no.json: No such file"),
        ("lengths mad", "mad.json: its rows have no values of each seed by length"),
        ("comparison cifar10", "cifar10.json: it has no report"),
        ("single_run no no.json imdb label command", "metrics.json: No such file"),
        ("entry no=1 -- train", "python benchmarks/entry.py"),
        *((f"{name} more", f"python benchmarks/{name}.py") for name in (
            "by_length", "lattice_chunks", "picture", "table", "vla_state_norm",
        )),
    ],
)  # fmt: skip
def test_what_a_script_lacks_is_told_in_one_line(call, monkeypatch, words, told):
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("LONGSEQ_BENCHMARK_CHANGES", "")  # so that what entry.py sets is undone
    monkeypatch.delenv("LONGSEQ_BENCHMARK_CHANGES")
    monkeypatch.setattr(concurrent.futures, "ProcessPoolExecutor", None)  # it is told before processes begin
    name, *rest = words.split()
    said = call(name, *rest)
    assert told in said
    assert "python benchmarks" in said or "\n" not in said.strip()


def test_rows_without_a_value_of_each_seed_are_told(script, monkeypatch):
    rows = [{"mixer": "gla", "d_model=8": {"0": 0.5}}, {"mixer": "lattice", "d_model=8": "diverged"}]
    results = script("comparison").results_of({"report": "test/accuracy", "rows": rows})
    assert [entry["name"] for entry in results["summary"]] == ["gla"]
    rows.append({"mixer": "vla", "d_model=8": 0.25})
    with pytest.raises(ValueError, match=r"the row vla has no value of each seed in d_model=8, but 0\.25"):
        script("comparison").results_of({"report": "test/accuracy", "rows": rows})


@pytest.mark.slow
def test_language_models_are_measured_beyond_their_training_length(script, tmp_path, monkeypatch, command_here):
    pytest.importorskip("matplotlib")
    text = tmp_path / "text.jsonl"
    lines = [f"document {number} says {number * number} " * (20 + number) for number in range(60)]
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    for name, share in (("short", 0.2), ("long", 0.9)):
        words = [f"input={text}", f"output={tmp_path / name}", "validation=0.05", f"test={share}", "processes=1"]
        with initialize_config_module("longseq.conf", version_base="1.3"):
            prepare.run(compose("prepare", words))
    start_others_as_forks(monkeypatch, comparison_runs)
    folder = tmp_path / "comparison"
    command = ["compare", "comparison=mixers_110m", "trainer=cpu", "jobs=1"]
    command += ["rows=null", "mixers=[gla]", f"data.root={tmp_path / 'short'}"]
    command += ["scale=1m", "model.d_model=16", "model.depth=1", "data.window=64", "recipe.batch_size=256"]
    command += ["recipe.tokens=null", "recipe.updates=6", "recipe.schedule.warmup_tokens=null", "plot=false"]
    command += ["data.num_workers=0"]
    command += ["recipe.validate_every_updates=null", "trainer.log_every_n_steps=2", f"output={folder}"]
    done = command_here(tmp_path, *command)
    assert done.returncode == 0, done.stderr + done.stdout
    measure = script("language_mixers")
    monkeypatch.setattr(measure, "WINDOW", 512)
    monkeypatch.setattr(measure, "SHORTEST", 64)
    monkeypatch.setattr(measure, "HERE", tmp_path)
    monkeypatch.setattr(sys, "argv", ["", str(folder), str(tmp_path / "long"), "kept", "A title", "A note."])
    measure.main()
    kept = json.loads((tmp_path / "kept.json").read_text())
    assert [row["mixer"] for row in kept["rows"]] == ["gla"]
    for row in kept["rows"]:
        assert row["tokens_per_second"]["0"] > 0
        lengths = [key for key in row if key.startswith("perplexity_to_")]
        assert lengths == [f"perplexity_to_{length}" for length in (64, 128, 256, 512)]
        assert all(1 < row[key]["0"] < 400 for key in (*lengths, "test_perplexity"))
    assert (tmp_path / "kept.png").stat().st_size > 10_000


@pytest.mark.slow
def test_image_files_stand_beside_shards_of_them(script, tmp_path, monkeypatch, command_here):
    for part, count in (("train", 10), ("test", 1)):
        for value, name in ((0, "black"), (255, "white")):
            (tmp_path / "images" / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = np.full((150, 140 + number, 3), value, np.uint8)
                Image.fromarray(pixels).save(tmp_path / "images" / part / name / f"{number}.jpg")
    start_others_as_forks(monkeypatch, comparison_runs)
    image_shards = script("image_shards")

    def call(place: Path, *words: str) -> None:
        done = command_here(place, *(word.replace("[0,1,2]", "[3]") for word in words))
        assert done.returncode == 0, done.stderr + done.stdout

    monkeypatch.setattr(image_shards, "call", call)
    words = ["recipe.epochs=1", "model.depth=1", "model.embed_dim=16", "recipe.batch_size=4"]
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "images"), str(tmp_path / "kept.json"), *words])
    image_shards.main()
    files, shards = json.loads((tmp_path / "kept.json").read_text())["rows"]
    assert (files["images"], shards["images"]) == ("files as they are", "shards of size=128")
    for row in (files, shards):
        assert 0 <= row["test_top1"]["3"] <= 1
        assert (row["model"], row["epochs"]) == ("linear_attention", 1)
        assert row["measured"]["processor"]


@pytest.mark.slow
def test_packed_images_are_those_of_the_folder_and_a_changed_pixel_is_found(script, folder, tmp_path, monkeypatch):
    cifar10_data = script("cifar10_data")
    monkeypatch.setattr(cifar10_data, "ACROSS", 2)
    cifar10_data.pack(str(folder), tmp_path / "pictures")
    cifar10_data.unpack([tmp_path / "pictures"], tmp_path / "file.npz")
    from_folder = training_batches(script, folder)
    monkeypatch.setitem(sources._SOURCES, "cifar10", sources.cifar10)
    script("entry").read_cifar10_from(str(tmp_path / "file.npz"))
    from_file = training_batches(script, tmp_path / "file.npz")
    assert from_file.split.source.class_names == ["cat", "dog"]
    assert np.array_equal(from_file.split.indices, from_folder.split.indices)
    indices = [script("entry").SampleIndex(position, 0, 1) for position in range(len(from_file))]
    for of_file, of_folder in zip(from_file[indices][:2], from_folder[indices][:2], strict=True):
        assert torch.equal(of_file, of_folder)
    # What a process of augmented.py does, which has not heard of the file.
    monkeypatch.setitem(sources._SOURCES, "cifar10", sources.cifar10)
    words = ["data.val_fraction=0.34", "recipe.batch_size=2", "data.num_workers=0"]
    script("augmented").augment_epoch((3, 1), str(tmp_path / "file.npz"), tmp_path, words)
    assert np.array_equal(np.load(tmp_path / "seed3_epoch1.npy"), from_file[indices].inputs.numpy())
    picture = tmp_path / "pictures" / "cifar10_0.webp"
    changed = np.array(Image.open(picture))
    changed[0, 0, 0] ^= 1
    Image.fromarray(changed).save(picture, lossless=True)
    with pytest.raises(ValueError, match="not those that were packed"):
        cifar10_data.unpack([tmp_path / "pictures"], tmp_path / "file.npz")


def test_augmented_images_of_the_files_are_those_of_the_command(script, folder, tmp_path, monkeypatch):
    entry = script("entry")
    batches = training_batches(script, folder)
    for epoch in (0, 1):
        entry.augment(batches, tmp_path, epoch)
    monkeypatch.setattr(data, "TrainingBatches", TrainingBatches)
    entry.read_augmented_from(str(tmp_path))
    read = training_batches(script, folder)
    assert isinstance(read, entry.AugmentedBatches)
    seen = []
    for epoch in (0, 1):
        indices = [entry.SampleIndex(position, 0, epoch) for position in (2, 0)]
        seen.append(read[indices].inputs)
        assert torch.equal(read[indices].inputs, batches[indices].inputs)
        assert torch.equal(read[indices].targets, batches[indices].targets)
    assert not torch.equal(*seen)


def test_weights_move_by_one_unit_in_the_last_place_and_each_draw_is_another(script):
    entry = script("entry")
    models = [entry.move_by_one_unit(torch.nn.Linear(50, 50), draw) for draw in (0, 1) if torch.manual_seed(0)]
    torch.manual_seed(0)
    plain = torch.nn.Linear(50, 50).weight
    for model in models:
        assert torch.equal((model.weight.view(torch.int32) - plain.view(torch.int32)).abs(), torch.ones(50, 50).int())
    assert not torch.equal(models[0].weight, models[1].weight)


def test_first_calls_are_timed_of_operations_and_of_models(script, monkeypatch):
    first_calls = script("first_calls")
    assert first_calls.time_call(TINY[0], torch.device("cpu")) >= 0.0
    language = [*first_calls.LANGUAGE, "text.mixers=[linear_attention]", "text.d_model=16", "text.depth=1"]
    language += ["text.vocabulary=50", "text.lengths=[8]", "text.step_tokens=8", "seconds=0.01", "device=cpu"]
    assert first_calls.time_call(language, torch.device("cpu")) >= 0.0
    assert len(first_calls.CALLS) == 10


def test_first_calls_that_were_timed_stay_when_one_fails(script, monkeypatch, tmp_path):
    first_calls, seconds = script("first_calls"), iter((2.5, 4.5))
    monkeypatch.setattr(first_calls, "in_a_new_process", lambda call: next(seconds))
    output = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["first_calls.py", str(output), "training step"])
    monkeypatch.setattr(first_calls, "add_circumstances", lambda rows, device: list(rows))
    with pytest.raises(StopIteration):
        first_calls.main()
    rows = json.loads(output.read_text())["rows"]
    assert [row["first_call_s"] for row in rows] == [2.5, 4.5]
    assert all("training step" in row["call"] for row in rows)
    monkeypatch.setattr(sys, "argv", ["first_calls.py", str(output), "nothing"])
    with pytest.raises(SystemExit, match="no call has nothing in its name; the calls: delta_rule"):
        first_calls.main()


@pytest.mark.slow
def test_a_step_is_taken_apart(script, monkeypatch):
    image_steps = script("image_steps")
    x = torch.randn(4, 4)
    row = image_steps.take_apart(lambda: x @ x, torch.device("cpu"))
    assert min(row["step_ms"], row["host_ms"]) >= 0
    assert row["kernels_ms"] == row["launches"] == 0  # the kernels of a GPU alone
    monkeypatch.setattr(image_steps, "take_apart", lambda step, _: {"found": step()})
    words = ["image.models=[longseq_vit_tiny_patch16_224]", "image.mixers=[linear_attention]", "image.peers=[]"]
    (row,) = image_steps.measure([*words, "image.sizes=[[16,1]]", "image.classes=2"], torch.device("cpu"))
    assert row == {"model": words[0][14:-1], "mixer": "linear_attention", "pixels": 16, "batch": 1, "found": None}


def test_new_rows_replace_those_of_the_same_model_and_others_stay(script):
    keep = script("keep")
    old = [{"mixer": "a", "tokens": 8, "speed": 1}, {"mixer": "b", "tokens": 8, "speed": 1}]
    kept = {"what": "models", "command": "first", "notes": ["by hand"], "rows": old}
    result = {
        "what": "Whole models",
        "command": "second",
        "notes": [],
        "rows": [{"mixer": "b", "tokens": 8, "speed": 2}],
    }
    merged = keep.merge(kept, result, {})
    assert merged["rows"] == [old[0], *result["rows"]]
    assert (merged["what"], merged["notes"], merged["command"]) == ("models", ["by hand"], "first; second")
    assert keep.merge(merged, result, {})["command"] == "first; second"
    recomputed = keep.merge(kept, result, {"recompute": "mixer"})
    assert recomputed["rows"] == [*old, {**result["rows"][0], "recompute": "mixer"}]
    all_new = {**result, "rows": [*result["rows"], {"mixer": "a", "tokens": 8, "speed": 3}]}
    assert keep.merge(kept, all_new, {})["command"] == "second"
    parts = [{"part": "step"}, {"part": "whole", "decode": "gpu"}, {"part": "whole", "decode": "cpu"}]
    assert keep.merge({**kept, "rows": []}, {**result, "rows": parts}, {})["rows"] == parts
    with pytest.raises(ValueError, match="for the same call or model"):
        keep.merge(kept, {**result, "rows": [*result["rows"], {**result["rows"][0], "unheard_of": 1}]}, {})


@pytest.mark.slow
def test_converted_models_stand_beside_those_from_scratch(script, tmp_path, monkeypatch):
    conversion = script("conversion")
    for name, values in (
        ("attention", [4.0, 3.0]),
        ("gsa.converted.3e-4", [3.5, 3.2]),
        ("gsa.scratch.3e-4", [6.0, 5.0]),
    ):
        run = tmp_path / name
        run.mkdir()
        lines = [f"{update - 1},{value}" for update, value in zip((10, 20), values, strict=True)]
        (run / "metrics.csv").write_text("\n".join(["step,val/loss", "14,", *lines]))
        (run / "metrics.json").write_text('{"updates": 20, "parameters": 7, "test/loss": 2.0}')
    output = tmp_path / "conversion.json"
    monkeypatch.setattr(sys, "argv", ["conversion.py", str(tmp_path), str(output)])
    conversion.main()
    rows = json.loads(output.read_text())["rows"]
    assert [row["best_validation_loss"] for row in rows] == [3.0, 3.2, 5.0]
    assert [row["start"] for row in rows[1:]] == ["converted", "scratch"]
    assert rows[1]["validation_loss_at_10"] == 3.5
    assert output.with_suffix(".png").is_file()


def test_a_single_run_joins_a_comparison_once_and_is_no_line_of_its_plot(script, tmp_path, monkeypatch):
    single_run, lengths = script("single_run"), script("lengths")
    compared = {"mixer": "gla", "test/accuracy": {"0": 0.7}, "up_to_512": {"0": 0.6}, "longer": {"0": 0.8}}
    (tmp_path / "reviews.json").write_text(json.dumps({"what": "reviews", "rows": [compared]}))
    (tmp_path / "measured.json").write_text('{"commit": "abc"}')
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("seed: 3\n")
    found = {"test/accuracy": 0.92, "test/accuracy_up_to_512": 0.9, "val/accuracy": 1, "parameters": 7, "seconds": 1.6}
    (run / "metrics.json").write_text(json.dumps(found))
    words = [str(run), str(tmp_path / "measured.json"), "reviews", "tuned", "longseq train"]
    for module in (single_run, lengths):
        monkeypatch.setattr(module, "HERE", tmp_path)
    monkeypatch.setattr(sys, "argv", ["single_run.py", *words])
    single_run.main()
    single_run.main()
    row = {"mixer": "tuned", "command": "longseq train", "test/accuracy": {"3": 0.92}, "up_to_512": {"3": 0.9}}
    row |= {"parameters": 7, "seconds_a_run": 2, "measured": {"commit": "abc"}}
    assert json.loads((tmp_path / "reviews.json").read_text())["rows"] == [compared, row]
    drawn: list[str] = []
    monkeypatch.setattr(lengths.plt.Axes, "plot", lambda *_, label, **__: drawn.append(label))
    lengths.draw("reviews")
    assert drawn == ["gla"]
    assert (tmp_path / "reviews.png").stat().st_size > 0


def test_the_plot_of_a_file_has_the_mean_of_each_cell(script, tmp_path, monkeypatch):
    axes = pytest.importorskip("matplotlib.axes").Axes
    comparison = script("comparison")
    rows = [
        {"mixer": "vla", "pairs=4": {"0": 0.75, "1": 0.25}, "pairs=8": {"0": 0.5, "1": 0.5}, "seconds_a_run": 3},
        {"mixer": "gla", "pairs=4": {"0": 0.125, "1": 0.125}, "pairs=8": {"0": 0.25, "1": 0.0}, "seconds_a_run": 3},
    ]
    (tmp_path / "recall.json").write_text(json.dumps({"report": "test/accuracy", "rows": rows}))
    monkeypatch.setattr(comparison, "HERE", tmp_path)
    monkeypatch.setattr(sys, "argv", ["comparison.py", "recall"])
    drawn: dict[str, tuple[list[float], list[float]]] = {}
    errorbar = axes.errorbar

    def note(plot: Any, places: Any, means: list[float], *, yerr: list[float], label: str, **options: Any) -> Any:
        drawn[label] = means, [round(error, 4) for error in yerr]
        return errorbar(plot, places, means, yerr=yerr, label=label, **options)

    monkeypatch.setattr(axes, "errorbar", note)
    comparison.main()
    assert drawn == {"vla": ([0.5, 0.5], [0.3536, 0.0]), "gla": ([0.125, 0.125], [0.0, 0.1768])}
    assert (tmp_path / "recall.png").stat().st_size > 0


@pytest.mark.slow
def test_tables_are_those_of_the_rows(script):
    pages = script("table").list_pages()
    stale = [page.relative_to(ROOT).as_posix() for page, make in pages.items() if page.read_text() != make()]
    assert stale == [], "run python benchmarks/table.py"


def test_every_table_stands_on_a_page(script):
    table = script("table")
    pages = "".join(page.read_text() for page in table.list_pages())
    assert [name for name in table.TABLES if f"<!-- table {name} -->" not in pages] == []


def test_every_row_says_what_it_was_measured_on(script):
    table = script("table")
    assert {"cifar10", "digits", "image_models", "kernels", "mad"} <= set(table.list_tables())
    for name in table.list_tables():
        result = table.read(name)
        assert "..." not in result["command"], f"{name}: a command that cannot be run"
        for command in result["command"].split("; "):
            program, *words = shlex.split(command)
            assert program in ("longseq", "python"), f"{name}: {command} is no command"
            assert not any(word.startswith("(") for word in words), f"{name}: {command} holds a remark"
        for row in result["rows"]:
            measured = row["measured"]
            assert ("commit" in measured) != ("recorded" in measured), f"{name}: {row}"
            assert measured["date"], f"{name}: {row}"
            assert "torch" in measured["versions"], f"{name}: {row}"
            # Of some of those rows, the values of seeds were not kept, either.
            if any("±" in str(value) for value in row.values()):
                assert "recorded" in measured, f"{name}: {row}: give the value of each seed"
                assert any("the value of each seed was not kept" in note for note in result["notes"]), name
            # Rows from before commits were kept tell the GPU or the processor; those since, the processor always.
            assert measured.get("processor") or ("recorded" in measured and measured["gpu"]), f"{name}: {row}"


def test_a_row_is_older_than_a_later_change_of_its_mixer_alone(script, monkeypatch):
    table = script("table")
    change = {"what": "a mend", "commit": "b", "date": "2026-01-02T00:00:00+00:00", "moves": ["accuracy"]}
    of_a_table = {**change, "names": [], "tables": ["recall"]}
    of_chunks = {**change, "names": ["gla"], "spares": ["decoding"]}
    of_a_size = {**change, "names": [], "rows": [{"mixer": "longhorn", "pixels": 512}, {"mixer": "mamba"}]}
    known = [{**change, "names": ["deltanet"]}, of_a_table, of_chunks, of_a_size]
    monkeypatch.setattr(table, "changes", lambda: known)

    def later(kind: str = "accuracy", day: str = "2026-01-01", name: str = "", **row: Any) -> list[int]:
        return table.find_later_changes({**row, "measured": {"commit": f"a {day}T00:00:00+00:00"}}, kind, name)

    assert later(mixer="deltanet convolution_width=0") == [1]
    assert later(model="deltanet with a wide MLP", kind="accuracy and speed") == [1]
    assert later(model="longseq_vit_tiny_patch16_224", mixer="deltanet") == [1]
    assert later(mixer="deltanet", kind="speed") == []
    assert later(mixer="deltanet", day="2026-01-03") == []
    assert later(mixer="gated_deltanet") == []
    assert later(op="delta_rule", variant="deltanet") == [1]
    assert later(mixer="gated_deltanet", name="recall") == [2]
    assert later(op="deltanet", implementation="fla") == []
    assert (later(mixer="gla", task="text"), later(mixer="gla", task="decoding")) == ([3], [])
    assert (later(mixer="longhorn", pixels=512), later(mixer="mamba", pixels=224)) == ([4], [4])
    assert later(mixer="longhorn", pixels=224) == later(mixer="longhorn") == later(mixer="gsa", pixels=512) == []


def test_rows_of_our_mixers_can_be_told_as_older(script):
    """A row that names no mixer, operation or model of ours would stay new whatever changes."""
    table = script("table")
    named = [card.name for card in mixers.list_mixers(d_model=256, tokens=1024)]
    ours = {*named, *dispatch.list_ops(), *dispatch.list_local_ops()}
    for name in table.list_tables():
        result = table.read(name)
        if result["kind"] == "history":
            continue
        for row in result["rows"]:
            words = {
                word for key in table.SUBJECTS for word in re.findall(r"[a-z_0-9]+", str(row.get(key, "")).lower())
            }
            not_ours = row.get("implementation") not in table.OURS or row.get("mixer") == "linear"
            not_ours |= str(row.get("model")).startswith(("deit", "transformers"))
            other = not_ours or row.get("part") in ("read", "decode", "augment", "loader")
            assert other or words & ours, f"{name}: {row}"


def test_parameters_say_when_they_are_not_those_of_attention(script):
    table = script("table")
    assert table.millions(3_582_922, 3_582_922) == "3.58M"
    assert table.millions(3_650_000, 3_582_922) == "3.65M"
    assert table.millions(394_920_960, 336_479_232) == "395M (+17 %)"
    assert table.millions(1_281_266_688) == "1.28B"


def test_the_trainers_table_tells_the_parameters_of_what_its_rows_call_by_their_scale(script):
    page = script("table").trainer_speed()
    speed = find_row("trainer_speed", run="340M, longhorn, 2,048 tokens")["trainer_tokens_per_second"]
    assert re.search(rf"\| 340M, longhorn, 2,048 tokens( \(older\))? \| 395M \| {speed:,.0f} \|", page)


def rows_of(name: str) -> list[dict[str, Any]]:
    return json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())["rows"]


def words_of(path: str) -> str:
    """The text of a page or of a configuration's comments in one line."""
    return " ".join((ROOT / path).read_text().replace("\n#", "\n").split())


def test_figures_in_sentences_are_those_of_the_rows(script):
    top1 = {row["model"]: 100 * mean(row["test_top1"].values()) for row in rows_of("cifar10")}
    gains = [
        top1[name] - top1[f"{name} without convolution"] for name in ("deltanet", "longhorn", "longhorn_exact", "mamba")
    ]
    said = "The short convolution gives DeltaNet {:.1f} points, Longhorn {:.1f}, its exact form {:.1f} and Mamba {:.1f}"
    for page in ("docs/pages/results.md", "benchmarks/README.md"):
        assert said.format(*gains) in words_of(page), page

    digits = [mean(row["test_top1"].values()) for row in rows_of("digits")]
    assert f"test/top1 of {min(digits):.3f} to {max(digits):.3f} by mixer" in words_of("conf/comparison/digits.yaml")

    accuracy = {row["mixer"]: mean(row["test/accuracy"].values()) for row in rows_of("imdb")}
    said = "Expected: {mamba2:.3f} with mamba2, {gated_deltanet:.3f} with gated_deltanet (three seeds each), {gla:.3f}"
    assert said.format(**accuracy) in words_of("conf/experiment/document/imdb.yaml")

    held = {f"{row[f'gib_after_{count}']:.2f}" for row in rows_of("generation_memory") for count in (1000, 100000)}
    assert f"GSA of 340M parameters held {' or '.join(held)} GiB after 1,000 tokens and after 100,000" in words_of(
        "docs/pages/language.md"
    )

    memory = [row["trainer_gib"] / row["loop_gib"] - 1 for row in rows_of("trainer_speed")]
    assert f"up to {100 * max(memory):.0f} % more memory than the loop" in words_of("docs/pages/results.md")

    files = [row for row in rows_of("files") if row["part"] == "whole" and "compile" not in row]
    shares = {decode: [100 * row["of_step"] for row in files if row["decode"] == decode] for decode in ("gpu", "cpu")}
    spans = {decode: f"{min(values):.0f} to {max(values):.0f} %" for decode, values in shares.items()}
    page = words_of("docs/pages/data.md")
    said = (
        f"eager models trained at {spans['gpu']} of the speed of their bare step with `gpu`, and at {spans['cpu']} with"
    )
    assert said in page
    told = before(find_later(script, "files", files))
    assert f"(../../benchmarks/README.md){told and ', '}{told}). There the processor" in page
    shares = [
        f"{100 * find_row('vim_recipe', decode=decode, gpus=gpus, updates=updates)['of_step']:.0f} %"
        for decode, gpus, updates in (
            ("cpu", 1, 200),
            ("cpu", 2, 200),
            ("cpu", 1, 104),
            ("gpu", 1, 104),
            ("cpu", 2, 104),
            ("gpu", 1, 200),
            ("gpu", 2, 200),
        )
    ]
    said = (
        "reached {} of the bare step with `cpu` on an H200, and {} of two bare steps on two of them with 32 cores. "
        "With 104 updates it was {} with `cpu` and {} with `gpu` on 16 cores and an H200, and {} of two bare steps "
        "with `cpu` on two H100s; with 200 and `gpu` {} on an H100 and {} on two ("
    )
    assert said.format(*shares) in page
    told = before(find_later(script, "vim_recipe", rows_of("vim_recipe")))
    assert f"[Vim's recipe on an ImageNet folder](../../benchmarks/README.md){told and ', '}{told})" in page


def find_later(script: Any, name: str, rows: Sequence[dict[str, Any]]) -> set[int]:
    table = script("table")
    kind = table.read(name)["kind"]
    return {number for row in rows for number in table.find_later_changes(row, kind, name)}


def listed(numbers: Iterable[int]) -> str:
    """Numbers as in a sentence: 24, 25 and 26."""
    *most, last = (str(number) for number in sorted(numbers))
    return f"{', '.join(most)} and {last}" if most else last


def before(numbers: set[int]) -> str:
    """What a sentence says of figures that changes made older; nothing if there were none."""
    return f"before change{'s' * (len(numbers) > 1)} {listed(numbers)}" if numbers else ""


def find_row(name: str, **wanted: Any) -> dict[str, Any]:
    (row,) = (row for row in rows_of(name) if all(row.get(key) == value for key, value in wanted.items()))
    return row


def test_comparisons_in_sentences_are_those_of_the_rows(script):
    page = words_of("docs/pages/results.md")
    top1 = {row["model"]: 100 * mean(row["test_top1"].values()) for row in rows_of("cifar10")}
    ahead = [
        top1[f"{name} without convolution"] - top1["attention"] for name in ("longhorn", "longhorn_exact", "mamba")
    ]
    said = "Longhorn, its exact form and Mamba are {:.1f} to {:.1f} points above attention then"
    assert said.format(min(ahead), max(ahead)) in page

    _, of_seeds, rounded = (row["test_top1"] for row in rows_of("digits_deltanet"))
    said = "rounding alone moves a run from {:.3f} to {:.3f}, and the standard deviation over seeds is {:.3f}"
    assert said.format(of_seeds["0"], max(rounded.values()), stdev(of_seeds.values())) in page

    recall = {row["mixer"]: row for row in rows_of("mqar_vla")}

    def find_distance(ours, other):
        cells = [(f"pairs={n}", n) for n in (4, 8, 16, 24, 32, 48)]
        return {n: mean(recall[other][cell].values()) - mean(recall[ours][cell].values()) for cell, n in cells}

    behind = find_distance("vla normalizer=false convolution_width=4", "deltanet")
    assert "as well it is within 0.03 of DeltaNet with its own up to 32 pairs." in page
    assert "With a convolution each, DeltaNet is ahead at 16 pairs and more; without one, VLA is from 24 on." in page
    assert max(behind[n] for n in (4, 8, 16, 24, 32)) <= 0.03 < behind[48]
    assert min(behind[n] for n in (16, 24, 32, 48)) > 0
    behind = find_distance("vla normalizer=false", "deltanet convolution_width=0")
    assert max(behind[n] for n in (24, 32, 48)) < 0 < behind[16]

    files, shards = (row["test_top1"] for row in rows_of("image_shards"))
    data_page = words_of("docs/pages/data.md")
    assert f"a test accuracy of {format_mean(files)} from the files, whose shorter side is" in data_page
    assert f"and {format_mean(shards)} from shards of `size=128`" in data_page
    assert "Scaled images train as well as the files, as far as three seeds tell" in data_page
    assert len(files) == len(shards) == 3
    spread = max(stdev(files.values()), stdev(shards.values()))
    assert abs(mean(files.values()) - mean(shards.values())) < spread

    by_cpu, by_gpu = (find_row("image_decoding", decode=decode)["test_top1"] for decode in ("cpu", "gpu"))
    said = "names the class of {} of 352 others with `cpu` and of {} with `gpu`, over six seeds"
    shown = (f"{mean(values.values()):.3f} ± {stdev(values.values()):.3f}" for values in (by_cpu, by_gpu))
    assert said.format(*shown) in data_page
    assert len(by_cpu) == len(by_gpu) == 6
    assert abs(mean(by_cpu.values()) - mean(by_gpu.values())) < min(stdev(by_cpu.values()), stdev(by_gpu.values()))

    language = [row for row in rows_of("trainer_speed") if "2,048 tokens" in row["run"]]
    shares = [100 * row["trainer_tokens_per_second"] / row["loop_tokens_per_second"] for row in language]
    said = "Language models of 340M and 1.3B parameters keep {:.0f} to {:.0f} % of the loop's speed."
    assert said.format(min(shares), max(shares)) in page


def test_speeds_in_sentences_are_those_of_the_rows(script):
    times, of_ours = [], []
    for op, variant, shape, digits in (
        ("delta_rule", "plain", "B=8 T=2048 H=16 K=128 V=128", 2),
        ("delta_rule", "plain", "B=1 T=65536 H=16 K=128 V=128", 1),
        ("linear_attention", "channel_gated", "B=8 T=2048 H=16 K=128 V=128", 2),
    ):
        for implementation in ("triton", "fla"):
            row = find_row("kernels", op=op, variant=variant, shape=shape, implementation=implementation)
            times.append([f"{row[key]:.{digits}f}" for key in ("forward_graph_ms", "both_graph_ms")])
            of_ours += [row] if implementation == "triton" else []
    (short, fla_short), (long, fla_long), (gated, fla_gated) = times[:2], times[2:4], times[4:]
    page = words_of("docs/pages/kernels.md")
    assert f"takes {short[0]} ms and with its gradient {short[1]} ms at 8 x 2,048 tokens, and {long[0]} and" in page
    told = before(find_later(script, "kernels", of_ours[:2]))
    told = f" (measured {told})" if told else ""
    assert f"and {long[0]} and {long[1]} ms at 1 x 65,536{told}, where" in page
    assert f"takes {fla_short[0]} and {fla_short[1]}, {fla_long[0]} and {fla_long[1]}; gated" in page
    assert not find_later(script, "kernels", of_ours[2:])
    assert f"takes {gated[0]} and {gated[1]}, and there {fla_gated[0]} and {fla_gated[1]} (CUDA graphs" in page

    ratios, used = [], []
    for pixels in (224, 512, 1024):
        models = {"model": "longseq_vit_small_patch16_224", "pixels": pixels}
        ours, attention = (find_row("image_models", **models, mixer=mixer) for mixer in ("deltanet", "attention"))
        ratios.append(f"{ours['training_images_per_s'] / attention['training_images_per_s']:.2f}")
        used += [ours, attention]
    told = before(find_later(script, "image_models", used))
    told = f", measured {told}" if told else ""
    assert f"(small: {ratios[0]}, {ratios[1]} and {ratios[2]} times attention's speed, eager{told})" in words_of(
        "docs/pages/results.md"
    )

    shares, used = [], []
    for size in ("small", "tiny"):
        for repeats in (3, 1):
            run = {"part": "whole", "decode": "gpu", "compile": "reduce-overhead", "repeats": repeats}
            used.append(find_row("files", model=f"longseq_vit_{size}_patch16_224", **run))
            shares.append(f"{100 * used[-1]['of_step']:.0f} %")
    said = (
        "`longseq_vit_small` with DeltaNet trains from files at {} of the speed of its bare step with three repeats "
        "and at {} with one, "
    )
    said += "`longseq_vit_tiny` at {} and {} ({})."
    last, others = (before(find_later(script, "files", rows)) for rows in (used[3:], used[:3]))
    told = f"the last one {last}" + (f", the others {others}" if others else "")
    assert said.format(*shares, told) in words_of("docs/pages/data.md")


@pytest.mark.slow
def test_the_bytes_that_a_layer_keeps_are_those_of_the_page(tmp_path):
    pytest.importorskip("triton")
    script = ROOT / "benchmarks" / "kept_bytes.py"
    done = subprocess.run(
        [sys.executable, script, "deltanet", "none"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    page = (ROOT / "docs" / "pages" / "results.md").read_text()
    table = page.split("python benchmarks/kept_bytes.py")[1].split("\n\n")[1]
    of_page = [line.split(" | ")[:2] for line in table.splitlines()[:3]]
    assert of_page == [line.removesuffix(" |").split(" | ") for line in done.stdout.splitlines()]


def test_pages_name_the_gpu_and_the_versions_on_which_kernels_ran():
    """A row of another GPU or of other versions changes the sentence."""
    ran, gpus = set(), set()
    for path in (ROOT / "benchmarks").glob("*.json"):
        for row in json.loads(path.read_text()).get("rows", ()):
            measured = row.get("measured", {})
            if measured.get("gpu") and "triton" in measured["versions"]:
                gpus.add(re.match(r"NVIDIA (\w+)", measured["gpu"])[1])
                ran.add(tuple(measured["versions"][name].rsplit(".", 1)[0] for name in ("torch", "triton")))
    ((torch_version, triton),) = ran
    named = " and ".join(f"{gpu}s" for gpu in sorted(gpus))
    said = f"ran, and were measured, on NVIDIA {named} with torch {torch_version} and Triton {triton}."
    for page in ("README.md", "docs/pages/kernels.md"):
        assert said in words_of(page), page


def test_the_page_of_kernels_tells_what_the_table_of_compilations_was_made_with():
    held = json.loads((ROOT / "benchmarks" / "compilations.json").read_text())
    triton, torch_version = (".".join(held["versions"][name].split(".")[:2]) for name in ("triton", "torch"))
    assert held["missing"] == 0
    said = f"With Triton {triton} and torch {torch_version} all of them compile and fit."
    assert said in words_of("docs/pages/kernels.md")
