"""The protocol's own server in Python on standard input and output, which speaks both generations."""

from mcp.server import MCPServer
from mcp.server.mcpserver import Context

server = MCPServer("newer")


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
async def grow(ctx: Context) -> str:
    """Adds a tool."""
    server.add_tool(lambda: "more", name="more")
    await ctx.notify_tools_changed()
    return "grown"


server.run("stdio")
