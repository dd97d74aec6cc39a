"""`pytest -m fast` touches every folder, every operation and every mixer, and stays small."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from longseq import mixers
from longseq.kernels import list_ops
from longseq.kernels.dispatch import list_local_ops

TESTS = Path(__file__).parent


def test_every_folder_has_fast_tests(fast_cases: set[tuple[str, ...]]) -> None:
    count = Counter(Path(file).parts[1] for file, *_ in fast_cases)
    folders = {path.name for path in TESTS.iterdir() if any(path.glob("**/test_*.py"))}
    assert folders
    assert not {folder: count[folder] for folder in folders if count[folder] < 5}


@pytest.mark.parametrize(
    ("file", "test", "subjects"),
    [
        ("kernels/test_contracts.py", "test_forms_equal_the_recurrence", list_ops()),
        ("kernels/test_triton.py", "test_kernel_equals_the_recurrence", ["delta_rule"]),
        ("kernels/test_local.py", "test_the_torch_form_is_the_formula", list_local_ops()),
        ("mixers/test_contract.py", "test_every_mixer_keeps_every_law", mixers.mixer_names()),
    ],
)
def test_every_operation_and_mixer_has_fast_tests(
    file: str, test: str, subjects: list[str], fast_cases: set[tuple[str, ...]]
) -> None:
    assert not [subject for subject in subjects if (f"tests/{file}", test, subject) not in fast_cases]


def test_fast_tests_are_few(fast_cases: set[tuple[str, ...]]) -> None:
    assert 700 < len(fast_cases) < 1500
