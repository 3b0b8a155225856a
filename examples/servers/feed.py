#!/usr/bin/env python3
"""Prices that move, for examples/poll.yaml and examples/stream.yaml: a page and server-sent events.

    python3 feed.py [PORT]      (8900 when absent; on this machine only)

GET /price   {"symbol": "ACME", "price": 101.5}
GET /events  the same as events, one each second, with ids: a reader that comes back gets what it missed
"""

import http.server
import json
import math
import sys
import threading
import time

PRICES = []  # of each second since the start


def walk():
    while True:
        n = len(PRICES)
        PRICES.append({"symbol": "ACME", "price": round(100 + 8 * math.sin(n / 5), 2)})
        time.sleep(1)


class Feed(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/price":
            self.page()
        elif self.path == "/events":
            self.stream()
        else:
            self.send_error(404)

    def page(self):
        body = json.dumps(PRICES[-1]).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def stream(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        last = self.headers.get("Last-Event-ID", "")
        n = int(last) + 1 if last.isdigit() else max(0, len(PRICES) - 1)
        try:
            while True:
                while n < len(PRICES):
                    self.wfile.write(f"id: {n}\ndata: {json.dumps(PRICES[n])}\n\n".encode())
                    n += 1
                time.sleep(0.1)
        except (BrokenPipeError, ConnectionResetError):
            pass

    def log_message(self, *words):
        pass


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True


if __name__ == "__main__":
    threading.Thread(target=walk, daemon=True).start()
    while not PRICES:
        time.sleep(0.01)
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8900
    Server(("127.0.0.1", port), Feed).serve_forever()
