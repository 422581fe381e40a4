"""The page of a run: what lies in its files, and what a person sees of it in a browser."""

import http.server
import json
import re
import threading

import pandas as pd
import pytest

from cpbkit.errors import RunError
from cpbkit.evaluation import past
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
    assert told["forecast"] == model.forecast().to_dict() and told["meaning"] == model.verdict and told["note"] == ""
    assert told["step_ms"] == 900_000 and told["synthetic"]
    assert {len(column) for column in told["candles"].values()} == {CANDLES}
    assert told["candles"]["time"][-1] == pd.Timestamp(told["forecast"]["last_bar"], tz="UTC").value // 10**6
    assert told["candles"]["close"][-1] == pytest.approx(told["forecast"]["last"]["close"], rel=1e-6)
    kept = past.from_bytes(recent_run._folder.losses("ETHUSDT_15m"), "")["price"]
    one = told["past"]["price"]
    assert one["ahead"] == [1, 3] and one["truth"][1] == pytest.approx(kept.levels(kept.truth)[:, 1], rel=1e-6)
    assert one["time"][1][0] - one["time"][0][0] == 2 * 900_000
    assert {path.name for path in pages[False].parent.glob("series/*")} == {f"{name}.js" for name in NAMES}


def test_a_public_page_holds_no_bar(recent_run, pages):
    told = document(pages[True], "ETHUSDT_15m")
    model = recent_run["ETHUSDT_15m"].forecast()
    assert told["candles"] is None and told["forecast"]["last"] is None and told["forecast"]["unit"] == "bp"
    assert told["forecast"]["bars"][0]["close"] == pytest.approx(
        1e4 * (model.frame["close"].iloc[0] / model.last["close"] - 1), abs=1e-4
    )
    assert set(told["past"]["price"]) == {"target", "ahead", "unit", "time", "rmse", "persistence", "inside"}
    files = [path for path in pages[True].parent.rglob("*.*") if "bokeh" not in path.name]
    everything = b"".join(path.read_bytes() for path in files)
    mine = document(pages[False], "ETHUSDT_15m")
    levels = [*mine["candles"]["close"], *mine["past"]["price"]["truth"][0], *mine["forecast"]["last"].values()]
    assert not [level for level in levels if f"{level:.8g}".encode() in everything]


def test_a_folder_of_something_else_is_left_alone_and_an_earlier_page_is_not(recent_run, pages, tmp_path):
    (tmp_path / "thesis.md").write_text("mine")
    with pytest.raises(RunError, match="must be a new or an empty folder, or hold a page"):
        recent_run.page(tmp_path)
    before = (pages[False].parent / "site.js").stat().st_mtime_ns
    recent_run.page(pages[False].parent)
    assert (pages[False].parent / "site.js").stat().st_mtime_ns > before


def test_where_no_bars_can_be_had_the_page_says_why(recent_run, tmp_path, monkeypatch):
    frames = {"BTCUSDT_1h": pd.DataFrame({"open": [1.0]}, index=pd.DatetimeIndex(["2025-01-01"], tz="UTC"))}
    index = recent_run.page(tmp_path / "page", bars=frames).path
    told = document(index, "BTCUSDT_1h")
    assert told["forecast"] is None and told["note"].startswith("No forecast of the next bars: ")
    assert told["past"]["price"]["truth"]


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
