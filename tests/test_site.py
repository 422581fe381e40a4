"""The page of a run: what lies in its files, and what a person sees of it in a browser."""

import html
import http.server
import json
import re
import shutil
import sys
import threading

import pandas as pd
import pytest

import cpbkit as cpb
from cpbkit.data.klines import Incomplete
from cpbkit.data.synthetic import make_market
from cpbkit.errors import CpbkitError, RunError
from cpbkit.evaluation import past
from cpbkit.runs import trained
from cpbkit.views.site import CANDLES, Site

NAMES = ["BTCUSDT_1h", "BTCUSDT_15m", "ETHUSDT_1h", "ETHUSDT_15m"]


@pytest.fixture(scope="module")
def pages(recent_run, tmp_path_factory):
    """The page with bars, and the one to be shown around."""
    out = tmp_path_factory.mktemp("pages")
    return {public: recent_run.page(out / str(public), public=public).path for public in (False, True)}


def document(index, name):
    text = (index.parent / "series" / f"{name}.js").read_text()
    return json.loads(re.fullmatch(r"cpbkit\((.*)\);\n", text)[1])


def test_a_page_holds_the_forecast_the_newest_bars_and_what_the_test_split_did(recent_run, pages):
    told = document(pages[False], "ETHUSDT_15m")
    model = recent_run["ETHUSDT_15m"]
    assert told["forecast"] == model.forecast().to_dict() and told["note"] == ""
    assert told["meanings"] == {"price": model.verdict}
    assert told["step_ms"] == 900_000 and told["synthetic"]
    assert {len(column) for column in told["candles"].values()} == {CANDLES}
    assert told["candles"]["time"][-1] == pd.Timestamp(told["forecast"]["last_bar"], tz="UTC").value // 10**6
    assert told["candles"]["close"][-1] == pytest.approx(told["forecast"]["last"]["close"], rel=1e-6)
    kept = past.from_bytes(recent_run._folder.losses("ETHUSDT_15m"), "")["price"]["close"]
    (one,) = told["past"]["price"]
    assert one["ahead"] == [1, 3] and one["truth"][1] == pytest.approx(kept.levels(kept.truth)[:, 1], rel=1e-6)
    assert one["time"][1][0] - one["time"][0][0] == 2 * 900_000
    assert {path.name for path in pages[False].parent.glob("series/*")} == {f"{name}.js" for name in NAMES}


def test_a_page_says_of_each_head_what_the_verdicts_say(recent_run, pages, rich):
    told = html.unescape(pages[False].read_text(encoding="utf-8"))
    said = recent_run.verdicts().said
    assert "price, all 4 series at once: " in said["price, all series"]
    assert all(line in told.partition("<main>")[0] for line in said.values())
    assert "squared error over the variance known when the forecast was made" in told
    told = html.unescape(rich[False].read_text(encoding="utf-8"))
    assert re.findall(r'data-more="(.*?), all 2 series at once: ', told) == [
        *("price", "volatility", "price (old weights)", "volatility (old weights)")
    ]


def test_a_public_page_holds_no_bar(recent_run, pages):
    told = document(pages[True], "ETHUSDT_15m")
    model = recent_run["ETHUSDT_15m"].forecast()
    assert told["candles"] is None and told["forecast"]["last"] is None and told["forecast"]["unit"] == "bp"
    assert told["forecast"]["bars"][0]["close"] == pytest.approx(
        1e4 * (model.frame["close"].iloc[0] / model.last["close"] - 1), abs=1e-4
    )
    assert set(told["past"]["price"][0]) == {"target", "ahead", "unit", "time", "rmse", "persistence", "inside"}
    files = [path for path in pages[True].parent.rglob("*.*") if "bokeh" not in path.name]
    everything = b"".join(path.read_bytes() for path in files)
    mine = document(pages[False], "ETHUSDT_15m")
    levels = [*mine["candles"]["close"], *mine["past"]["price"][0]["truth"][0], *mine["forecast"]["last"].values()]
    assert not [level for level in levels if f"{level:.8g}".encode() in everything]


def test_a_folder_of_something_else_is_left_alone_and_an_earlier_page_is_not(recent_run, pages, tmp_path):
    (tmp_path / "thesis.md").write_text("mine")
    with pytest.raises(RunError, match="must be a new or an empty folder, or hold a page"):
        recent_run.page(tmp_path)
    before = (pages[False].parent / "site.js").stat().st_mtime_ns
    recent_run.page(pages[False].parent)
    assert (pages[False].parent / "site.js").stat().st_mtime_ns > before


def test_a_page_without_the_library_that_draws_says_what_to_install(recent_run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bokeh", None)
    with pytest.raises(CpbkitError, match=r'bokeh, which is not installed: pip install "cpbkit\[page\]"'):
        recent_run.page(tmp_path / "page")
    assert not (tmp_path / "page").exists()


def test_the_page_shows_what_can_be_forecast_and_says_why_the_rest_is_missing(recent_run, tmp_path, caplog):
    bars = trained.newest_bars(recent_run.models())
    one = pd.DataFrame({"open": [1.0]}, index=pd.DatetimeIndex(["2025-01-01"], tz="UTC"))
    index = recent_run.page(tmp_path / "page", bars={"BTCUSDT_1h": one, "ETHUSDT_1h": bars["ETHUSDT_1h"]}).path
    told = document(index, "BTCUSDT_1h")
    assert told["forecast"] is None and told["note"].startswith("No forecast of the next bars: BTCUSDT_1h: ")
    assert told["past"]["price"][0]["truth"] and "3 of 4 series: No forecast of the next bars" in caplog.text
    assert document(index, "ETHUSDT_15m")["note"].endswith("ETHUSDT_15m: no bars of it were given")
    other = document(index, "ETHUSDT_1h")
    assert other["forecast"] and other["candles"] and other["note"] == ""


def test_a_venue_that_lacks_a_coin_leaves_the_others_on_the_page(recent_run, monkeypatch):
    bars = trained.newest_bars(recent_run.models())

    def partly(models, now):
        there = {model.series: bars[model.series] for model in models if model.series != "ETHUSDT_1h"}
        raise Incomplete("one is not there", there, {"ETHUSDT_1h": "ETHUSDT_1h: the venue does not answer\x1b[2J"})

    monkeypatch.setattr(trained, "newest_bars", partly)
    site = Site(recent_run.folder, recent_run.models())
    told = site.documents(site.models)
    assert [name for name, one in told.items() if one["forecast"]] == [name for name in NAMES if name != "ETHUSDT_1h"]
    assert told["ETHUSDT_1h"]["note"] == "No forecast of the next bars: ETHUSDT_1h: the venue does not answer"
    monkeypatch.setattr(trained, "newest_bars", lambda *_: {})
    assert site.documents(["BTCUSDT_1h"])["BTCUSDT_1h"]["note"].endswith("BTCUSDT_1h: no bars of it were given")


def test_names_and_verdicts_are_escaped(recent_run, monkeypatch):
    site = Site(recent_run.folder, [recent_run[name] for name in recent_run])
    hostile = {name.replace("BTC", "<b>"): model for name, model in site.models.items()}
    site.models = hostile
    assert b"<b>USDT" not in site.index() and b"&lt;b&gt;" in site.index()


@pytest.mark.browser
@pytest.mark.parametrize(("public", "width", "scheme"), [(False, 1280, "dark"), (True, 390, "light")])
def test_every_control_of_the_page_works_in_a_browser(pages, visit, public, width, scheme):
    page = visit(pages[public].as_uri(), width, scheme)
    shown = lambda name: page.wait_for_selector(f"body[data-shown={name}]")  # noqa: E731
    first = page.locator("#name").get_attribute("data-first")
    shown(first)
    page.locator("#next canvas").first.wait_for()
    page.get_by_label("Coin").select_option("ETHUSDT")
    page.get_by_label("Bar length").select_option("15m")
    shown("ETHUSDT_15m")
    assert page.locator("h2").first.inner_text() == "ETH 15m" and page.url.endswith("#ETHUSDT_15m")
    assert page.locator("#verdict").inner_text()
    spoken = page.locator("#next .plot").get_attribute("aria-label")
    assert spoken.startswith("ETH 15m: close forecast as ") and (", bp from the last close" in spoken) == public
    before = page.locator("#past .plot").get_attribute("aria-label")
    page.get_by_label("Bars ahead").select_option("3")
    page.wait_for_function("label => document.querySelector('#past .plot').ariaLabel !== label", arg=before)
    page.get_by_text("The forecast as a table").click()
    assert page.locator("#bars tbody tr:visible").count() == 3
    page.locator("ol a", has_text="BTC 15m").focus()
    page.keyboard.press("Enter")
    shown("BTCUSDT_15m")
    assert page.get_by_label("Coin").input_value() == "BTCUSDT"
    page.emulate_media(color_scheme="light" if scheme == "dark" else "dark")
    page.wait_for_timeout(800)
    assert page.locator("#next .bk-Figure").count() == 1 and page.locator("#past .bk-Figure").count() == 1
    assert page.evaluate("document.documentElement.scrollWidth") == width


@pytest.mark.browser
def test_a_coin_whose_name_an_address_encodes_is_shown_as_any_other(pages, visit, tmp_path):
    shutil.copytree(pages[True].parent, tmp_path / "page")
    renamed = "ETHUSDT", "币安人生USDT"
    for path in tmp_path.rglob("*ETHUSDT*.js"):
        path.with_name(path.name.replace(*renamed)).write_text(path.read_text().replace(*renamed), encoding="utf-8")
    index = tmp_path / "page/index.html"
    index.write_text(index.read_text(encoding="utf-8").replace(*renamed), encoding="utf-8")
    page = visit(f"{index.as_uri()}#币安人生USDT_15m")  # a link that somebody sent
    page.wait_for_selector("body[data-shown=币安人生USDT_15m]")
    assert page.get_by_label("Coin").input_value() == "币安人生USDT"
    assert page.locator("ol a[aria-current]").get_attribute("href") == "#币安人生USDT_15m"
    page.locator("ol a", has_text="BTC 1h").click()
    page.wait_for_selector("body[data-shown=BTCUSDT_1h]")
    page.locator("ol a[href='#币安人生USDT_1h']").click()
    page.wait_for_selector("body[data-shown=币安人生USDT_1h]")
    assert page.locator("#verdict").inner_text() and page.locator("#note").inner_text() == ""


@pytest.fixture(scope="module")
def rich(tmp_path_factory):
    """The page of a refit of models that forecast quantiles of three targets of two heads."""
    folder = tmp_path_factory.mktemp("rich")
    where = {"source": "synthetic", "symbols": ["BTCUSDT", "ETHUSDT"], "intervals": ["1h"], "start": "2025-01-01"}
    small = {"context": 8, "horizon": 3, "width": 4, "epochs": 1, "steps": 5}
    heads = {"targets": ["high", "volatility", "close"], "quantiles": [0.05, 0.5, 0.95]}
    place = {"executor": "local", "quiet": True}
    run = cpb.sweep("quick", folder=folder / "run", end="2025-02-10", **where, **small, **heads, **place)
    child = run.refit("2025-03-01", **place)
    bars = make_market(["BTCUSDT", "ETHUSDT"], ["1h"], "2025-01-01", "2025-03-01")
    return {public: child.page(folder / str(public), bars, public=public).path for public in (False, True)}


def test_old_and_new_weights_have_a_verdict_and_past_forecasts_of_each_target(rich):
    told = document(rich[False], "BTCUSDT_1h")
    heads = ["price", "volatility", "price (old weights)", "volatility (old weights)"]
    assert list(told["meanings"]) == heads and sorted(told["past"]) == sorted(heads)
    assert told["intervals"]["price"]["coverage"] != told["intervals"]["volatility"]["coverage"]
    old, new = (told["past"][f"price{end}"] for end in (" (old weights)", ""))
    assert [one["target"] for one in old] == [one["target"] for one in new] == ["close", "high"]
    assert old[1]["truth"] == new[1]["truth"] and old[1]["forecast"] != new[1]["forecast"]
    public = document(rich[True], "BTCUSDT_1h")["forecast"]["bars"][0]
    assert public["close_q0.05"] < public["close"] == public["close_q0.5"] < public["close_q0.95"]


@pytest.mark.browser
@pytest.mark.parametrize(("public", "width", "scheme"), [(False, 390, "dark"), (True, 1280, "light")])
def test_target_weights_and_quantiles_are_chosen_by_keyboard(rich, visit, public, width, scheme):
    page = visit(rich[public].as_uri(), width, scheme)
    page.wait_for_selector("body[data-shown]")
    what, spread = page.get_by_label("Forecast of"), page.get_by_label("Spread")
    assert what.locator("option").all_inner_texts() == [
        *("price: close", "price: high", "volatility"),
        *("price: close (old weights)", "price: high (old weights)", "volatility (old weights)"),
    ]
    assert page.locator("ol:visible").count() == 1 and "of the price;" in page.locator(".headline").inner_text()
    assert page.locator(".more").inner_text().startswith("price, all 2 series at once: ")
    spoken = page.locator("#next .plot")
    what.focus()
    page.keyboard.press("ArrowDown")
    page.wait_for_function("document.querySelector('#next .plot').ariaLabel.includes(': high forecast as ')")
    assert "Past forecasts of high" in page.locator("#past figcaption").inner_text()
    page.get_by_text("The forecast as a table").click()
    spread.focus()
    page.keyboard.press("ArrowDown")
    page.wait_for_function("document.querySelector('#bars').textContent.includes('high q0.05')")
    assert "between the quantiles 5 %, 50 %, 95 %" in page.locator("#next figcaption").inner_text()
    what.select_option(label="volatility")
    page.wait_for_function("document.querySelector('.headline').textContent.includes('of the volatility;')")
    assert page.locator(".more").inner_text().startswith("volatility, all 2 series at once: ")
    assert spoken.get_attribute("aria-label").startswith("BTC 1h: volatility forecast as ")
    what.select_option(label="price: close (old weights)")
    page.wait_for_selector("ol[data-head='price (old weights)']:visible")
    page.wait_for_function("document.querySelector('#next').hidden")
    assert page.locator("#past canvas").first.is_visible() and "Old weights" in page.locator("#note").inner_text()
    page.locator("ol:visible a", has_text="ETH 1h").click()
    page.wait_for_selector("body[data-shown=ETHUSDT_1h]")
    assert what.input_value() == "close" and page.evaluate("document.documentElement.scrollWidth") == width


@pytest.mark.browser
def test_numbers_of_a_column_have_the_same_decimals(pages, visit, tmp_path):
    """39,914 stood above 39,577.2, as if it were known to the unit alone."""
    shutil.copytree(pages[False].parent, tmp_path / "page")
    path = tmp_path / "page/series/ETHUSDT_1h.js"
    told = document(tmp_path / "page/index.html", "ETHUSDT_1h")
    for bar, close in zip(told["forecast"]["bars"], (39914.0, 39577.2, 39611.25), strict=True):
        bar["close"] = close
    path.write_text(f"cpbkit({json.dumps(told)});\n")
    page = visit(f"{(tmp_path / 'page/index.html').as_uri()}#ETHUSDT_1h")
    page.wait_for_selector("body[data-shown=ETHUSDT_1h]")
    closes = page.locator("#bars tbody td:nth-child(2)").all_text_contents()
    assert closes == ["39,914.00", "39,577.20", "39,611.25"]


@pytest.mark.browser
def test_the_page_works_from_a_web_server_too(pages, visit):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=pages[True].parent)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = visit(f"http://127.0.0.1:{server.server_port}/#ETHUSDT_1h")
        page.wait_for_selector("body[data-shown=ETHUSDT_1h]")
        page.locator("#next canvas").first.wait_for()
        server.shutdown()
