"""Figures hold the numbers they were given. The run drawn here is made up: every number in it is invented."""

import itertools
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex
from matplotlib.image import imread

from cpbkit import quantities, texts
from cpbkit.config.experiment import vary
from cpbkit.config.presets import PRESETS
from cpbkit.data.klines import Gap, Passport, validate
from cpbkit.errors import DataError
from cpbkit.evaluation import verdicts
from cpbkit.evaluation.results import ResultLine, Running, relative
from cpbkit.evaluation.training_checks import Check, check_results
from cpbkit.evaluation.verdicts import Judgement
from cpbkit.views import palette, strip, style
from cpbkit.views.loss import loss_figure
from cpbkit.views.market import candle_figure, passport_figure
from cpbkit.views.panels import PANEL_X, PANEL_Y, Frame, SweepPicture, sweep_html
from cpbkit.views.strip import memory_html, strips, ticks
from cpbkit.views.tables import COLOURS, styled, verdict_html
from cpbkit.views.verdict import forecast_figure, health_figure, verdict_figure
from cpbkit.windows.series import Series

EXPERIMENT = vary(PRESETS["quick"], source="synthetic", start="2023-03-01", end="2023-06-30")
BEATS, LOSES, SICK, FAILED = (3, 9, 27), (12,), 25, 26  # places in the experiment's order


def made_up_judgement(kind: str, rng, head: str) -> dict:
    skill = {"BEATS": 0.03, "TIES": 0.0, "LOSES": -0.03}[kind] + rng.normal(0, 0.002)
    naive = 40 + 10 * rng.random()
    return Judgement(
        windows=1200,
        horizon=4,
        unit="bp",
        rmse=naive * (1 - skill),
        mae=0.7 * naive,
        rmse_by_horizon=(1.0, 2.0, 3.0, 4.0),
        best_baseline="persistence" if head == "price" else "ewma",
        baseline_rmse_by_horizon=(1.0, 2.0, 3.0, 4.0),
        baselines={"persistence": naive, "ewma": naive},
        skill=skill,
        skill_low=skill - 0.01,
        skill_high=skill + 0.01,
        rmse_skill=skill,
        rmse_skill_low=skill - 0.02,
        rmse_skill_high=skill + 0.02,
        diebold_mariano=-4.5,
        persistence_skill=skill + 0.001,
        persistence_skill_low=skill - 0.009,
        persistence_skill_high=skill + 0.011,
        ic=0.02,
        ic_low=-0.01,
        ic_high=0.05,
        fee=0.3,
        fee_low=-0.4,
        fee_high=1.0,
        statistic=-4.0,
        p=0.4 if kind == "TIES" else 1e-6,
        spread=0.1,
        direction=0.51,
        direction_low=0.48,
        direction_high=0.54,
        r2=0.9981,
        r2_persistence=0.9983,
        mape=0.41,
        mape_persistence=0.40,
    ).to_dict()


def made_up_passport(name: str, synthetic: bool) -> Passport:
    gaps = (Gap("2023-03-24T13:00", "2023-03-24T13:00", 1, "spot matching-engine outage of 2023-03-24"),)
    gaps += (Gap("2023-04-02T00:00", "2023-04-02T09:00", 10),) if name == "LTCUSDT_1h" else ()
    missing = sum(gap.bars for gap in gaps)
    return Passport(
        series=name,
        source="made up",
        market="spot",
        first="2023-03-01T00:00",
        last="2023-06-30T23:00",
        expected=2928,
        got=2928 - missing,
        gaps=gaps,
        notes=("listed after the start that was asked for",) if name.startswith("PEPE") else (),
        synthetic=synthetic,
    )


def made_up_results(heads=("price",), synthetic: bool = True, stop: int = 40) -> list[ResultLine]:
    rng, lines = np.random.default_rng(0), []
    for k, name in enumerate(EXPERIMENT.series[:stop]):
        epochs = int(rng.integers(8, 13))
        validation = 1 - rng.uniform(-0.02, 0.05) + 0.2 * np.exp(-np.arange(epochs) / 2)
        validation += 0.004 * rng.standard_normal(epochs)
        train = validation - 0.02 * np.arange(epochs) / epochs
        kind = "BEATS" if k in BEATS else "LOSES" if k in LOSES else "TIES"
        line = ResultLine(
            series=name,
            status="done",
            reason="no better validation loss for 5 epochs",
            synthetic=synthetic,
            preset="quick",
            parameters=4321,
            epochs=epochs,
            best_epoch=int(np.argmin(validation)) + 1,
            seconds=2.1,
            curve={
                "train": list(1.02 * train),
                "validation": list(0.98 * validation),
                "learning_rate": [1e-3] * epochs,
                "gradient_norm": [0.5] * epochs,
                "clipped": [0.1] * epochs,
            },
            persistence={"train": 1.02, "validation": 0.98},
            windows={"train": 8000, "validation": 1700, "test": 1700},
            dates={
                "train": ["2023-03-01T00:00", "2023-05-25T09:45"],
                "validation": ["2023-05-25T10:45", "2023-06-12T16:00"],
                "test": ["2023-06-12T17:00", "2023-06-30T23:45"],
            },
            test={head: made_up_judgement(kind, rng, head) for head in heads},
            passport=made_up_passport(name, synthetic).to_dict(),
        )
        if k == SICK:
            curve = {c: [*values[:6], None] for c, values in line.curve.items()}
            reason = "nan at epoch 7 in <b>decoder & co</b> $x_1$"
            line = replace(line, status="sick", reason=reason, test={}, curve=curve)
        if k == FAILED:
            line = ResultLine(name, "failed", "too few bars", synthetic=synthetic, passport=line.passport)
        lines.append(line)
    return lines


def made_up_monitor(gpu: bool, rows: int = 150) -> pd.DataFrame:
    time = 0.5 * np.arange(rows)
    frame = pd.DataFrame(
        {"time": time, "device": "cpu", "allocated": np.nan, "reserved": np.nan, "used": 8e9, "host": 1e9 + 1e6 * time}
    )
    frame = frame.assign(utilisation=np.r_[np.nan, np.full(rows - 1, 80.0)], text="")
    frame.loc[rows // 2, "text"] = "9 left the stack"
    if gpu:
        device = frame.assign(device="cuda:0", allocated=1.4e9, reserved=1.7e9, text="")
        frame = pd.concat([frame, device]).sort_values(["time", "device"], ignore_index=True)
    return frame


def title_of(figure) -> str:
    return figure.texts[0].get_text()


def pixels(png: bytes, tmp_path):
    path = tmp_path / "picture.png"
    path.write_bytes(png)
    return imread(path)


# The sweep


class Page(HTMLParser):
    """The panels of a sweep's HTML: name, words, classes, reason, spoken text, and the points of what is drawn."""

    def __init__(self, html):
        super().__init__()
        self.panels, self.texts, self.open = [], [], []
        self.feed(html)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        self.handle_startendtag(tag, attributes)
        self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        attributes = dict(attributes)
        kind = attributes.get("class", "")
        if "cpb-panel" in kind.split():
            self.panels.append({"waiting": "cpb-waiting" in kind, "kinds": [], "words": [], "drawn": {}, "reason": ""})
        if not self.panels:
            return
        panel = self.panels[-1]
        if tag == "svg":
            panel.setdefault("spoken", attributes.get("aria-label"))  # what follows are its curves, and the strips
        elif tag == "span":
            panel["kinds"].append(kind)
        elif tag in ("polyline", "circle", "path"):
            panel["drawn"][tag, kind] = attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)
        if self.panels and self.open[-1] in ("b", "span", "small"):
            key = {"b": "name", "span": "words", "small": "reason"}[self.open[-1]]
            self.panels[-1][key] = [*self.panels[-1]["words"], data] if key == "words" else data


def curve_of(panel, split):
    points = panel["drawn"]["polyline", f"cpb-{split}"]["points"].split()
    return np.array(points, float).reshape(-1, 2)


def test_the_sweep_draws_each_loss_over_the_loss_of_persistence():
    results = made_up_results()
    panels = Page(SweepPicture(EXPERIMENT.series, "quick", 12).html(results)).panels
    assert [panel["name"] for panel in panels] == [style.label(name) for name in EXPERIMENT.series]
    # Heights are compared with the line of persistence, which is 1, and one known loss, so no scale is assumed.
    first = relative(results[0], "validation")
    y_one = float(panels[0]["drawn"]["path", "cpb-persistence"]["d"].split()[1].split("H")[0])
    scale = (curve_of(panels[0], "validation")[0, 1] - y_one) / (first[0] - 1)
    for result, panel in zip(results, panels, strict=True):
        for split in ("train", "validation"):
            curve = relative(result, split)
            curve = curve[np.isfinite(curve)]
            if not len(curve):
                continue
            drawn = curve_of(panel, split)
            np.testing.assert_allclose(drawn[:, 0], np.arange(len(curve)) * PANEL_X / 11, atol=1)
            inside = (drawn[:, 1] > 0) & (drawn[:, 1] < PANEL_Y)
            np.testing.assert_allclose(drawn[inside, 1], (y_one + scale * (curve - 1))[inside], atol=8)
    assert relative(results[0], "train")[0] == pytest.approx(results[0].curve["train"][0] / 1.02)


def test_what_explodes_leaves_its_panel_and_bends_no_other():
    results = made_up_results()[:9]
    calm = Page(SweepPicture(EXPERIMENT.series[:9], "quick", 12).html(results)).panels
    results[8].curve["validation"] = [0.9, 5.0, 1e30, 0.94, float("inf")]
    wild = Page(SweepPicture(EXPERIMENT.series[:9], "quick", 12).html(results)).panels
    drawn = curve_of(wild[8], "validation")
    assert len(drawn) == 4 and drawn[2, 1] == -PANEL_Y and 0 < drawn[3, 1] < PANEL_Y
    assert np.ptp(curve_of(wild[0], "train")[:, 1]) > 0.5 * np.ptp(curve_of(calm[0], "train")[:, 1])


def test_a_curve_is_cut_off_at_the_edge_of_its_panel():
    """The outer picture has room for a mark on the edge, through which curves ran towards the title."""
    html = sweep_html(made_up_results()[:9])
    curves = re.findall(r'<svg style="width:1420px;height:800px">(.*?)</svg>', html)
    assert len(curves) == 9 and sum(inner.count("<polyline") for inner in curves) == html.count("<polyline") == 18
    assert not any("<circle" in inner for inner in curves)


def test_a_long_curve_is_thinned_to_its_ends():
    frame = Frame(last=1000, low=0.0, high=2.0)
    points = np.array(re.search('points="(.*?)"', frame.line(np.linspace(2, 0, 1000), "train"))[1].split(), float)
    points = points.reshape(-1, 2)
    assert len(points) == 150 and points[0].tolist() == [0, 0] and points[-1].tolist() == [PANEL_X, PANEL_Y]


def test_the_mark_stands_on_the_lowest_validation_loss():
    results = made_up_results()[:1]
    (panel,) = Page(SweepPicture(EXPERIMENT.series[:1], "quick", 12).html(results)).panels
    (dot,) = [drawn for (tag, _), drawn in panel["drawn"].items() if tag == "circle"]
    best = curve_of(panel, "validation")[results[0].best_epoch - 1]
    assert [float(dot["cx"]), float(dot["cy"])] == best.tolist()
    assert f"at epoch {results[0].best_epoch}" in panel["spoken"]


def test_a_judged_panel_says_the_verdict_of_the_test_split():
    """Whatever the validation loss fell to: its green once stood beside models that lose."""
    results = made_up_results()
    results[0].curve["validation"] = [0.5 * loss for loss in results[0].curve["validation"]]  # and yet it ties
    panels = Page(SweepPicture(EXPERIMENT.series, "quick", 12).html(results)).panels
    for k, (result, panel) in enumerate(zip(results, panels, strict=True)):
        if k in (SICK, FAILED):
            continue
        word = "BEATS" if k in BEATS else "LOSES" if k in LOSES else "TIES"
        kind = word.lower() if word != "TIES" else "muted"
        skill = f"{100 * result.test['price']['skill'] + 0.0:+.1f} %".replace("-", "−")
        assert panel["words"] == [f"{word} {skill}"] and panel["kinds"] == [f"cpb-{kind}"]
        assert word in panel["spoken"] and ("circle", f"cpb-{kind}") in panel["drawn"]
    both = made_up_results(heads=("price", "volatility"))
    page = Page(SweepPicture(EXPERIMENT.series, "quick", 12).html(both))
    assert page.panels[BEATS[0]]["words"] == ["BEATS", "BEATS"]
    assert any("verdict on the test bars (price, volatility)" in text for text in page.texts)


def test_a_verdict_follows_those_that_come_after_it():
    """They are corrected for each other, so a cached word would be wrong."""
    results = made_up_results()
    picture = SweepPicture(EXPERIMENT.series, "quick", 12)
    for stop in (1, 20, 40):
        assert picture.html(results[:stop]) == SweepPicture(EXPERIMENT.series, "quick", 12).html(results[:stop])


def test_a_picture_that_was_drawn_before_is_the_picture_drawn_anew():
    """Panels that nothing changed are kept from the last drawing."""
    results, monitor = made_up_results(), made_up_monitor(gpu=True)
    names = [line.series for line in results]

    def running(epochs, *names):
        curve = {split: [1.3, 1.1, 1.0, 0.97][:epochs] for split in ("train", "validation")}
        return {name: Running(curve, {"train": 1.0, "validation": 1.0}) for name in names}

    states = [([], {}), ([], running(1, *names[:8])), ([], running(3, *names[:8]))]
    states += [(results[:4], running(4, *names[4:8])), (results[:8], {}), (results, {})]
    kept = SweepPicture(EXPERIMENT.series, "quick", 12)
    for finished, training in states:
        anew = SweepPicture(EXPERIMENT.series, "quick", 12)
        assert kept.html(finished, training, monitor) == anew.html(finished, training, monitor)


def test_every_panel_says_its_state():
    results = made_up_results()
    running = {line.series: Running(line.curve, line.persistence) for line in results[30:35]}
    page = Page(SweepPicture(EXPERIMENT.series, "quick", 12).html(results[:30], running))
    assert "28 done  ·  5 training  ·  1 sick  ·  1 failed  ·  5 waiting" in page.texts
    words = [panel["words"][0] for panel in page.panels]
    assert words[30:] == [f"epoch {len(line.curve['train'])}" for line in results[30:35]] + ["waiting"] * 5
    assert [panel["waiting"] for panel in page.panels] == [False] * 35 + [True] * 5
    assert words[SICK] == "sick at 7" and words[FAILED] == "failed"
    assert page.panels[SICK]["reason"] == results[SICK].reason and page.panels[FAILED]["reason"] == "too few bars"
    assert ("path", "cpb-sick") in page.panels[SICK]["drawn"]
    assert ("path", "cpb-sick") not in page.panels[FAILED]["drawn"]  # it has no epoch to put a cross at
    results[0] = replace(results[0], test={})
    assert Page(sweep_html(results)).panels[0]["words"] == ["not judged"]


@pytest.mark.parametrize("count", [1, 8, 9, 41])
def test_any_number_of_series_has_its_panels(count):
    names = [f"C{i}USDT_1h" for i in range(count)]
    assert [panel["name"] for panel in Page(SweepPicture(names, "many", 12).html([])).panels] == [
        f"C{i} 1h" for i in range(count)
    ]


def test_results_of_other_series_than_the_settings_name_are_drawn_too():
    page = Page(sweep_html(made_up_results()[:2], series=("OTHER_1h",)))
    assert {"OTHER 1h", "BTC 15m", "2 done  ·  1 waiting"} <= set(page.texts)


def test_the_picture_is_text_that_loads_nothing_and_runs_nothing():
    html = sweep_html(made_up_results(), made_up_monitor(gpu=True))
    assert not re.search("<script|<img|http|url\\(|@import| on[a-z]+=", html)
    assert "&lt;b&gt;decoder &amp; co" in html and "<b>decoder" not in html
    assert "prefers-color-scheme:dark" in html and "[data-jp-theme-light=false] .cpb" in html
    body = html.partition("</style>")[2]
    assert not re.search("#[0-9a-f]{6}", body)  # a colour of its own would stand out on a dark page
    assert all(panel["spoken"].startswith(panel["name"]) for panel in Page(html).panels)
    assert 'aria-label="SYNTHETIC · quick  ·  40 series: 38 done' in html


def strip_of(html):
    title = re.search("<div><div>(.*?)</div>", html)[1]
    paths = {kind: d for kind, d in re.findall('<path class="cpb-(memory|load|upper)" d="(.*?)"', html)}
    points = {kind: np.array(re.findall(r"-?[\d.]+", d), float).reshape(-1, 2) for kind, d in paths.items()}
    return title, points, re.findall('<span class="cpb-said".*?>(.*?)</span>', html)


def test_the_strips_draw_what_the_monitor_saw():
    monitor = made_up_monitor(gpu=True)
    memory, load = map(strip_of, strips(monitor))
    assert memory[0] == "GPU memory, GB: allocated 1.40, reserved 1.70" and memory[2] == ["9 left the stack"]
    reserved, allocated = memory[1]["upper"], memory[1]["memory"]
    assert (1000 - reserved[:, 1]).mean() / (1000 - allocated[:, 1]).mean() == pytest.approx(1.7 / 1.4, rel=0.01)
    assert load[0] == "device busy, %: 80" and load[1]["load"][1:, 1].tolist() == [200.0] * 149
    time = monitor["time"].max()
    _, half = map(strip_of, strips(monitor, seconds_left=time))
    assert half[1]["load"][:, 0].max() == 500  # the other half is still to come
    host, cpu = map(strip_of, strips(made_up_monitor(gpu=False)))
    assert host[0] == "host memory, GB: 1.07" and cpu[0] == "CPU busy, %: 80"
    assert [*strips(monitor[:1])] == [], "of a finished run that is opened again"
    unknown = made_up_monitor(gpu=False).assign(utilisation=np.nan)
    assert strip_of(list(strips(unknown))[1])[0] == "CPU busy, %, not measured here"
    assert not list(strips(None)) and not list(strips(monitor[:0]))


def test_ticks_are_round_numbers():
    assert ticks(7.3, 5) == [0, 2, 4, 6] and ticks(100, 4) == [0, 50, 100] and ticks(0.31, 4) == [0, 0.1, 0.2, 0.3]


# One model


def test_the_title_says_whether_the_loss_fell_below_persistence():
    line = made_up_results()[0]
    line.curve.update({"train": [1.02, 0.9, 0.8], "validation": [1.0, 0.931, 0.95]})
    figure = loss_figure(replace(line, synthetic=False, passport={}))
    assert title_of(figure) == "BTC 15m falls below persistence: its loss is 5 % lower at epoch 2"
    _, train, validation, _ = figure.axes[0].lines
    np.testing.assert_allclose(validation.get_xydata(), [(1, 1.0 / 0.98), (2, 0.95), (3, 0.95 / 0.98)])
    np.testing.assert_allclose(train.get_ydata(), np.array([1.02, 0.9, 0.8]) / 1.02)
    line.curve["validation"] = [1.96, 0.99, 1.2]
    assert "never falls below persistence: its loss is 1 % higher at best" in title_of(loss_figure(line))


def test_a_sick_or_failed_model_says_why():
    results = made_up_results()
    assert title_of(loss_figure(results[SICK])).startswith("SYNTHETIC · NEAR 1h is sick: nan at epoch 7 in <b>")
    assert title_of(loss_figure(results[FAILED])) == "SYNTHETIC · DYDX 15m is failed: too few bars"
    for k in (SICK, FAILED):
        loss_figure(results[k]).png()


# Memory


def test_memory_and_load_of_a_diagnosis_are_one_piece_of_a_page():
    drawn = memory_html(made_up_monitor(gpu=True), "Diagnosis of <quick>")
    assert "Diagnosis of &lt;quick&gt;" in drawn and drawn.count('class="cpb-plot"') == 2


def test_a_long_timeline_is_thinned_without_losing_its_peak():
    time, values = np.arange(50_000.0), np.ones(50_000)
    values[31_415] = 7
    values[:100] = np.nan
    thin, (curve,) = strip.thinned(time, [values])
    assert len(thin) <= strip.POINTS and np.nanmax(curve) == 7 and thin[0] == 0


# Verdicts


def test_verdicts_are_drawn_best_first_in_the_colour_of_their_word():
    results = made_up_results(heads=("price", "volatility"))
    figure = verdict_figure(results)
    by_head = verdicts.judgements(results)
    assert len(figure.axes) == len(by_head) == 2
    assert title_of(figure) == "SYNTHETIC · " + verdicts.headline(verdicts.verdicts(by_head["price"]), "price", 2)
    assert "3 of 40 beat" in title_of(figure) and "2 could not be judged" in title_of(figure)
    assert "test 2023-06-12 to 2023-06-30" in figure.texts[1].get_text()
    for axes, (head, group) in zip(figure.axes, by_head.items(), strict=True):
        words = verdicts.verdicts(group)
        order = sorted(group, key=lambda name: -group[name].skill)
        assert [t.get_text() for t in axes.get_yticklabels()] == [style.label(name) for name in order]
        bars, dots = axes.lines[1::2], axes.lines[2::2]
        for name, bar, dot in zip(order, bars, dots, strict=True):
            j = group[name]
            np.testing.assert_allclose(bar.get_xdata(), [100 * j.skill_low, 100 * j.skill_high])
            np.testing.assert_allclose(dot.get_xdata(), [100 * j.skill])
            colour = {"BEATS": palette.GREEN, "TIES": palette.FAINT, "LOSES": palette.RED}[words[name].word]
            assert to_hex(bar.get_color()) == to_hex(dot.get_color()) == colour
        said = [t.get_text() for t in axes.texts]
        assert said == [words[name].word for name in order if words[name].word != "TIES"] and len(said) == 4
        assert head in axes.get_title(loc="left")


def test_the_table_of_a_notebook_has_each_verdict_in_its_colour_and_the_headlines():
    by_head = verdicts.judgements(made_up_results())
    page = verdict_html(verdicts.verdict_table(by_head), ["3 of 40 beat & so on"])
    rules = re.findall(r"((?:#\w+[, \n]*)+)\{\s*color: (#\w+);", page)
    colour = {name: value for names, value in rules for name in re.findall(r"#(\w+)", names)}
    words = re.findall(r'<td id="(\w+)"[^>]*>(BEATS|TIES|LOSES)<', page)
    assert {(word, colour[cell]) for cell, word in words} == set(COLOURS.items()) and len(set(COLOURS.values())) == 3
    assert COLOURS["LOSES"] == "#c0392b" and COLOURS["BEATS"] == "#1a7f4b", "red and green"
    assert len(words) == 38 and page.endswith("<p><b>3 of 40 beat &amp; so on</b></p>")
    small = verdicts.verdict_table(by_head).assign(p=0.0004)
    assert verdict_html(small, []).count(">&lt; 0.001<") == 38, "no p is 0"
    assert page.count("<th ") == 10, "the head is a column where there are several"


def test_one_hopeless_model_does_not_flatten_the_others():
    results = made_up_results()
    results[0].test["price"] |= {"skill": -99.0, "skill_low": -99.0, "skill_high": 1.0}
    (axes,) = verdict_figure(results).axes
    low, high = axes.get_xlim()
    assert -30 < low < 0 < high < 30
    assert axes.lines[-1].get_marker() == "<" and axes.lines[-1].get_xdata()[0] == pytest.approx(low)


def test_no_verdict_yet_is_a_sentence():
    assert title_of(verdict_figure([])) == "No model is judged yet"


# Bars


def made_up_klines(bars: int, drop: slice = slice(0, 0), synthetic: bool = False):
    rng = np.random.default_rng(0)
    index = pd.date_range("2023-03-24", periods=bars, freq="1h", tz="UTC", name="open_time")
    close = 100 * np.exp(np.cumsum(0.01 * rng.standard_normal(bars)))
    opened = np.r_[100, close[:-1]]
    frame = pd.DataFrame({"open": opened, "high": np.maximum(opened, close) + 1, "low": np.minimum(opened, close) - 1})
    frame = frame.assign(close=close, volume=rng.gamma(2.0, 50.0, bars)).set_index(index)
    return validate(frame.drop(frame.index[drop]), "BTCUSDT_1h", market="spot", synthetic=synthetic)


def test_candles_are_the_bars_and_gaps_are_shaded_and_named():
    klines = made_up_klines(60, slice(13, 14))
    figure = candle_figure(klines)
    price, volume = figure.axes
    frame = klines.frame
    rises = frame["close"] >= frame["open"]
    bodies = [
        np.array([path.vertices[:4] for path in c.get_paths()]) for c in price.collections if c.get_array() is None
    ]
    wicks, bodies = bodies[0::2], bodies[1::2]
    for side, body in ((rises, bodies[0]), (~rises, bodies[1])):
        expected = np.sort(frame.loc[side, ["open", "close"]], axis=1)
        np.testing.assert_allclose(np.sort(body[:, :2, 1], axis=1), expected)
    np.testing.assert_allclose(np.sort(wicks[0][:, :, 1], axis=1), frame.loc[rises, ["low", "high"]])
    assert sum(len(c.get_paths()) for c in volume.collections) == len(frame) == 59
    assert [t.get_text() for t in price.texts] == ["spot matching-engine outage of 2023-03-24, 1 bar"]
    assert title_of(figure) == "BTC 1h, 2023-03-24 to 2023-03-26: 1 bar missing in 1 gap"
    (span,) = price.patches
    edges = price.transData.inverted().transform_bbox(span.get_window_extent()).intervalx
    assert [round(24 * (x % 1)) for x in edges] == [13, 14]


def test_many_bars_share_a_candle_and_lose_nothing():
    klines = made_up_klines(5000)
    figure = candle_figure(klines)
    price, volume = figure.axes
    heights = [path.vertices[:, 1].max() for c in volume.collections for path in c.get_paths()]
    assert len(heights) <= 240 and sum(heights) == pytest.approx(klines.frame["volume"].sum())
    wicks = np.concatenate([[path.vertices[:, 1] for path in c.get_paths()] for c in price.collections[0::2]])
    days = klines.frame.groupby(klines.frame.index.date)
    np.testing.assert_allclose(np.sort(wicks.min(axis=1)), np.sort(days["low"].min()))
    np.testing.assert_allclose(np.sort(wicks.max(axis=1)), np.sort(days["high"].max()))
    assert "a candle is 24 bars of 1h" in figure.texts[1].get_text() and title_of(figure).endswith("no gap")


def test_a_stretch_without_bars_is_refused():
    with pytest.raises(DataError, match="has none from 2030-01-01 to its end: it holds 2023-03-24T00:00"):
        candle_figure(made_up_klines(60), start="2030-01-01")


def test_each_passport_is_a_strip_with_its_gaps():
    passports = [made_up_passport(name, False) for name in EXPERIMENT.series]
    figure = passport_figure(passports)
    (axes,) = figure.axes
    assert [t.get_text() for t in axes.get_yticklabels()] == [style.label(p.series) for p in passports]
    strips = [(c.get_facecolor()[0], path) for c in axes.collections for path in c.get_paths()]
    colours = [to_hex(colour) for colour, _ in strips]
    assert (
        colours.count(palette.PALE_BLUE) == 40
        and colours.count(palette.MUTED) == 40
        and colours.count(palette.ORANGE) == 1
    )
    (missing,) = (path.vertices for colour, path in strips if to_hex(colour) == palette.ORANGE)
    assert missing[:, 1].mean() == pytest.approx([p.series for p in passports].index("LTCUSDT_1h"), abs=0.3)
    assert title_of(figure).startswith("39 of 40 series hold every bar that was traded; 10 bars missing")
    pixel = np.diff(axes.get_xlim()) / (style.WIDTH - 96 - 250)
    assert all(np.ptp(path.vertices[:, 0]) >= 1.9 * pixel for _, path in strips)


# Forecasts


def made_up_series(bars: int = 600) -> Series:
    price = np.log(100) + np.cumsum(0.01 * np.random.default_rng(0).standard_normal(bars))[:, None]
    times = np.datetime64("2025-04-01", "ns") + np.arange(bars) * np.timedelta64(3600, "s")
    return Series(
        name="BTCUSDT_1h",
        times=times,
        step_seconds=3600,
        inputs=np.zeros((bars, 1)),
        features=("x",),
        levels=price,
        anchors=price,
        targets=("close",),
        heads=("price",),
        synthetic=True,
    )


def test_a_forecast_is_drawn_where_it_falls_due():
    series, origins = made_up_series(), np.arange(100, 500)
    truth = series.truth(origins, 4)
    figure = forecast_figure(series, origins, truth, windows=50)
    level, moves = figure.axes
    real, last, told = (line.get_ydata() for line in level.lines)
    np.testing.assert_allclose(real, np.exp(series.levels[origins[-50:] + 4, 0]))
    np.testing.assert_allclose(last, np.exp(series.levels[origins[-50:], 0]))
    np.testing.assert_allclose(told, real)
    np.testing.assert_allclose(moves.lines[2].get_ydata(), 1e4 * truth[-50:, 3, 0])
    due = matplotlib.dates.date2num(series.times[origins[-50:] + 4])
    np.testing.assert_allclose(level.lines[0].get_xdata(), due)
    assert "the direction is right 100.0 % of the time" in title_of(figure)
    assert figure.texts[1].get_text().endswith("it does not lag the truth")


def test_a_copy_of_the_last_price_is_called_one():
    series, origins = made_up_series(), np.arange(100, 500)
    figure = forecast_figure(series, origins, np.zeros((400, 4, 1)), ahead=2)
    assert title_of(figure) == "SYNTHETIC · BTC 1h, 2 bars ahead: the forecast names no direction"
    assert figure.texts[1].get_text().endswith("nearest to the truth of 2 bars before, which is persistence")


# Health


def test_every_check_is_a_mark_in_the_health_picture():
    checks = check_results(made_up_results())
    figure = health_figure(checks, synthetic=True)
    (axes,) = figure.axes
    marks = {to_hex(line.get_color()): len(line.get_xdata()) for line in axes.lines}
    count = {word: sum(c.verdict == word for c in checks) for word in ("OK", "NOTE", "SICK")}
    assert marks == {palette.GREEN: count["OK"], palette.ORANGE: count["NOTE"], palette.RED: count["SICK"]}
    assert title_of(figure).startswith("SYNTHETIC · 38 of 40 models trained soundly") and "2 sick" in title_of(figure)


# All of them


def test_a_table_reads_from_the_left_and_says_its_verdicts_in_colour():
    table = pd.DataFrame({"check": ["echo", "<b>"], "verdict": ["OK", "FAIL"], "mae": [465_399.557, np.nan]})
    html = styled(table).to_html()
    cells = dict(re.findall(r'id="T_\w+?_row\d_(col\d)" class="data row1 col\d" >(.*?)<', html))
    assert cells == {"col0": "&lt;b&gt;", "col1": "FAIL", "col2": ""} and ">465,400<" in html
    rules = re.findall(r"(#T_\w+.*?) \{\s*(.*?)\}", html, re.DOTALL)
    left = {selector.strip().rpartition(".")[2] for selector, rule in rules if "text-align: left" in rule}
    assert left == {"col0", "col1"}
    colour = {selector.rpartition("_row")[2]: rule for selector, rule in rules if "color: " in rule}
    assert "#1a7f4b" in colour["0_col1"] and "#c0392b" in colour["1_col1"] and len(colour) == 2


def every_figure(synthetic: bool):
    results = made_up_results(synthetic=synthetic)
    yield loss_figure(results[0])
    yield verdict_figure(results)
    yield candle_figure(made_up_klines(60, synthetic=synthetic))
    yield passport_figure([made_up_passport("BTCUSDT_1h", synthetic)])
    told = [Check("LUNA 15m", "target scale", "SICK", "scaled targets are far from 1: " + "scale them " * 20)]
    yield health_figure([*check_results(results), *told], synthetic=synthetic)


def test_a_long_name_keeps_its_beginning():
    assert texts.cut("bandwidth-f1576f", 14) == "bandwidth-f15…" and texts.cut("quick-f742d7", 12) == "quick-f742d7"


def test_no_text_leaves_its_picture():
    for figure in every_figure(synthetic=True):
        drawn, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
        assert 0 <= drawn.x0 and 0 <= drawn.y0 and drawn.x1 <= width and drawn.y1 <= height, repr(figure)


def test_made_up_bars_are_stamped_and_real_ones_are_not():
    for figure in every_figure(synthetic=True):
        assert title_of(figure).startswith("SYNTHETIC · ")
    for figure in every_figure(synthetic=False):
        assert "SYNTHETIC" not in "".join(text.get_text() for text in figure.texts)


def test_the_look_does_not_depend_on_the_notebooks_style(tmp_path):
    line = made_up_results()[0]
    plain = loss_figure(line).png()
    with matplotlib.rc_context({"axes.facecolor": "black", "font.size": 30, "axes.grid": True, "lines.linewidth": 9}):
        assert np.array_equal(pixels(loss_figure(line).png(), tmp_path), pixels(plain, tmp_path))


def test_a_notebook_shows_a_picture_at_its_size(tmp_path):
    figure = loss_figure(made_up_results()[0])
    png, size = figure._repr_png_()
    height, width, _ = pixels(png, tmp_path).shape
    assert (width, height) == (2 * size["width"], 2 * size["height"])
    assert size["alt"] == repr(figure) and "falls below persistence" in size["alt"]


def test_pyplot_is_never_loaded():
    code = (
        "import sys, cpbkit.views.market, cpbkit.views.loss, cpbkit.views.verdict;"
        "print('matplotlib.pyplot' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: style.label("BTCUSDT_15m"), "BTC 15m"),
        (lambda: style.label("1000PEPEUSDT_1h"), "1000PEPE 1h"),
        (lambda: style.label("USDT_1h"), "USDT 1h"),
        (lambda: style.label("etth1"), "etth1"),
        (lambda: quantities.duration(44.6), "45 s"),
        (lambda: quantities.duration(112), "1 m 52 s"),
        (lambda: quantities.duration(7500), "2 h 05 m"),
        (lambda: quantities.amount(840), "840"),
        (lambda: quantities.amount(11_800), "11.8 k"),
        (lambda: quantities.amount(1_240_000), "1.24 M"),
        (lambda: quantities.figure(0.4250491), "0.425049"),
        (lambda: quantities.figure(999_999.7), "1,000,000"),
        (lambda: quantities.figure(-1_773_460.4, 4), "-1,773,460"),
        (lambda: quantities.counted(1, "gap"), "1 gap"),
        (lambda: quantities.counted(1204, "bar"), "1,204 bars"),
    ],
)
def test_names_and_numbers_are_said_as_people_say_them(call, said):
    assert call() == said


@pytest.mark.parametrize("count", [1, 3, 7])
def test_each_word_has_room_beside_its_panel(count):
    """TOO FEW TO TELL ran into the names of the next panel, and out of the picture."""
    results = made_up_results(heads=[f"target{k}" for k in range(count)], stop=3)
    for line in results:
        for told in line.test.values():
            told.update({"windows": 63, "skill_low": -99.0, "skill_high": 1.0})
    figure = verdict_figure(results)
    drawn = figure.canvas.get_renderer()
    boxes = lambda texts: [text.get_window_extent(drawn) for text in texts]  # noqa: E731
    names = [box for axes in figure.axes for box in boxes(axes.get_yticklabels())]
    words = [box for axes in figure.axes for box in boxes(axes.texts)]
    assert len(figure.axes) == count and len(words) == len(names) == 3 * count
    assert not any(word.overlaps(name) for word in words for name in names)
    assert max(word.x1 for word in words) <= figure.bbox.width
    for axes in figure.axes:
        ticks = boxes(axes.get_xticklabels())
        assert axes.bbox.width > 150 and not any(a.overlaps(b) for a, b in itertools.pairwise(ticks))


def test_too_few_windows_are_a_dot_without_a_line():
    results = made_up_results(stop=4)
    for line in results[1:]:
        line.test["price"].update({"windows": 63, "skill_low": -99.0, "skill_high": 1.0})
    (axes,) = verdict_figure(results).axes
    assert len(axes.lines) == 1 + 2 + 3  # zero, an interval with its dot, and three dots
    assert [text.get_text() for text in axes.texts].count("TOO FEW TO TELL") == 3
    low, high = axes.get_xlim()
    assert -20 < low < high < 20
