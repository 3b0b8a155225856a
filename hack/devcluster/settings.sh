# shellcheck shell=bash
# Settings of one cluster; each can be set from outside. Source it, do not run it.
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$HERE/../lib.sh"
RUN=$(realpath -m "${RUN:-/var/tmp/agentloop-devcluster}")   # all state of the cluster; down.sh removes it
API_PORT=${API_PORT:-6443}
ETCD_PORT=${ETCD_PORT:-2379}                                 # and ETCD_PORT+1 for its peer address
KCM_PORT=${KCM_PORT:-10257}
SCHED_PORT=${SCHED_PORT:-10259}
APISERVER_ARGS=${APISERVER_ARGS:-}                           # e.g. audit flags
CLIENT_QPS=${CLIENT_QPS:-50}                                 # client limit of controller-manager and scheduler
VOLUMES=${VOLUMES:-120}                                      # static volumes of the default storage class

# The node's network: a range that is reserved for benchmarks, so it is nobody's real network.
POD_CIDR=198.18.0.0/16
SERVICE_CIDR=198.19.0.0/16
NODE_IP=198.18.0.1                                           # bridge cni0 = node = API server as pods see it
API_VIP=198.19.0.1
DNS_VIP=198.19.0.10
NODE_LOCK=/run/agentloop-devcluster.node                     # names the one cluster that has the node

kube() { "$BIN/kubectl" --kubeconfig "$RUN/admin.kubeconfig" "$@"; }

# alive NAME: prints the pid while it runs. A pid counts only while its command line names $RUN: pids are reused.
alive() {
  local pid
  pid=$(cat "$RUN/pid/$1" 2>/dev/null) || return 1
  { tr '\0' ' ' <"/proc/$pid/cmdline"; } 2>/dev/null | grep -qF "$RUN/" || return 1
  echo "$pid"
}

# start NAME COMMAND...: in a session of its own, so that Ctrl-C does not reach it; log and pid under $RUN.
start() {
  local name=$1
  shift
  alive "$name" >/dev/null && return 0
  # The process notes its own pid before it becomes the command: no moment where it runs unnoted.
  # shellcheck disable=SC2016
  setsid bash -c 'echo $$ >"$0"; exec "$@"' "$RUN/pid/$name" "$@" >>"$RUN/log/$name.log" 2>&1 </dev/null 3>&- &
}

# wait_for SECONDS WHAT COMMAND...: until the command succeeds.
wait_for() {
  local tries=$(($1 * 10)) what=$2
  shift 2
  until "$@" >/dev/null 2>&1; do
    tries=$((tries - 1))
    [ $tries -gt 0 ] || die "$what is not ready; the logs are in $RUN/log"
    sleep 0.1
  done
}
