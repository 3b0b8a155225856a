#!/usr/bin/env bash
# lint.sh        checks scripts with shellcheck; the chart with helm lint and, as it renders, with kubeconform and checkov; the
#                examples and the manifests of the pages likewise; dashboards with Grafana's models; pages with vale; dependencies with cargo-deny
# lint.sh all    and the chart with kube-score, which takes a minute to build once; so does CI=true
set -euo pipefail
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
"$ROOT/hack/packages.sh" lint
"$ROOT/hack/devcluster/tools.sh" helm kubeconform vale
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
# A release has one of both monitors.
render --values hack/lint-values.yaml --set metrics.podMonitor.enabled=false,metrics.serviceMonitor.enabled=true \
  --set metrics.serviceMonitor.bearerTokenSecret.name=reader --show-only templates/servicemonitor.yaml >"$out/servicemonitor.yaml"
# module FOLDER MODULE: the files of a Go module, in the version of hack/devcluster/tools/FOLDER/go.mod
module() { (cd "hack/devcluster/tools/$1" && go mod download "$2" && go list -m -f '{{.Dir}}' "$2"); }
swagger=$(module k8s k8s.io/kubernetes)/api/openapi-spec/swagger.json
monitoring=$(module prometheus-operator github.com/prometheus-operator/prometheus-operator)/example/prometheus-operator-crd
mkdir "$out/monitoring" "$out/gitops"
cp "$monitoring"/monitoring.coreos.com_{servicemonitors,podmonitors,prometheusrules}.yaml "$out/monitoring"
# What pages show for Argo CD, Flux and snapshots of volumes: definition MODULE@VERSION FILE, without the modules that it needs.
definition() {
  local said
  said=$(cd / && go mod download -json "$1") || die "cannot download $1: $said"
  cp "$(sed -nE 's/^\t"Dir": "(.*)",/\1/p' <<<"$said")/$2" "$out/gitops"
}
definition github.com/argoproj/argo-cd/v3@v3.2.0 manifests/crds/application-crd.yaml
definition github.com/fluxcd/helm-controller@v1.4.0 config/crd/bases/helm.toolkit.fluxcd.io_helmreleases.yaml
definition github.com/fluxcd/kustomize-controller@v1.7.3 config/crd/bases/kustomize.toolkit.fluxcd.io_kustomizations.yaml
definition github.com/fluxcd/source-controller@v1.7.0 config/crd/bases/source.toolkit.fluxcd.io_gitrepositories.yaml
definition github.com/kubernetes-csi/external-snapshotter/client/v8@v8.2.0 config/crd/snapshot.storage.k8s.io_volumesnapshots.yaml
# hack/foreign-crds has what the chart uses of the grafana-operator.
/usr/bin/python3 hack/kube-schemas.py "$swagger" "$out/schemas" crds hack/foreign-crds "$out/monitoring" "$out/gitops"
/usr/bin/python3 hack/docs-manifests.py "$out/pages" *.md docs/*.md docs/*/*.md
# The file of kustomize is no object of an API.
conform() {
  kubeconform -strict -summary -skip kustomize.config.k8s.io/v1beta1/Kustomization \
    -schema-location "$out/schemas/{{ .ResourceKind }}{{ .KindSuffix }}.json" "$@"
}
conform "$out"/*.yaml "$out"/pages/*.yaml deploy/*.yaml examples/*.yaml

say "Security of the chart"
# What `helm test` creates has rules of its own.
mkdir "$out/release" "$out/test"
render --no-hooks >"$out/release/default.yaml"
render --no-hooks --set rbac.clusterScoped=false,crds.enabled=false,watchNamespaces='{team-a}' >"$out/release/namespaced.yaml"
render --no-hooks --values hack/lint-values.yaml >"$out/release/everything.yaml"
cp deploy/*.yaml Dockerfile "$out/release"
render --values hack/lint-values.yaml --show-only templates/tests/check.yaml >"$out/test/everything.yaml"
checkov=("$("$ROOT/hack/python-env.sh" checkov/requirements.txt)" -m checkov.main)
for part in release test; do
  "${checkov[@]}" --config-file "hack/checkov/$part.yaml" --directory "$out/$part"
done

say "Dashboards"
"$("$ROOT/hack/python-env.sh" dashboards/requirements.txt)" hack/dashboards/round-trip.py "$chart"/dashboards/*.json

say "Pages"
vale --config hack/vale/vale.ini --no-wrap -- *.md docs examples hack/*/README.md

say "Dependencies"
"$ROOT/hack/cargo-deny.sh"

[ "${1:-}" = all ] || [ "${CI:-}" = true ] || exit 0
say "Practices"
"$ROOT/hack/devcluster/tools.sh" kube-score
# CPU is not limited, since a limit slows the leader down when many Agents report. The pull policy is a value. The controller
# writes no files. The link's Service selects the leader, which labels its own pod. The test pod accepts no connections.
for file in default namespaced everything; do
  kube-score score --ignore-container-cpu-limit --output-format ci \
    --ignore-test container-ephemeral-storage-request-and-limit,container-image-pull-policy,service-targets-pod,pod-networkpolicy \
    "$out/$file.yaml" | { grep -v '^\[OK\]\|^\[SKIPPED\]' || true; }
done
