#!/usr/bin/env bash
# previous.sh [REF]: image and chart of an older version, for the test of upgrades, under target/previous:
# agentloop.tar (the image $PREVIOUS_IMAGE), chart/, commit. Without REF: the newest tag before this commit or, while there is none,
# the commit $PREVIOUS_COMMITS (100) before it. Nothing is built for a commit that is there already.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
default_ref() {
  git describe --tags --abbrev=0 HEAD^ 2>/dev/null || echo "HEAD~${PREVIOUS_COMMITS:-100}"
}
ref=${1:-$(default_ref)}
commit=$(git rev-parse --verify --quiet "$ref^{commit}") || die "there is no commit $ref here; name one that this clone has: FROM=ref"
if [ "$(cat "$PREVIOUS_DIR/commit" 2>/dev/null)" = "$commit" ]; then
  say "The image of $(git log -1 --format='%h (%s)' "$commit") is there"
  exit 0
fi

# Cargo tells the crates of two work trees of one project apart by the times of their files only, so that the older ones get a
# target directory of their own. Dependencies are linked into it: they stay compiled, and no file of theirs is written to.
work=$(mktemp -d) build=$CARGO_TARGET_DIR/previous
clean_up() {
  git worktree remove --force "$work/tree" 2>/dev/null || true
  rm -rf "$work" "$build"
}
trap clean_up EXIT
link_dependencies() { # PROFILE_DIR
  local part
  for part in deps build .fingerprint; do
    [ -d "$CARGO_TARGET_DIR/$1/$part" ] || continue
    mkdir -p "$build/$1"
    cp --archive --link "$CARGO_TARGET_DIR/$1/$part" "$build/$1/"
    find "$build/$1/$part" -maxdepth 1 \( -name 'agentloop*' -o -name 'libagentloop*' \) -exec rm -r {} +
  done
}

rm -rf "$PREVIOUS_DIR" "$build"
git worktree add --quiet --detach "$work/tree" "$commit"
link_dependencies release
link_dependencies "$TARGET/release"
say "Building the image of $(git log -1 --format='%h (%s)' "$commit")"
CARGO_TARGET_DIR=$build IMAGE=$PREVIOUS_IMAGE "$work/tree/hack/image.sh"
mkdir -p "$PREVIOUS_DIR"
cp "$work/tree/target/image/agentloop.tar" "$PREVIOUS_DIR/"
cp -r "$work/tree/charts/agentloop" "$PREVIOUS_DIR/chart"
echo "$commit" >"$PREVIOUS_DIR/commit"   # last: its presence says that all is there
