"""The page of a report shows what the report says, whatever the report is like."""

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from base64 import b64encode
from collections.abc import Mapping
from contextlib import closing
from copy import deepcopy
from hashlib import sha256
from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from client_apps.account_page import account_page
from client_apps.app import app as client_app
from strategies.app import page_line, train
from strategies.report_page import page as pages
from strategies.report_page.page import PAGE_FILE, ReportError, read_report, render
from strategies.report_page.plots import (
    MOST_POINTS,
    Interval,
    axis_from_zero,
    interval_figure,
    linear_axis,
    log_axis,
    spread,
    thin,
    whole_number_axis,
)
from strategies.run.grid import InProcessGrid
from tests.support.examples.explained import SMALL, SMALL_SQL
from tests.support.examples.reports import small_report
from tests.support.files import ROOT, case_table
from tests.support.page_reading import Page
from tp_flower.query import Query
from tp_flower.reports.blocks import DARK, LIGHT, STYLES, Record, Table
from tp_flower.reports.records import RoundReport, report_dict, write_json
from tp_flower.settings import Settings

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
HOSTILE = "</svg><script>alert('x')</script>\"'&"
ODD = st.sampled_from([None, "", "x", -1, 1e400, True, [], {}, [None], {"a": None}])
DECIMALS = st.floats(-1e12, 1e12).filter(lambda x: x == 0 or abs(x) > 1e-12)
PROBE = ROOT / "tests" / "support" / "examples" / "page_probe.html"


def made_report(epochs=3, tables=("f", "p"), test_rows=7, **changes):
    """Return a report of two rounds per epoch whose figures follow from the epoch."""
    history = [{"round": 1, "epoch": 0, "phase": "extract", "overhead-bytes": 500}]
    for epoch in range(1, epochs + 1):
        history.append({"round": 2 * epoch, "epoch": epoch, "phase": "admm"})
        history.append({"round": 2 * epoch + 1, "epoch": epoch, "phase": "consensus"})
        for n, item in enumerate(history[-2:]):
            item["bytes-up"] = dict.fromkeys(tables, 1000 * (n + 1))
            item["bytes-down"] = dict.fromkeys(tables, 10)
            item |= {"server-seconds": 0.25, "client-seconds": 0.5, "wait-seconds": 1.0}
            item["site-seconds"] = {"north": 0.5, "south": 0.125}
        metrics = {"loss": 0.4 + 0.3 / epoch, "auc": 0.8 - 0.2 / epoch}
        history[-1]["train"] = metrics
        history[-1]["test"] = metrics if test_rows else {}
        history[-1]["residuals"] = {"primal": 2.0**-epoch, "dual": 0.1 * 2.0**-epoch}
    content = report_dict(small_report())
    base = content["tables"][0]
    content |= {
        "query": "SELECT f.late AS label, p.age FROM f JOIN p ON f.p = p.id",
        "history": history,
        "tables": [{**base, "table": name, "name": name} for name in tables],
        "joined-rows": {"train": 20, "test": test_rows},
        "totals": {},
        "epochs": epochs,
        "final": {part: history[-1].get(part, {}) for part in ("train", "test")},
        "contributions": {name: {"share": 1 / len(tables)} for name in tables},
    }
    return json.loads(json.dumps(content | changes))


def shown(report) -> Page:
    """The page of a report, as a browser reads it."""
    return Page(render(report))


CASES = case_table(__file__)
EXAMPLES = {
    "as usual": made_report(),
    "one epoch": made_report(epochs=1),
    "no test rows": made_report(test_rows=0),
    "200 epochs": made_report(epochs=200),
    "30 tables": made_report(tables=[f"a_table_{n}" for n in range(30)]),
    "failed": made_report(status="failed: site 'EWR' is gone", final={}),
    "failed at once": made_report(history=[], epochs=0, final={}, status="failed: x"),
    "coreset": made_report(
        chosen={"coreset": CASES["coreset"]}, warnings=["tau is 150"]
    ),
    "classes": made_report(**CASES["compared"]),
    "numbers": made_report(deciles=CASES["deciles"]),
    "thresholds": made_report(
        **CASES["compared"],
        deciles=CASES["compared-tenths"],
        curve=CASES["curve"],
        calibration={"slope": 0.5, "intercept": 0.25, "brier": 0.125},
    ),
    "nothing": {},
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_plot_has_its_data(name):
    for title, figure in shown(EXAMPLES[name]).figures.items():
        drawn = [*figure.points.values(), *figure.bars.values()]
        assert all(map(len, drawn)), title
        # a head and at least one row
        assert drawn
        assert len(figure.cells) >= 2
        width, height = map(float, figure.svg.attrib["viewBox"].split()[2:])
        assert title in figure.svg.attrib["aria-label"]
        for mark in figure.svg.iter("circle"):
            assert 0 <= float(mark.attrib["cx"]) <= width
            assert 0 <= float(mark.attrib["cy"]) <= height


def test_figures_are_those_of_the_report():
    report = EXAMPLES["as usual"]
    figures = shown(report).figures
    ended = [item for item in report["history"] if item.get("train")]
    for metric, title in (("auc", "AUC by epoch"), ("loss", "Loss by epoch")):
        expected = [(item["epoch"], item["test"][metric]) for item in ended]
        assert figures[title].points == {"test rows": expected, "train rows": expected}
    assert figures["Residuals by epoch"].points == {
        name: [(item["epoch"], item["residuals"][name]) for item in ended]
        for name in ("primal", "dual")
    }
    # costs are counted from the start of the run; an epoch: two tables,
    # (1000 + 2000) up and (10 + 10) down each; set-up: 500
    sent = [500 + 6040 * epoch for epoch in (1, 2, 3)]
    by_bytes = figures["Test AUC by megabytes sent"].points["test rows"]
    aucs = [item["test"]["auc"] for item in ended]
    assert by_bytes == [(size / 1e6, auc) for size, auc in zip(sent, aucs, strict=True)]
    by_time = figures["Test AUC by time"].points["test rows"]
    assert by_time == [(3.5 * epoch, auc) for epoch, auc in enumerate(aucs, 1)]
    bars = {title: figure.bars for title, figure in figures.items() if figure.bars}
    assert bars == CASES["charts"]


def test_labels_lie_beside_predictions():
    figure = shown(EXAMPLES["numbers"]).figures["Label against prediction"]
    pairs = [(group["predicted"], group["actual"]) for group in CASES["deciles"]]
    equal = [(predicted, predicted) for predicted, _ in pairs]
    assert figure.points == {"rows not trained on": pairs, "prediction = label": equal}


def test_calibration_has_its_intervals_to_scale():
    page = shown(EXAMPLES["thresholds"])
    figure = page.figures["Calibration"]
    groups = CASES["compared-tenths"]
    ends = [(group["low"], group["high"]) for group in groups]
    lines = [e for e in figure.svg.iter("line") if e.attrib["class"] == "reach"]
    found = [(float(e.attrib["y1"]), float(e.attrib["y2"])) for e in lines]
    heights = {
        float(e.attrib["data-y"]): e.attrib["cy"] for e in figure.svg.iter("circle")
    }
    values, places = np.array([(v, float(y)) for v, y in sorted(heights.items())]).T
    slope, start = np.polyfit(values, places, 1)
    np.testing.assert_allclose(found, start + slope * np.array(ends), atol=0.02)
    assert figure.cells[0][1:4] == ["rows not trained on", "low", "high"]
    assert ["0.2500", "0.3000", "0.1000", "0.6000", "0.2500"] in figure.cells
    assert "Brier score 0.1250" in page.text
    evaluated = EXAMPLES["thresholds"] | {"metrics": {"auc": 0.5}}
    assert "rows of the query" in shown(evaluated).figures["Calibration"].points


def test_curves_of_thresholds_are_those_of_the_report():
    page = shown(EXAMPLES["thresholds"])
    rows, chance = "rows not trained on", "at random"
    points = {title: figure.points for title, figure in page.figures.items()}
    diagonal = [(0.0, 0.0), (1.0, 1.0)]
    roc = [(0.0, 0.0), (0.5, 0.75), (1.0, 1.0)]
    assert points["ROC curve"] == {rows: roc, chance: diagonal}
    precision = {rows: [(0.75, 0.5), (1.0, 0.4)], chance: [(0.75, 0.4), (1.0, 0.4)]}
    assert points["Precision and recall"] == precision
    gains = [(0.0, 0.0), (0.6, 0.75), (1.0, 1.0)]
    assert points["Cumulative gains"] == {rows: gains, chance: diagonal}
    lift = {rows: [(0.6, 1.25), (1.0, 1.0)], chance: [(0.6, 1.0), (1.0, 1.0)]}
    assert points["Lift"] == lift
    assert "12 0.7500 0.6000 0.7500 0.5000 0.5000" in page.text
    # of one class, or of numbers, there are none
    assert "ROC" not in shown(EXAMPLES["classes"]).text


@CASES.each("commands", "mode", "model", "verbs")
def test_commands_repeat_the_run_and_go_on(mode, model, verbs):
    folder = "/my runs/it's $HOME;1"
    sql = "SELECT '\"a\\b\"'\nFROM é"
    chosen = Settings(sql=sql, l2=1e-5, progress=False, output_dir=folder)
    report = Record({"mode": mode, "model": model, "settings": chosen.to_dict()})
    written = tomllib.loads(pages.run_file(report))
    assert written == {"sql": sql, "l2": 1e-5, "progress": False}
    first, second, *others = map(shlex.split, pages.commands(report).lines)
    file = f"{folder}/{pages.RUN_FILE}"
    named = ["--set", f"model-name={model}"] if model else []
    assert first == ["tp-flower", mode, file]
    assert second == ["flwr", "run", ".", "--stream", "-c", file]
    assert others == [["tp-flower", verb, file, *named] for verb in verbs]


def test_drawings_are_to_scale():
    entries = [("age", -2.0), ("seats", 1.0)]
    named = [{"feature": n, "output": "score", "value": value} for n, value in entries]
    figures = shown(made_report(epochs=9, coefficients={"p": named})).figures
    dots = list(figures["Loss by epoch"].svg.iter("circle"))[:9]
    for place, value in (("cx", "data-x"), ("cy", "data-y")):
        at = np.diff([float(dot.attrib[place]) for dot in dots])
        of = np.diff([float(dot.attrib[value]) for dot in dots])
        # coordinates have two decimals
        assert at / of == pytest.approx(at[0] / of[0], rel=0.02, abs=2.0)
    bars = figures["Bytes by table and direction"].svg.iter("rect")
    shares = [float(bar.get("width")) / float(bar.get("data-value")) for bar in bars]
    assert shares == pytest.approx([shares[0]] * len(shares), rel=0.02)
    # negative values go to the left of zero
    figure = figures["Coefficients of p"]
    assert figure.bars == {"age": [-2.0], "seats": [1.0]}
    left, right = figure.svg.iter("rect")
    start = float(left.attrib["x"]) + float(left.attrib["width"])
    assert float(right.attrib["x"]) == pytest.approx(start, abs=0.01)


@pytest.mark.parametrize("ratio", ["", "odds ratio"])
def test_intervals_are_to_scale(ratio):
    given_ends = [(0.0, -1.0, 1.0), (1.5, 0.5, 2.5)]
    intervals = [Interval(f"x{n}", *ends) for n, ends in enumerate(given_ends)]
    figure = interval_figure("Intervals", intervals, ratio)
    drawing = ElementTree.fromstring(str(figure.svg))
    neutral, *lines = drawing.iter("line")
    places = {0.0: float(neutral.attrib["x1"])}
    for line, (_, low, high) in zip(lines, given_ends, strict=True):
        places |= {low: float(line.attrib["x1"]), high: float(line.attrib["x2"])}
    for dot, (value, _, _) in zip(drawing.iter("circle"), given_ends, strict=True):
        places[value] = float(dot.attrib["cx"])
    # the logarithms of ratios, and the values themselves, are on a line
    values, found = np.array(sorted(places.items())).T
    slope, start = np.polyfit(values, found, 1)
    np.testing.assert_allclose(found, start + slope * values, atol=0.02)
    assert slope > 0.0
    shown = [float(cell) for row in figure.table.rows for cell in row[1:]]
    ends = np.array(given_ends).ravel()
    np.testing.assert_allclose(shown, np.exp(ends) if ratio else ends, rtol=1e-3)
    assert interval_figure("none", []) is None


@settings(max_examples=40)
@given(count=st.integers(1, 5 * MOST_POINTS))
def test_a_long_line_is_thinned_evenly_to_its_ends(count):
    points = [point[0] for point in thin([(float(n), 0.0) for n in range(count)])]
    assert len(points) == min(count, MOST_POINTS)
    assert [points[0], points[-1]] == [0, count - 1]
    gaps = {b - a for a, b in pairwise(points)}
    assert max(gaps, default=1) - min(gaps, default=1) <= 1
    assert min(gaps, default=1) >= 1


def test_the_page_needs_nothing_else_and_its_links_lead_to_its_sections():
    html = render(EXAMPLES["as usual"])
    tags = Page(html).tags
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in tags}
    loading = {"src", "srcset", "xlink:href", "onload", "onclick"}
    assert not loading & {name for _, attributes in tags for name in attributes}
    assert not re.search(r"url\(|@import|https?:", html)
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(set(ids)) == len(ids)
    links = {attributes["href"] for _, attributes in tags if "href" in attributes}
    assert links == {f"#{name}" for name in ids}
    assert [attributes["id"] for tag, attributes in tags if tag == "section"] == [
        "result",
        "query-and-tables",
        "convergence",
        "time-and-bytes",
        "model",
        "privacy",
        "settings",
    ]
    # the query has a line per clause
    label, *lines = re.findall("<code>(.*?)</code>", html)
    assert label == "f.late"
    clauses = ["SELECT f.late AS label, p.age", "FROM f", "JOIN p ON f.p = p.id"]
    assert lines[:3] == clauses


@pytest.mark.parametrize("name", [*EXAMPLES, "account"])
def test_a_browser_may_apply_the_pages_style_and_nothing_else(name):
    """What would slip through the escaping of names is not run, loaded or sent."""
    if name == "account":
        html = account_page([], Table("Budgets", (), ()))
    else:
        html = render(EXAMPLES[name])
    tags = Page(html).tags
    (policy,) = [a["content"] for _, a in tags if "http-equiv" in a]
    (style,) = re.findall("(?s)<style>(.*?)</style>", html)
    digest = b64encode(sha256(style.encode()).digest()).decode()
    assert policy.split("; ") == [
        "default-src 'none'",
        f"style-src 'sha256-{digest}'",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    # before all that it is about
    assert [tag for tag, _ in tags][:4] == ["html", "head", "meta", "meta"]
    assert tags[3][1]["http-equiv"] == "Content-Security-Policy"
    # which it would forbid: a drawing's looks are attributes of SVG, and classes
    assert not [
        a for _, a in tags if "style" in a or any(n.startswith("on") for n in a)
    ]


def test_names_are_text():
    report = made_report(tables=(HOSTILE, "p"), status=HOSTILE, query=HOSTILE)
    report["settings"][HOSTILE] = HOSTILE
    report["history"][0]["phase"] = HOSTILE
    report["history"][1]["site-seconds"] = {HOSTILE: 1.0}
    report["coefficients"] = {HOSTILE: [{"feature": HOSTILE, "value": 1.0}]}
    report["output-dir"] = f"/runs/{HOSTILE}"
    page = shown(report)
    assert "script" not in {tag for tag, _ in page.tags}
    assert page.text.count("alert('x')") >= 10


def test_status_of_a_failed_run_is_at_the_top():
    page = shown(EXAMPLES["failed"])
    assert ("p", {"class": "failure", "role": "alert"}) in page.tags
    assert "failed: site 'EWR' is gone" in page.text
    # the last epoch stands for the model that was not finished
    assert "Test AUC" not in shown(EXAMPLES["failed at once"]).text
    assert "AUC 0.7333" in page.text


@CASES.each("sentences", "name")
def test_what_a_run_was_is_said(name):
    text = shown(EXAMPLES[name]).text
    for sentence in CASES["sentences"][name]:
        assert sentence in text
    assert ("Who draws" in text) == (name == "coreset")


@settings(max_examples=10, derandomize=True)
@given(st.data())
def test_any_part_may_be_missing_or_odd(data):
    report = made_report(epochs=2)
    for _ in range(data.draw(st.integers(1, 6))):
        place: object = report
        while True:
            keys = list(place) if isinstance(place, Mapping) else range(len(place))
            key = data.draw(st.sampled_from(list(keys)))
            inner = place[key]
            is_whole = not isinstance(inner, dict | list) or not inner
            if is_whole or data.draw(st.booleans()):
                break
            place = inner
        place[key] = deepcopy(data.draw(ODD))
    for figure in shown(report).figures.values():
        assert figure.points or figure.bars


def test_a_run_that_fails_midway_has_a_page(tmp_path):
    def fail(report: RoundReport) -> None:
        if report.epoch == 2 and report.train:
            raise RuntimeError("no space left")

    chosen = Settings(seed=1, test_fraction=0.4)
    with (
        closing(InProcessGrid(client_app, SMALL)) as grid,
        pytest.raises(RuntimeError, match="no space left"),
    ):
        train(Query.from_sql(SMALL_SQL), chosen, fail, grid, tmp_path)
    page_line(tmp_path)
    page = Page((tmp_path / PAGE_FILE).read_text())
    assert "failed: no space left" in page.text
    figure = page.figures["Loss (1/2 squared error) by epoch"]
    assert len(figure.points["test rows"]) == 2


def test_a_page_that_cannot_be_written_is_only_said(tmp_path):
    write_json(made_report(), tmp_path)
    (tmp_path / PAGE_FILE).mkdir()
    assert page_line(tmp_path).startswith("report.html could not be written: ")
    (tmp_path / PAGE_FILE).rmdir()
    assert page_line(tmp_path).endswith(f"\nPage: {tmp_path / PAGE_FILE}")


@pytest.mark.parametrize("content", ["{", "[" * 100_000, "[1]", "{}"])
def test_what_is_no_report_is_refused(tmp_path, content):
    (tmp_path / "report.json").write_text(content)
    is_json = content.endswith(("]", "}"))
    message = "is not the report of a run" if is_json else "cannot be read"
    with pytest.raises(ReportError, match=message):
        read_report(tmp_path)


@pytest.mark.parametrize(
    ("fit", "numbers", "least", "most"),
    [
        (linear_axis, DECIMALS, 2, 9),
        (axis_from_zero, DECIMALS, 2, 9),
        (log_axis, st.floats(1e-30, 1e30), 2, 12),
        (whole_number_axis, st.integers(0, 5500), 1, 9),
    ],
)
@settings(max_examples=40)
@given(data=st.data())
def test_an_axis_holds_its_values_and_few_ticks(fit, numbers, least, most, data):
    values = data.draw(st.lists(numbers, min_size=1, max_size=5))
    scale = fit(values)
    assert all(-1e-6 <= scale.at(value) <= 1 + 1e-6 for value in values)
    ticks = [tick for tick, _ in scale.ticks]
    assert least <= len(ticks) <= most
    assert ticks == sorted(ticks)
    assert len({label for _, label in scale.ticks}) == len(ticks)
    if fit is whole_number_axis:
        assert all(tick == int(tick) for tick in ticks)
    if fit in (linear_axis, axis_from_zero):
        assert ticks[0] == scale.low
        assert ticks[-1] == scale.high


@settings(max_examples=40)
@given(st.lists(st.floats(0, 200), max_size=9))
def test_labels_do_not_lie_on_each_other(heights):
    placed = spread(sorted(heights), 13.0, 200.0)
    assert all(b - a >= 13 - 1e-9 for a, b in pairwise(placed))
    assert max(placed, default=0.0) <= 200


def luminance(colour: str) -> float:
    """Return the relative luminance of WCAG 2."""
    parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_lines_stand_out_from_the_background(palette):
    colours = dict(re.findall(r"--(\w+): (#\w{6})", palette))
    behind = luminance(colours["bg"]) + 0.05
    for n in range(1, STYLES + 1):
        ratio = (luminance(colours[f"s{n}"]) + 0.05) / behind
        assert max(ratio, 1 / ratio) >= 3, n


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_a_browser_shows_it_at_the_width_of_a_phone(tmp_path):
    html = render(made_report(epochs=12))
    page = tmp_path / "page.html"
    probe = tmp_path / "probe.html"
    page.write_text(html)
    probe.write_text(PROBE.read_text().replace("PAGE", page.as_uri()))
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    command = [CHROMIUM, *CASES["chromium"], profile, "--dump-dom", probe.as_uri()]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=300
    )
    output = re.search(r"FOUND(.*?)END", done.stdout)
    assert output, done.stderr[-500:]
    for view in json.loads(output[1]):
        assert view["overflow"] <= 0
        assert view["plots"] == len(Page(html).figures)
        assert view["outside"] == []
        assert min(view["sizes"]) >= 10
        assert view["requests"] == 0
