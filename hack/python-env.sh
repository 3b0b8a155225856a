#!/usr/bin/env bash
# python-env.sh [FILE]: makes (once) a Python environment with the packages of a file under hack/ and prints its
# interpreter. Without FILE: model-server/requirements.txt.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
requirements=$ROOT/hack/${1:-model-server/requirements.txt}

command -v python3 >/dev/null || die "python3 is missing; the tests against real servers need it"
key=$(python3 -c 'import sys; print(sys.prefix, sys.version)' | cat - "$requirements" | sha256sum | cut -c 1-12)
env=$CACHE/python-$key
if [ ! -e "$env/complete" ]; then
  mkdir -p "$CACHE"
  exec 9>"$CACHE/.python.lock"
  flock 9   # tests ask side by side
  if [ ! -e "$env/complete" ]; then
    say "Installing the packages of ${requirements#"$ROOT"/} (once; cached in $env)" >&2
    python3 -c 'import ensurepip' 2>/dev/null || "$ROOT/hack/packages.sh" python >&2
    rm -rf "$env"
    python3 -m venv "$env" >&2
    "$env/bin/pip" install --quiet --no-input --disable-pip-version-check --no-deps -r "$requirements" >&2
    touch "$env/complete"
  fi
fi
echo "$env/bin/python"
