"""Rows of csv and tsv files, also where a quotation mark closes no cell."""

import csv
import io
import random

import pytest

from longseq.tasks.text.delimited import PARTED, read_rows

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


QUOTED = {
    ",": [
        "".join(f"line {number}, of a poem\n" for number in range(10)) + "the end",
        "".join(f"line {number}, of a song\n" for number in range(15)) + 'he said "ah", and so on',
    ],
    "\t": [
        "Name:\tGood film\nwas a great one",
        "name\tGood film\nscore\t7 of 10\nwas a bad one",
        "Name:\tGood film\nscore\t7 of 10\nwas one",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("order", [("label", "text"), ("text", "label")])
@pytest.mark.parametrize("places", [(0, 1, 2), (5, 9, 30), (20, 21, 199)])
@pytest.mark.parametrize("delimiter", [",", "\t"])
def test_a_quoted_text_of_lines_with_delimiters_is_one_cell(
    delimiter: str, places: tuple[int, ...], order: tuple[str, str]
) -> None:
    """As pandas writes it, at any place of a file."""
    texts = [f"word {row}" for row in range(200)]
    for place, text in zip(places, QUOTED[delimiter], strict=False):
        texts[place] = text
    rows = [{"label": "ab"[row % 2], "text": text} for row, text in enumerate(texts)]
    file = io.StringIO(newline="")
    csv.writer(file, delimiter=delimiter).writerows([[row[name] for name in order] for row in rows])
    found = list(read_rows(io.StringIO(delimiter.join(order) + "\n" + file.getvalue(), newline=""), delimiter))
    assert [row.cells for row in found] == [list(order), *([row[name] for name in order] for row in rows)]
    assert not any(row.doubt == PARTED for row in found)


@pytest.mark.slow
def test_a_file_of_one_quoted_text_is_one_row() -> None:
    poem = "".join(f"line {number}, of a poem\n" for number in range(30))
    good, malformed = read(f'text,author\n"{poem}",me\n', ",")
    assert [cells for _, cells in good] == [["text", "author"], [poem, "me"]]
    assert not malformed


@pytest.mark.slow
@pytest.mark.parametrize("rows", [range(1), range(20), range(40, 200)], ids=["first", "before", "behind"])
@pytest.mark.parametrize("delimiter", [",", "\t"])
def test_rows_among_two_stray_marks_are_told_by_their_labels(delimiter: str, rows: range) -> None:
    """The mark that opens stands in one of `rows`, that which closes in a later one."""
    lines = rows_of(delimiter)
    first = rows[-1] - 15 if len(rows) > 100 else rows[-1]
    lines[first], lines[first + 14] = f'a{delimiter}"word\n', f'a{delimiter}word"\n'
    found = list(read_rows([f"label{delimiter}text\n", *lines], delimiter))
    assert len(found) == 201
    assert [row.line for row in found if row.doubt == PARTED] == [first + 2]
    assert [row.line for row in found if row.malformed] == ([first + 2] if delimiter == "," else [])


@pytest.mark.slow
@pytest.mark.parametrize("where", [3, 35], ids=["before", "behind"])
def test_rows_among_two_stray_marks_are_told_by_other_stray_marks(where: int) -> None:
    """Where no two rows have a cell in common, and a file of tabs has marks that are not quoted."""
    lines = [f"{row}th\tword {row}\n" for row in range(40)]
    lines[10], lines[30] = '10th\t"word 10\n', '30th\tword 30"\n'
    assert len(list(read_rows(["place\ttext\n", *lines], "\t"))) == 21
    lines[where] = f'{where}th\ta 12" disc\n'
    found = list(read_rows(["place\ttext\n", *lines], "\t"))
    assert [row.cells for row in found[1:]] == [line.rstrip().split("\t") for line in lines]
    assert [row.line for row in found if row.doubt == PARTED] == [12]


def numbered(numbers: list[int], strays: dict[int, int], columns: tuple[str, str] = ("number", "text")) -> list[str]:
    """The lines of a csv of numbers and texts, with stray marks in the rows of the keys of `strays` and the values."""
    texts = [f"word {row}" for row in range(len(numbers))]
    for start, stop in strays.items():
        texts[start], texts[stop] = f'"word {start}', f'word {stop}"'
    rows = ({"number": str(number), "text": text} for number, text in zip(numbers, texts, strict=True))
    return [",".join(columns) + "\n", *(",".join(row[name] for name in columns) + "\n" for row in rows)]


@pytest.mark.parametrize("columns", [("number", "text"), ("text", "number")])
def test_rows_that_a_column_numbers_are_told_by_their_numbers(columns: tuple[str, str]) -> None:
    """Where no two rows have a cell in common: as one text, they would leave out numbers."""
    strays = {5: 25, 40: 41, 60: 90}
    found = list(read_rows(numbered(list(range(7, 107)), strays, columns), ","))
    assert [(row.line, row.malformed, row.doubt) for row in found if row.malformed] == [
        (row + 2, STRAY, PARTED) for row in strays
    ]
    good = [dict(zip(columns, row.cells, strict=True)) for row in found[1:] if not row.malformed]
    assert [int(row["number"]) for row in good] == [row + 7 for row in range(100) if row not in strays]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("numbers", "start", "stop", "is_told"),
    [
        (list(range(40)), 0, 20, True),
        (list(range(40)), 25, 39, False),  # a table may count on from its row, and no row behind contradicts
        ([row * 3 for row in range(40)], 10, 12, True),
        ([row * 5 + row % 3 for row in range(60)], 20, 40, True),
        ([row * 5 + row % 3 for row in range(60)], 20, 22, False),
        (list(range(20)) + list(range(70, 110)), 25, 45, False),
        (list(range(60, 0, -1)), 20, 40, False),
    ],
    ids=["first", "last", "few", "uneven", "few uneven", "gap", "down"],
)
def test_numbers_tell_rows_where_they_leave_no_choice(numbers: list[int], start: int, stop: int, is_told: bool) -> None:
    found = list(read_rows(numbered(numbers, {start: stop}), ","))
    assert [row.line for row in found if row.doubt == PARTED] == ([start + 2] if is_told else [])
    assert len(found) == len(numbers) + 1 - (0 if is_told else stop - start)


@pytest.mark.slow
@pytest.mark.parametrize("delimiter", [",", "\t"])
def test_a_table_of_numbers_in_a_quoted_text_is_one_cell(delimiter: str) -> None:
    """Also one that counts on from the number of its row, as pandas writes it."""
    generator = random.Random(0)
    for _ in range(500):
        rows = []
        number = generator.randrange(2000)
        step = generator.choice([1, 1, 9, 30])
        for row in range(generator.randrange(3, 60)):
            text = f"word {row}"
            if generator.random() < 0.2:
                start = generator.choice([0, 1, number, number + 1, number + step, 1990])
                values = range(start, start + step * generator.randrange(2, 25), generator.randint(1, step))
                text = generator.choice(["", "Here it is:\n"])
                text += "\n".join(f"{value}{delimiter}value {value}" for value in values)
            rows.append([str(number), text])
            number += generator.randint(1, step)
        file = io.StringIO(newline="")
        csv.writer(file, delimiter=delimiter).writerows([["number", "text"], *rows])
        good, malformed = read(file.getvalue(), delimiter)
        assert [cells for _, cells in good[1:]] == rows
        assert not malformed


@pytest.mark.slow
def test_a_stray_mark_that_a_cell_of_another_column_closes_is_told_by_the_count_of_cells() -> None:
    lines = [f"word {row},{row}\n" for row in range(40)]
    lines[10], lines[30] = '"word 10,10\n', 'word 30,30"\n'
    good, malformed = read("text,number\n" + "".join(lines), ",")
    assert len(good) == 40
    assert malformed == [(12, STRAY)]


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
