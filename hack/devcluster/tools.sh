#!/usr/bin/env bash
# tools.sh NAME...: builds cluster tools from the Go module proxy into the cache. A tool is built again when its go.mod,
# its flags or the Go version changed. Groups: plane, node.
set -euo pipefail
. "$(dirname "$0")/settings.sh"

plane="etcd kube-apiserver kube-controller-manager kube-scheduler kubectl"
node="kubelet kube-proxy coredns pause"
names=()
for name; do
  case $name in plane | node) read -ra group <<<"${!name}" && names+=("${group[@]}") ;; *) names+=("$name") ;; esac
done

mkdir -p "$BIN"
if ! command -v go >/dev/null; then
  for name in "${names[@]}"; do
    [ -x "$BIN/$name" ] || die "Go is missing: it builds $name and the other cluster tools (https://go.dev/dl, 1.24 or newer)"
  done
  exit 0
fi
export CGO_ENABLED=0
exec 9>"$BIN/.lock"

# build NAME MODULE_DIR PACKAGE LDFLAGS
build() {
  local name=$1 dir=$HERE/$2 package=$3 flags=$4 key
  key=$(find "$dir" -type f | sort | xargs cat | cat - <(echo "$package $flags $go") | sha256sum)
  is_built() { [ -x "$BIN/$name" ] && [ "$(cat "$BIN/.$name.key" 2>/dev/null)" = "$key" ]; }
  is_built && return 0
  flock 9   # two builds at once would do everything twice
  is_built && { flock -u 9; return 0; }
  say "Building $name (once; cached in $BIN)"
  (cd "$dir" && go build -trimpath -ldflags "$flags" -o "$BIN/.$name.new" "$package")
  mv "$BIN/.$name.new" "$BIN/$name"
  echo "$key" >"$BIN/.$name.key"
  flock -u 9
}

go=$(go env GOVERSION GOARCH | tr '\n' ' ')
# Without these stamps the version reads v0.0.0, and kubelet and helm refuse or warn.
version=$(sed -nE 's/^\tk8s.io\/kubernetes (v[0-9.]+).*/\1/p' "$HERE/tools/k8s/go.mod")
IFS=. read -r major minor _ <<<"${version#v}"
stamp=k8s.io/component-base/version
stamps="-s -w -X $stamp.gitVersion=$version -X $stamp.gitMajor=$major -X $stamp.gitMinor=$minor -X $stamp.gitTreeState=clean"
for name in "${names[@]}"; do
  case $name in
    kubeconform) build kubeconform tools/kubeconform github.com/yannh/kubeconform/cmd/kubeconform "-s -w" ;;
    kube-score) build kube-score tools/kube-score github.com/zegl/kube-score/cmd/kube-score "-s -w" ;;
    kube*) build "$name" tools/k8s "k8s.io/kubernetes/cmd/$name" "$stamps" ;;
    etcd) build etcd tools/etcd go.etcd.io/etcd/server/v3 "-s -w" ;;
    coredns) build coredns tools/coredns github.com/coredns/coredns "-s -w" ;;
    helm) build helm tools/helm helm.sh/helm/v4/cmd/helm "-s -w" ;;
    otelcol) build otelcol tools/otelcol . "-s -w" ;;
    kstatus) build kstatus tools/kstatus . "-s -w" ;;
    vale) build vale tools/vale github.com/errata-ai/vale/v2/cmd/vale "-s -w" ;;
    kwok) build kwok tools/kwok sigs.k8s.io/kwok/cmd/kwok "-s -w" ;;
    pause) build pause pause . "-s -w" ;;
    *) die "tools.sh: no tool '$name'" ;;
  esac
done
