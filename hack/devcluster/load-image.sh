#!/usr/bin/env bash
# load-image.sh REF ROOTFS_DIR ENTRYPOINT [ARG...]: makes an image of one layer from a directory and imports it.
# load-image.sh REF ARCHIVE.tar: imports an OCI archive (see hack/image.sh). Pods use either with imagePullPolicy: Never.
# IMAGE_USER=uid:gid sets the user of an image made from a directory.
set -euo pipefail
. "$(dirname "$0")/settings.sh"
ref=$1 source=$2
shift 2
name=${ref%:*} tag=${ref##*:}
images() { ctr -a "$RUN/containerd.sock" -n k8s.io images "$@"; }
import() { # ARCHIVE: its tag may be another one than the tag asked for
  local imported
  imported=$(images import --base-name "$name" "$1" | sed -n 's/^unpacking \([^ ]*\) .*/\1/p')
  [ "$imported" = "$ref" ] || images tag --force "$imported" "$ref" >/dev/null
}
if [ -f "$source" ]; then
  import "$source"
  exit 0
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$HERE/pack-image.sh" "$work/oci" "$tag" "$source" "$@"
tar -C "$work/oci" -cf "$work/image.tar" .
import "$work/image.tar"
