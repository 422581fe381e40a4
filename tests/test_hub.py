"""Published and loaded again, over the Hub's protocol on loopback with its own client, with faults put in."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from conftest import terminal
from hub_server import hub_in_use, speak_to

import cpbkit as cpb
from cpbkit.data.synthetic import make_market
from cpbkit.errors import CpbkitError, RunError
from cpbkit.hub import client
from cpbkit.hub.client import HubError
from cpbkit.hub.publish import INDEX, write_repository
from cpbkit.hub.record import record
from cpbkit.hub.score import score
from cpbkit.runs.folder import RunFolder
from cpbkit.training import checkpoint

# The client's own, under a newer HTTP library than it was written for.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
NAMES = "BTCUSDT_1h", "ETHUSDT_1h"
SMALL = {"context": 8, "horizon": 2, "width": 4, "epochs": 1, "steps": 5, "executor": "local", "quiet": True}
TOKEN = "hf_never_to_be_seen"


@pytest.fixture(scope="module")
def bars():
    """Bars as a venue's would be: the seeded market, without the stamp that says so."""
    market = make_market(["BTCUSDT", "ETHUSDT"], ["1h"], "2025-01-01", "2025-01-25")
    return {name: klines.frame for name, klines in market.items()}


@pytest.fixture(scope="module")
def run(bars, tmp_path_factory):
    return cpb.sweep("quick", data=bars, folder=tmp_path_factory.mktemp("hub") / "run", **SMALL)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with hub_in_use(monkeypatch, tmp_path / "cache", TOKEN) as hub:
        yield hub


def test_a_published_run_loads_model_by_model_and_forecasts_the_same(run, bars, hub):
    told = run.publish("me/forty")
    assert str(told).endswith("/me/forty") and hub.repos["model", "me/forty"]["private"]
    assert len(hub.repos["model", "me/forty"]["commits"]) == 2, "all files come in one commit"
    before = len(hub.calls)
    found = cpb.load("me/forty")
    assert set(found) == set(NAMES)
    model = found["ETHUSDT_1h"]
    mine = run["ETHUSDT_1h"]
    assert model.forecast(bars["ETHUSDT_1h"]).frame.equals(mine.forecast(bars["ETHUSDT_1h"]).frame)
    assert model.verdict == mine.verdict != ""
    asked = [path for _, path, _ in hub.calls[before:]]
    assert not any("BTCUSDT_1h.safetensors" in path for path in asked), "one model needs no other"


def test_what_is_published_says_what_may_be_said_and_holds_no_bars_or_paths(run, tmp_path):
    out = write_repository(run.folder, "me/forty", tmp_path / "look")
    card = (out / "README.md").read_text()
    assert "of 2 beat" in card and 'cpb.load("me/forty")' in card and "no advice" in card and "model-index" in card
    assert all(name in card for name in NAMES) and (out / "verdicts.png").read_bytes().startswith(b"\x89PNG")
    everything = b"".join(path.read_bytes() for path in out.rglob("*") if path.is_file())
    assert os.fsencode(run.folder) not in everything and TOKEN.encode() not in everything
    assert {path.suffix for path in out.rglob("*") if path.is_file()} == {
        ".md",
        ".png",
        ".json",
        ".jsonl",
        ".safetensors",
        ".yaml",
    }
    (entry, _) = yaml.safe_load((out / ".eval_results" / "cpbkit.yaml").read_text())
    table = run.verdicts().to_frame()
    assert entry["dataset"] == {"id": "me/forty-record", "task_id": f"{table['series'][0]}-price"}
    assert entry["value"] == pytest.approx(table["skill %"][0], abs=1e-4)
    assert not json.loads((out / "results.jsonl").read_text().splitlines()[0])["curve"]
    with pytest.raises(HubError, match="must be a new or an empty folder"):
        write_repository(run.folder, "me/forty", out)


def front_of(card):
    """Return what the Hub reads of a card, and the text below."""
    _, front, text = card.split("---\n", 2)
    return yaml.safe_load(front), text


def test_a_card_says_all_that_the_verdicts_say_and_what_its_words_mean(run, tmp_path):
    """Its skill was that of another formula, by which a model of a greater RMSE could not be better."""
    front, text = front_of((write_repository(run.folder, "me/forty", tmp_path / "look") / "README.md").read_text())
    told = run.verdicts()
    assert all(f"- {line}\n" in text for line in told.headlines) and "price, all 2 series at once: " in text
    assert "1 - RMSE" not in text and "squared error over the variance known when the forecast was made" in text
    assert "A head is a target, or a group of targets, that is judged together" in text
    header, _, *rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    assert [row[header.index("p")] for row in rows] == [f"{p:.3f}" for p in told.table["p"]]
    assert [entry["dataset"]["name"] for entry in front["model-index"][0]["results"]] == list(told.table["series"])


def test_a_model_index_has_an_entry_a_series_and_in_it_a_metric_a_head(tmp_path):
    index = pd.date_range("2024-01-01", periods=600, freq="1h", tz="UTC")
    walk = np.random.default_rng(0).standard_normal((600, 4)).cumsum(axis=0)
    tables = {f"plant{k}": pd.DataFrame(walk[:, 2 * k : 2 * k + 2], index, ["load", "heat"]) for k in range(2)}
    run = cpb.sweep("quick", data=tables, folder=tmp_path / "run", **SMALL)
    out = write_repository(run.folder, "me/plants", tmp_path / "look")
    front, text = front_of((out / "README.md").read_text())
    entries, table = front["model-index"][0]["results"], run.verdicts().to_frame().set_index(["series", "head"])
    assert {entry["dataset"]["name"] for entry in entries} == set(tables) and len(entries) == 2
    for entry in entries:
        values = {metric["name"].partition(" (")[0]: metric["value"] for metric in entry["metrics"]}
        rmse = table["rmse"][entry["dataset"]["name"]]
        assert values == {f"RMSE of the {head}": pytest.approx(rmse[head], abs=1e-6) for head in ("load", "heat")}
    days = run.results[0].dates["test"]
    assert entries[0]["dataset"]["args"] == {"start": days[0], "end": days[1]}
    assert "of\nown tables." in text and "table spot" not in text and entries[0]["dataset"]["type"] == "table"


def test_synthetic_data_and_own_code_are_refused(tmp_path, hub, bars, monkeypatch):
    where = {"source": "synthetic", "symbols": ["BTCUSDT"], "intervals": ["1h"], "start": "2025-01-01"}
    made_up = cpb.sweep("quick", folder=tmp_path / "run", end="2025-01-25", **where, **SMALL)
    with monkeypatch.context() as without, pytest.raises(HubError, match="synthetic data cannot be published"):
        without.setattr("cpbkit.hub.client.get_token", lambda: None)  # a token would not help
        made_up.publish("me/forty")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_loss_here.py").write_text("def loss(f, y):\n    return (f - y).abs().mean((-1, -2))\n")
    own = cpb.sweep("quick", data=bars, folder="own", loss="own_loss_here:loss", **SMALL)
    with pytest.raises(HubError, match="own code cannot be published"):
        own.publish("me/forty")
    assert not hub.repos, "nothing was begun"


@pytest.mark.parametrize("status", [429, 500, 503])
@pytest.mark.parametrize("part", ["/api/repos/create", "/preupload/", "/objects/batch", "/_upload/", "/commit/"])
def test_a_busy_hub_is_asked_again_and_nothing_is_half_published(run, hub, part, status, caplog):
    hub.faults = [(part, status)] * 2
    run.publish("me/forty")
    assert not hub.faults and len(hub.repos["model", "me/forty"]["commits"]) == 2
    assert TOKEN not in caplog.text


@pytest.mark.parametrize("part", ["/preupload/", "/_upload/", "/commit/"])
def test_an_upload_that_is_cut_off_goes_on_and_sends_no_file_twice(run, hub, part):
    hub.faults = [(part, "drop")]
    run.publish("me/forty")
    assert not hub.faults and set(hub.files("me/forty")) >= {INDEX, "models/BTCUSDT_1h.safetensors"}
    sent = [path for method, path, _ in hub.calls if method == "PUT"]
    assert len(sent) <= len(NAMES) + (part == "/_upload/")
    assert set(cpb.load("me/forty")) == set(NAMES)


def test_presets_share_a_collection_and_a_second_publication_adds_nothing(run, hub):
    for name in ("me/gru", "me/lstm", "me/gru"):
        run.publish(name, collection="Forty")
    ((slug, made),) = hub.collections.items()
    assert made["title"] == "Forty" and made["private"] and slug.startswith("me/")
    assert [item["id"] for item in made["items"]] == ["me/gru", "me/lstm"]


def test_an_audit_goes_with_the_models_and_one_that_failed_is_refused(run, hub, tmp_path):
    folder = shutil.copytree(run.folder, tmp_path / "run")
    finding = {"check": "future", "verdict": "PASS", "evidence": "nothing moved"}
    RunFolder(folder).keep_audit({"BTCUSDT_1h": [finding]})
    out = write_repository(folder, "me/forty", tmp_path / "look")
    told = (out / "audit.json").read_bytes()
    assert json.loads((out / INDEX).read_text())["audit"] == hashlib.sha256(told).hexdigest()
    assert "An audit for leaks of BTCUSDT_1h made 1 check, of which none failed" in (out / "README.md").read_text()
    RunFolder(folder).keep_audit({"BTCUSDT_1h": [finding | {"verdict": "FAIL"}]})
    with pytest.raises(HubError, match=r"a run whose audit failed .*BTCUSDT_1h: future"):
        cpb.open_run(folder).publish("me/forty")


def test_a_refit_may_follow_the_run_before_it_and_no_path_of_own_files_is_told(bars, hub, tmp_path):
    for name, frame in bars.items():
        frame.to_csv(tmp_path / f"{name}.csv")
    run = cpb.sweep("quick", files=tmp_path, end="2025-01-20", folder=tmp_path / "run", **SMALL)
    out = write_repository(run.folder, "me/forty", tmp_path / "look")
    everything = b"".join(path.read_bytes() for path in out.rglob("*") if path.is_file())
    assert os.fsencode(tmp_path) not in everything
    assert cpb.TrainedModel.read((out / "models" / "BTCUSDT_1h.safetensors").read_bytes())
    given = {name: frame[:"2025-01-20"] for name, frame in bars.items()}
    first = cpb.sweep("quick", data=given, folder=tmp_path / "first", **SMALL)
    first.publish("me/follow")
    later = first.refit("2025-01-24", data=bars, executor="local", quiet=True)
    later.publish("me/follow")
    assert json.loads(hub.files("me/follow")[INDEX])["models"]["BTCUSDT_1h"] == later["BTCUSDT_1h"].about["sha256"]
    assert b"old weights" not in hub.files("me/follow")["README.md"]


def test_a_hub_that_stays_busy_is_told_and_leaves_what_was_there(run, hub):
    run.publish("me/forty")
    before = dict(hub.files("me/forty"))
    hub.faults = [("/commit/", 503)] * 50
    with pytest.raises(HubError, match=r"HTTP 503, 5 times\. What was there is as it was"):
        run.publish("me/forty")
    assert hub.files("me/forty") == before
    hub.faults = []
    run.publish("me/forty")


DOORS = "publish", "record", "score", "load"
MINE = [("1" * 40, {"thesis.md": b"mine"})]
KINDS = {"publish": "model", "load": "model", "record": "dataset", "score": "dataset"}
WRONG = {
    "no name": "a repository is named user/name; got 'forty'",
    "no token": "writing to me/forty needs a token: make one .*, then `hf auth login`, or set HF_TOKEN",
    "no right": r"the token may not do this \(HTTP 403\): make one with the right to write",
    "something else": "holds (other files than|no run of cpbkit)",
    "of somebody else": "it is not there, or it is private and the token may not see it; check the name",
    "no network": r"no connection to the Hub .* 5 times\. What was there is as it was; the same call goes on",
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("door", DOORS)
def test_what_is_wrong_is_told_in_one_line_with_the_remedy(run, bars, hub, monkeypatch, door, wrong):
    repo, now = "forty" if wrong == "no name" else "me/forty", bars["BTCUSDT_1h"].index[-1] + pd.Timedelta(hours=1)
    calls = {
        "publish": lambda: run.publish(repo),
        "record": lambda: record(run.models(), repo, "kit", bars, clock=lambda: now),
        "score": lambda: score(repo, bars, clock=lambda: now),
        "load": lambda: cpb.load(repo),
    }
    if wrong in ("something else", "of somebody else"):
        hub.repos[KINDS[door], repo] = {"private": True, "commits": MINE}
    if wrong == "of somebody else":
        hub.repos[KINDS[door], repo]["hidden"] = True
    if wrong == "no right":
        hub.faults = [("/", 403)] * 99
    if wrong == "no network":
        speak_to("http://127.0.0.1:9", monkeypatch, "unused")
    words = WRONG[wrong]
    if wrong == "no token":
        monkeypatch.setattr(client, "get_token", lambda: None)
        words = WRONG["of somebody else"] if door == "load" else words
    before = {name: list(repo["commits"]) for name, repo in hub.repos.items()}
    with pytest.raises(HubError, match=words) as caught:
        calls[door]()
    assert "\n" not in str(caught.value) and TOKEN not in str(caught.value) and len(str(caught.value)) < 300
    assert {name: repo["commits"] for name, repo in hub.repos.items()} == before


def test_a_run_that_is_neither_here_nor_on_the_hub_is_told(hub):
    for place, words in (("rnu", "named user/name"), ("me/rnu", "it is not there")):
        done = terminal("record", place, "--repo", "me/record")
        assert done.exit_code == 1 and f"{place} is no run folder here, and " in done.output and words in done.output


def test_a_token_that_ends_on_the_way_is_told(run, hub):
    hub.faults = [("/commit/", 401)]
    with pytest.raises(HubError, match="the token may not do this"):
        run.publish("me/forty")


def test_without_a_token_the_remedy_is_told(run, hub, monkeypatch):
    monkeypatch.setattr(client, "get_token", lambda: None)
    shown = terminal("publish", run.folder, "--repo", "me/forty")
    assert shown.exit_code == 1 and "hf auth login" in shown.output and not hub.calls


def test_a_repository_of_something_else_is_left_alone(run, hub, bars, tmp_path):
    run.publish("me/forty")
    other = cpb.sweep("quick", data=bars, folder=tmp_path / "other", **SMALL | {"steps": 6})
    with pytest.raises(HubError, match="holds another run"):
        other.publish("me/forty")
    hub.repos["model", "me/mine"] = {"private": True, "commits": [("1" * 40, {"thesis.md": b"mine"})]}
    with pytest.raises(HubError, match="holds other files"):
        run.publish("me/mine")
    assert hub.files("me/mine") == {"thesis.md": b"mine"}
    huge = {INDEX: b" " * 1_000_001}
    hub.repos["model", "me/huge"] = {"private": True, "commits": [("1" * 40, huge)]}
    with pytest.raises(HubError, match="1,000,001 bytes, more than the 1,000,000"):
        run.publish("me/huge")
    assert hub.files("me/huge") == huge


def test_a_dry_run_writes_what_would_be_published_and_asks_nobody(run, hub, tmp_path):
    out = tmp_path / "look"
    shown = terminal("publish", run.folder, "--repo", "me/forty", "--dry-run", out)
    assert shown.exit_code == 0 and (out / INDEX).exists() and not hub.calls


def test_what_is_not_there_is_told(run, hub):
    with pytest.raises(HubError, match="it is not there"):
        cpb.load("me/nowhere")
    with pytest.raises(HubError, match="named user/name"):
        cpb.load("../../etc/passwd")
    run.publish("me/forty")
    with pytest.raises(HubError, match="has no model of SOLUSDT_1h; it has BTCUSDT_1h"):
        cpb.load("me/forty")["SOLUSDT_1h"]


HOSTILE = {
    "a path in a name": lambda files: {INDEX: b'{"format": 1, "models": {"../../x": "0"}}'},
    "another format": lambda files: {INDEX: b'{"format": 99, "models": {}}'},
    "no JSON": lambda files: {INDEX: b"{"},
    "a number without end": lambda files: {INDEX: b'{"format": 1, "models": {}, "x": 1e999}'},
    "a judgement that is none": lambda files: {
        "results.jsonl": re.sub(rb'"skill": ?-?[0-9.e-]+', b'"skill":"high"', files["results.jsonl"])
    },
    "deep JSON": lambda files: {INDEX: b"[" * 100_000 + b"]" * 100_000},
    "a huge index": lambda files: {INDEX: b" " * 1_000_001},
    "another model": lambda files: {"models/BTCUSDT_1h.safetensors": files["models/ETHUSDT_1h.safetensors"]},
    "no model": lambda files: {"models/BTCUSDT_1h.safetensors": None},
    "a broken ledger": lambda files: {"results.jsonl": b"{}\n"},
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_repository_is_refused_with_one_line(run, hub, kind):
    run.publish("me/forty")
    hub.commit("me/forty", HOSTILE[kind](hub.files("me/forty")))
    with pytest.raises(CpbkitError) as caught:
        cpb.load("me/forty")["BTCUSDT_1h"]
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("part", "setting", "value"),
    [
        ("model", "width", 10**9),
        ("model", "layers", 10**9),
        ("model", "width", 5),
        ("model", "name", "os:system"),
        ("task", "horizon", 10**9),
        ("task", "loss", "os:getcwd"),
    ],
)
def test_a_config_that_asks_for_code_or_for_much_is_refused(run, part, setting, value):
    content = (run.folder / "models" / "BTCUSDT_1h.safetensors").read_bytes()
    weights, told = checkpoint.load(content)
    told["experiment"][part][setting] = value
    with pytest.raises(CpbkitError):
        cpb.TrainedModel.read(checkpoint.save(weights, told))


def test_weights_of_other_shapes_and_numbers_that_do_not_fit_are_refused(run):
    content = (run.folder / "models" / "BTCUSDT_1h.safetensors").read_bytes()
    weights, told = checkpoint.load(content)
    name = next(iter(weights))
    with pytest.raises(RunError, match="are not those of a gru of width 4"):
        cpb.TrainedModel.read(checkpoint.save(weights | {name: torch.zeros(3)}, told))
    with pytest.raises(RunError, match="input_mean of a scaler must have the shape"):
        cpb.TrainedModel.read(checkpoint.save(weights, told | {"scaler": told["scaler"] | {"input_mean": [0.0]}}))
    wrong = {"price": {"half_width": [[1.0]], "nominal": 0.9, "coverage": 0.9}}
    with pytest.raises(RunError, match="a row for each of 2 bars"):
        cpb.TrainedModel.read(checkpoint.save(weights, told | {"intervals": wrong}))


def test_the_door_does_not_load_the_hub_before_it_is_asked_for():
    code = "import sys, cpbkit.api; print('huggingface_hub' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_page_is_published_as_a_static_space_without_a_bar(run, bars, hub, tmp_path):
    told = run.publish("me/forty", page=True, bars=bars)
    assert str(told).endswith("/spaces/me/forty") and hub.repos["space", "me/forty"]["private"]
    files = hub.files("me/forty", "space")
    card = files["README.md"].decode()
    assert "sdk: static" in card and "app_file: index.html" in card and "of 2 beat" in card and "no advice" in card
    assert {"index.html", "site.js", "bokeh.min.js", *(f"series/{name}.js" for name in NAMES)} <= set(files)
    everything = b"".join(content for name, content in files.items() if "bokeh" not in name)
    assert os.fsencode(run.folder) not in everything and b'"candles":null' in everything
    closes = [f"{close:.8g}".encode() for close in bars["BTCUSDT_1h"]["close"].iloc[-200:]]
    assert not [close for close in closes if close in everything]
    run.publish("me/forty", page=True, bars=bars)  # again, over what is its own
    look = run.publish("me/forty", page=True, bars=bars, dry_run=tmp_path / "look")
    assert look.path == tmp_path / "look" / "index.html" and ("model", "me/forty") not in hub.repos
    hub.repos["space", "me/mine"] = {"private": True, "commits": [("1" * 40, {"index.html": b"mine"})]}
    with pytest.raises(HubError, match="holds other files"):
        run.publish("me/mine", page=True, bars=bars)


def test_a_page_of_made_up_bars_is_not_published(recent_run, hub):
    with pytest.raises(HubError, match="synthetic data cannot be published"):
        recent_run.publish("me/forty", page=True)
    assert not hub.repos
