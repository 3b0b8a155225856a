"""A fast OpenAI-compatible server that answers at random and counts by itself. `/<label>/v1/chat/completions` bills one
input token for every four bytes of the messages and tools, and as output at random half of the request's limit up to all
of it. Each call leaves a `begin` and an `end` line in the record, as record.py does; the bill counts from `begin`, whether
the client hears of it or not. `parts` are the lengths of the request's messages (`true`) and of all else in it, `limit` its
output limit.
"""

import json
import random
import time

import common

SECONDS = (0.02, 0.3)
# Not too short: around each message a server may write more than is in it, and whoever bounds the bill must allow for that.
TEXT = " ".join(["Counted."] * 50)


def length(value):
    """In bytes, as a client writes it."""
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode())


class Counting(common.Handler):
    record = None

    def do_POST(self):
        label = self.path.split("/")[1]
        request = json.loads(self.request_body())
        messages = [(length(message), True) for message in request.pop("messages")]
        tools = [(length(tool), False) for tool in request.pop("tools", [])]
        shown = sum(bytes for bytes, _ in messages + tools)
        limit = request.get("max_completion_tokens") or request.get("max_tokens")
        output = random.randint(-(-limit // 2), limit)
        usage = {"prompt_tokens": -(-shown // 4), "completion_tokens": output}
        usage["total_tokens"] = sum(usage.values())
        call = {"id": self.record.next_id(), "label": label, "key": self.headers.get("Idempotency-Key")}
        parts = messages + tools + [(length(request), False)]
        self.record.append(event="begin", usage=usage, parts=parts, limit=limit, **call)
        delivered = False
        try:
            time.sleep(random.uniform(*SECONDS))
            self.reply(request.get("stream", False), usage)
            delivered = True
        except OSError:
            self.close_connection = True
        finally:
            self.record.append(event="end", usage=usage, status=200, complete=True, delivered=delivered, **call)

    def reply(self, streamed, usage):
        body = {"id": "x", "object": "chat.completion", "model": "counting"}
        if not streamed:
            choice = {"index": 0, "message": {"role": "assistant", "content": TEXT}, "finish_reason": "stop"}
            self.answer(200, json.dumps({**body, "choices": [choice], "usage": usage}).encode(), [("Content-Type", "application/json")])
            return
        body["object"] += ".chunk"
        choice = {"index": 0, "delta": {"role": "assistant", "content": TEXT}, "finish_reason": "stop"}
        self.start_chunks(200, [("Content-Type", "text/event-stream")])
        for piece in ({**body, "choices": [choice]}, {**body, "choices": [], "usage": usage}):
            self.chunk(b"data: " + json.dumps(piece).encode() + b"\n\n")
        self.chunk(b"data: [DONE]\n\n")
        self.end_chunks()


def main():
    parser = common.arguments(__doc__)
    parser.add_argument("--record", required=True, help="file that gets the lines")
    options = parser.parse_args()
    Counting.record = common.Record(options.record)
    common.serve(options, Counting)


if __name__ == "__main__":
    main()
