#!/usr/bin/env bash
# emulate.sh: builds the image for amd64 and arm64, and runs the arm64 binary under emulation: its version, its custom resources, and an
# Agent in one process for ten seconds, which compiles and uses what is written in C and assembler (SQLite, ring).
set -euo pipefail
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
[ "$ARCH" = x86_64 ] || die "this emulates arm64 on amd64"
"$ROOT/hack/packages.sh" emulator
PLATFORMS=linux/amd64,linux/arm64 "$ROOT/hack/image.sh"
arm=$IMAGE_DIR/rootfs-arm64/agentloop amd=$IMAGE_DIR/rootfs/agentloop
state=$(mktemp -d)
trap 'rm -rf "$state"' EXIT

say "Version"
[ "$(qemu-aarch64-static "$arm" --version)" = "$("$amd" --version)" ] || die "the two binaries have different versions"
say "Custom resources"
cmp <(qemu-aarch64-static "$arm" crds) <("$amd" crds) || die "the two binaries have different custom resources"
say "An Agent"
qemu-aarch64-static "$arm" run -f examples/local.yaml --state "$state" --duration 10
