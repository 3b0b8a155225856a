#!/usr/bin/env bash
# try.sh: builds the binary and runs two scripted agents for TRY_SECONDS=20, without a cluster; starts from scratch each time.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
seconds=${TRY_SECONDS:-20}
say "Building (a debug build; takes a few minutes the first time)"
cargo build --locked --quiet --bin agentloop
state=$(mktemp -d)
trap 'rm -rf "$state"' EXIT
say "Running examples/local.yaml for $seconds seconds; press Ctrl-C to stop"
"$CARGO_TARGET_DIR/debug/agentloop" run -f examples/local.yaml --state "$state" --duration "$seconds"
say "To run it yourself: $CARGO_TARGET_DIR/debug/agentloop run -f examples/local.yaml   (docs/tasks/local.md)"
