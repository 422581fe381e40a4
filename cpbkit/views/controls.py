"""Buttons of a running sweep in a notebook, which a kernel hears while its cell runs."""

import asyncio
import threading
from collections.abc import Callable, Iterable
from queue import Empty
from typing import Any

WIDGET = "application/vnd.jupyter.widget-view+json"
Stop = Callable[..., None]  # as `Run.stop` is


class Controls:
    """What a person may ask of a sweep: to end after the epoch, to end one model, to draw no more.

    Without widgets nothing is shown: `cpbkit stop`, and the kernel's own stop key, do the same everywhere.
    """

    def __init__(self, stop: Stop, series: Iterable[str]):
        import ipywidgets
        from IPython.display import display

        self._stop, self.asked = stop, ""  # what was asked for last
        self.series = tuple(series)
        # None is chosen but by a person, lest a press ends another one than was meant.
        self._menu = ipywidgets.Dropdown(
            options=self.series,
            value=None,
            description="model",
            style={"description_width": "auto"},
            layout={"width": "200px"},
            disabled=not self.series,
        )
        self._pause = ipywidgets.ToggleButton(value=False, description="pause drawing", layout={"width": "auto"})
        stop_all = ipywidgets.Button(description="stop after this epoch", layout={"width": "auto"})
        stop_all.on_click(self._ask_all)
        self._one = ipywidgets.Button(description="stop this model", layout={"width": "auto"}, disabled=not self.series)
        self._one.on_click(self._ask_one)
        self._box = ipywidgets.HBox([stop_all, self._menu, self._one, self._pause])
        view = {"version_major": 2, "version_minor": 0, "model_id": self._box.model_id}
        # Where there is no such view, as in a saved notebook, the other text stands: none.
        self._shown = display({WIDGET: view, "text/plain": ""}, raw=True, display_id=True)

    @property
    def paused(self) -> bool:
        """Whether nothing is to be drawn."""
        return self._pause.value

    def offer(self, series: Iterable[str]) -> None:
        """Let the menu name the series that train now."""
        if tuple(series) != self.series:
            self.series = tuple(series)
            chosen = self._menu.value
            self._menu.options = self.series
            self._menu.disabled = self._one.disabled = not self.series
            self._menu.value = chosen if chosen in self.series else None

    def close(self) -> None:
        """Take them off the page: a finished cell has nothing to stop."""
        self._shown.update({"text/plain": ""}, raw=True)
        for widget in (*self._box.children, self._box):
            widget.close()

    def _ask_all(self, _) -> None:
        self._stop(after_epoch=True)
        self.asked = "all models end with this epoch"

    def _ask_one(self, _) -> None:
        if not self._menu.value:
            self.asked = "no model is chosen: the menu names those that train"
            return
        self._stop(self._menu.value)
        self.asked = f"{self._menu.value} ends with this epoch"


def hear(kernel: Any) -> None:
    """Let a kernel handle what widgets have sent since its cell began; other requests keep waiting, in their order.

    A kernel takes up requests between cells. Pages that know subshells (JupyterLab with ipykernel 7) send those of
    widgets beside the cell; for the others they are taken here from the queue: the one of ipykernel 6, or the socket
    that its successor has between its threads.
    """
    if threading.current_thread() is not threading.main_thread():
        return  # the queue belongs to the thread of the cells
    if hasattr(kernel, "msg_queue"):
        _hear_queue(kernel)
    elif getattr(kernel, "shell_channel_thread", None):
        _hear_socket(kernel)


def _hear_queue(kernel: Any) -> None:
    from tornado.queues import QueueEmpty
    from zmq import POLLIN

    kernel.shell_stream.flush(POLLIN)
    waiting = []
    while True:
        try:
            waiting.append(kernel.msg_queue.get_nowait())
        except (QueueEmpty, Empty, asyncio.QueueEmpty):
            break
    for request in waiting:
        *_, arguments = request
        if not (arguments and _handle(kernel, kernel.shell_stream, arguments[0])):
            kernel.msg_queue.put_nowait(request)


def _hear_socket(kernel: Any) -> None:
    import zmq

    pair = kernel.shell_channel_thread.manager.get_shell_channel_to_subshell_pair(None)
    while pair.to_socket.poll(0, zmq.POLLIN):
        frames = pair.to_socket.recv_multipart(copy=False)
        if not _handle(kernel, None, frames):
            # the way of those that the stream took before the cell began: a shorter one would overtake them
            pair.to_stream._run_callback(pair.to_stream._recv_callback, frames)


def _handle(kernel: Any, stream: Any, frames: list) -> bool:
    """Handle a request if it is a widget's; say whether it was."""
    if len(frames) < 2:
        return False
    identities, parts = kernel.session.feed_identities(frames, copy=False)
    kind = kernel.session.unpack(parts[1].bytes)["msg_type"]
    if kind not in ("comm_msg", "comm_open", "comm_close"):
        return False
    request = kernel.session.deserialize(parts, content=True, copy=False)
    kernel._publish_status("busy", "shell", parent=request)  # a page sends no more of a widget until it is idle again
    try:
        kernel.shell_handlers[kind](stream, identities, request)
    finally:
        kernel._publish_status("idle", "shell", parent=request)
    return True
