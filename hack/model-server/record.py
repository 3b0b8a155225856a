"""A proxy in front of a model server that writes down what the server itself says each answer used.

It is the judge of end-to-end tests: it knows nothing of agentloop. Everything passes through unchanged and unbuffered;
when the client goes away, the call to the server is cut. `/<label>/v1/…` is passed on as `/v1/…`, so that the calls of
several clients can be told apart. Each call leaves two lines in the record:

    {"event": "begin", "id": 7, "label": …, "path": …, "key": <Idempotency-Key>, "at": …}
    {"event": "end", "id": 7, …, "status": 200, "usage": {…} or null, "complete": true, "delivered": true, "at": …}

`complete`: the server's answer came whole. `delivered`: all of it was handed to the client's connection.
"""

import http.client
import json
import threading
import urllib.parse

import common

HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "host", "te", "upgrade", "trailer"}


class UsageReader:
    """Finds the server's own `usage` in an answer as it passes: in the JSON body, or in the last event that has one.
    A streamed Anthropic message gives its input in the first event and its output, as totals, in later ones."""

    def __init__(self, streamed):
        self._streamed = streamed
        self._rest = b""
        self._head = {}
        self.usage = None

    def feed(self, data):
        self._rest += data
        if self._streamed:
            *lines, self._rest = self._rest.split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    self._look(line[5:])

    def finish(self):
        if not self._streamed:
            self._look(self._rest)

    def _look(self, text):
        try:
            answer = json.loads(text)
            usage = answer.get("message", answer).get("usage")
        except (ValueError, AttributeError):
            return
        if usage and answer.get("type") == "message_start":
            self._head = usage  # its output is not the last word
        elif usage:
            self.usage = {**self._head, **usage}


def split_label(path):
    """`/x/v1/chat` → (`x`, `/v1/chat`); `/v1/chat` → (``, `/v1/chat`)."""
    first, slash, rest = path[1:].partition("/")
    return ("", path) if first == "v1" or not slash else (first, "/" + rest)


class Proxy(common.Handler):
    upstream = None
    record = None

    def do_GET(self):
        self.forward()

    def do_POST(self):
        self.forward()

    def forward(self):
        label, path = split_label(self.path)
        call = {"id": self.record.next_id(), "label": label, "path": path, "key": self.headers.get("Idempotency-Key")}
        body = self.request_body()
        self.record.append(event="begin", **call)
        end = {"status": None, "usage": None, "complete": False, "delivered": False}
        server = http.client.HTTPConnection(self.upstream)
        over = threading.Event()
        watcher = threading.Thread(target=self.cut_when_client_gone, args=(server, over), daemon=True)
        try:
            headers = {k: v for k, v in self.headers.items() if k.lower() not in HOP_BY_HOP}
            server.request(self.command, path, body, headers)
            watcher.start()
            self.relay(server.getresponse(), end)
        except (OSError, http.client.HTTPException, ValueError, AttributeError):
            self.close_connection = True  # cut on one side is cut on both; closed sockets show up as any of these
        finally:
            over.set()
            server.close()
            self.record.append(event="end", **call, **end)

    def relay(self, response, end):
        end["status"] = response.status
        usage = UsageReader("event-stream" in (response.headers.get("Content-Type") or ""))
        headers = [(k, v) for k, v in response.headers.items() if k.lower() not in HOP_BY_HOP]
        self.start_chunks(response.status, headers)
        while data := response.read1(65536):
            usage.feed(data)
            end["usage"] = usage.usage
            self.chunk(data)
        usage.finish()
        end["usage"] = usage.usage
        end["complete"] = True
        self.end_chunks()
        end["delivered"] = True

    def cut_when_client_gone(self, server, over):
        while not over.is_set():
            if common.client_gone(self.connection, wait_milliseconds=20):
                if server.sock:
                    server.sock.shutdown(2)
                return


def main():
    parser = common.arguments(__doc__)
    parser.add_argument("--upstream", required=True, help="base address of the model server, such as http://127.0.0.1:8080")
    parser.add_argument("--record", required=True, help="file that gets the lines")
    options = parser.parse_args()
    Proxy.upstream = urllib.parse.urlsplit(options.upstream).netloc
    Proxy.record = common.Record(options.record)
    common.serve(options, Proxy)


if __name__ == "__main__":
    main()
