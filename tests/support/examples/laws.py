"""Laws of random cases: a few of them on every change, many by `--whole`."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy


def law(
    few: int, many: int, **drawn: SearchStrategy[object]
) -> Callable[[Callable[..., None]], Callable[[int], None]]:
    """Make a test of a function that checks one random case.

    The few cases are the same on every change.
    """

    def test_of(check: Callable[..., None]) -> Callable[[int], None]:
        @pytest.mark.cases("few")
        @pytest.mark.parametrize("examples", [few, many], ids=["few", "many"])
        def test(examples: int) -> None:
            settings(max_examples=examples)(given(**drawn)(check))()

        # not functools.wraps: pytest would ask for the arguments of the check
        test.__name__, test.__doc__ = check.__name__, check.__doc__
        test.__module__, test.__qualname__ = check.__module__, check.__qualname__
        return test

    return test_of
