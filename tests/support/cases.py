"""Many cases in one test, which names those that fail: for cases that take less time than pytest needs per test."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from longseq.kernels.operation import forget

Test = Callable[..., None]


def cases(names: str | tuple[str, ...], values: Iterable[Any] | Callable[..., Iterable[Any]]) -> Callable[[Test], Test]:
    """Run a test with each of the values, as `pytest.mark.parametrize` does, but as one test.

    `values` may be a function of other arguments of the test, by their names. The cases share the test's fixtures:
    changes by one case remain for the next. All cases run; the error names those that failed, and the first failure is
    its cause.
    """
    names = (names,) if isinstance(names, str) else names
    listed = values if callable(values) else list(values)

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def run(**arguments: Any) -> None:
            found = listed
            if callable(found):
                found = list(found(**{name: arguments[name] for name in inspect.signature(found).parameters}))
            assert found, "a test without a case tests nothing"
            failures: list[tuple[str, BaseException]] = []
            for value in found:
                case = dict(zip(names, value if len(names) > 1 else (value,), strict=True))
                forget()  # forget backends that an earlier case chose
                try:
                    test(**arguments, **case)
                except (Exception, pytest.fail.Exception) as error:
                    failures.append((", ".join(f"{name}={x!s:.80}" for name, x in case.items()), error))
            if failures:
                lines = [f"{case}: {type(error).__name__}: {error}" for case, error in failures]
                raise AssertionError(
                    "\n".join([f"{len(failures)} of {len(found)} cases failed:", *lines])
                ) from failures[0][1]

        signature = inspect.signature(test)
        assert set(names) <= signature.parameters.keys()
        kept = [parameter for name, parameter in signature.parameters.items() if name not in names]
        run.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return run

    return decorate
