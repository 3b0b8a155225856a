#!/usr/bin/env bash
# previous.sh [REF]: image and chart of an older version, for the test of upgrades, under target/previous: agentloop.tar,
# chart/, and what they are: image ($PREVIOUS_IMAGE), commit. Without REF: the newest tag before this commit or, while there is
# none, the commit $PREVIOUS_COMMITS (100) before it. Nothing is built if this image of this commit is there already.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
default_ref() {
  git describe --tags --abbrev=0 HEAD^ 2>/dev/null || echo "HEAD~${PREVIOUS_COMMITS:-100}"
}
ref=${1:-$(default_ref)}
commit=$(git rev-parse --verify --quiet "$ref^{commit}") || die "there is no commit $ref here; name one that this clone has: FROM=ref"
title=$(git log -1 --format='%h (%s)' "$commit")
kept() { cat "$PREVIOUS_DIR/$1" 2>/dev/null || true; }

# One run at a time in this work tree: the paths below are always the same, so that a run removes what a killed one left.
mkdir -p "$ROOT/target"
exec {lock}>"$ROOT/target/previous.lock"
flock "$lock"
if [ "$(kept commit)" = "$commit" ] && [ "$(kept image)" = "$PREVIOUS_IMAGE" ]; then
  say "The image of $title is there"
  exit 0
fi

# Cargo tells the crates of two work trees of one project apart by the times of their files only, so that the older ones get a
# target directory of their own; other work trees may share $CARGO_TARGET_DIR. Dependencies stay compiled: the compiler replaces
# their files and never writes to them, so these are linked. Cargo may write to its records and to what build scripts made.
tree=$ROOT/target/previous-tree
build=$CARGO_TARGET_DIR/previous-$(printf %s "$ROOT" | sha256sum | cut -c1-12)
clean_up() {
  git worktree remove --force --force "$tree" 2>/dev/null || true
  rm -rf "$tree" "$build"
}
trap clean_up EXIT
take_dependencies() { # PROFILE_DIR
  local part how
  for part in deps build .fingerprint; do
    [ -d "$CARGO_TARGET_DIR/$1/$part" ] || continue
    how=(--archive)
    [ "$part" != deps ] || how+=(--link)
    mkdir -p "$build/$1"
    cp "${how[@]}" "$CARGO_TARGET_DIR/$1/$part" "$build/$1/"
    find "$build/$1/$part" -maxdepth 1 \( -name 'agentloop*' -o -name 'libagentloop*' \) -exec rm -r {} +
  done
}

rm -rf "$PREVIOUS_DIR"
clean_up
git worktree add --quiet --force --detach "$tree" "$commit"
take_dependencies release
take_dependencies "$TARGET/release"
say "Building the image of $title"
CARGO_TARGET_DIR=$build IMAGE=$PREVIOUS_IMAGE "$tree/hack/image.sh" {lock}>&-
mkdir -p "$PREVIOUS_DIR"
cp "$tree/target/image/agentloop.tar" "$PREVIOUS_DIR/"
cp -r "$tree/charts/agentloop" "$PREVIOUS_DIR/chart"
echo "$PREVIOUS_IMAGE" >"$PREVIOUS_DIR/image"
echo "$commit" >"$PREVIOUS_DIR/commit"   # last: its presence says that all is there
