#!/usr/bin/env bash
# check.sh         what must hold before a commit; needs no cluster and no root
# check.sh static  what of it is no test: CI runs it beside `make test`, which has all of these tests
set -euo pipefail
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
what=${1:-all}
case $what in all | static) ;; *) die "usage: check.sh [static]" ;; esac
"$ROOT/hack/packages.sh" build database docs
"$ROOT/hack/devcluster/tools.sh" helm kstatus   # tests ask them

say "Format"
cargo fmt --check
say "Spelling"
# Words of Rust and a header of HTTP that are in the list of misspellings.
codespell --ignore-words-list crate,crates,te -- *.md docs examples deploy/argocd charts/agentloop/values.yaml charts/agentloop/templates/NOTES.txt hack/*/README.md
say "Lints"
cargo clippy --locked --all-targets --quiet -- -D warnings
say "Links in comments"
RUSTDOCFLAGS="-D warnings -A rustdoc::private_intra_doc_links -A rustdoc::invalid_html_tags" cargo doc --locked --quiet --no-deps --document-private-items --lib
say "Build"
cargo fetch --locked   # a test reads the metadata of all platforms offline
cargo test --locked --quiet --no-run
binary=$CARGO_TARGET_DIR/debug/agentloop   # that build has made it
if [ "$what" = all ]; then
  say "Tests without a cluster"
  cargo test --locked --quiet --lib --bins
  # INSTA_UPDATE=no: a changed snapshot fails instead of being written.
  # A few schedules of the simulations; `make test` runs more.
  AGENTLOOP_SIM_SCHEDULES=5000 AGENTLOOP_SENSOR_SCHEDULES=50 INSTA_UPDATE=no cargo test --locked --quiet --test it -- --skip e2e::
  AGENTLOOP_TEST_BINARY=$binary cargo test --locked --quiet --test toolbox
fi
"$ROOT/hack/lint.sh"
say "Generated files"
AGENTLOOP_BINARY=$binary "$ROOT/hack/generate.sh" --check
