#!/usr/bin/env bash
# krew.sh VERSION HOMEPAGE [BINARY]: the archive of the kubectl plugin and its Krew manifest, under target/krew, for a release.
# BINARY defaults to the one that `make image` built. The archive is published below HOMEPAGE/releases/download/vVERSION.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
[ $# -ge 2 ] || die "usage: hack/krew.sh VERSION HOMEPAGE [BINARY]"
version=${1#v} homepage=${2%/} binary=${3:-$IMAGE_DIR/rootfs/agentloop}
[ -f "$binary" ] || die "$binary does not exist: run 'make image' first"
"$binary" --version | grep -qx "agentloop $version" || die "$binary is not of version $version: $("$binary" --version)"

out=$ROOT/target/krew
archive=agentloop-linux-amd64.tar.gz
rm -rf "$out"
mkdir -p "$out/files"
cp "$binary" "$out/files/agentloop"
cp LICENSE "$out/files/"
# The same bytes for the same files, so that the digest can be verified by a second build.
tar -C "$out/files" --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner --mode=a+rX,u+w,go-w -cf - . | gzip -n9 >"$out/$archive"
rm -r "$out/files"
digest=$(sha256sum "$out/$archive" | cut -d' ' -f1)
sed -e 1d -e "s|@VERSION@|$version|" -e "s|@HOMEPAGE@|$homepage|" -e "s|@SHA256@|$digest|" \
  -e "s|@URI@|$homepage/releases/download/v$version/$archive|" deploy/krew/agentloop.yaml.in >"$out/agentloop.yaml"
say "$out/agentloop.yaml"
cat "$out/agentloop.yaml"
