"""Candidates of a search: the product of a grid, or samples of distributions.

A grid has, by setting, a list of values, and a list of grids all candidates of each. A
text of a command has one grid: ``"l2 = 0.01, 0.1; leaves = 15, 31"``. A distribution
stands in the place of a list: a text such as ``"log(1e-4, 1)"``, or an object with a
method ``rvs``, as those of scipy.stats have.
"""

import itertools
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeAlias

import numpy as np

from tp_flower.errors import SettingsError
from tp_flower.randomness import Stream, generator
from tp_flower.settings.run_config import read_override

Grid: TypeAlias = Mapping[str, Any]
Candidates: TypeAlias = list[dict[str, Any]]

_DISTRIBUTION: Final = re.compile(r"(uniform|log|int)\(\s*([^,()]+),\s*([^,()]+)\)")
_FORMS: Final = '"uniform(a, b)", "log(a, b)", "int(a, b)"'
MOST_TRIES: Final = 100
"""Samples for each candidate, before the distributions count as too narrow."""


def grid_candidates(grids: Grid | Sequence[Grid]) -> Candidates:
    """Return every combination of the values of a grid, or of several grids.

    >>> grid_candidates({"l2": [0.1, 1.0], "num_epochs": [5]})
    [{'l2': 0.1, 'num_epochs': 5}, {'l2': 1.0, 'num_epochs': 5}]

    Raises:
        SettingsError: a setting has a distribution, or no values.
    """
    candidates = []
    for grid in _list(grids):
        for name, values in grid.items():
            if _is_distribution(values) or not _values(values):
                raise SettingsError(
                    f"{name}: {values!r} is no list of values, as a grid has them; a "
                    "search of random candidates says how many it tries"
                )
        columns = map(_values, grid.values())
        rows = itertools.product(*columns)
        candidates += [dict(zip(grid, row, strict=True)) for row in rows]
    return _distinct(candidates)


def random_candidates(
    grids: Grid | Sequence[Grid], count: int, seed: int
) -> Candidates:
    """Return distinct random candidates, each of one of the grids.

    >>> random_candidates({"l2": [0.1, 1.0], "leaves": "int(3, 4)"}, 2, seed=0)
    [{'l2': 0.1, 'leaves': 3}, {'l2': 1.0, 'leaves': 4}]

    Raises:
        SettingsError: there are not so many, or a distribution is none.
    """
    rng = generator(seed, Stream.CANDIDATES)
    listed = _list(grids)
    candidates: Candidates = []
    for _ in range(MOST_TRIES * count):
        grid = listed[int(rng.integers(len(listed)))]
        candidate = {name: _sample(name, of, rng) for name, of in grid.items()}
        if candidate not in candidates:
            candidates.append(candidate)
        if len(candidates) == count:
            return candidates
    raise SettingsError(
        f"there are not {count} different candidates: try fewer, or more values"
    )


def read_candidates(texts: Sequence[str], count: int, seed: int) -> Candidates:
    """Return the candidates of a command's grids: all, or so many random ones.

    >>> read_candidates(["l2=0.1,1", "strategy=boost"], 0, seed=0)
    [{'l2': 0.1}, {'l2': 1}, {'strategy': 'boost'}]
    """
    if not texts:
        return []
    grids = [read_grid(text) for text in texts]
    return random_candidates(grids, count, seed) if count else grid_candidates(grids)


def read_grid(text: str) -> dict[str, Any]:
    """Return the grid of a text, by setting its values or its distribution.

    Values are separated by commas; a list in brackets has values with commas.

    >>> read_grid('l2=0.01, 1; hidden-sizes=["16,8", "32"]; rho=log(0.1, 10)')
    {'l2': [0.01, 1], 'hidden-sizes': ['16,8', '32'], 'rho': 'log(0.1, 10)'}
    """
    return dict(_read_values(part) for part in text.split(";") if part.strip())


def _read_values(text: str) -> tuple[str, Any]:
    name, equals, values = (part.strip() for part in text.partition("="))
    if not (name and equals and values):
        raise SettingsError(
            f"--grid {text.strip()!r}: write key=value, value, such as l2=0.01,0.1,1"
        )
    if _DISTRIBUTION.fullmatch(values):
        return name, values
    if values.startswith("["):
        try:
            return name, tomllib.loads(f"values = {values}")["values"]
        except ValueError:
            raise SettingsError(f"--grid {name}: {values} is no list") from None
    items = (item.strip() for item in values.split(","))
    return name, [read_override(f"{name}={item}")[1] for item in items]


def _list(grids: Grid | Sequence[Grid]) -> Sequence[Grid]:
    listed = [grids] if isinstance(grids, Mapping) else list(grids)
    if not listed or not all(isinstance(grid, Mapping) for grid in listed):
        raise SettingsError(
            "a grid is a dictionary of settings to lists of values, or a list of such"
        )
    return listed


def _values(values: Any) -> Sequence[Any]:
    """Return the values of a setting; a lone value, which may be a text, is one."""
    if isinstance(values, str | bool | int | float):
        return [values]
    return [
        value.item() if isinstance(value, np.generic) else value for value in values
    ]


def _plain(value: Any) -> Any:
    """Return a number of numpy as Python's."""
    return value.item() if isinstance(value, np.generic) else value


def _is_distribution(values: Any) -> bool:
    is_text = isinstance(values, str) and bool(_DISTRIBUTION.fullmatch(values))
    return is_text or hasattr(values, "rvs")


def _sample(name: str, values: Any, rng: np.random.Generator) -> Any:
    """Return a value of a list, or of a distribution."""
    if hasattr(values, "rvs"):
        return _plain(values.rvs(random_state=rng))
    if not _is_distribution(values):
        listed = _values(values)
        return listed[int(rng.integers(len(listed)))]
    kind, low, high = _read_distribution(name, values)
    if kind == "int":
        return int(rng.integers(int(low), int(high), endpoint=True))
    if kind == "log":
        return float(math.exp(rng.uniform(math.log(low), math.log(high))))
    return float(rng.uniform(low, high))


def _read_distribution(name: str, text: str) -> tuple[str, float, float]:
    """Return the kind of a distribution and its ends."""
    match = _DISTRIBUTION.fullmatch(text)
    with suppress(ValueError):
        if match is not None:
            low, high = float(match[2]), float(match[3])
            if low < high and (match[1] != "log" or low > 0.0):
                return match[1], low, high
    raise SettingsError(f"{name}: {text!r} is not one of {_FORMS} with a < b")


def _distinct(candidates: Candidates) -> Candidates:
    """Return the candidates, each once; their values may have no hash."""
    seen: Candidates = []
    for candidate in candidates:
        if candidate not in seen:
            seen.append(candidate)
    return seen
