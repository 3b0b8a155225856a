#!/usr/bin/env bash
# tools-image.sh: assembles (once) the root filesystem of the image that the tests use for containers of tools, and prints its
# directory: busybox, Node.js, and the MCP project's own test server under /app.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
"$ROOT/hack/packages.sh" test >&2
app=$("$ROOT/hack/node-env.sh" mcp-server/everything)
node=$(readlink -f "$(command -v node)")
key=$({ sha256sum <"$0"; sha256sum <"$node"; echo "$app"; } | sha256sum | cut -c 1-12)
rootfs=$CACHE/tools-image-$key
if [ ! -e "$rootfs.complete" ]; then
  say "Assembling the image of tools for the tests (once; cached in $rootfs)" >&2
  rm -rf "$rootfs"
  mkdir -p "$rootfs"/{bin,sbin,usr/bin,etc,tmp,workspace,run,proc,sys,dev}
  install -m 755 "$(command -v busybox)" "$rootfs/bin/busybox"
  for name in $(busybox --list | grep -vx busybox); do ln -s busybox "$rootfs/bin/$name"; done
  cp "$node" "$rootfs/bin/node"
  # The libraries of Node.js at their own paths, with the loader.
  ldd "$node" | grep -o '/[^ ]*' | while read -r library; do
    mkdir -p "$rootfs${library%/*}"
    cp -L "$library" "$rootfs$library"
  done
  cp -r "$app" "$rootfs/app"
  touch "$rootfs.complete"
fi
echo "$rootfs"
