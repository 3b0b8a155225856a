#!/usr/bin/env bash
# run.sh [BENCH_ARGUMENT...]: measures engine, ledger, gateway, worker, sensor pod and leases (*.rs), then our controller (bench.py), and prints
# its figures beside those of other operators.
# SIZES=200,1000 are the bursts. Results are kept in hack/bench/results.
set -euo pipefail
. "$(dirname "$0")/../lib.sh"
cd "$ROOT"
as_root_or_say "the benchmark (it resets peak memory counters and uses a CPU cgroup)"
command -v python3 >/dev/null || die "python3 is missing"
"$ROOT/hack/packages.sh" build plane bench
"$ROOT/hack/devcluster/tools.sh" plane kwok
say "Building the release binary"
build_release build
export BIN AGENTLOOP_BINARY=$CARGO_TARGET_DIR/$TARGET/release/agentloop
say "Engine and ledger without I/O; gateway, worker and sensor pod with their disk"
build_release bench --bench engine --bench week --bench ledger --bench scrape --bench gateway --bench tools --bench worker --bench sensor
say "Leases over the link, with an API server"
plane() { RUN=/var/tmp/agentloop-bench-leases API_PORT=8443 ETCD_PORT=8379 KCM_PORT=18257 SCHED_PORT=18259 "$ROOT/hack/devcluster/$1.sh" "${@:2}"; }
trap 'plane down' EXIT
plane up --no-node
AGENTLOOP_TEST_KUBECONFIG=/var/tmp/agentloop-bench-leases/admin.kubeconfig build_release bench --bench lease
plane down
trap - EXIT
out=$ROOT/hack/bench/results/agentloop-$(git rev-parse --short HEAD).json
python3 -B hack/bench/bench.py hack/bench/agentloop.json --sizes "${SIZES:-200,1000}" --out "$out" "$@"
say "Beside others (hack/bench/README.md says how, where and with what noise)"
python3 -B hack/bench/report.py "$out" hack/bench/peers.json
