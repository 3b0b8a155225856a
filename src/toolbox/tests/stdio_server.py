"""An MCP server on standard input and output, of revision 2025-11-25, for the failures that libraries do not have.

stdio_server.py RECORD [--dies-unless-initialized]: RECORD gets a line for each message that it receives.
"""

import json
import os
import subprocess
import sys

record = open(sys.argv[1], "a")
dies = "--dies-unless-initialized" in sys.argv
initialized = False
tools = ["call"]


def send(message):
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def call(identifier, params):
    arguments = params.get("arguments", {})
    do = arguments.get("do")
    if do == "die":
        os._exit(3)
    if do == "hang":
        return
    if do == "progress":
        token = params["_meta"]["progressToken"]
        for step in range(3):
            send({"method": "notifications/progress", "params": {"progressToken": token, "progress": step}})
    if do == "progress then die":
        token = params["_meta"]["progressToken"]
        send({"method": "notifications/progress", "params": {"progressToken": token, "progress": 1}})
        os._exit(3)
    if do == "grow":
        tools.append("more")
        send({"method": "notifications/tools/list_changed"})
    if do == "log":
        sys.stderr.write("x" * arguments["bytes"] + "\nlogged\n")
        sys.stderr.flush()
    if do == "start":
        subprocess.Popen(["setsid", "sleep", arguments["seconds"]])
    if do == "noise":
        print("this is not a message", flush=True)
    text = "y" * arguments["bytes"] if do == "long" else json.dumps(params)
    send({"id": identifier, "result": {"content": [{"type": "text", "text": text}]}})


for line in sys.stdin:
    record.write(line)
    record.flush()
    message = json.loads(line)
    method, identifier, params = message.get("method"), message.get("id"), message.get("params") or {}
    if method == "initialize":
        initialized = True
        info = {"name": "stdio", "version": "1"}
        capabilities = {"tools": {"listChanged": True}}
        result = {"protocolVersion": "2025-11-25", "capabilities": capabilities, "serverInfo": info}
        send({"id": identifier, "result": result})
    elif dies and not initialized:
        sys.exit("expected initialize")
    elif method == "tools/list":
        listed = [{"name": name, "inputSchema": {"type": "object"}} for name in tools]
        send({"id": identifier, "result": {"tools": listed}})
    elif method == "tools/call":
        call(identifier, params)
    elif identifier is not None:
        send({"id": identifier, "error": {"code": -32601, "message": "Method not found"}})
