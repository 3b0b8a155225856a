#!/usr/bin/env bash
# generate.sh          writes crds/ (and the chart's copy) from the Rust types, and deploy/ from the chart
# generate.sh --check  fails when they are not what would be written
set -euo pipefail
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
"$ROOT/hack/devcluster/tools.sh" helm
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

mkdir "$out/crds" "$out/deploy"
cargo run --locked --quiet -- crds --dir "$out/crds"
cp -r charts/agentloop "$out/chart"
rm -rf "$out/chart/files/crds"
cp -r "$out/crds" "$out/chart/files/crds"
helm template agentloop "$out/chart" --namespace agentloop-system >"$out/deploy/agentloop.yaml"

if [ "${1:-}" = --check ]; then
  diff -ru crds "$out/crds" && diff -ru charts/agentloop "$out/chart" && diff -ru deploy "$out/deploy" ||
    die "generated files differ: run 'make generate' and commit"
else
  rm -rf crds deploy charts/agentloop/files/crds
  cp -r "$out/crds" "$out/deploy" .
  cp -r "$out/crds" charts/agentloop/files/crds
fi
