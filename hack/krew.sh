#!/usr/bin/env bash
# krew.sh VERSION HOMEPAGE [BINARY...]: an archive of the kubectl plugin for each platform and the Krew manifest, under OUT (target/krew),
# for a release. BINARY defaults to all that `make image` built (PLATFORMS=linux/amd64,linux/arm64). The archives are published below
# HOMEPAGE/releases/download/vVERSION. A binary for another platform than this machine's runs under emulation, to tell its version.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
[ $# -ge 2 ] || die "usage: hack/krew.sh VERSION HOMEPAGE [BINARY...]"
version=${1#v} homepage=${2%/}
binaries=("${@:3}")
[ ${#binaries[@]} -gt 0 ] || binaries=("$IMAGE_DIR"/rootfs*/agentloop)
template=deploy/krew/agentloop.yaml.in

# machine_of BINARY: the architecture that its ELF header names, as the kernel calls it.
machine_of() {
  case $(od -An -tx1 -j18 -N2 "$1" | tr -d ' ') in
    3e00) echo x86_64 ;;
    b700) echo aarch64 ;;
    *) die "$1 is no binary for linux/amd64 or linux/arm64" ;;
  esac
}

# version_of BINARY MACHINE: what it says its version is.
version_of() {
  if [ "$2" = "$ARCH" ]; then
    "$1" --version
  else
    command -v "qemu-$2-static" >/dev/null || "$ROOT/hack/packages.sh" emulator >&2
    "qemu-$2-static" "$1" --version
  fi
}

out=${OUT:-$ROOT/target/krew}
rm -rf "$out"
mkdir -p "$out"
# The lines of a platform are the end of the template, and are repeated for each.
sed -e 1d -e '/^  platforms:$/q' -e "s|@VERSION@|$version|" -e "s|@HOMEPAGE@|$homepage|" "$template" >"$out/agentloop.yaml"
for binary in "${binaries[@]}"; do
  [ -f "$binary" ] || die "$binary does not exist: run 'make image' first"
  machine=$(machine_of "$binary")
  suffix=amd64
  [ "$machine" = x86_64 ] || suffix=arm64
  archive=agentloop-linux-$suffix.tar.gz
  [ ! -e "$out/$archive" ] || die "two binaries are for linux/$suffix"
  found=$(version_of "$binary" "$machine")
  [ "$found" = "agentloop $version" ] || die "$binary is not of version $version: $found"
  mkdir "$out/files"
  cp "$binary" "$out/files/agentloop"
  cp LICENSE "$out/files/"
  # The same bytes for the same files, so that the digest can be verified by a second build.
  tar -C "$out/files" --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner --mode=a+rX,u+w,go-w -cf - . | gzip -n9 >"$out/$archive"
  rm -r "$out/files"
  digest=$(sha256sum "$out/$archive" | cut -d' ' -f1)
  sed -e '1,/^  platforms:$/d' -e "s|@ARCH@|$suffix|" -e "s|@SHA256@|$digest|" \
    -e "s|@URI@|$homepage/releases/download/v$version/$archive|" "$template" >>"$out/agentloop.yaml"
done
say "$out/agentloop.yaml"
cat "$out/agentloop.yaml"
