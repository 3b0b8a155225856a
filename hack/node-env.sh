#!/usr/bin/env bash
# node-env.sh DIR: installs (once) what the package-lock.json in a directory under hack/ names, without running any of its
# scripts, and prints the directory that has node_modules.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
source=$ROOT/hack/$1

command -v npm >/dev/null || die "npm is missing; the tests against the MCP project's own server need it"
key=$(cat "$source/package.json" "$source/package-lock.json" | sha256sum | cut -c 1-12)
env=$CACHE/node-$key
if [ ! -e "$env/complete" ]; then
  mkdir -p "$env"
  exec 9>"$CACHE/.node.lock"
  flock 9   # tests ask side by side
  if [ ! -e "$env/complete" ]; then
    say "Installing the packages of ${source#"$ROOT"/} (once; cached in $env)" >&2
    cp "$source/package.json" "$source/package-lock.json" "$env/"
    (cd "$env" && npm ci --ignore-scripts --no-audit --no-fund --silent >&2)
    touch "$env/complete"
  fi
fi
echo "$env"
