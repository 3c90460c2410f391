"""The results page is what the committed file of the benchmark says."""

import re
from pathlib import Path

import pytest

from scripts.bench.report import results_page as results
from scripts.bench.report.results_page import (
    BEGIN,
    END,
    FOLDER,
    PAGE,
    README,
    render,
    summary,
    with_section,
)
from scripts.bench.results_file import (
    RESULTS_FILE,
    new_results,
    put_outcome,
    read_results,
)
from scripts.bench.runs import Check, Outcome
from scripts.bench.suites.methods import ADMM_CLAIM, SGD_CLAIM

PAGE_TEXT = PAGE.read_text(encoding="utf-8")


def test_nobody_edits_figures_by_hand() -> None:
    committed = read_results(FOLDER / RESULTS_FILE)
    expected = with_section(PAGE_TEXT, render(committed))
    assert expected == PAGE_TEXT, "run python scripts/bench/report/results_page.py"
    readme = README.read_text(encoding="utf-8")
    assert with_section(readme, summary(committed)) == readme


def test_every_image_is_there_and_none_is_left_over() -> None:
    section = PAGE_TEXT.partition(BEGIN)[2].partition(END)[0]
    named = {
        (PAGE.parent / path).resolve()
        for path in re.findall(r"!\[[^]]*\]\(([^)]+)\)", section)
    }
    assert named == set(FOLDER.glob("*.png"))
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in named)


def test_the_committed_file_is_small_and_without_paths() -> None:
    text = (FOLDER / RESULTS_FILE).read_text(encoding="utf-8")
    assert len(text) < 300_000
    assert str(Path.home()) not in text


def test_no_suite_of_the_committed_file_failed() -> None:
    assert read_results(FOLDER / RESULTS_FILE)["failed"] == {}


def test_only_the_text_between_the_markers_is_replaced() -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert with_section(page, "new") == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("no markers", "the page needs one"),
        (f"{BEGIN} {BEGIN} {END}", "the page needs one"),
        (f"{END} {BEGIN}", "stands before"),
    ],
)
def test_markers_are_needed(page: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_section(page, "new")


@pytest.mark.parametrize("content", [None, "text", '{"schema": 0}'])
def test_another_file_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    file = tmp_path / "other.json"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    with pytest.raises(SystemExit, match="2"):
        results.main([str(file)])
    assert f"'{file}' is no benchmark.json: " in capsys.readouterr().err
    assert PAGE.read_text(encoding="utf-8") == PAGE_TEXT


def run_of(title: str, epoch: int, seconds: float) -> dict[str, object]:
    curve = {"metric": [0.1] * 7}
    if not epoch:
        return {"title": title, "curve": curve}
    cost = {"bytes": 2_500_000, "communication-seconds": {"US-UK": seconds}}
    return {"title": title, "curve": curve, "epochs-to-1%": epoch, "to-1%": cost}


def test_methods_by_data_sets() -> None:
    data = {
        "title": "Made up",
        "metric": "auc",
        "reference": 0.8,
        "methods": {
            "admm": run_of("TP-ADMM", 2, 1.25),
            "sgd": run_of("TP-SGD", 1, 14.0),
            "gd": run_of("GD", 0, 0.0),
        },
    }
    checks = {
        f"Made up: {ADMM_CLAIM}": {"measured": 1.0, "is-met": True},
        f"Made up: {SGD_CLAIM}": {"measured": 2.0, "is-met": False},
    }
    table = results.methods_table({"one": data}, checks)
    assert table.head == ["", "Made up: test AUC >= 0.7920"]
    assert table.rows == [
        ["TP-ADMM", "2 epochs, 2.5 MB, 1.25 s"],
        ["TP-SGD", "1 epoch, 2.5 MB, 14 s"],
        ["GD", "not in 7 epochs"],
        [ADMM_CLAIM, "1 (tie)"],
        [SGD_CLAIM, "**2**"],
    ]


def test_a_missed_figure_is_bold() -> None:
    content = new_results()
    found = Outcome([Check("a", 0.5, 1.0, "s"), Check("b", float("inf"), 1.0)])
    put_outcome(content, "new-suite", found, 60.0)
    text = render(content)
    assert "**Suite new-suite** (`--suite new-suite`)" in text
    assert "| a | 0.5 s | 1 s |" in text
    assert "| b | **-** | 1 |" in text
