"""An OpenAI-compatible server that misbehaves on purpose. `/<label>/v1/chat/completions` shows the fault that
`PUT /_control/<label>` (body: the fault's name) last chose for the label; before that, the fault of the label's own name,
so that `/401/v1` always refuses. Faults: see FAULTS. Each call leaves a `begin` and an `end` line in the record, as
record.py does; `usage` is what the client was told, `messages` a short hash of each message that the client sent.
"""

import email.utils
import hashlib
import json
import time

import common

USAGE = {"prompt_tokens": 40, "completion_tokens": 8, "total_tokens": 48, "prompt_tokens_details": {"cached_tokens": 10}}
RETRY_SECONDS = 2
# Texts of answers and errors say `canary-…`: none of them may show up in a status, an event, a log or a metric.


def completion(content, usage=USAGE):
    message = {"role": "assistant", "content": content}
    body = {"id": "x", "object": "chat.completion", "model": "faulty", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
    return {**body, "usage": usage} if usage else body


def hashes(request):
    texts = (json.dumps(message, sort_keys=True) for message in request.get("messages", []))
    return [hashlib.sha256(text.encode()).hexdigest()[:12] for text in texts]


def event(delta, finish=None, usage=None):
    choices = [] if usage else [{"index": 0, "delta": delta, "finish_reason": finish}]
    body = {"id": "x", "object": "chat.completion.chunk", "model": "faulty", "choices": choices}
    if usage:
        body["usage"] = usage
    return b"data: " + json.dumps(body).encode() + b"\n\n"


class Faulty(common.Handler):
    record = None
    chosen = {}

    def do_PUT(self):
        self.chosen[self.path.removeprefix("/_control/")] = self.request_body().decode()
        self.answer(204, b"")

    def do_POST(self):
        label = self.path.split("/")[1]
        request = json.loads(self.request_body())
        call = {"id": self.record.next_id(), "label": label, "path": self.path, "key": self.headers.get("Idempotency-Key")}
        fault = self.chosen.get(label, label)
        self.record.append(event="begin", fault=fault, messages=hashes(request), **call)
        self.end = {"status": None, "usage": None, "complete": False, "delivered": False}
        try:
            FAULTS.get(fault, Faulty.good)(self, request.get("stream", False))
        except OSError:
            self.close_connection = True
        finally:
            self.record.append(event="end", fault=fault, **call, **self.end)

    def finish_with(self, status, body, headers=()):
        self.end.update(status=status, complete=True, usage=json.loads(body).get("usage") if status == 200 and body[:1] == b"{" else None)
        self.answer(status, body, [("Content-Type", "application/json"), *headers])
        self.end["delivered"] = True

    def error(self, status, code, headers=()):
        body = {"error": {"message": f"{code}: canary-provider-text", "type": code, "code": code}}
        self.finish_with(status, json.dumps(body).encode(), headers)

    def stream(self, pieces, usage=USAGE, pause=0.0, cut=False):
        self.end["status"] = 200
        self.start_chunks(200, [("Content-Type", "text/event-stream")])
        for piece in pieces:
            self.chunk(event({"content": piece}))
            if pause:
                time.sleep(pause)
                if common.client_gone(self.connection):
                    raise ConnectionResetError
        if cut:
            raise ConnectionResetError
        self.chunk(event({}, "stop"))
        self.finish_stream(usage)

    def finish_stream(self, usage):
        if usage:
            self.chunk(event({}, usage=usage))
        self.end.update(usage=usage, complete=True)
        self.chunk(b"data: [DONE]\n\n")
        self.end_chunks()
        self.end["delivered"] = True

    def good(self, streamed, usage=USAGE):
        if streamed:
            self.stream(["canary-answer-text ", "nothing to do."], usage)
        else:
            self.finish_with(200, json.dumps(completion("canary-answer-text nothing to do.", usage)).encode())

    def sleep(self, _streamed):
        """The model chooses to sleep for an hour."""
        arguments = json.dumps({"mode": "sleep", "sleep": 3600, "reason": "nothing to do"})
        tool_call = {"index": 0, "id": "call-1", "type": "function", "function": {"name": "yield", "arguments": arguments}}
        self.end["status"] = 200
        self.start_chunks(200, [("Content-Type", "text/event-stream")])
        self.chunk(event({"tool_calls": [tool_call]}))
        self.chunk(event({}, "tool_calls"))
        self.finish_stream(USAGE)

    def slow(self, streamed):
        """Two seconds of stream, then good."""
        self.stream(["word "] * 40, pause=0.05) if streamed else self.good(streamed)

    def endless(self, streamed):
        forever = iter(lambda: "word ", None)
        self.stream(forever, pause=0.01)

    def cut_stream(self, streamed):
        self.stream(["half ", "an "], cut=True)

    def garbage(self, streamed):
        self.finish_with(200, b"<html>this is not JSON</html>")

    def retry_after_date(self, _streamed):
        date = email.utils.formatdate(time.time() + RETRY_SECONDS + 1, usegmt=True)
        self.error(429, "rate_limit_exceeded", [("Retry-After", date)])


FAULTS = {
    "good": Faulty.good,
    "slow": Faulty.slow,
    "sleep": Faulty.sleep,
    "endless": Faulty.endless,
    "cut": Faulty.cut_stream,
    "garbage": Faulty.garbage,
    "no-usage": lambda self, streamed: self.good(streamed, usage=None),
    "401": lambda self, _: self.error(401, "invalid_api_key"),
    "404": lambda self, _: self.error(404, "model_not_found"),
    "429": lambda self, _: self.error(429, "rate_limit_exceeded", [("Retry-After", str(RETRY_SECONDS))]),
    "429-date": Faulty.retry_after_date,
    "429-quota": lambda self, _: self.error(429, "insufficient_quota"),
    "500": lambda self, _: self.error(500, "server_error"),
    "529": lambda self, _: self.error(529, "overloaded_error"),
}


def main():
    parser = common.arguments(__doc__)
    parser.add_argument("--record", required=True, help="file that gets the lines")
    options = parser.parse_args()
    Faulty.record = common.Record(options.record)
    common.serve(options, Faulty)


if __name__ == "__main__":
    main()
