#!/usr/bin/env bash
# lint.sh        checks scripts with shellcheck; the chart with helm lint and, as it renders, with kubeconform; the examples likewise
# lint.sh all    and the chart with kube-score, which takes a minute to build once
set -euo pipefail
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
"$ROOT/hack/packages.sh" lint
"$ROOT/hack/devcluster/tools.sh" helm kubeconform
chart=charts/agentloop
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

say "Scripts"
# SC2034: variables of files that are sourced, and of groups that are read by their name.
shellcheck --shell=bash --external-sources --source-path=SCRIPTDIR --severity=warning --exclude=SC2034 .ci/run hack/*.sh hack/*/*.sh

say "Chart"
helm lint --strict --quiet "$chart"
# The namespaced release, one with everything that can be turned on, and the default.
render() { helm template agentloop "$chart" --namespace agentloop-system "$@"; }
render >"$out/default.yaml"
render --set rbac.clusterScoped=false,crds.enabled=false,watchNamespaces='{team-a}' >"$out/namespaced.yaml"
render --values hack/lint-values.yaml >"$out/everything.yaml"
swagger=$(cd hack/devcluster/tools/k8s && go mod download k8s.io/kubernetes && go list -m -f '{{.Dir}}' k8s.io/kubernetes)/api/openapi-spec/swagger.json
/usr/bin/python3 hack/kube-schemas.py "$swagger" "$out/schemas" crds hack/foreign-crds
# Kinds of the Prometheus operator have no schema here; hack/foreign-crds has that of the grafana-operator.
conform() {
  kubeconform -strict -summary -skip ServiceMonitor,PodMonitor,PrometheusRule,Kustomization \
    -schema-location "$out/schemas/{{ .ResourceKind }}{{ .KindSuffix }}.json" "$@"
}
conform "$out"/*.yaml deploy/*.yaml examples/*.yaml

[ "${1:-}" = all ] || exit 0
say "Practices"
"$ROOT/hack/devcluster/tools.sh" kube-score
# CPU is not limited, since a limit slows the leader down when many Agents report. The pull policy is a value. The controller
# writes no files. The link's Service selects the leader, which labels its own pod. The test pod accepts no connections.
for file in default namespaced everything; do
  kube-score score --ignore-container-cpu-limit --output-format ci \
    --ignore-test container-ephemeral-storage-request-and-limit,container-image-pull-policy,service-targets-pod,pod-networkpolicy \
    "$out/$file.yaml" | { grep -v '^\[OK\]\|^\[SKIPPED\]' || true; }
done
