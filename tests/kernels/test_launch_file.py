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
    monkeypatch.setattr(triton_launch, "shared_memory", lambda: triton_launch.SHARED_MEMORY)

    def write(*rows, capability=(9, 0)):
        file = tmp_path / "launches.json"
        file.write_text(json.dumps({"capability": capability, "launches": rows}))
        monkeypatch.setenv("LONGSEQ_LAUNCHES", str(file))
        return file

    return write


def row(**changes):
    return {"op": "delta_rule", "bytes": 2, "width": 64, "kernel": "prepare", "launch": BEST, **changes}


def test_without_a_file_the_table_stays(monkeypatch, table):
    monkeypatch.delenv("LONGSEQ_LAUNCHES", raising=False)
    before = {key: dict(launches) for key, launches in table.items()}
    fit_launches("delta_rule", table)
    assert table == before


def test_a_gpu_with_little_shared_memory_has_fewer_stages(monkeypatch):
    monkeypatch.setattr(triton_launch, "shared_memory", lambda: 99 * 1024)
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


def test_another_gpu_is_refused(name_file, table):
    name_file(row(), capability=(8, 0))
    with pytest.raises(ValueError, match=r"capability \[8, 0\], and this one has \[9, 0\]: unset it"):
        fit_launches("delta_rule", table)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"launches": []}', '{"launches": {}, "capability": null}'])
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
        ({"op": "delta_rule"}, " has no 'bytes'"),
        (["delta_rule"], r" is \['delta_rule'\], but must be an object"),
        (row(launch=None), " has 'launch': None"),
        (row(width="64"), " has 'width': '64'"),
        (row(launch={"block": 64}), r"\.launch has no 'step'"),
        (row(launch={**BEST, "block": None}), r"\.launch has 'block': None"),
        (row(launch={**BEST, "waves": 2}), r"\.launch has 'waves', which no launch has"),
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
