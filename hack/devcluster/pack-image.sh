#!/usr/bin/env bash
# pack-image.sh LAYOUT_DIR TAG ROOTFS_DIR ENTRYPOINT [ARG...]: an OCI layout with one image of one layer, without Docker.
# IMAGE_USER=uid:gid sets its user, IMAGE_ARCHITECTURE=amd64|arm64 its architecture. A layout that exists gets one image more.
set -euo pipefail
layout=$1 tag=$2 rootfs=$3
shift 3
entrypoint=()
for word; do entrypoint+=(--config.entrypoint "$word"); done
log=$(mktemp)
trap 'rm -f "$log"' EXIT
{
  [ -e "$layout/oci-layout" ] || umoci init --layout "$layout"
  umoci new --image "$layout:$tag"
  umoci insert --image "$layout:$tag" "$rootfs" /
  umoci config --image "$layout:$tag" "${entrypoint[@]}" ${IMAGE_USER:+--config.user "$IMAGE_USER"} \
    ${IMAGE_ARCHITECTURE:+--architecture "$IMAGE_ARCHITECTURE"}
  umoci gc --layout "$layout"
} >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
