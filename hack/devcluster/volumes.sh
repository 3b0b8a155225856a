#!/usr/bin/env bash
# volumes.sh create: the storage class and its static volumes, directories under $RUN/volumes.
# volumes.sh reclaim DIR: empties a volume whose claim is gone and offers it again, forever; up.sh starts it.
set -euo pipefail
. "$(dirname "$0")/settings.sh"

volume() {
  cat <<YAML
---
apiVersion: v1
kind: PersistentVolume
metadata: {name: $1, labels: {devcluster: volume}}
spec:
  capacity: {storage: 10Gi}
  accessModes: [ReadWriteOnce]
  persistentVolumeReclaimPolicy: Retain
  storageClassName: local
  local: {path: $RUN/volumes/$1}
  nodeAffinity:
    required:
      nodeSelectorTerms: [{matchExpressions: [{key: kubernetes.io/hostname, operator: In, values: [node1]}]}]
YAML
}

create() {
  kube apply -f "$HERE/manifests/storage-class.yaml" >/dev/null
  local have name
  have=$(kube get persistentvolumes -l devcluster=volume -o name)
  for name in $(seq -f 'volume-%03g' "$VOLUMES"); do
    mkdir -p "$RUN/volumes/$name"
    grep -qx "persistentvolume/$name" <<<"$have" || volume "$name"
  done | { read -r first || exit 0; { echo "$first"; cat; } | kube create -f - >/dev/null; }
}

# The claim is gone only when no pod uses it any more (Kubernetes protects claims in use), so emptying is safe. One claim's end
# is several events of its volume, and a later one may be read when the volume is offered or has its next claim. A volume that is
# released and still names its claim is neither: only this script removes the name.
reclaim() {
  local name phase
  while :; do
    kube get persistentvolumes -l devcluster=volume --watch --no-headers \
      -o custom-columns=NAME:.metadata.name,PHASE:.status.phase 2>/dev/null |
      while read -r name phase; do
        [[ $phase == Released && $name == volume-* ]] || continue
        [[ $(kube get persistentvolume "$name" -o 'jsonpath={.status.phase} {.spec.claimRef.uid}') == "Released "?* ]] || continue
        find "$RUN/volumes/$name" -mindepth 1 -delete || true
        chown root:root "$RUN/volumes/$name" && chmod 755 "$RUN/volumes/$name"   # without the last owner's group
        kube patch persistentvolume "$name" --type json -p '[{"op": "remove", "path": "/spec/claimRef"}]' || true
      done || true
    sleep 1   # the API server ends watches now and then, and may be unavailable
  done
}

"$1"
