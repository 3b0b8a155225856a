"""A server of both wire formats that misbehaves on purpose. `/<label>/v1/chat/completions` and `/<label>/v1/messages` show the fault that
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
MESSAGE_USAGE = {"input_tokens": 30, "cache_creation_input_tokens": 6, "cache_read_input_tokens": 10, "output_tokens": 8}
RETRY_SECONDS = 2
# Texts of answers and errors say `canary-…`: none of them may show up in a status, an event, a log or a metric.


def completion(content, usage):
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


class Chat:
    """OpenAI chat completions."""

    usage = USAGE

    def whole(self, content, usage):
        return completion(content, usage)

    def error(self, code):
        return {"error": {"message": f"{code}: canary-provider-text", "type": code, "code": code}}

    def head(self, _usage):
        return []

    def text(self, piece):
        return event({"content": piece})

    def tool(self, name, arguments):
        tool_call = {"index": 0, "id": "call-1", "type": "function", "function": {"name": name, "arguments": arguments}}
        return [event({"tool_calls": [tool_call]})]

    def is_result(self, message):
        return message["role"] == "tool"

    def end(self, reason, usage):
        return [event({}, reason), *([event({}, usage=usage)] if usage else []), b"data: [DONE]\n\n"]


def message_event(kind, **fields):
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


class Messages:
    """Anthropic messages."""

    usage = MESSAGE_USAGE

    def whole(self, content, usage):
        body = {"id": "x", "type": "message", "role": "assistant", "model": "faulty", "stop_reason": "end_turn"}
        body["content"] = [{"type": "text", "text": content}]
        return {**body, "usage": usage} if usage else body

    def error(self, code):
        return {"type": "error", "error": {"type": code, "message": f"{code}: canary-provider-text"}}

    def head(self, usage):
        message = {"id": "x", "type": "message", "role": "assistant", "model": "faulty", "content": [], "stop_reason": None}
        if usage:
            message["usage"] = {**usage, "output_tokens": 1}
        block = {"type": "text", "text": ""}
        return [message_event("message_start", message=message), message_event("content_block_start", index=0, content_block=block)]

    def text(self, piece):
        return message_event("content_block_delta", index=0, delta={"type": "text_delta", "text": piece})

    def tool(self, name, arguments):
        block = {"type": "tool_use", "id": "toolu_1", "name": name, "input": {}}
        pieces = [arguments[:7], arguments[7:]]
        deltas = ({"type": "input_json_delta", "partial_json": piece} for piece in pieces)
        start = message_event("content_block_start", index=1, content_block=block)
        return [start, *(message_event("content_block_delta", index=1, delta=delta) for delta in deltas)]

    def is_result(self, message):
        return any(part["type"] == "tool_result" for part in message["content"])

    def end(self, reason, usage):
        counts = {"usage": {"output_tokens": usage["output_tokens"]}} if usage else {}
        delta = {"stop_reason": {"stop": "end_turn", "tool_calls": "tool_use"}[reason]}
        stop = message_event("content_block_stop", index=0)
        return [stop, message_event("message_delta", delta=delta, **counts), message_event("message_stop")]


class Faulty(common.Handler):
    record = None
    chosen = {}
    format = Chat()

    def do_PUT(self):
        self.chosen[self.path.removeprefix("/_control/")] = self.request_body().decode()
        self.answer(204, b"")

    def do_POST(self):
        label = self.path.split("/")[1]
        self.format = Messages() if self.path.endswith("/messages") else Chat()
        self.request = request = json.loads(self.request_body())
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
        self.finish_with(status, json.dumps(self.format.error(code)).encode(), headers)

    def stream(self, pieces, usage=True, pause=0.0, cut=False):
        usage = self.format.usage if usage else None
        self.begin_stream(usage)
        for piece in pieces:
            self.chunk(self.format.text(piece))
            if pause:
                time.sleep(pause)
                if common.client_gone(self.connection):
                    raise ConnectionResetError
        if cut:
            raise ConnectionResetError
        self.finish_stream("stop", usage)

    def begin_stream(self, usage):
        self.end["status"] = 200
        self.start_chunks(200, [("Content-Type", "text/event-stream")])
        for piece in self.format.head(usage):
            self.chunk(piece)

    def finish_stream(self, reason, usage):
        *pieces, last = self.format.end(reason, usage)
        for piece in pieces:
            self.chunk(piece)
        self.end.update(usage=usage, complete=True)
        self.chunk(last)
        self.end_chunks()
        self.end["delivered"] = True

    def good(self, streamed, usage=True):
        if streamed:
            self.stream(["canary-answer-text ", "nothing to do."], usage)
        else:
            whole = self.format.whole("canary-answer-text nothing to do.", self.format.usage if usage else None)
            self.finish_with(200, json.dumps(whole).encode())

    def sleep(self, _streamed):
        """The model chooses to sleep for an hour."""
        self.call_tool("yield", {"mode": "sleep", "sleep": 3600, "reason": "nothing to do"})

    def call_tool(self, name, arguments):
        self.begin_stream(self.format.usage)
        for piece in self.format.tool(name, json.dumps(arguments)):
            self.chunk(piece)
        self.finish_stream("tool_calls", self.format.usage)

    def outage_in_mid_turn(self, _streamed):
        """The model calls a tool, and nothing that comes after its result is answered."""
        if self.format.is_result(self.request["messages"][-1]):
            self.error(500, "server_error")
        else:
            self.call_tool("hub__note", {"text": "before the outage"})

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
    "outage": Faulty.outage_in_mid_turn,
    "sleep": Faulty.sleep,
    "endless": Faulty.endless,
    "cut": Faulty.cut_stream,
    "garbage": Faulty.garbage,
    "no-usage": lambda self, streamed: self.good(streamed, usage=False),
    "401": lambda self, _: self.error(401, "invalid_api_key"),
    "404": lambda self, _: self.error(404, "model_not_found"),
    "429": lambda self, _: self.error(429, "rate_limit_exceeded", [("Retry-After", str(RETRY_SECONDS))]),
    "429-date": Faulty.retry_after_date,
    "429-quota": lambda self, _: self.error(429, "insufficient_quota"),
    "402": lambda self, _: self.error(402, "billing_error"),
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
