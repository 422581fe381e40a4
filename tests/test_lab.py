"""The notebooks as a person meets them: JupyterLab in Chromium, "Run all", and what is then on the page.

`make test-browser` runs these alone; what was on the page is left as pictures in `seen/`.
"""

import io
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import nbformat
import pytest
from conftest import ROOT
from test_notebooks import SMALL, with_parameters

pytestmark = [pytest.mark.lab, pytest.mark.browser]
SEEN = ROOT / "seen"
LONGEST = 280  # s of one notebook; of all of them together the suite allows five minutes on two idle cores
SWEEP = """
import cpbkit.runs.plan
from cpbkit.config.experiment import vary
from cpbkit.config.presets import PRESETS

source, symbols, intervals = "synthetic", ("BTCUSDT", "ETHUSDT", "BNBUSDT"), ("1h",)
start, end, epochs = "2025-01-01", "2025-01-31", 100_000  # a sweep that only a person ends
preset = vary(PRESETS["quick"], patience=epochs, steps=20)
# All at once: on a busy machine a plan may train them apart.
cpbkit.runs.plan._cut = lambda names, size: [names]
"""
MORE = {"01_gpu_diagnosis": "\nloops = 'kept.py'\n", "05_verdict": "source = 'synthetic'\n"}
SETTINGS = {
    "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"},  # else cells out of sight are not on the page
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False},
}
READY = """async () => {
    const notebook = window.jupyterapp.shell.currentWidget;
    await notebook.context.ready;
    await notebook.sessionContext.ready;
    while (notebook.sessionContext.session?.kernel?.connectionStatus !== 'connected')
        await new Promise(done => setTimeout(done, 100));
    await notebook.sessionContext.session.kernel.info;
}"""
RUN_ALL = """() => {
    window.through = false;
    window.jupyterapp.commands.execute('notebook:run-all-cells').finally(() => { window.through = true; });
}"""
OUTPUTS = "() => window.jupyterapp.shell.currentWidget.content.widgets.flatMap(c => c.model.outputs?.toJSON() ?? [])"
HEIGHT = """() => {
    const cells = [...document.querySelectorAll('.jp-Notebook .jp-Cell')].map(cell => cell.getBoundingClientRect());
    return Math.ceil(Math.max(...cells.map(box => box.bottom)) - Math.min(...cells.map(box => box.top)));
}"""
# Tables and code that are wider than their place, and names of models that are.
CUT = """() => [
    ...[...document.querySelectorAll('.jp-OutputArea-output table')]
        .filter(table => table.scrollWidth > table.closest('.jp-OutputArea-output').clientWidth + 1),
    ...[...document.querySelectorAll('.cpb-panel b, .jp-InputArea .cm-scroller')]
        .filter(text => text.scrollWidth > text.clientWidth),
].map(cut => cut.innerText.slice(0, 200))"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder of notebooks with small parameters, which a JupyterLab serves."""
    folder = tmp_path_factory.mktemp("lab")
    for name in ("00_environment", "01_gpu_diagnosis", "03_smoke_test", "04_sweep", "05_verdict"):
        parameters = SWEEP if name == "04_sweep" else SMALL[name][0] + MORE.get(name, "")
        nbformat.write(with_parameters(ROOT / "notebooks" / f"{name}.ipynb", parameters), folder / f"{name}.ipynb")
    return folder


@pytest.fixture(scope="module")
def lab(home, tmp_path_factory):
    """The address of the JupyterLab, without a token since it is on loopback alone."""
    config = tmp_path_factory.mktemp("jupyter")
    (config / "labconfig").mkdir()
    (config / "labconfig" / "default_setting_overrides.json").write_text(json.dumps(SETTINGS))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}"]
    command += ["--IdentityProvider.token=", f"--ServerApp.root_dir={home}", "--LabApp.expose_app_in_browser=True"]
    places = {"JUPYTER_CONFIG_DIR": config, "JUPYTER_DATA_DIR": config / "data", "CPBKIT_CACHE": config / "cache"}
    settings = os.environ | {name: str(place) for name, place in places.items()} | {"PYTHONPATH": str(ROOT)}
    log = config / "log"
    with log.open("w") as said, subprocess.Popen(command, env=settings, stdout=said, stderr=said) as server:
        address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"{address}/api/status", timeout=5).close()
                break
            except (urllib.error.URLError, OSError):
                assert server.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.2)
        yield address
        server.terminate()


class Notebook:
    """One notebook on a page 1000 px wide."""

    def __init__(self, browser, lab, name):
        self.name, self.page = name, browser.new_page(viewport={"width": 1000, "height": 1400})
        self.page.set_default_timeout(60_000)
        self.page.goto(f"{lab}/doc/tree/{name}.ipynb")
        self.wait()

    def wait(self):
        self.page.wait_for_selector(".jp-NotebookPanel .jp-Notebook .jp-Cell")
        self.page.evaluate(READY)

    def command(self, name):
        self.page.evaluate(f"() => window.jupyterapp.commands.execute('{name}')")

    def run_all(self):
        self.page.evaluate(RUN_ALL)

    def until(self, condition, what, seconds=LONGEST):
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                self.keep("late")
                raise AssertionError(f"{what}: not within {seconds} s; {self.errors()}")
            self.page.wait_for_timeout(100)

    def is_through(self):
        return self.page.evaluate("() => window.through")

    def errors(self):
        return [output["ename"] for output in self.page.evaluate(OUTPUTS) if output["output_type"] == "error"]

    def keep(self, moment):
        """Leave a picture of all that the notebook shows, from its top to its end."""
        SEEN.mkdir(exist_ok=True)
        high = self.page.evaluate(HEIGHT)
        self.page.set_viewport_size({"width": 1000, "height": min(12_000, high + 120)})
        self.page.evaluate("() => { document.querySelector('.jp-WindowedPanel-outer').scrollTop = 0; }")
        self.page.screenshot(path=SEEN / f"{self.name}-{moment}.png")
        self.page.set_viewport_size({"width": 1000, "height": 1400})

    def sweep(self):
        """Return the text and the picture of the sweep that stand on the page, ("", "") before there are any."""
        line, picture = self.page.locator(".cpb-line"), self.page.locator(".cpb-panels")
        if not (line.count() and picture.count()):
            return "", ""
        stage = self.page.locator(".cpb-stage").first
        return line.first.inner_text() + " " + stage.inner_text(), picture.first.inner_html()


def colours(locator):
    """Return how many colours an element shows."""
    from PIL import Image

    image = Image.open(io.BytesIO(locator.screenshot())).convert("RGB")
    return len(image.getcolors(1 << 24))


def assert_sound(notebook):
    """No error, nothing blank, no column cut."""
    assert notebook.errors() == []
    for picture in notebook.page.locator(".jp-OutputArea-output img, .jp-OutputArea-output .cpb").all():
        if picture.is_visible():
            assert colours(picture) > 3, "a blank picture"
    assert notebook.page.evaluate(CUT) == []


def test_a_sweep_is_interrupted_reloaded_and_stopped_by_its_button(browser, lab, home):
    notebook = Notebook(browser, lab, "04_sweep")
    notebook.run_all()
    epochs, pictures = [], []

    def collect():
        _, picture = notebook.sweep()
        if picture and picture not in pictures:
            epochs.append(sum(map(int, re.findall(r">epoch (\d+)<", picture))))
            pictures.append(picture)
        return len(set(epochs)) >= 5

    notebook.until(collect, "five pictures of a running sweep, each further than the one before")
    assert epochs == sorted(epochs)
    assert colours(notebook.page.locator(".cpb-panels")) > 5
    notebook.keep("1-during")

    notebook.command("notebook:interrupt-kernel")
    notebook.until(notebook.is_through, "the end after an interrupt")
    text, picture = notebook.sweep()
    assert "stopped here; the same cell goes on" in text and "epoch" in picture
    assert set(notebook.errors()) == {"KeyboardInterrupt"}
    assert notebook.page.get_by_role("button", name="stop this model").count() == 0
    notebook.command("docmanager:save")
    notebook.page.reload()
    notebook.wait()
    assert notebook.sweep() == (text, picture)
    notebook.keep("2-reloaded")

    notebook.run_all()  # the cell is in the state that it was left in until its kernel comes to it
    button = notebook.page.get_by_role("button", name="stop after this epoch")
    again = r">epoch (\d+)<"
    notebook.until(lambda: button.count() and len(re.findall(again, notebook.sweep()[1])) == 3, "the second run")
    assert sum(map(int, re.findall(again, notebook.sweep()[1]))) >= epochs[0]  # it went on from a checkpoint
    button.click()
    notebook.until(lambda: "3 of 3 done" in notebook.sweep()[0], "the end after the button")
    notebook.until(notebook.is_through, "the rest of the notebook")
    assert_sound(notebook)
    notebook.keep("3-stopped")
    (run,) = (home / "runs").glob("quick-*")
    reasons = [json.loads(line)["reason"] for line in (run / "results.jsonl").read_text().splitlines()]
    assert reasons == ["stopped by hand"] * 3

    notebook.page.get_by_role("link", name=re.compile(r"report\.html$")).click()  # which JupyterLab shows in a frame
    notebook.page.frame_locator("iframe").first.get_by_text("BTC 1h").first.wait_for(state="attached")
    notebook.page.screenshot(path=SEEN / "04_sweep-4-report.png")
    notebook.page.close()


@pytest.mark.parametrize("name", ["00_environment", "01_gpu_diagnosis", "03_smoke_test", "05_verdict"])
def test_a_notebook_runs_to_its_end(browser, lab, name):
    notebook = Notebook(browser, lab, name)
    notebook.run_all()
    notebook.until(notebook.is_through, "the end of the notebook")
    notebook.keep("end")
    assert_sound(notebook)
    notebook.page.close()
