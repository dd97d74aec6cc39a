"""Rows of csv and tsv files."""

import csv
import random
from pathlib import Path

import pytest

from longseq.tasks.text.delimited import DELIMITERS, read_rows


@pytest.mark.parametrize("ending", [".csv", ".tsv"])
def test_quoted_cells_are_read_as_they_were_written(tmp_path: Path, ending: str) -> None:
    """Also those with delimiters, quotation marks and ends of lines."""
    generator = random.Random(0)
    letters = ["a", "b", " ", '"', ",", "\t", "\n", "\r\n", "ä", "'", "\\"]
    cells = [["".join(generator.choices(letters, k=generator.randrange(9))) for _ in range(3)] for _ in range(1000)]
    path = tmp_path / f"rows{ending}"
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter=DELIMITERS[ending]).writerows(cells)
    assert [row for _, row in read_rows(path)] == cells


def test_a_row_has_the_line_at_which_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes('\ufefflabel,text\r\n\r\na,"Dear Sir,\nyours, Bob"\nb,a 12" disc\n'.encode())
    assert list(read_rows(path)) == [
        (1, ["label", "text"]),
        (4, ["a", "Dear Sir,\nyours, Bob"]),
        (5, ["b", 'a 12" disc']),
    ]


def test_a_cell_may_be_long(tmp_path: Path) -> None:
    path = tmp_path / "rows.TSV"
    path.write_text("text\n" + "word " * 100_000 + "\n")
    assert [len(cells[0]) for _, cells in read_rows(path)] == [4, 500_000]


@pytest.mark.parametrize("text", ['a,"word" 1\nb,c\n', 'a,"word 1\nb,c\n'], ids=["closed inside", "not closed"])
def test_a_stray_quotation_mark_is_an_error_with_file_and_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("label,text\nb,c\n" + text)
    with pytest.raises(ValueError, match=r"rows\.csv, line 3: "):
        list(read_rows(path))
