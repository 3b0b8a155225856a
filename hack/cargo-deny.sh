#!/usr/bin/env bash
# cargo-deny.sh: checks licenses, sources and banned crates by deny.toml. Builds cargo-deny once, into the cache.
# Advisories are not checked: their database is a repository, not a package.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
version=0.20.2
home=$CACHE/cargo-deny-$version

if [ ! -x "$home/bin/cargo-deny" ]; then
  mkdir -p "$CACHE"
  exec 9>"$CACHE/.cargo-deny.lock"
  flock 9
  if [ ! -x "$home/bin/cargo-deny" ]; then
    say "Building cargo-deny $version (once; cached in $home)"
    # Not optimized: a run takes two seconds, and the build half the time.
    CARGO_PROFILE_DEV_DEBUG=0 CARGO_TARGET_DIR=$home/target cargo install cargo-deny --version "$version" \
      --quiet --locked --debug --no-default-features --root "$home"
    rm -rf "$home/target"
  fi
fi
"$home/bin/cargo-deny" --locked check --hide-inclusion-graph bans licenses sources
