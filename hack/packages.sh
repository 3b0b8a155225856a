#!/usr/bin/env bash
# packages.sh GROUP...: makes sure the Debian packages of the groups are there; installs only what is missing.
#   build: the Rust build   image: packing images   plane: control plane   node: a node   test: what tests call   database: a Postgres for tests   browser: what opens the page   pictures: what takes pictures of the dashboards   docs: what checks the pages and what their commands call   demo: what the demo calls   bench: what counts   python: the model server   generate: what writes generated files   lint: checks of scripts and of the chart   cross: the build for arm64 on amd64   emulator: runs its binary
set -euo pipefail
. "$(dirname "$0")/lib.sh"

# package:probe; a probe is a command or a path.
build="gcc:cc libc6-dev:/usr/include/stdlib.h ca-certificates:/etc/ssl/certs/ca-certificates.crt"
image="umoci:umoci python3:python3 git:git"
cross="gcc-aarch64-linux-gnu:aarch64-linux-gnu-gcc libc6-dev-arm64-cross:/usr/aarch64-linux-gnu/include/stdlib.h"
emulator="qemu-user-static:qemu-aarch64-static"
plane="openssl:openssl util-linux:flock"
node="containerd:containerd runc:runc containernetworking-plugins:/usr/lib/cni/bridge iptables:iptables
  iproute2:ip mount:umount"
test="prometheus:promtool busybox-static:busybox python3:python3 nodejs:node npm:npm curl:curl"
database="postgresql:/var/lib/dpkg/info/postgresql.list"
browser="chromium-headless-shell:chromium-headless-shell"
pictures="prometheus:prometheus python3:python3 nodejs:node npm:npm curl:curl openssl:openssl pngquant:pngquant $browser"
docs="codespell:codespell lua5.4:lua5.4 sqlite3:sqlite3 jq:jq"
demo="curl:curl"
generate="python3:python3"
lint="shellcheck:shellcheck python3-yaml:/usr/lib/python3/dist-packages/yaml"
bench="strace:strace"
python="python3-venv:/var/lib/dpkg/info/python3-venv.list"

missing=()
for group; do
  case $group in build | image | plane | node | test | database | browser | pictures | docs | demo | bench | python | generate | lint | cross | emulator) ;; *) die "packages.sh: no group '$group'" ;; esac
  for entry in ${!group}; do
    probe=${entry#*:}
    if [[ $probe == /* ]]; then [ -e "$probe" ]; else PATH=$PATH:/usr/sbin:/sbin command -v "$probe" >/dev/null; fi ||
      missing+=("${entry%%:*}")
  done
done
[ ${#missing[@]} -gt 0 ] || exit 0

if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
  die "missing: ${missing[*]}. Install them (Debian: apt-get install ${missing[*]}), or run this as root on Debian"
fi
say "Installing Debian packages: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
