#!/usr/bin/env bash
# generate.sh          writes crds/ (and the chart's copy), docs/reference/api.md and kubectl-plugin.md from the Rust types, the
#                      chart's dashboards from the registry of metrics, deploy/agentloop.yaml from the chart, and the chart's
#                      README from its values.yaml
# generate.sh --check  fails when they are not what would be written
# AGENTLOOP_BINARY=path of a build of this source; otherwise it is built
set -euo pipefail
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
"$ROOT/hack/devcluster/tools.sh" helm
"$ROOT/hack/packages.sh" generate
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

agentloop() { if [ -n "${AGENTLOOP_BINARY:-}" ]; then "$AGENTLOOP_BINARY" "$@"; else cargo run --locked --quiet -- "$@"; fi; }

cp -r charts "$out"
agentloop crds --dir "$out/crds"
rm "$out"/charts/agentloop/files/crds/*
cp "$out"/crds/* "$out/charts/agentloop/files/crds/"
rm "$out"/charts/agentloop/dashboards/*
agentloop dashboards --dir "$out/charts/agentloop/dashboards"
mkdir -p "$out/deploy" "$out/docs/reference"
agentloop crds --format markdown >"$out/docs/reference/api.md"
agentloop kubectl reference >"$out/docs/reference/kubectl-plugin.md"
helm template agentloop "$out/charts/agentloop" --namespace agentloop-system --skip-tests >"$out/deploy/agentloop.yaml"
python3 hack/chart-readme.py charts/agentloop >"$out/charts/agentloop/README.md"

stale=
for folder in crds charts/agentloop/files/crds charts/agentloop/dashboards deploy/agentloop.yaml docs/reference/api.md \
  docs/reference/kubectl-plugin.md charts/agentloop/README.md; do
  if [ "${1:-}" = --check ]; then
    diff -ru "$folder" "$out/$folder" || stale=1
  else
    rm -rf "$folder"
    cp -r "$out/$folder" "$folder"
  fi
done
[ -z "$stale" ] || die "generated files differ: run 'make generate' and commit"
