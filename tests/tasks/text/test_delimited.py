"""Rows of csv and tsv files, also where a quotation mark closes no cell."""

import csv
import io
import random

import pytest

from longseq.tasks.text.delimited import read_rows

STRAY = "a quotation mark that closes no cell: write it twice inside a cell"


def read(text: str, delimiter: str) -> tuple[list[tuple[int, list[str]]], list[tuple[int, str]]]:
    rows = list(read_rows(io.StringIO(text, newline=""), delimiter))
    good = [(row.line, row.cells) for row in rows if row.malformed is None]
    return good, [(row.line, row.malformed) for row in rows if row.malformed is not None]


@pytest.mark.parametrize("delimiter", [",", "\t"])
def test_rows_are_those_of_the_standard_library(delimiter: str) -> None:
    generator = random.Random(0)
    letters = ["a", "b", " ", '"', ",", "\n", "\r\n", "ä", "'", "\\"]
    for _ in range(300):
        cells = [["".join(generator.choices(letters, k=generator.randrange(9))) for _ in range(3)] for _ in range(6)]
        file = io.StringIO(newline="")
        csv.writer(file, delimiter=delimiter).writerows(cells)
        good, malformed = read(file.getvalue(), delimiter)
        assert [row for _, row in good] == cells
        assert not malformed


def rows_of(delimiter: str) -> list[str]:
    return [f"{'ab'[number % 2]}{delimiter}word {number}\n" for number in range(200)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("opened in two texts", {20: '"word 20', 150: '"word 150'}),
        ("closed at the end of a later text", {20: '"word 20', 150: 'word 150"'}),
        ("opened in the last text", {199: '"word 199'}),
        ("closed inside a text", {7: '"word" 7'}),
    ],
)
@pytest.mark.parametrize("delimiter", [",", "\t"])
def test_a_stray_quotation_mark_costs_its_own_row_at_most(delimiter: str, name: str, text: dict[int, str]) -> None:
    lines = rows_of(delimiter)
    for row, cell in text.items():
        lines[row] = f"a{delimiter}{cell}\n"
    good, malformed = read(f"label{delimiter}text\n" + "".join(lines), delimiter)
    found = {line - 2: cells[1] for line, cells in good[1:]}
    whole = {row: f"word {row}" for row in range(200)}
    if delimiter == "\t":  # such files are often written without quotation
        assert found == whole | text
        assert not malformed
    else:
        opened = [row for row, cell in text.items() if cell.startswith('"')]
        assert malformed == [(row + 2, STRAY) for row in opened]
        assert found == {row: text.get(row, cell) for row, cell in whole.items() if row not in opened}


def test_a_ragged_row_among_swallowed_ones_hides_none_of_them() -> None:
    lines = rows_of("\t")
    lines[20], lines[90], lines[150] = 'a\t"word 20\n', "\nno tab\n", 'a\tword 150"\n'
    good, _ = read("label\ttext\n" + "".join(lines), "\t")
    assert [cells for _, cells in good[1:]] == [line.strip().split("\t") for line in lines]


def test_a_text_of_several_lines_is_one_cell() -> None:
    text = '"Dear Sir, hello\nyours, Bob"'
    for rows in (f"label,text\na,{text}\nb,c\n", f"text,label\n{text},a\nc,b\n"):
        good, malformed = read(rows, ",")
        assert [len(cells) for _, cells in good] == [2, 2, 2]
        assert any("Dear Sir, hello\nyours, Bob" in cells for _, cells in good)
        assert not malformed
    good, malformed = read('text\n"one\ntwo\nthree"\nfour\n', "\t")
    assert [cells for _, cells in good] == [["text"], ["one\ntwo\nthree"], ["four"]]


def test_a_header_with_a_stray_quotation_mark_is_told() -> None:
    assert read('"text,label\none,a\n', ",")[1][0] == (1, STRAY)


def test_a_nul_outside_quotation_marks_is_a_letter() -> None:
    """Python 3.10's csv refuses it; later ones read it, also among quotation marks."""
    good, malformed = read("label,text\na,b\0c\n\0,d\n", ",")
    assert good == [(1, ["label", "text"]), (2, ["a", "b\0c"]), (3, ["\0", "d"])]
    assert not malformed
    good, malformed = read('label,text\na,"b\0,c"\nd,e\n', ",")
    assert good[-1] == (3, ["d", "e"])
    assert malformed in ([], [(2, "a NUL among quotation marks, which Python reads from 3.11 on")])
