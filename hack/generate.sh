#!/usr/bin/env bash
# generate.sh          writes crds/ from the Rust types and deploy/ from the chart
# generate.sh --check  fails when they are not what would be written
set -euo pipefail
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

mkdir "$out/crds" "$out/deploy"
cargo run --locked --quiet -- crds --dir "$out/crds"
if [ -d charts/agentloop ]; then
  "$ROOT/hack/devcluster/tools.sh" helm
  helm template agentloop charts/agentloop --namespace agentloop-system --include-crds >"$out/deploy/agentloop.yaml"
fi
if [ "${1:-}" = --check ]; then
  diff -ru crds "$out/crds" && diff -ru deploy "$out/deploy" || die "generated files differ: run 'make generate' and commit"
else
  rm -rf crds deploy
  cp -r "$out/crds" "$out/deploy" .
fi
