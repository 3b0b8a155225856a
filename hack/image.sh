#!/usr/bin/env bash
# image.sh: the static binary and the CA roots on an empty root, as an OCI layout and archive under target/image, with a software bill of
# materials (CycloneDX) for each platform and an unsigned provenance statement (SLSA) beside it.
# PLATFORMS=linux/amd64,linux/arm64 builds one image for both; default: that of this machine. arm64 is cross-compiled on amd64, and
# experimental (hack/emulate.sh tests it).
set -euo pipefail
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
started=$(date --utc +%Y-%m-%dT%H:%M:%SZ)
case $ARCH in x86_64) native=linux/amd64 ;; aarch64) native=linux/arm64 ;; *) die "unknown machine $ARCH" ;; esac
IFS=, read -ra platforms <<<"${PLATFORMS:-$native}"
"$ROOT/hack/packages.sh" build image

cross_setup() {
  [ "$native" = linux/amd64 ] || die "only arm64 on amd64 can be cross-compiled"
  "$ROOT/hack/packages.sh" cross
  rustup target list --installed | grep -qx "$TARGET" || rustup target add "$TARGET"
  # The compiler of C code (ring, SQLite) is found by its name; the linker is not.
  export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
}

rm -rf "$IMAGE_DIR"
mkdir -p "$IMAGE_DIR"
tag=${IMAGE##*:} singles=()
for platform in "${platforms[@]}"; do
  TARGET=$(target_of "$platform")
  [ "$platform" = "$native" ] || cross_setup
  say "Building the static binary for $platform"
  build_release build
  binary=$CARGO_TARGET_DIR/$TARGET/release/agentloop

  # hack/krew.sh takes the binary of this machine from `rootfs`.
  rootfs=$IMAGE_DIR/rootfs
  [ "$platform" = "$native" ] || rootfs=$IMAGE_DIR/rootfs-${platform#*/}
  mkdir -p "$rootfs/etc/ssl/certs"
  cp "$binary" "$rootfs/agentloop"
  cp /etc/ssl/certs/ca-certificates.crt "$rootfs/etc/ssl/certs/"
  single=$tag
  if [ ${#platforms[@]} -gt 1 ]; then
    single=$tag-${platform#*/}
    singles+=("$platform=$single")
  fi
  IMAGE_USER=65532:65532 IMAGE_ARCHITECTURE=${platform#*/} \
    "$ROOT/hack/devcluster/pack-image.sh" "$IMAGE_DIR/oci" "$single" "$rootfs" /agentloop
  python3 "$ROOT/hack/sbom.py" "$TARGET" "$rootfs" >"$IMAGE_DIR/sbom-${platform#*/}.cdx.json"
done
[ ${#singles[@]} = 0 ] || python3 "$ROOT/hack/image-index.py" "$IMAGE_DIR/oci" "$tag" "${singles[@]}"
python3 "$ROOT/hack/provenance.py" "$IMAGE_DIR/oci" "$IMAGE" "$started" >"$IMAGE_DIR/provenance.json"
tar -C "$IMAGE_DIR/oci" -cf "$IMAGE_DIR/agentloop.tar" .
printf '%s: binary %s, image %s, for %s\n' "$IMAGE" "$(du -h "$IMAGE_DIR"/rootfs*/agentloop | cut -f1 | paste -sd' ')" \
  "$(du -h "$IMAGE_DIR/agentloop.tar" | cut -f1)" "${platforms[*]}"
