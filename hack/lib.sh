# shellcheck shell=bash
# Shared by the scripts under hack/: where things are, and how they speak. Source it, do not run it.
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/agentloop   # survives a fresh clone; safe to delete
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$CACHE/target}
BIN=${BIN:-$CACHE/bin}                                                 # built cluster tools
export PATH=$BIN:$PATH
IMAGE=${IMAGE:-localhost/agentloop:dev}
TOOLS_IMAGE=${TOOLS_IMAGE:-localhost/agentloop-tools:dev}
ARCH=$(uname -m)
TARGET=$ARCH-unknown-linux-gnu
IMAGE_DIR=$ROOT/target/image                                           # rootfs, OCI layout, archive
PREVIOUS_IMAGE=${PREVIOUS_IMAGE:-localhost/agentloop:previous}         # of an older version: hack/previous.sh
PREVIOUS_DIR=$ROOT/target/previous                                     # its archive and its chart

say() { printf '\n==> %s\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# as_root_or_say WHAT: ends with plain words where root is missing.
as_root_or_say() { [ "$(id -u)" = 0 ] || die "$1 needs root: run it as root (sudo -E make ...)"; }

# target_of PLATFORM: the Rust target of linux/amd64 or linux/arm64.
target_of() {
  case $1 in
    linux/amd64) echo x86_64-unknown-linux-gnu ;;
    linux/arm64) echo aarch64-unknown-linux-gnu ;;
    *) die "platform '$1' is not supported: linux/amd64 or linux/arm64" ;;
  esac
}

# build_release build|bench [CARGO_ARGUMENT...]: static, optimised, as it ships.
build_release() {
  local command=(bench) link_arguments=()   # `cargo bench` takes the release profile by itself
  if [ "$1" = build ]; then
    command=(rustc --release --bin agentloop)
    # Each process reads its own relocations at its start: packed they are 20 kB instead of 1.7 MB of its memory.
    # shellcheck disable=SC2054
    link_arguments=(-- -C link-arg=-Wl,-z,pack-relative-relocs)
  fi
  # An explicit target keeps the flag away from build scripts and proc macros, which cannot be static.
  local flags="-C target-feature=+crt-static"
  # On arm64 the start code of the static glibc reaches only a small global offset table: ours does without one.
  [[ $TARGET != aarch64-* ]] || flags+=" -C relocation-model=static"
  RUSTFLAGS=$flags cargo "${command[@]}" --locked --target "$TARGET" "${@:2}" "${link_arguments[@]}"
}
