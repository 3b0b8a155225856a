"""An MCP server for tests, on the protocol's own package for Python: version 2 speaks both generations, 1 the older.

serve.py --record FILE [--host ADDRESS] [--port N] [--page N] [--json] [--stop-with-stdin]

Prints the port it listens on. FILE gets a line of JSON for each call that did something, and for each that was cancelled.
"""

import argparse
import json
import os
import socket
import sys
import threading

import anyio
import uvicorn

try:
    from mcp.server import MCPServer
    from mcp.server.mcpserver import Context, Image
    from mcp.server.mcpserver.exceptions import ToolError
    from mcp_types import ListToolsResult, ToolAnnotations

    OLDER = False
except ImportError:
    from mcp.server.fastmcp import Context, FastMCP as MCPServer, Image
    from mcp.server.fastmcp.exceptions import ToolError
    from mcp.types import ToolAnnotations

    OLDER = True

options = argparse.ArgumentParser()
options.add_argument("--record", required=True)
options.add_argument("--host", default="127.0.0.1")
options.add_argument("--port", type=int, default=0)
options.add_argument("--page", type=int, default=0)
options.add_argument("--json", action="store_true")
options.add_argument("--stop-with-stdin", action="store_true")
options = options.parse_args()


class Server(MCPServer):
    """Gives its list in pages on request."""

    async def _handle_list_tools(self, ctx, params):
        tools = await self.list_tools()
        if not options.page:
            return ListToolsResult(tools=tools)
        first = int(params.cursor) if params and params.cursor else 0
        after = first + options.page
        return ListToolsResult(tools=tools[first:after], next_cursor=str(after) if after < len(tools) else None)


server = Server("test")


def record(what, context):
    meta = context.request_context.meta
    if hasattr(meta, "model_dump"):
        meta = meta.model_dump()
    headers = context.request_context.request.headers
    line = {
        "what": what,
        "key": (meta or {}).get("agentloop.dev/idempotency-key"),
        "authorization": headers.get("authorization"),
        "protocol": headers.get("mcp-protocol-version"),
    }
    with open(options.record, "a") as file:
        file.write(json.dumps(line) + "\n")


@server.tool(annotations=ToolAnnotations(**{"readOnlyHint": True}))
def add(a: int, b: int, ctx: Context) -> int:
    """Adds two numbers."""
    record("add", ctx)
    return a + b


@server.tool(annotations=ToolAnnotations(**{"destructiveHint": False, "idempotentHint": True}))
def note(text: str, ctx: Context) -> str:
    """Notes a text."""
    record("note " + text, ctx)
    return "noted"


@server.tool()
async def slow(seconds: float, ctx: Context) -> str:
    """Takes its time."""
    record("slow began", ctx)
    try:
        await anyio.sleep(seconds)
    except anyio.get_cancelled_exc_class():
        record("slow cancelled", ctx)
        raise
    record("slow ended", ctx)
    return "at last"


@server.tool()
def huge(bytes: int) -> str:
    """Says a lot."""
    return "x" * bytes


@server.tool()
def fail() -> str:
    """Always fails."""
    raise ToolError("there is no bread")


@server.tool()
def picture() -> Image:
    """Draws."""
    return Image(data=b"not really a picture", format="png")


@server.tool(name="odd.name")
def odd() -> str:
    """Has a name that models do not take."""
    return "odd"


@server.tool()
async def grow(name: str, ctx: Context, description: str = "Was not there before.") -> str:
    """Adds a tool, or replaces it, and notifies all clients."""
    # There is no public way to replace a tool that both generations have.
    server._tool_manager._tools.pop(name, None)
    server.add_tool(lambda: "new", name=name, description=description)
    if not OLDER:
        await ctx.notify_tools_changed()
    await ctx.session.send_tool_list_changed()
    return "grown"


def stop_with_stdin():
    sys.stdin.read()
    os._exit(0)


if options.stop_with_stdin:
    threading.Thread(target=stop_with_stdin, daemon=True).start()
if OLDER:
    server.settings.json_response = options.json
    app = server.streamable_http_app()
else:
    app = server.streamable_http_app(json_response=options.json, host=options.host)
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind((options.host, options.port))
listener.listen()
print(listener.getsockname()[1], flush=True)
uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
