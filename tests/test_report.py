"""The report of a made-up run: whole, self-contained, and everything that is in the folder is on the page."""

import errno
import html
import html.parser
import itertools
import json
import os
import re
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_verdicts import example
from test_views import BEATS, EXPERIMENT, FAILED, SICK, made_up_monitor, made_up_results

from cpbkit.config.experiment import to_json, vary
from cpbkit.errors import CpbkitError, RunError, UnknownName
from cpbkit.evaluation import verdicts
from cpbkit.runs.folder import RunFolder
from cpbkit.views import report
from cpbkit.views.report import write_report
from cpbkit.views.style import label

ABOUT = {
    "command": "cpbkit sweep --run 'runs/<first> & only'",
    "date": "2026-01-02 03:04 UTC",
    "machine": {"system": "Linux x86_64", "cpu": "A Processor", "cores": 2, "gpu": ""},
    "versions": {"cpbkit": "0.1.0", "torch": "2.4.0+made-up"},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    results = made_up_results(heads=("price", "volatility"))
    return write_report(write_run(tmp_path_factory.mktemp("runs") / "first", results))


@pytest.fixture(scope="module")
def page(path):
    return Page(path)


def write_run(folder, results, experiment=EXPERIMENT, monitor=True):
    folder.mkdir()
    (folder / "experiment.json").write_text(to_json(experiment))
    (folder / "results.jsonl").write_text("".join(f"{line.to_json()}\n" for line in results))
    if monitor:
        made_up_monitor(gpu=True).to_parquet(folder / "monitor.parquet")
        (folder / "clock.json").write_text(json.dumps({"bars": 25.0, "training": 75.0, "worker: epochs": 140.0}))
        (folder / "about.json").write_text(json.dumps(ABOUT))
    return folder


class Page(html.parser.HTMLParser):
    """What a browser would make of the page: its text, its tables, and all that it would load."""

    EMPTY = ("meta", "br", "hr", "img", "link", "input")

    def __init__(self, path):
        super().__init__()
        self.open, self.words, self.tables, self.loads, self.ids = [], [], [], [], []
        self.feed(path.read_text(encoding="utf-8"))
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag not in self.EMPTY:
            self.open.append(tag)
        if tag in ("link", "img", "iframe", "object", "embed", "image"):
            self.loads.append(tag)
        self.loads += [v for k, v in attributes.items() if k in ("src", "href", "xlink:href") and not v.startswith("#")]
        self.ids += [attributes["id"]] if "id" in attributes else []
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.EMPTY:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data):
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data
        if "style" not in self.open:
            self.words.append(data)

    def table(self, *columns):
        (found,) = [t for t in self.tables if tuple(t[0][: len(columns)]) == columns]
        return found[1:]


def test_the_page_is_sound_and_loads_nothing(path, page):
    source = path.read_text(encoding="utf-8")
    assert path.name == "report.html" and page.open == [] and page.loads == []
    assert "http:" not in source and "https:" not in source and "@import" not in source
    assert source.count("<script") == 1  # its own, whose hash the policy names
    assert set(re.findall(r"url\((.)", source)) <= {"#"}
    inner = [name for name in page.ids if not name.startswith("s-")]
    assert inner == ["verdicts", "series", "training", "time", "bars", "splits", "settings", "origin"]
    assert {name for name in page.ids if name.startswith("s-")} == {f"s-{name}" for name in EXPERIMENT.series}
    assert len(set(page.ids)) == len(page.ids)
    assert set(re.findall(r"#([\w-]+)", " ".join(re.findall(r"""(?:href="|url\()#[\w-]+""", source)))) <= set(page.ids)


def test_each_verdict_is_on_the_page(page):
    by_head = verdicts.judgements(made_up_results(heads=("price", "volatility")))
    tables = [t[1:] for t in page.tables if t[0][:2] == ["series", "verdict"]]
    for (head, group), rows in zip(by_head.items(), tables, strict=True):
        found = verdicts.verdicts(group)
        assert verdicts.headline(found, head, 2) in page.text
        order = sorted(group, key=lambda name: -group[name].skill)
        assert [row[:2] for row in rows] == [[label(name), found[name].word] for name in order]
        j, row = group[order[0]], rows[0]
        low, high = 100 * j.skill_low, 100 * j.skill_high
        assert row[3:5] == [f"{100 * j.skill:+.2f}", f"{low:+.2f} to {high:+.2f}"] and row[5] == "< 0.0001"
        assert row[9:] == ["51.0", "+0.020", "0.3", "1,200"]
    figures = {row[1]: row[2] for t in page.tables for row in t if len(row) == 3 and row[0] == "price"}
    assert figures["direction %"] == "51.0, 48.0 to 54.0" and figures["break-even fee, bp"] == "0.3, −0.4 to 1.0"
    assert figures["R²"] == "0.9981, that of persistence 0.9983" and figures["IC"] == "+0.020, −0.010 to +0.050"


def test_everything_of_the_folder_is_on_the_page(page):
    assert all(label(name) in page.text for name in EXPERIMENT.series)
    assert page.text.count("SYNTHETIC") >= 40  # the stamp and each figure
    assert ABOUT["command"] not in page.text and "2.4.0+made-up" in page.text and ABOUT["date"] in page.text
    assert ["training", "75.0 s", "75.0 %", ""] in [row for table in page.tables for row in table]
    assert "1 m 40 s in all" in page.text and "all workers added up: 2 m 20 s" in page.text
    settings = dict(row for table in page.tables for row in table if len(row) == 2)
    assert settings["horizon"] == "4" and settings["learning_rate"] == "0.003" and settings["intervals"] == "15m, 1h"
    passports = {row[0]: row for row in page.table("series", "there", "files")}
    assert list(passports) == [label(name) for name in EXPERIMENT.series]
    assert "listed after the start that was asked for" in page.text
    assert passports["LTC 1h"][5:9] == ["2,928", "2,917", "2", "10"]
    gaps = page.table("first missing bar, UTC")
    assert gaps[0][:4] == ["2023-03-24 13:00", "2023-03-24 13:00", "1", "spot matching-engine outage of 2023-03-24"]
    assert len(gaps[0][4].split(", ")) == 40 and gaps[1][3:] == ["unknown", "LTC\N{NO-BREAK SPACE}1h"]
    (splits,) = page.table("train", "validation")
    assert splits[2] == "2023-06-12 17:00 to 2023-06-30 23:45" and splits[3] == "8,000 / 1,700 / 1,700"
    assert "4 bars are left out" in page.text
    sick = page.table("series", "check")
    assert [row[0] for row in sick if row[2] == "SICK"] == [label(EXPERIMENT.series[k]) for k in (SICK, FAILED)]
    assert "GPU memory, GB" in page.text and "reserved 1.70" in page.text


def test_coverage_stands_under_its_own_name(tmp_path):
    told = {"coverage": 0.912, "coverage_wild": 0.701, "coverage_worst_step": 0.888, "width": 80.0, "unit": "bp"}
    told |= {"score": 91.0, "score_persistence": 92.0, "crps": 11.0, "crps_persistence": 12.0, "nominal": 0.9}
    told |= {"dates": ["2023-06-12T17:00", "2023-06-30T23:45"], "over_time": [0.9, 0.92]}
    results = made_up_results(stop=1)
    results[0].prediction_intervals["price"] = told
    ((name, head, *numbers),) = Page(write_report(write_run(tmp_path / "run", results))).table("series", "head")
    assert (name, head) == (label(results[0].series), "price")
    assert numbers == ["91.2", "70.1", "88.8", "80.00 bp", "91.00", "92.00", "11.00", "12.00"]


def test_the_settings_are_those_that_the_plan_settled(tmp_path):
    folder = write_run(tmp_path / "run", made_up_results(stop=2), monitor=False)
    (folder / "progress").mkdir()
    plan = {"jobs": [["BTCUSDT_15m"]], "steps": 77, "epochs": 9, "patience": 3, "devices": ["cpu"]}
    (folder / "progress/plan.json").write_text(json.dumps(plan))
    settings = dict(row for table in Page(write_report(folder)).tables for row in table if len(row) == 2)
    assert (settings["steps"], settings["epochs"], settings["patience"]) == ("77", "9", "3")
    assert settings["learning_rate"] == "0.003"


def test_text_is_escaped(path):
    source = path.read_text(encoding="utf-8")
    assert "<b>decoder" not in source and "<first>" not in source
    assert "nan at epoch 7 in &lt;b&gt;decoder &amp; co&lt;/b&gt; $x_1$" in source
    assert "default-src 'none'" in source and ABOUT["command"].split()[0] + " sweep" not in source
    told = write_report(path.parent, path.parent / "with.html", with_command=True).read_text(encoding="utf-8")
    assert html.escape(ABOUT["command"], quote=False).replace("'", "&#39;") in told


def leaves(value, at=()):
    yield at
    for key, inner in value.items() if isinstance(value, dict) else list(enumerate(value))[:1]:
        yield from leaves(inner, (*at, key)) if isinstance(inner, dict | list) else [(*at, key)]


ODD = [
    None,
    True,
    -1,
    10**24,
    9e99,
    "",
    "<script>alert(1)</script>",
    "\x1b]0;x\x07\u202e",
    [],
    {},
    [[]],
    ["x"],
    {"a": 1},
]
DRAWS = dict(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])


@settings(**DRAWS)
@given(draw=st.data())
def test_whatever_stands_in_a_ledger_is_reported_or_refused_in_one_line(tmp_path_factory, draw):
    """A stranger's line ends in a page, or in a sentence; nothing in it is live."""
    results = made_up_results(stop=2)
    lines = [json.loads(line.to_json()) for line in results]
    at = draw.draw(st.sampled_from([at for at in leaves(lines[0]) if at]))
    inner = lines[0]
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = draw.draw(st.sampled_from(ODD))
    folder = write_run(tmp_path_factory.mktemp("runs") / "odd", results, monitor=False)
    (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    try:
        written = write_report(folder).read_text(encoding="utf-8")
        verdicts.verdict_table(verdicts.judgements(RunFolder(folder).results()))
    except CpbkitError as error:
        assert "\n" not in str(error)
    else:
        assert "<script>alert" not in written


def test_a_run_that_is_not_over_says_what_is_missing(tmp_path):
    experiment = vary(EXPERIMENT, source="binance")
    folder = write_run(tmp_path / "half", made_up_results(synthetic=False, stop=38), experiment, monitor=False)
    page = Page(write_report(folder))
    assert "Not finished yet: LUNA 15m, LUNA 1h" in page.text and "SYNTHETIC" not in page.text
    assert "No time was kept." in page.text
    assert "2 waiting" in page.text and "3 of 38 beat the best naive forecast of the price" in page.text


@pytest.mark.parametrize(
    ("bars", "said"),
    [
        ({"source": "binance", "market": "um"}, "binance um"),
        ({"source": "files", "files": "my bars"}, "own files"),
        ({"source": "synthetic"}, "the seeded market"),
        ({"source": "table", "start": "", "end": ""}, "own tables"),
    ],
)
def test_the_head_says_whose_bars_they_are(tmp_path, bars, said):
    results = made_up_results(synthetic=bars["source"] == "synthetic")
    folder = write_run(tmp_path / "run", results, vary(EXPERIMENT, **bars), monitor=False)
    text = Page(write_report(folder)).text
    assert f"out · {said} · " in text and "… to …" not in text


def test_the_head_says_how_all_series_do_at_once_and_what_to_take(tmp_path, recent_run):
    said = recent_run.verdicts().said
    path = recent_run.report(tmp_path / "recent.html").path
    head = Page(path).text.partition("Verdicts Series")[0]
    assert len(re.findall(r"\. \d+ % of the truth lies inside", path.read_text(encoding="utf-8"))) == 4
    assert "price, all 4 series at once: " in said["price, all series"] and all(line in head for line in said.values())
    results = [line for k, line in enumerate(made_up_results()) if k not in (*BEATS, SICK, FAILED)]
    page = Page(write_report(write_run(tmp_path / "ties", results, monitor=False)))
    assert "no model of the price is worth its training: take the naive one, persistence" in page.text


def test_columns_that_say_nothing_are_left_out(tmp_path):
    """Of a table, whose columns nobody trades, those of the sign were empty."""
    results = made_up_results(stop=3)
    for line in results:
        line.test["price"] |= {"ic": None, "fee": None, "fee_low": None, "direction": None}
    path = write_report(write_run(tmp_path / "run", results, monitor=False))
    page = Page(path)
    (columns, *rows) = next(table for table in page.tables if table[0][:2] == ["series", "verdict"])
    assert columns[3:] == ["skill %", "95 % interval", "p", "against", "RMSE", "naive RMSE", "windows"]
    assert {len(row) for row in rows} == {len(columns)} and rows[0][6] == "persistence" and rows[0][-1] == "1,200"
    assert "rank correlation" not in page.text and "the fee" not in page.text.lower()


def test_what_only_the_script_can_do_is_said_by_the_script(path):
    """A page that JupyterLab does not trust runs none, and said how to sort its columns."""
    still = path.read_text(encoding="utf-8").partition("<script>")[0]
    assert "sorts by it" not in still and "opens its part" not in still and "<input" not in still


def test_a_run_of_sick_models_has_a_report_too(tmp_path):
    results = [made_up_results()[k] for k in (SICK, FAILED)]
    page = Page(write_report(write_run(tmp_path / "sick", results, monitor=False)))
    assert "No model is judged yet." in page.text and "0 of 2 models trained soundly" in page.text


def test_an_order_of_arrival_changes_nothing(tmp_path):
    results = made_up_results()
    first, second = (write_run(tmp_path / n, r) for n, r in (("a", results), ("b", results[::-1])))
    pages = [write_report(f).read_text(encoding="utf-8").replace(f"· {f.name}", "") for f in (first, second)]
    one, other = (re.sub(r"#?[mp][0-9a-f]{10}", "", page) for page in pages)  # old matplotlibs number at random
    assert one == other


def test_a_folder_without_results_is_refused(tmp_path):
    with pytest.raises(RunError, match="is no run folder"):
        write_report(tmp_path)
    with pytest.raises(RunError, match=r"at least one finished series; .* has none of 40"):
        write_report(write_run(tmp_path / "empty", []))
    assert not (tmp_path / "empty" / "report.html").exists()


def test_a_full_disk_leaves_the_old_report(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "full", made_up_results()[:2])
    path = folder / "report.html"
    path.write_text("the old one")
    before = sorted(folder.iterdir())

    def fail(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write_report(folder)
    assert path.read_text() == "the old one" and sorted(folder.iterdir()) == before


def test_of_many_series_the_best_and_the_worst_get_a_part(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "PARTS_AT_MOST", 4)
    folder = write_run(tmp_path / "run", made_up_results())
    page = Page(write_report(folder))
    (group,) = verdicts.judgements(made_up_results()).values()
    order = sorted(group, key=lambda name: -group[name].skill)
    assert [name[2:] for name in page.ids if name.startswith("s-")] == [*order[:2], *order[-2:]]
    assert (
        len(page.table("series", "verdict")) == len(order) and "4 of 40 series, the 2 best and the 2 worst" in page.text
    )
    page = Page(write_report(folder, series=["ETHUSDT_1h"]))
    assert [name for name in page.ids if name.startswith("s-")] == ["s-ETHUSDT_1h"]
    with pytest.raises(UnknownName, match="nearest: ETHUSDT_1h"):
        write_report(folder, series=["ETHUSD_1h"])


def test_ten_thousand_series_fit_into_a_page(tmp_path):
    lines, sizes = [line for line in made_up_results() if line.status == "done"], []
    for count in (300, 600):
        names = [f"COIN{k:05d}USDT_1h" for k in range(count)]
        symbols = tuple(name.removesuffix("_1h") for name in names)
        many = [replace(lines[k % len(lines)], series=name) for k, name in enumerate(names)]
        experiment = vary(EXPERIMENT, symbols=symbols, intervals=("1h",))
        sizes.append(write_report(write_run(tmp_path / str(count), many, experiment, monitor=False)).stat().st_size)
    assert sizes[1] + (10_000 - 600) * (sizes[1] - sizes[0]) / 300 < 8e6


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 390])
def test_no_word_of_a_panel_is_cut_or_covered(tmp_path, visit, width):
    """Three heads of too few windows were TOO FEW TOO FEV, and a loss covered the end of a long name."""
    results = made_up_results(heads=("price", "volatility", "range"))
    for line in results:
        for told in line.test.values():
            told |= {"windows": 63, "skill_low": -99.0, "skill_high": 1.0}
    results[-1] = replace(made_up_results()[12], series="trace200000_200ms")
    page = visit(write_report(write_run(tmp_path / "run", results, monitor=False)).as_uri(), width)
    assert "A column's name sorts by it" in page.locator("#verdicts > .muted").first.inner_text()
    titles = page.locator(".cpb-panel > :first-child").all()
    assert len(titles) == 41
    for title in titles:
        room, boxes = title.bounding_box(), [part.bounding_box() for part in title.locator("*").all()]
        assert all(box["x"] + box["width"] <= room["x"] + room["width"] + 1 for box in boxes), title.inner_text()
        for one, other in itertools.combinations(boxes, 2):
            apart = one["x"] + one["width"] <= other["x"] + 1 or one["y"] + one["height"] <= other["y"] + 2
            assert apart, title.inner_text()
        assert title.locator("b").evaluate("e => e.scrollWidth <= e.clientWidth + 1"), title.inner_text()


@pytest.mark.browser
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_the_report_is_sorted_searched_and_opened_in_a_browser(path, visit, width, scheme):
    page = visit(path.as_uri(), width, scheme)
    table = page.locator(".marks").first
    skills = lambda: [float(t.replace("−", "-")) for t in table.locator("tbody td:nth-child(4)").all_inner_texts()]  # noqa: E731
    assert skills() == sorted(skills(), reverse=True)
    table.get_by_role("button", name="skill %").press("Enter")
    assert skills() == sorted(skills()) and table.locator("th[aria-sort=ascending]").count() == 1
    table.get_by_role("button", name="series").click()
    names = table.locator("tbody td:first-child").all_inner_texts()
    assert names.index("BTC 15m") < names.index("ETH 15m") and len(names) == 38
    page.get_by_role("searchbox").fill("eth 1h")
    assert table.locator("tbody tr:visible").all_inner_texts()[0].startswith("ETH 1h")
    assert page.locator("details.part:visible").count() == 1
    assert page.get_by_role("status").inner_text() == "2 of 76"
    table.get_by_role("link", name="ETH 1h").click()
    part = page.locator("#s-ETHUSDT_1h")
    part.get_by_text("Passport").wait_for()
    assert part.get_by_role("img").count() == part.locator("svg[aria-label]").count() == 1  # no forecasts were kept
    page.get_by_role("searchbox").fill("")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    cut = "[...document.querySelectorAll('.wide')].filter(e => e.scrollWidth > e.clientWidth + 1).length"
    assert page.evaluate(cut) == 0, "no table is cut"
    small = "[...document.querySelectorAll('body *')].filter(e => parseFloat(getComputedStyle(e).fontSize) < 10).length"
    assert page.evaluate(small) == 0, "all text can be read"
    page.set_viewport_size({"width": 703, "height": 1000})  # of an A4 page between its margins
    page.emulate_media(media="print")
    assert page.locator("details.part:visible").count() == 1, "what is open is printed"
    assert page.evaluate("document.documentElement.scrollWidth") == 703 and page.evaluate(cut) == 0


def test_a_run_that_cannot_be_written_to_tells_where_a_report_can_go(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run", made_up_results()[:2])

    def refuse(path, *mode):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr("cpbkit.atomic.os.replace", refuse)
    with pytest.raises(RunError, match=r"report.html cannot be written \(Read-only file system\); .*--out"):
        write_report(folder)


def test_a_skill_whose_interval_is_not_known_is_told_without_one():
    j = verdicts.judge(*example(3000, 2, gain=0.3), "bp")
    plain, open_ended = (
        replace(j, persistence_skill=0.1, persistence_skill_low=low, persistence_skill_high=high)
        for low, high in ((None, None), (-0.2, 1.0))  # of an earlier version's ledger; of few windows that decide
    )
    told = [dict(report._numbers(each))["skill against persistence %"] for each in (plain, open_ended)]
    assert told == ["+10.00, ", "+10.00, −20.00 or more"]
