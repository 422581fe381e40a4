"""What a person sees of a sweep in a notebook: every message that a real kernel sends to the page, with its time."""

import re
import time
from types import SimpleNamespace

import pytest
from jupyter_client.manager import start_new_kernel

SETUP = """
from cpbkit.config.experiment import vary
from cpbkit.config.presets import PRESETS
from cpbkit.runs import sweep as runs
from cpbkit.views import live as views
from cpbkit.views.live import live

views.BEAT = views.PERIOD = 0.1  # a small sweep has the states of a large one
experiment = vary(
    PRESETS["quick"], source="synthetic", start="2025-01-01", end="2025-01-31", epochs=90, patience=90,
    symbols=("BTC", "ETH", "BNB"), intervals=("1h",),
)
"""
SWEEP = "runs.sweep(experiment, 'run', executor='local', on_progress=live(experiment)); print('through')"
LONGEST = 120  # s of a cell


class Page:
    """A kernel, and what a page that is connected to it hears."""

    def __init__(self, folder):
        self.manager, self.client = start_new_kernel(cwd=str(folder))

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)

    def kill(self):
        """Kill the kernel and start it anew, as a page does whose machine was taken away."""
        self.manager.restart_kernel(now=True)
        self.client.wait_for_ready(timeout=LONGEST)

    def run(self, code, act=None, when=lambda shown: False, until=lambda shown: False):
        """Run a cell, `act` once it has shown `when`, and return what it showed until it ended, or `until`."""
        shown = SimpleNamespace(states={}, texts="", errors=[], parents=set(), widgets={}, id=self.client.execute(code))
        shown.tracebacks, shown.red = [], ""
        deadline = time.monotonic() + LONGEST
        while not until(shown):
            message = self.client.get_iopub_msg(timeout=max(0, deadline - time.monotonic()))
            kind, content, parent = message["msg_type"], message["content"], message["parent_header"].get("msg_id")
            if kind == "status" and content["execution_state"] == "idle" and parent == shown.id:
                break
            if kind == "stream":
                shown.texts += content["text"]
                shown.red += content["text"] if content["name"] == "stderr" else ""
            elif kind == "error":
                shown.errors.append(content["ename"])
                shown.tracebacks.append(content["traceback"])
            elif kind == "comm_open":
                shown.widgets[content["data"]["state"].get("description")] = content["comm_id"]
            elif kind in ("display_data", "update_display_data"):
                shown.parents.add(parent)
                states = shown.states.setdefault(content["transient"].get("display_id", len(shown.states)), [])
                assert bool(states) == (kind == "update_display_data")
                states.append((time.monotonic(), content["data"]))
            if act and when(shown):
                act = act()
        return shown

    def press(self, widget):
        """Press a button as pages do that know no subshells: in the queue, behind the cell that runs and a next one."""
        content = {"comm_id": widget, "data": {"method": "custom", "content": {"event": "click"}}}
        self.client.execute("print('the next cell')")
        self.client.shell_channel.send(self.client.session.msg("comm_msg", content))

    def run_beside(self, code):
        """Run code in a subshell, beside the cell that runs, as pages do for their widgets."""
        session, control = self.client.session, self.client.control_channel
        control.send(session.msg("create_subshell_request"))
        reply = control.get_msg(timeout=LONGEST)
        message = session.msg("execute_request", {"code": code, "silent": False})
        message["header"]["subshell_id"] = reply["content"]["subshell_id"]
        self.client.shell_channel.send(message)


@pytest.fixture
def page(tmp_path):
    page = Page(tmp_path)
    yield page
    page.close()


def lines(shown):
    line, _ = shown.states.values()
    return [data["text/plain"] for _, data in line]


def pictures(shown):
    _, picture = shown.states.values()
    return [data["text/html"] for _, data in picture]


def share(line):
    return int(re.search(r"(\d+) %", line)[1])


def words(shown):
    """What the last state of the line says, "" before there is one."""
    return lines(shown)[-1] if len(shown.states) == 2 else ""


@pytest.mark.slow
def test_a_sweep_moves_to_its_end_and_after_a_kill_begins_with_what_is_done(page):
    one_each = SETUP + "from cpbkit.runs import plan; plan._cut = lambda names, size: [[name] for name in names]\n"
    page.run(one_each)
    begun = page.run(SWEEP, until=lambda shown: words(shown).startswith("1 of 3 done"))
    assert lines(begun)[0].startswith("0 of 3 done  ·  0 %") and "3 waiting" in pictures(begun)[0]
    page.kill()
    page.run(one_each)
    ended = page.run(SWEEP)
    first, last = lines(ended)[0], lines(ended)[-1]
    assert re.match("[12] of 3 done  ·  (33|66)", first), first
    assert re.search("[12] done", pictures(ended)[0]) and pictures(ended)[0].count("<polyline") >= 2
    assert last.startswith("3 of 3 done  ·  100 %") and ended.texts == "through\n" and not ended.errors
    for shown in (begun, ended):
        assert shown.parents == {shown.id}  # nothing lands in another cell
        training = [line for line in lines(shown) if re.search(r"s left  ·  \d.* samples/s", line)]
        assert len({share(line) for line in training}) >= 3  # a third of the work alone, on a fast machine
        shares = [share(line) for line in lines(shown)]
        assert shares == sorted(shares)
    assert len({share(line) for line in lines(begun) + lines(ended)}) >= 8
    epochs = [re.findall(r">epoch (\d+)<", html) for html in pictures(begun) + pictures(ended)]
    assert len({tuple(found) for found in epochs}) >= 5  # the picture follows, not the line alone
    drawn = pictures(ended)[-1]
    assert "3 done<" in drawn and drawn.count("<polyline") == 6
    assert len(re.findall('<span class="cpb-[a-z]+">(BEATS|TIES|LOSES|TOO FEW)', drawn)) == 3

    again = page.run(SWEEP)  # finished: it begins with what is done, and that is the end
    assert {line.partition("  ·  ")[0] for line in lines(again)} == {"3 of 3 done"} and not again.errors
    assert {html.count("<polyline") for html in pictures(again)} == {6}


@pytest.mark.slow
def test_the_heartbeat_lands_in_its_cell_while_a_subshell_runs_another(page):
    page.run(SETUP + "import time; from cpbkit.runs.progress import State; views.SILENCE = 0.5")
    code = "live(experiment)(State(experiment, 3)); time.sleep(4)"
    shown = page.run(code, act=lambda: page.run_beside("print('beside')"), when=lambda shown: words(shown))
    assert shown.texts == "beside\n" and not shown.errors
    assert len(lines(shown)) >= 10 and re.search(r"nothing new for [1-4] s", lines(shown)[-2])
    assert shown.parents == {shown.id}


@pytest.mark.slow
def test_a_mistyped_name_is_an_error_and_no_run(page, tmp_path):
    """An interrupt of a run is one line, and what is only information is not red."""
    page.run("import cpbkit as cpb; days = {'source': 'synthetic', 'start': '2025-01-01', 'end': '2025-01-31'}")
    page.run("import torch\ndef flat(task, model):\n    return torch.nn.Flatten()")
    for wrong in ("symbols=['no coin']", "features=('close_return', 'rsii')", "name=flat"):
        shown = page.run(f"cpb.sweep('quick', **days, {wrong}, executor='local')")
        left = [states[-1][1] for states in shown.states.values()]
        assert shown.errors and left == [{"text/plain": ""}] * len(left), wrong
        assert not list((tmp_path / "runs").glob("*")), wrong
    page.run("from cpbkit.views import live; live.BEAT = 0.1")
    begun = page.run(
        "cpb.sweep('quick', **days, symbols=['BTC'], intervals=['1h'], epochs=10**6, patience=10**6, executor='local')",
        act=lambda: page.manager.interrupt_kernel(),
        when=lambda shown: re.search(">epoch [1-9]", str(shown.states)),
    )
    assert begun.errors == ["KeyboardInterrupt"]
    assert begun.tracebacks == [["stopped; the same call goes on from what is done"]]
    assert "stopped here; the same cell goes on from what is done" in str(begun.states)
    assert len(list((tmp_path / "runs").glob("*"))) == 1
    told = page.run("cpb.window('quick', source='synthetic', symbols=['BTC'], intervals=['1d']); None")
    assert not told.red and "No days were given" in str(told.states)


LISTEN = """
from cpbkit.views.controls import hear
for _ in range(20):
    time.sleep(0.1)
    hear(get_ipython().kernel)
print('heard')
"""


@pytest.mark.slow
def test_cells_that_wait_keep_their_order_while_one_listens(page):
    """As pages ask for them with "Run all": some are on their way to the kernel before that one begins."""
    for code in ("import time; time.sleep(2)", LISTEN, "x = 1; print('next')", "print('after', x)"):
        page.client.execute(code)
    shown = page.run("print('last')")
    assert shown.texts == "heard\nnext\nafter 1\nlast\n" and not shown.errors


@pytest.mark.slow
def test_a_button_ends_a_sweep_while_its_cell_runs(page):
    """The models end with the epoch and are judged; the next cell, asked for before the press, comes after."""
    # As one stack: a timed plan may train them apart, and what has not begun then is left for another run.
    at_once = "from cpbkit.runs import plan; plan._cut = lambda names, size: [names]\n"
    # An epoch lasts, on any machine, long enough for a state between the press and its end.
    endless = "import cpbkit as cpb; experiment = vary(experiment, epochs=10**6, patience=10**6, steps=100)"
    page.run(SETUP + at_once + endless)
    code = "run = cpb.sweep(experiment, folder='run', executor='local'); print(*(x.reason for x in run.results))"
    shown_widgets = {}
    shown = page.run(
        code,
        act=lambda: page.press(shown_widgets["stop after this epoch"]),
        when=lambda shown: shown_widgets.update(shown.widgets) or "epoch 2" in str(shown.states),
    )
    assert shown.texts == "stopped by hand stopped by hand stopped by hand\n" and not shown.errors
    controls, line, picture = shown.states.values()
    assert "widget-view" in str(controls[0]) and controls[-1][1] == {"text/plain": ""}
    assert any("all models end with this epoch" in data["text/plain"] for _, data in line)
    assert "3 done<" in picture[-1][1]["text/html"] and shown.parents == {shown.id}
