"""What the programs here share: where to listen, the record file, and an end together with whoever started them."""

import argparse
import json
import os
import select
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# The devcluster's bridge: reachable from its pods and from this machine, from nowhere else.
DEFAULT_HOST = os.environ.get("AGENTLOOP_MODEL_HOST", "198.18.0.1")


def arguments(description):
    """The options every program here takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--host", default=DEFAULT_HOST, help="address to listen on (AGENTLOOP_MODEL_HOST)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0 takes a free one")
    parser.add_argument("--stop-with-stdin", action="store_true", help="end when standard input is closed")
    return parser


def ready(options, url):
    """Says where the program listens, as its first line on standard output."""
    print(f"listening {url}", flush=True)
    if options.stop_with_stdin:
        threading.Thread(target=_stop_with_stdin, daemon=True).start()


def _stop_with_stdin():
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(0)


class Record:
    """One JSON line per event, appended in one write each, so that a reader never sees half a line."""

    def __init__(self, path):
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._lock = threading.Lock()
        self._last = 0

    def next_id(self):
        with self._lock:
            self._last += 1
            return self._last

    def append(self, **line):
        line["at"] = round(time.time(), 4)
        os.write(self._file, (json.dumps(line) + "\n").encode())


class Handler(BaseHTTPRequestHandler):
    """An HTTP/1.1 handler that is quiet, sends each piece at once, and can write a chunked body."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def request_body(self):
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, status, body, headers=()):
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def start_chunks(self, status, headers=()):
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def chunk(self, data):
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def end_chunks(self):
        self.wfile.write(b"0\r\n\r\n")


def client_gone(connection, wait_milliseconds=0):
    """Whether the other side has closed; waits at most this long for it. Leaves the socket's own settings alone."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
    return bool(poll.poll(wait_milliseconds))


class Server(ThreadingHTTPServer):
    """One thread a connection; a broken connection is not worth a traceback."""

    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request, client_address):
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


def serve(options, handler):
    """Listens, says where, serves until ended."""
    server = Server((options.host, options.port), handler)
    ready(options, f"http://{options.host}:{server.server_address[1]}")
    server.serve_forever()
