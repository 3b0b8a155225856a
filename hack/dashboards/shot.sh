#!/usr/bin/env bash
# shot.sh: pictures of the dashboards, drawn with Grafana's UI library, in docs/images. Starts a cluster on this machine with
# agentloop, Agents and a Prometheus, lets them run for RUN_MINUTES=12, takes the pictures, and removes all of it.
#   PROMETHEUS_URL=http://...  takes them of what that Prometheus has, and starts nothing else
#   SHOT_MINUTES=n             minutes that the pictures show; default: those of the run, or 60
#   SCRAPE_SECONDS=n           interval at which that Prometheus scrapes; default 15
#   OUT=DIR                    where the pictures go   BOARDS="fleet agent"   only these
#   KEEP=1                     leaves the cluster, for a look around; `make demo-down` removes it
set -euo pipefail
. "$(dirname "$0")/../lib.sh"
cd "$ROOT"
OUT=${OUT:-docs/images}
BOARDS=${BOARDS:-fleet agent budgets sensors operator}
shot=$ROOT/hack/dashboards/shot
system=agentloop-system

take_pictures() {
  local board arguments=()
  for board in $BOARDS; do
    [ -e "charts/agentloop/dashboards/agentloop-$board.json" ] ||
      die "there is no dashboard '$board'; BOARDS is a list of names of files in charts/agentloop/dashboards, without agentloop-"
    arguments+=("$board=charts/agentloop/dashboards/agentloop-$board.json")
  done
  say "Drawing the last $SHOT_MINUTES minutes of $PROMETHEUS_URL"
  SHOT_MINUTES=$SHOT_MINUTES SCRAPE_SECONDS=$SCRAPE_SECONDS PROMETHEUS_URL=$PROMETHEUS_URL NODE_ENV_DIR=$node_env \
    node "$shot/picture.mjs" "$OUT" "${arguments[@]}"
}

# --- a run of a cluster of our own ---

# A target of Prometheus for each pod.
TARGETS='{range .items[*]}  - targets: ["{.status.podIP}:{.spec.containers[0].ports[?(@.name=="metrics")].containerPort}"]
    labels: {"{pod: "}{.metadata.name}{"}"}
{end}'
pids=()
binary=$IMAGE_DIR/rootfs/agentloop   # the one of the image
work=""

stop() {
  local pid
  trap - EXIT
  for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
  for pid in "${pids[@]}"; do wait "$pid" 2>/dev/null || true; done
  [ -z "$work" ] || rm -rf "$work"
  if [ -n "${KEEP:-}" ]; then
    say "The cluster stays up (KEEP): export KUBECONFIG=$KUBECONFIG. To remove it: make demo-down"
  else
    "$ROOT/hack/demo.sh" down
  fi
}

# in_background NAME COMMAND...: until the end of this script; its output in $work/NAME.log.
in_background() {
  local name=$1
  shift
  "$@" >"$work/$name.log" 2>&1 </dev/null &
  pids+=($!)
}

# until_true SECONDS WHAT LOG COMMAND...
until_true() {
  local _ seconds=$1 what=$2 log=$3
  shift 3
  for _ in $(seq "$seconds"); do
    ! "$@" >/dev/null 2>&1 || return 0
    sleep 1
  done
  tail -n 20 "$log" >&2
  die "$what within $seconds s; above is the end of its log"
}

free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

# One target for each replica, as docs/tasks/monitoring.md asks for, and the chart's rules. Debian's Prometheus is built without
# the discovery of Kubernetes, so the pods are looked up here.
start_prometheus() {
  local port targets
  targets=$(kubectl -n "$system" get pods -l app.kubernetes.io/name=agentloop,app.kubernetes.io/component=controller -o jsonpath="$TARGETS")
  [ -n "$targets" ] || die "there is no controller to scrape; see: kubectl -n $system get pods"
  port=$(free_port)
  PROMETHEUS_URL=http://127.0.0.1:$port
  cat >"$work/prometheus.yml" <<YAML
global: {scrape_interval: ${SCRAPE_SECONDS}s, evaluation_interval: ${SCRAPE_SECONDS}s}
rule_files: [$ROOT/charts/agentloop/files/rules.yaml]
scrape_configs:
- job_name: agentloop
  honor_labels: true
  static_configs:
$targets
YAML
  in_background prometheus prometheus --config.file="$work/prometheus.yml" --storage.tsdb.path="$work/tsdb" \
    --web.listen-address="127.0.0.1:$port"
  # A sample of the controller: until then nothing is drawn.
  until_true 60 "Prometheus has not scraped the controller" "$work/prometheus.log" scraped
}

scraped() {
  curl --silent --fail "$PROMETHEUS_URL/api/v1/query" --data-urlencode 'query=up{job="agentloop"} == 1' | grep -q '"__name__"'
}

start_tool_server() {
  local python node_ip port
  python=$("$ROOT/hack/python-env.sh" mcp-server/requirements.txt)
  node_ip=$(. "$ROOT/hack/devcluster/settings.sh" && echo "$NODE_IP")
  in_background tools "$python" "$ROOT/hack/mcp-server/serve.py" --record "$work/tool-calls" --host "$node_ip"
  until_true 30 "the tool server has not started" "$work/tools.log" grep -q '^[0-9]' "$work/tools.log"
  port=$(grep -m1 '^[0-9]' "$work/tools.log")
  tool_server=http://$node_ip:$port/mcp
}

apply_agents() {
  say "Applying Agents, AgentBudgets and Sensors"
  kubectl create namespace research
  kubectl create namespace support
  kubectl -n research apply -f examples/quickstart.yaml -f examples/goal.yaml -f examples/team-budget.yaml
  kubectl -n support apply -f examples/request.yaml -f examples/schedule.yaml -f examples/webhook.yaml
  sed "s#TOOL_SERVER#$tool_server#" "$shot/run.yaml" | kubectl apply -f -
  kubectl -n support create serviceaccount requester
  kubectl -n support create rolebinding requester --clusterrole=edit --serviceaccount=support:requester
  kubectl -n support wait --for=condition=Ready --timeout=180s agents.agentloop.dev/request
  kubectl -n support wait --for=condition=Connected --timeout=180s sensors.agentloop.dev/orders
}

open_webhook() {
  in_background webhook kubectl -n support port-forward service/orders-webhook :80
  until_true 30 "the webhook of the Sensor cannot be reached" "$work/webhook.log" grep -q '^Forwarding from 127' "$work/webhook.log"
  webhook=$(sed -n 's/^Forwarding from \(127[^ ]*\).*/\1/p' "$work/webhook.log" | head -1)
}

order() { # NUMBER KEY
  local body sum
  body="{\"order\": $1, \"total\": $(($1 * 37 % 400))}"
  sum=$(printf %s "$body" | openssl dgst -sha256 -hmac "$2" -r | cut -d' ' -f1)
  curl --silent --max-time 4 --output "$work/order" "http://$webhook/" -H "X-Hub-Signature-256: sha256=$sum" -H "X-GitHub-Delivery: $1" \
    -d "$body" || echo "order $1 was not taken"
}

# Does not wait for the answer.
request() { # NUMBER
  timeout 50 "$binary" kubectl run request --namespace support --service-account requester --stream=false \
    --prompt "Ticket $1: The shop is slow." >>"$work/requests.log" 2>&1 </dev/null &
  pids+=($!)
}

# The team's budget gets this much more, as an entry for each of these ids; entries are never removed.
top_up() { # ID...
  local id entries=""
  for id; do entries+=${entries:+,}"{\"id\": \"$id\", \"tokens\": 3000, \"reason\": \"the report is due\"}"; done
  kubectl -n research patch agentbudgets.agentloop.dev team-research --type merge -p "{\"spec\": {\"topUps\": [$entries]}}"
}

# Its gate may be answered already, or not be open yet.
approve() { "$binary" kubectl approve --namespace operations deployer || true; }

# What happens at a tick of 5 seconds, of so many.
happens() { # TICK TICKS
  local quarter=$(($2 / 4))
  # One order in nine is not signed as it should be.
  case $(($1 % 9)) in 0 | 2 | 3 | 6) order "$1" only-to-try-it-out ;; 7) order "$1" a-wrong-key ;; esac
  [ $(($1 % 4)) != 1 ] || request "$1"
  case $1 in
    "$quarter")
      echo "A top-up for the exhausted budget, and an approval"
      top_up first
      approve
      ;;
    $((2 * quarter)))
      echo "A second top-up, and a pod is deleted"
      top_up first second
      kubectl -n research delete pod quickstart --wait=false
      ;;
    $((3 * quarter)))
      echo "A third top-up, another approval, and an Agent is suspended"
      top_up first second third
      kubectl -n support patch agents.agentloop.dev schedule --type merge -p '{"spec": {"suspend": true}}'
      approve
      ;;
  esac
}

run_cluster() {
  local tick ticks
  as_root_or_say "a cluster on this machine"
  export RUN=${RUN:-/var/tmp/agentloop-devcluster}
  export KUBECONFIG=$RUN/admin.kubeconfig
  [ ! -e "$KUBECONFIG" ] || die "a cluster is already there ($RUN): remove it with 'make demo-down', or give PROMETHEUS_URL"
  work=$(mktemp -d)
  trap stop EXIT
  trap 'exit 130' INT TERM
  "$ROOT/hack/demo.sh" install
  start_prometheus
  start_tool_server
  apply_agents
  open_webhook
  ticks=$((RUN_MINUTES * 12))
  say "Running for $RUN_MINUTES minutes"
  for tick in $(seq "$ticks"); do
    happens "$tick" "$ticks"
    sleep 5
  done
  echo "The last answers to requests:"
  tail -n 4 "$work/requests.log"
  kubectl get agents.agentloop.dev,agentbudgets.agentloop.dev,sensors.agentloop.dev --all-namespaces
}

for number in RUN_MINUTES SHOT_MINUTES SCRAPE_SECONDS; do
  [[ ${!number:-1} =~ ^[1-9][0-9]*$ ]] || die "$number=${!number} is not a whole number from 1 on"
done
"$ROOT/hack/packages.sh" pictures
node_env=$("$ROOT/hack/node-env.sh" dashboards/shot)
if [ -n "${PROMETHEUS_URL:-}" ]; then
  SHOT_MINUTES=${SHOT_MINUTES:-60} SCRAPE_SECONDS=${SCRAPE_SECONDS:-15}
else
  RUN_MINUTES=${RUN_MINUTES:-12} SCRAPE_SECONDS=5
  SHOT_MINUTES=${SHOT_MINUTES:-$RUN_MINUTES}
  run_cluster
fi
take_pictures
