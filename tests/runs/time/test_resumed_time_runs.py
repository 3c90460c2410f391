"""Runs over rows up to a cutoff go on where their server was killed."""

import pytest

from strategies import STRATEGIES
from tests.support.examples.killed_servers import Killed, KilledGrid
from tests.support.federated import LocalGrid
from tests.support.tables.looking_back import GRID, SQL, shop, two_sites
from tp_flower.query import Query


def strategy_in(folder, **settings):
    own = {"num_epochs": 3, "device": "cpu", "output_dir": str(folder), **settings}
    return STRATEGIES["cg"](Query.from_sql(SQL), **own)


@pytest.mark.parametrize("how", [{"cutoff_grid": GRID}, {"sealed_cutoffs": True}])
def test_a_run_that_looks_back_goes_on(tmp_path, how):
    """Killed once cutoffs are sealed, about the extraction of rows, and in training."""
    sites = two_sites(shop(60, 300))
    whole = strategy_in(tmp_path / "run", **how)
    whole.start(LocalGrid(sites, state=tmp_path / "whole"))
    phases = [report.phase for report in whole.history]
    extract = phases.index("extract") + 1
    # with a grid, round 2 is that of the rows, too
    for at in sorted({2, -extract, extract, len(phases) - 2}):
        place = tmp_path / str(at)
        grid = KilledGrid(sites, state=place / "sites")
        grid.kill_at = at
        with pytest.raises(Killed):
            strategy_in(place, **how).start(grid)
        grid.kill_at = None
        resumed = strategy_in(place, resume=str(place), **how)
        resumed.start(grid)
        assert [report.phase for report in resumed.history] == phases
        assert resumed.report.final_train == whole.report.final_train
        assert resumed.report.final_test == whole.report.final_test
