// start.mjs: starts the unchanged server on loopback alone (by itself it listens on all addresses), prints its port once it
// listens, and ends when its standard input does.
import net from "node:net";

const listen = net.Server.prototype.listen;
net.Server.prototype.listen = function (port, ready) {
  return listen.call(this, { port: Number(port), host: "127.0.0.1" }, () => {
    process.stdout.write(`port ${this.address().port}\n`);
    ready?.();
  });
};
process.stdin.on("end", () => process.exit(0)).resume();
process.argv[2] = "streamableHttp";
await import(`${process.env.EVERYTHING_DIR}/node_modules/@modelcontextprotocol/server-everything/dist/index.js`);
