"""Estimates, errors, ratios, p and intervals of six joins are R's, to four digits."""

import tomllib
from pathlib import Path

import numpy as np
import pytest

from tests.support.examples.six_joins import examples

OF_R = tomllib.loads(Path(__file__).with_name("six_joins.toml").read_text("utf-8"))
"""What six_joins.R has printed, which says of what."""
DIGITS = 5e-5
"""Half of the fourth digit of a number that begins with a 1."""
FAR = 5.0
FAR_DIGITS = 1e-3
"""A p below 1e-6 moves by |z|^2 times as much as z, which has its four digits."""


def found_of(name: str, *, is_sharded: bool) -> dict[str, np.ndarray]:
    """Train on a join's tables, and return the statistics by R's names."""
    example = examples()[name]
    settings = {}
    if name == "absences":
        settings["loss"] = f"negative-binomial({OF_R[name]['dispersion'][0]})"
    model = example.fit(is_sharded=is_sharded, **settings)
    table = model.coefficients.set_index("column")
    features = [feature[2:] for feature in example.features]
    ratio = "z" if name in ("births", "policies", "absences", "relapses") else "t"
    names = {
        "coefficients": "coefficient",
        "errors": "standard_error",
        "ratios": ratio,
        "chances": "p",
        "low": "low",
        "high": "high",
    }
    found = {
        of_r: table.loc[features, ours].to_numpy(np.float64)
        for of_r, ours in names.items()
    }
    if name == "absences":
        likeliest = model.report["dispersion"]["likeliest"]
        found["dispersion"] = np.array([likeliest])
    return found


@pytest.mark.cases(
    "births-whole",
    "policies-sharded",
    "absences-whole",
    "costs-sharded",
    "homes-whole",
    "relapses-sharded",
)
@pytest.mark.parametrize("where", ["whole", "sharded"])
@pytest.mark.parametrize("name", OF_R)
def test_the_table_is_that_of_r(name, where):
    found = found_of(name, is_sharded=where == "sharded")
    of_r = {key: np.array(values) for key, values in OF_R[name].items()}
    assert found.keys() == of_r.keys()
    for key in of_r.keys() - {"chances"}:
        np.testing.assert_allclose(found[key], of_r[key], rtol=DIGITS, err_msg=key)
    is_small = np.abs(of_r["ratios"]) > FAR
    off = np.abs(found["chances"] / of_r["chances"] - 1.0)
    assert np.all(off < np.where(is_small, FAR_DIGITS, DIGITS)), off
