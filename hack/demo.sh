#!/usr/bin/env bash
# demo.sh          from nothing to Agents whose loops turn in pods of their own, within a budget, woken by a clock and answering a
#                  request, on a cluster of this machine; leaves them running
# demo.sh install  only the cluster, and agentloop on it
# demo.sh down     removes it
# CONTEXT=name IMAGE=ref: on the cluster of that kube context instead; it must be able to pull the image.
# A second run upgrades what the first one made.
set -euo pipefail
image_given=${IMAGE:-}
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
context=${CONTEXT:-}
export RUN=${RUN:-/var/tmp/agentloop-devcluster}
devcluster=$ROOT/hack/devcluster
example=$ROOT/examples/quickstart.yaml
budget_example=$ROOT/examples/team-budget.yaml
budget=team-research
sensor_example=$ROOT/examples/schedule.yaml
sensor=every-minute
woken=schedule   # the Agent that it wakes
request_example=$ROOT/examples/request.yaml
clerk=request    # its Agent
requester=demo   # the service account that sends requests
system=agentloop-system
[ -n "$context" ] || export KUBECONFIG=$RUN/admin.kubeconfig

kube() { kubectl ${context:+--context "$context"} "$@"; }
run_helm() { helm ${context:+--kube-context "$context"} --namespace "$system" "$@"; }

down() {
  if [ -z "$context" ]; then
    "$devcluster/down.sh"
    echo "The cluster is gone. What was built stays in $CACHE and $CARGO_TARGET_DIR."
    return
  fi
  kube delete --ignore-not-found -f "$example" -f "$budget_example" -f "$sensor_example" -f "$request_example"
  kube delete --ignore-not-found serviceaccount/"$requester" rolebinding/"$requester"
  run_helm uninstall agentloop --ignore-not-found --wait
  kube delete --ignore-not-found namespace "$system"
  echo "Removed from $context. The CustomResourceDefinitions stay, since deleting them deletes every Agent:"
  echo "  kubectl --context $context delete crd agents.agentloop.dev agentbudgets.agentloop.dev sensors.agentloop.dev"
}

# The cluster's tools are compiled beside the Rust build.
own_cluster() {
  local tools_pid log
  as_root_or_say "a cluster on this machine"
  "$ROOT/hack/packages.sh" build image plane node demo
  say "Building the cluster's tools and the image (half an hour or more on two cores the first time, cached afterwards)"
  log=$(mktemp)
  setsid "$devcluster/tools.sh" plane node helm >"$log" 2>&1 &
  tools_pid=$!
  # shellcheck disable=SC2064
  trap "kill -- -$tools_pid 2>/dev/null || true; rm -f '$log'" EXIT
  "$ROOT/hack/image.sh"
  wait "$tools_pid" || { cat "$log" >&2; die "the cluster's tools could not be built"; }
  trap - EXIT
  rm -f "$log"
  say "Starting Kubernetes on this machine"
  "$devcluster/up.sh"
  # A tag of its own for each build, so that an upgrade really replaces the pods.
  IMAGE=${IMAGE%:*}:$(sha256sum <"$IMAGE_DIR/rootfs/agentloop" | cut -c 1-12)
  "$devcluster/load-image.sh" "$IMAGE" "$IMAGE_DIR/agentloop.tar"
}

existing_cluster() {
  [ -n "$image_given" ] || die "CONTEXT=$context also needs IMAGE=ref, an image which that cluster can pull: run 'make image',
  push target/image/agentloop.tar to your registry (skopeo copy oci-archive:target/image/agentloop.tar docker://ref)"
  "$devcluster/tools.sh" kubectl helm
  kube version >/dev/null || die "the cluster of context '$context' does not answer"
}

install() {
  local pull=IfNotPresent
  [ -n "$context" ] || pull=Never
  say "Installing agentloop with Helm"
  run_helm upgrade --install agentloop charts/agentloop --create-namespace --wait --timeout 180s \
    --set image.repository="${IMAGE%:*}" --set image.tag="${IMAGE##*:}" --set image.pullPolicy=$pull | sed -n '/^NAME\|^STATUS\|^REVISION/p'
  kube -n "$system" get pods
}

until_budget() { # CONDITION: shows one line for each change until it is True
  timeout 90 kubectl ${context:+--context "$context"} -n "$namespace" get agentbudgets.agentloop.dev "$budget" --watch &
  local shown=$!
  kube -n "$namespace" wait --for=condition="$1" --timeout=90s "agentbudgets.agentloop.dev/$budget" >/dev/null
  kill "$shown" 2>/dev/null || true
  wait "$shown" 2>/dev/null || true
}

turns() { kube -n "$namespace" get agents.agentloop.dev "$1" -o 'jsonpath={.status.usage.turns}'; }

until_more_turns() { # AGENT TURNS: until it has completed more than this number
  local _
  for _ in $(seq 120); do
    [ "$(turns "$1")" -le "$2" ] || return 0
    sleep 0.5
  done
  die "Agent $1 has not continued within a minute"
}

show_budget() {
  say "Two Agents share 20,000 tokens an hour: kubectl apply -f examples/team-budget.yaml"
  # Of an earlier demo: its tokens are used, and its top-up is counted.
  kube -n "$namespace" delete -f "$budget_example" --ignore-not-found >/dev/null
  kube -n "$namespace" apply -f "$budget_example"
  kube -n "$namespace" wait --for=condition=Ready --timeout=60s "agentbudgets.agentloop.dev/$budget"
  until_budget NearLimit
  say "Near the limit: a warning. They continue ..."
  until_budget Exhausted
  say "... and pause before the call that would exceed it"
  kube -n "$namespace" wait --for=condition=BudgetExhausted --timeout=60s agents.agentloop.dev/reader agents.agentloop.dev/writer
  kube -n "$namespace" get agentbudgets.agentloop.dev "$budget"
  kube -n "$namespace" get agents.agentloop.dev -l team=research
  kube -n "$namespace" get agents.agentloop.dev reader -o jsonpath='{.status.conditions[?(@.type=="BudgetExhausted")].message}{"\n"}'

  local before
  before=$(turns reader)
  say "A top-up of 10,000 tokens: they continue within seconds"
  kube -n "$namespace" patch agentbudgets.agentloop.dev "$budget" --type merge \
    -p '{"spec": {"topUps": [{"id": "demo", "tokens": 10000, "reason": "shown to a friend"}]}}'
  # Not its condition: what was added may be used up again before that is written.
  until_more_turns reader "$before"
  kube -n "$namespace" get agentbudgets.agentloop.dev "$budget"
  kube -n "$namespace" get agents.agentloop.dev -l team=research
}

start_sensor() {
  say "A schedule for an Agent that sleeps for an hour: kubectl apply -f examples/schedule.yaml"
  kube -n "$namespace" apply -f "$sensor_example"
  kube -n "$namespace" wait --for=condition=Connected --timeout=120s "sensors.agentloop.dev/$sensor"
}

show_sensor() {
  say "Meanwhile the schedule has woken its Agent: each full minute is one event that takes effect once"
  kube -n "$namespace" wait --for=jsonpath='{.status.lastDeliveryId}' --timeout=90s "sensors.agentloop.dev/$sensor" >/dev/null
  kube -n "$namespace" get sensors.agentloop.dev "$sensor"
  kube -n "$namespace" get agents.agentloop.dev "$woken"
  kube -n "$namespace" logs "$woken" -c worker | grep -o '"event":"autonomy:\(sensor_updated\|turn_started\|notification_pushed\)","at":"[^"]*"' | tail -3
}

# Requests and events go to the controller's API, as docs/tasks/requests.md says: with a token of the cluster, over TLS.
call_link() { # PATH [CURL_ARGUMENT...]
  local link=agentloop-link.$system.svc:8443
  curl --silent --show-error --cacert "$work/ca.crt" --connect-to "$link:127.0.0.1:$link_port" \
    --oauth2-bearer "$token" "${@:2}" "https://$link/v1/namespaces/$namespace/agents/$clerk/$1"
}

open_link() {
  work=$(mktemp -d)
  kube -n "$namespace" create serviceaccount "$requester" --dry-run=client -o yaml | kube apply -f - >/dev/null
  kube -n "$namespace" create rolebinding "$requester" --clusterrole=edit --serviceaccount="$namespace:$requester" \
    --dry-run=client -o yaml | kube apply -f - >/dev/null
  token=$(kube -n "$namespace" create token "$requester")
  kube -n "$namespace" get configmap agentloop-link-ca -o jsonpath='{.data.ca\.crt}' >"$work/ca.crt"
  coproc LINK { exec kubectl ${context:+--context "$context"} -n "$system" port-forward service/agentloop-link :8443; }
  trap close_link EXIT
  local line
  read -r line <&"${LINK[0]}"   # Forwarding from 127.0.0.1:PORT -> 8443
  line=${line#*:} link_port=${line%% *}
}

close_link() {
  trap - EXIT
  kill "${LINK_PID:-}" 2>/dev/null || true
  rm -rf "$work"
}

show_request() {
  local accepted after response
  say "A request to an Agent, which answers in a given form: kubectl apply -f examples/request.yaml"
  kube -n "$namespace" apply -f "$request_example"
  kube -n "$namespace" wait --for=condition=Ready --timeout=60s "agents.agentloop.dev/$clerk"
  open_link
  echo 'POST .../agents/request/tasks {"prompt": "Ticket 17: The shop is down."}'
  accepted=$(call_link tasks --fail-with-body --retry 30 --retry-delay 1 --retry-max-time 60 \
    --data '{"prompt": "Ticket 17: The shop is down."}')
  echo "$accepted"
  after=${accepted##*'"after":'} after=${after%%[!0-9]*}
  say "Its response, in the Agent's events"
  IFS= read -r response < <(call_link "events?after=$after&messages=true" --no-buffer --max-time 60 2>/dev/null |
    sed -un '/"event":"task:ended"/ { s/.*"messages":\["\(.*\)"\].*/\1/; s/\\"/"/g; p; q }') || die "the request has no response"
  echo "$response"
  close_link
}

watch_agent() { # SECONDS: one line for each change
  timeout "$1" kubectl ${context:+--context "$context"} -n "$namespace" get agents.agentloop.dev "$agent" --watch || true
}

show() {
  local leader port
  say "Applying an Agent: kubectl apply -f examples/quickstart.yaml"
  kube apply -f "$example"
  agent=$(kube get -f "$example" -o jsonpath='{range .items[*]}{.kind} {.metadata.namespace} {.metadata.name}{"\n"}{end}{.kind} {.metadata.namespace} {.metadata.name}{"\n"}' | awk '$1 == "Agent" { print $2 " " $3; exit }')
  namespace=${agent% *} agent=${agent#* }
  kube -n "$namespace" wait --for=condition=Ready --timeout=120s "agents.agentloop.dev/$agent"

  say "The loop takes turns and sleeps; every token is counted"
  watch_agent 15

  say "The pod is deleted: the Agent continues where it left off"
  kube -n "$namespace" delete pod "$agent"
  kube -n "$namespace" wait --for=create --timeout=60s "pod/$agent"
  watch_agent 15

  start_sensor
  show_budget
  show_sensor
  show_request

  say "The same numbers in Prometheus"
  leader=$(kube -n "$system" get pods -l agentloop.dev/leader=true -o jsonpath='{.items[0].metadata.name}')
  port=$(kube -n "$system" get pod "$leader" -o jsonpath='{.spec.containers[0].ports[?(@.name=="metrics")].containerPort}')
  kube get --raw "/api/v1/namespaces/$system/pods/$leader:$port/proxy/metrics" |
    grep -E "^agentloop_agent_(tokens_total|turns_total|loop_state).*\"$agent\"|^agentloop_budget_(limit|used|reserved)_tokens" | grep -v ' 0$'

  say "The Agent's Events"
  kube -n "$namespace" get events --field-selector "involvedObject.kind=Agent,involvedObject.name=$agent" \
    --sort-by=.lastTimestamp -o custom-columns=TYPE:.type,REASON:.reason,MESSAGE:.message
}

goodbye() {
  local with=${context:+ --context $context}
  say "Everything stays up. To explore:"
  [ -n "$context" ] || echo "  export KUBECONFIG=$KUBECONFIG PATH=$BIN:\$PATH"
  cat <<TEXT
  kubectl$with -n $namespace get agents.agentloop.dev --watch
  kubectl$with -n $namespace get agentbudgets.agentloop.dev --watch
  kubectl$with -n $namespace describe agentbudgets.agentloop.dev $budget
  kubectl$with -n $namespace get sensors.agentloop.dev --watch
  kubectl$with -n $namespace describe agents.agentloop.dev $agent
  kubectl$with -n $namespace logs -f $(kube -n "$namespace" get pods -l "agentloop.dev/agent=$agent" -o name | head -1) -c worker
  kubectl$with explain agents.agentloop.dev.spec
  kubectl$with -n $namespace patch agents.agentloop.dev $agent --type merge -p '{"spec": {"suspend": true}}'
Remove it all:
  make demo-down${context:+ CONTEXT=$context}
TEXT
}

[ "${1:-}" != down ] || { down; exit; }
trap 'echo; echo "Interrupted. To remove what was started: make demo-down"; exit 130' INT TERM
if [ -n "$context" ]; then existing_cluster; else own_cluster; fi
install
[ "${1:-}" != install ] || exit 0
show
goodbye
printf '\nDone in %d s.\n' "$SECONDS"
