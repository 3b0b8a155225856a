#!/usr/bin/env bash
# test.sh                every test: without a cluster, on a real control plane, end to end on a real node
# test.sh plane|node     one half of it; `node` takes names of tests: test.sh node e2e::resume e2e::tasks
# test.sh upgrade [REF]  an upgrade from an older version (hack/previous.sh says which) and the rollback, on the node
# test.sh soak           SCHEDULES (2,000,000) of the ledger's simulation, SENSOR_SCHEDULES (100,000) of the Sensors' and
#                        MODE_SCHEDULES (20,000) of the modes', ROUNDS (200,000) of nearly right input, the build of the
#                        Dockerfile, then the upgrade, and then the end-to-end tests repeatedly, for MINUTES (60), with
#                        five minutes of kills for the budgets and for Sensors, ten for the journals, and 3,000 tasks under kills
# Starts the clusters it needs and stops them, whatever happens. Ends with what each part took and cargo's own summaries.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
what=${1:-all} filters=("${@:2}")
[ ${#filters[@]} -gt 0 ] || filters=(e2e::)
case $what in all | plane | node | upgrade | soak) ;; *) die "usage: test.sh [plane|node [TEST...]|upgrade [REF]|soak]" ;; esac
devcluster=$ROOT/hack/devcluster
logs=$ROOT/target/test-logs
PLANE_RUN=/var/tmp/agentloop-test-plane
NODE_RUN=/var/tmp/agentloop-test-node
export INSTA_UPDATE=no   # a changed snapshot fails instead of being written
took=() failed=0 missing='' tools_pid='' image_pid=''

plane_do() { RUN=$PLANE_RUN API_PORT=7443 ETCD_PORT=7379 KCM_PORT=17257 SCHED_PORT=17259 "$devcluster/$1.sh" "${@:2}"; }
node_do() { RUN=$NODE_RUN "$devcluster/$1.sh" "${@:2}"; }

stop() {
  [ -z "$tools_pid" ] || kill -- "-$tools_pid" 2>/dev/null || true
  [ -z "$image_pid" ] || kill -- "-$image_pid" 2>/dev/null || true
  plane_do down
  node_do down
}
trap stop EXIT
trap 'exit 130' INT TERM

# phase NAME COMMAND...: ends the run when the command fails.   tests NAME COMMAND...: notes the failure and goes on.
phase() {
  local name=$1 start=$SECONDS
  shift
  say "$name"
  "$@"
  took+=("$(printf '%5ds  %s' $((SECONDS - start)) "$name")")
}
tests() { phase "$1" run_tests "$logs/${1// /-}.log" "${@:2}"; }
run_tests() {
  local log=$1
  shift
  "$@" 2>&1 | tee -a "$log" || failed=1
}

# The tools are compiled beside the Rust build: one is often waiting for its linker while the other computes.
build() {
  setsid "$devcluster/tools.sh" plane helm kstatus otelcol ${node:+node} >"$logs/tools.log" 2>&1 &
  tools_pid=$!
  cargo fetch --locked   # a test reads the metadata of all platforms offline
  cargo test --locked --no-run
  if [ "$what" = all ]; then
    # Beside the tests on the control plane, in the time that they wait. In this session, whose tests go first by their priority.
    set -m
    nice -n 19 "$ROOT/hack/image.sh" >"$logs/image.log" 2>&1 &
    image_pid=$!
    set +m
  elif [ -n "$node" ]; then
    "$ROOT/hack/image.sh"
  fi
  [ -z "$previous" ] || "$ROOT/hack/previous.sh" ${from:+"$from"}
  wait "$tools_pid" || { cat "$logs/tools.log" >&2; die "the cluster tools could not be built"; }
  tools_pid=
}

plane_tests() {
  phase "Control plane up" plane_do up --no-node
  tests "Tests on the control plane" env AGENTLOOP_REQUIRE_CLUSTERS=1 \
    AGENTLOOP_TEST_KUBECONFIG=$PLANE_RUN/admin.kubeconfig cargo test --locked --no-fail-fast --lib --bins --test it -- --skip e2e:: \
    --test-threads=$(($(nproc) * 2))   # many wait more than they compute
  tests "Toolbox" env AGENTLOOP_REQUIRE_CLUSTERS=1 \
    AGENTLOOP_TEST_BINARY="${CARGO_TARGET_DIR:-$ROOT/target}/debug/agentloop" cargo test --locked --test toolbox
  tests "A minute without the database of the history" cargo test --locked --test it -- --ignored history::
  tests "Tests in documentation" cargo test --locked --doc --quiet
  phase "Control plane down" plane_do down
}

image_built() {
  # Without it the tests on the node cannot run. What the others found is still said.
  wait "$image_pid" || { tail -n 50 "$logs/image.log" >&2; failed=1 node='' missing="the image could not be built"; }
  image_pid=
}
node_up() {
  node_do up
  node_do load-image "$IMAGE" "$IMAGE_DIR/agentloop.tar"
  node_do load-image "$TOOLS_IMAGE" "$("$ROOT/hack/tools-image.sh")" /bin/sh
  [ -z "$previous" ] || node_do load-image "$PREVIOUS_IMAGE" "$PREVIOUS_DIR/agentloop.tar"
  AGENTLOOP_PYTHON=$("$ROOT/hack/python-env.sh")
  export AGENTLOOP_PYTHON
}
# A thread for each test, since they wait for their turns at the cluster (tests/e2e/turns.rs).
node_tests() {
  tests "Tests on the node" env AGENTLOOP_REQUIRE_CLUSTERS=1 AGENTLOOP_E2E_KUBECONFIG=$NODE_RUN/admin.kubeconfig AGENTLOOP_E2E_TURNS="$logs/turns.txt" \
    AGENTLOOP_E2E_IMAGE="$IMAGE" AGENTLOOP_E2E_TOOLS_IMAGE="$TOOLS_IMAGE" cargo test --locked --test it -- "${filters[@]}" --show-output --test-threads=200
}
# On a cluster without a release, since the older one comes first. Leaves the newer one.
upgrade_tests() {
  tests "Upgrade from $(git log -1 --format=%h "$(cat "$PREVIOUS_DIR/commit")")" env AGENTLOOP_REQUIRE_CLUSTERS=1 \
    AGENTLOOP_E2E_KUBECONFIG=$NODE_RUN/admin.kubeconfig AGENTLOOP_E2E_IMAGE="$IMAGE" AGENTLOOP_PREVIOUS_IMAGE="$PREVIOUS_IMAGE" \
    AGENTLOOP_PREVIOUS_CHART="$PREVIOUS_DIR/chart" cargo test --locked --test it -- e2e::upgrade --ignored --show-output
}
simulate() {
  # Optimized with all checks: a schedule of Sensors takes a seventh of the time of a debug build.
  # Other seeds than those of every test run, and others each time.
  tests "Simulations of the ledger and of Sensors" env AGENTLOOP_SIM_SCHEDULES="${SCHEDULES:-2000000}" \
    AGENTLOOP_SENSOR_SCHEDULES="${SENSOR_SCHEDULES:-100000}" \
    AGENTLOOP_SIM_FIRST=$((1000000 * (1 + RANDOM))) cargo test --locked --profile simulation --test it -- ledger::no_schedule sensor_delivery::no_schedule
  tests "Simulation of the modes" env AGENTLOOP_MODE_SCHEDULES="${MODE_SCHEDULES:-20000}" \
    AGENTLOOP_MODE_FIRST=$((1000000 * (1 + RANDOM))) cargo test --locked --profile simulation --lib -- modes::no_schedule
  tests "Nearly right answers, directives and journals" env AGENTLOOP_FUZZ_ROUNDS="${ROUNDS:-200000}" \
    cargo test --locked --test it -- fuzz::
  tests "What the Dockerfile runs" cargo test --locked --test it -- --ignored dockerfile::
}
soak() {
  export AGENTLOOP_E2E_CHAOS_SECONDS=${AGENTLOOP_E2E_CHAOS_SECONDS:-300}
  export AGENTLOOP_E2E_KILL_SECONDS=${AGENTLOOP_E2E_KILL_SECONDS:-600}
  export AGENTLOOP_E2E_TASKS=${AGENTLOOP_E2E_TASKS:-3000}
  local end=$((SECONDS + ${MINUTES:-60} * 60)) round=0
  while [ $SECONDS -lt $end ] && [ $failed = 0 ]; do
    round=$((round + 1))
    say "Round $round"
    node_tests
  done
}

node=1 previous='' from=''
case $what in
  plane) node='' ;;
  upgrade) previous=1 from=${2:-} ;;
  soak) previous=1 from=${FROM:-} ;;
esac
if [ -n "$node" ] && [ "$(id -u)" != 0 ]; then
  die "the tests on a node need root; without it: hack/test.sh plane"
fi

rm -rf "$logs"
mkdir -p "$logs"
stop   # what an earlier run left when it was killed
phase "Packages" "$ROOT/hack/packages.sh" build plane test database browser docs ${node:+node image}
phase "Build" build
if [ "$what" = all ] || [ "$what" = plane ]; then plane_tests; fi
if [ "$what" = soak ]; then simulate; fi
[ -z "$image_pid" ] || phase "Image" image_built
if [ -n "$node" ]; then
  phase "Node up" node_up
  [ -z "$previous" ] || upgrade_tests
  case $what in soak) soak ;; all | node) node_tests ;; esac
  phase "Node down" node_do down
fi

say "Took"
printf '%s\n' "${took[@]}"
figures=$(grep -h '^FIGURE ' "$logs"/*.log | sort -u) && say "Figures" && sed 's/^FIGURE //' <<<"$figures"
# A test says so and passes when what it needs is missing; here everything is there.
skipped=$(grep -h '^SKIPPED' "$logs"/*.log | sort -u) && say "Skipped, which is a failure" && echo "$skipped" && failed=1
say "Results"
grep -h '^test result:\|^    [a-z_:0-9]*$\|could not compile' "$logs"/*.log | grep -v '^    $' || true
[ $failed = 0 ] && exit
# Last, since whoever keeps only the end of the output needs it most. Each log lists its failures after `failures:`.
say "Failures"
awk '/^failures:$/ { after = 1 }
  after && / panicked at / { print ""; lines = 15 }
  /^stack backtrace:|^note: / { lines = 0 }
  lines-- > 0' "$logs"/*.log | cut -c 1-1000 | tail -n 100
[ -z "$missing" ] || die "$missing, so no test on the node ran: see $logs/image.log"
die "tests failed; whole logs in $logs"
