"""A mirror of an archive on loopback, in a process of its own that loads nothing heavy."""

import contextlib
import http.server
import multiprocessing
from collections.abc import Iterator


@contextlib.contextmanager
def serve(files: dict[str, bytes]) -> Iterator[str]:
    """Serve files from memory, by path; yield the address."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(files, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        process.terminate()
        process.join()
        ours.close()


def _serve(files: dict[str, bytes], pipe) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # or an answer waits 40 ms for the acknowledgement of its header

        def do_GET(self):
            body = files.get(self.path)
            self.send_response_only(404 if body is None else 200)
            self.send_header("Content-Length", str(len(body or b"")))
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *_):
            """Print nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    pipe.send(server.server_address[1])
    server.serve_forever()
