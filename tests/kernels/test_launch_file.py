"""Measured launches from a file: which the kernels take, and which they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from longseq import kernels
from longseq.kernels import triton_launch
from longseq.kernels.triton_launch import Launch, fit_launches

BEST = {"block": 128, "step": 32, "warps": 8, "stages": 3, "registers": 168}


@pytest.fixture
def table():
    return {(2, 64): {"prepare": Launch(64, 0, 4, 1), "advance": Launch(32, 0, 4, 1)}}


@pytest.fixture
def name_file(monkeypatch, tmp_path):
    """Writes a file of launches measured on a GPU like the one here, and names it in the environment."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(triton_launch, "longseq_shared_memory", lambda *device: 227 * 1024)

    def write(*rows):
        file = tmp_path / "launches.json"
        file.write_text(json.dumps({"launches": rows, "rows": [], "runs": [{"gpu": "H200"}]}))
        monkeypatch.setenv("LONGSEQ_LAUNCHES", str(file))
        return file

    return write


def row(**changes):
    place = {"op": "delta_rule", "capability": [9, 0], "bytes": 2, "width": 64, "kernel": "prepare"}
    return {**place, "launch": BEST, "run": 0, **changes}


def test_without_a_file_the_table_stays(monkeypatch, table):
    monkeypatch.delenv("LONGSEQ_LAUNCHES", raising=False)
    before = {key: dict(launches) for key, launches in table.items()}
    fit_launches("delta_rule", table)
    assert table == before


def test_a_gpu_with_little_shared_memory_has_fewer_stages(monkeypatch):
    monkeypatch.setattr(triton_launch, "longseq_shared_memory", lambda *device: 99 * 1024)
    tables = {(2, width): {"walk": Launch(64, 0, 4, 3, 168), "score": Launch(64, 0, 4, 1)} for width in (128, 256)}
    fit_launches("delta_rule", tables)
    assert [tables[2, 128][name].stages for name in ("walk", "score")] == [2, 1]
    assert tables[2, 256] == {"walk": Launch(64, 0, 4, 1, 168), "score": Launch(64, 0, 4, 1)}


def test_an_operation_takes_its_own_rows(name_file, table):
    name_file(row(), row(op="linear_attention", kernel="scan"))
    fit_launches("delta_rule", table)
    assert table == {(2, 64): {"prepare": Launch(128, 32, 8, 3, 168), "advance": Launch(32, 0, 4, 1)}}


@pytest.mark.parametrize("change", [{"kernel": "rest"}, {"width": 512}, {"bytes": 4}])
def test_rows_of_no_kernel_are_refused(name_file, table, change):
    name_file(row(**change))
    with pytest.raises(ValueError, match="which delta_rule does not launch: measure again with `longseq benchmark"):
        fit_launches("delta_rule", table)


def test_a_gpu_takes_the_rows_of_its_family(name_file, table):
    other = {**BEST, "warps": 16}
    name_file(row(), row(capability=[8, 0], launch=other), row(capability=[8, 0], kernel="advance", launch=other))
    fit_launches("delta_rule", table)
    assert table == {(2, 64): {"prepare": Launch(128, 32, 8, 3, 168), "advance": Launch(32, 0, 4, 1)}}


def test_where_other_operations_alone_were_measured_the_table_stays(name_file, table):
    name_file(row(op="linear_attention"), row(capability=[8, 0], kernel="rest"))
    before = {key: dict(launches) for key, launches in table.items()}
    fit_launches("delta_rule", table)
    assert table == before


def test_a_file_of_other_gpus_is_refused(name_file, table):
    name_file(row(capability=[8, 0]), row(op="linear_attention", capability=None))
    words = r"GPUs of capability None and \[8, 0\], and this one has \[9, 0\]: unset it, or measure here"
    with pytest.raises(ValueError, match=words) as caught:
        fit_launches("delta_rule", table)
    assert "\n" not in str(caught.value)
    name_file()
    with pytest.raises(ValueError, match=r"was measured on no GPU, and this one has \[9, 0\]: unset it"):
        fit_launches("delta_rule", table)


OF_THE_HEAD = '{"capability": [9, 0], "launches": [{"op": "delta_rule"}], "rows": []}'


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"launches": []}', '{"launches": {}}', OF_THE_HEAD])
def test_a_file_of_another_kind_is_refused(name_file, table, content):
    name_file().write_text(content)
    with pytest.raises(
        ValueError, match=r"LONGSEQ_LAUNCHES=.*: write one with `longseq benchmark tune output="
    ) as caught:
        fit_launches("delta_rule", table)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"op": "delta_rule"}, " has no 'capability'"),
        ({"op": "delta_rule", "capability": None}, " has no 'bytes'"),
        (["delta_rule"], r" is \['delta_rule'\], but must be an object"),
        (row(launch=None), " has 'launch': None"),
        (row(width="64"), " has 'width': '64'"),
        (row(capability=9), " has 'capability': 9"),
        (row(capability=[9]), r" has 'capability': \[9\]"),
        (row(capability=["9", "0"]), r" has 'capability': \['9', '0'\]"),
        (row(run=1), " has 'run': 1, and there are 1"),
        (row(launch={"block": 64}), r"\.launch has no 'step'"),
        (row(launch={**BEST, "block": None}), r"\.launch has 'block': None"),
        (row(launch={**BEST, "block": 48}), r"\.launch has block=48, which is no power of two"),
        (row(launch={**BEST, "warps": 0}), r"\.launch has warps=0, which is no power of two"),
        (row(launch={**BEST, "waves": 2}), r"\.launch has 'waves', which no such launch has"),
        (row(op="linear_attention", launch={**BEST, "registers": "all"}), r"\.launch has 'registers': 'all'"),
    ],
)
def test_rows_with_something_missing_are_refused(name_file, table, wrong, words):
    file = name_file(row(), wrong)
    with pytest.raises(ValueError, match=rf"^LONGSEQ_LAUNCHES={file}, launches\[1\]{words}: write one with") as caught:
        fit_launches("delta_rule", table)
    assert "\n" not in str(caught.value)


def test_registers_may_be_left_out(name_file, table):
    name_file(row(launch={name: size for name, size in BEST.items() if name != "registers"}))
    fit_launches("delta_rule", table)
    assert table[2, 64]["prepare"] == Launch(128, 32, 8, 3)


WALK = {"entries": 4, "vector": 4, "tokens": 4, "registers": 255}


def test_walks_of_the_scans_come_from_a_file(interpreted, monkeypatch, name_file):
    from longseq.kernels.diagonal_scan.triton_scan import Walk

    monkeypatch.setattr(triton_launch, "longseq_shared_memory", lambda *device: 99 * 1024)  # of which walks have no use
    place = {"op": "diagonal_scan", "bytes": 4, "width": 16}
    tables = {(4, 16): dict.fromkeys(("forward", "backward"), Walk(8, 2, 4, 255))}
    name_file(row(**place, kernel="forward", launch={**WALK, "tokens": 16, "registers": None}))
    fit_launches("diagonal_scan", tables)
    assert tables == {(4, 16): {"forward": Walk(4, 4, 16, None), "backward": Walk(8, 2, 4, 255)}}

    for wrong, words in (
        ({"tokens": 8}, "tokens=8, of which 4 is no multiple"),
        ({"tokens": 0}, "tokens=0, of which 4 is no multiple"),
        ({"entries": 3}, "entries=3, which is no power of two"),
        ({"vector": -1}, "vector=-1, which is no power of two"),
        ({"vector": None}, "'vector': None"),
        ({"warps": 1}, "'warps', which no such launch has"),
    ):
        file = name_file(row(**place, kernel="backward", launch={**WALK, **wrong}))
        with pytest.raises(ValueError, match=rf"^LONGSEQ_LAUNCHES={file}, launches\[0\]\.launch has {words}: "):
            fit_launches("diagonal_scan", tables)
    assert tables[4, 16]["backward"] == Walk(8, 2, 4, 255)


def test_a_missing_file_is_refused(monkeypatch, table, tmp_path):
    monkeypatch.setenv("LONGSEQ_LAUNCHES", str(tmp_path / "absent.json"))
    with pytest.raises(ValueError, match=r"absent.json cannot be read"):
        fit_launches("delta_rule", table)


TABLES = [
    path for path in sorted(Path(kernels.__file__).parent.rglob("triton_*.py")) if "\nLAUNCHES" in path.read_text()
]


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_every_table_takes_measured_launches(path):
    assert f'\nfit_launches("{path.parent.name}", LAUNCHES)\n' in path.read_text()
