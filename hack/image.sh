#!/usr/bin/env bash
# image.sh: the static binary and the CA roots on an empty root, as an OCI layout and archive under target/image.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
"$ROOT/hack/packages.sh" build image

say "Building the static binary"
build_release build
binary=$CARGO_TARGET_DIR/$TARGET/release/agentloop

rm -rf "$IMAGE_DIR"
mkdir -p "$IMAGE_DIR/rootfs/etc/ssl/certs"
cp "$binary" "$IMAGE_DIR/rootfs/agentloop"
cp /etc/ssl/certs/ca-certificates.crt "$IMAGE_DIR/rootfs/etc/ssl/certs/"
IMAGE_USER=65532:65532 "$ROOT/hack/devcluster/pack-image.sh" "$IMAGE_DIR/oci" "${IMAGE##*:}" "$IMAGE_DIR/rootfs" /agentloop
tar -C "$IMAGE_DIR/oci" -cf "$IMAGE_DIR/agentloop.tar" .
printf '%s: binary %s, image %s\n' "$IMAGE" "$(du -h "$binary" | cut -f1)" "$(du -h "$IMAGE_DIR/agentloop.tar" | cut -f1)"
