#!/usr/bin/env bash
# up.sh            a one-node Kubernetes: control plane, containerd, kubelet, kube-proxy, DNS, volumes; returns when Ready
# up.sh --no-node  the control plane only, on loopback; needs no root
# Idempotent: starts what does not run. All state is under $RUN; settings are in settings.sh. down.sh undoes it.
set -euo pipefail
. "$(dirname "$0")/settings.sh"
case ${1:-} in
  "") node=1 host=$NODE_IP endpoints=lease ;;
  # Loopback is not a valid endpoint of the `kubernetes` Service, and without pods nobody asks for it.
  --no-node) node='' host=127.0.0.1 endpoints=none ;;
  *) die "usage: up.sh [--no-node]" ;;
esac

refuse_second_node() {
  local other
  other=$(cat "$NODE_LOCK" 2>/dev/null) || return 0
  [ "$other" = "$RUN" ] || ! (RUN=$other; alive kubelet >/dev/null) ||
    die "a cluster with a node already runs here, and one machine can have one: stop it with RUN=$other $HERE/down.sh"
}

certificates() {
  [ -f "$RUN/pki/sa.key" ] && return 0
  local dns=DNS:localhost,DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,DNS:kubernetes.default.svc.cluster.local
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 365 -subj /CN=devcluster-ca \
    -keyout "$RUN/pki/ca.key" -out "$RUN/pki/ca.crt" 2>/dev/null
  chmod 600 "$RUN/pki/ca.key"
  echo "https://$host:$API_PORT" >"$RUN/server"
  "$HERE/user.sh" apiserver /CN=kube-apiserver "$dns,IP:127.0.0.1,IP:$API_VIP,IP:$NODE_IP"
  "$HERE/user.sh" admin /O=system:masters/CN=admin
  "$HERE/user.sh" kcm /CN=system:kube-controller-manager
  "$HERE/user.sh" sched /CN=system:kube-scheduler
  "$HERE/user.sh" proxy /CN=system:kube-proxy
  # kubectl exec and logs check the node's address in the kubelet's certificate.
  "$HERE/user.sh" kubelet /O=system:nodes/CN=system:node:node1 "IP:$NODE_IP,DNS:node1"
  openssl genrsa -out "$RUN/pki/sa.key" 2048 2>/dev/null   # last: its presence says that all the others are there
}

# The bridge comes first: with a node the API server listens on its address only, never on an outside interface.
network() {
  ip link show cni0 >/dev/null 2>&1 || ip link add cni0 type bridge
  ip address replace "$NODE_IP/${POD_CIDR#*/}" dev cni0
  ip link set cni0 up
  [ -f "$RUN/ip_forward" ] || sysctl -n net.ipv4.ip_forward >"$RUN/ip_forward"
  sysctl -qw net.ipv4.ip_forward=1
  # Docker, where installed, drops forwarded packets by default.
  iptables -C FORWARD -i cni0 -o cni0 -j ACCEPT 2>/dev/null || iptables -I FORWARD -i cni0 -o cni0 -j ACCEPT
  # Lets Services between pods of one bridge work; proxy_flags has the answer for kernels without it.
  modprobe br_netfilter 2>/dev/null || true
  sysctl -qw net.bridge.bridge-nf-call-iptables=1 2>/dev/null || true
}

# In a container with cgroup v2 our own processes sit where the pods' groups must go: move them one level down.
cgroups() {
  local top=/sys/fs/cgroup pid
  [ -f $top/cgroup.controllers ] || return 0
  echo "+cpu +memory +pids" 2>/dev/null >$top/cgroup.subtree_control && return 0
  [ -f $top/cgroup.type ] || return 0
  mkdir -p $top/init
  while read -r pid; do echo "$pid" >$top/init/cgroup.procs 2>/dev/null || true; done <$top/cgroup.procs
  echo "+cpu +memory +pids" >$top/cgroup.subtree_control
}

runtime_config() {
  mkdir -p "$RUN"/{cni,kubelet,containerd}
  cat >"$RUN/cni/10-bridge.conflist" <<JSON
{"cniVersion": "1.0.0", "name": "devcluster", "plugins": [
  {"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": false, "hairpinMode": true,
   "ipam": {"type": "host-local", "ranges": [[{"subnet": "$POD_CIDR"}]], "routes": [{"dst": "0.0.0.0/0"}],
            "dataDir": "$RUN/cni-ipam"}},
  {"type": "portmap", "capabilities": {"portMappings": true}}]}
JSON
  # restrict_oom_score_adj: without CAP_SYS_RESOURCE runc may not lower a container's oom_score_adj.
  cat >"$RUN/containerd.toml" <<TOML
version = 2
root = "$RUN/containerd/root"
state = "$RUN/containerd/state"
[grpc]
  address = "$RUN/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  restrict_oom_score_adj = true
  sandbox_image = "localhost/pause:1"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "$RUN/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      SystemdCgroup = false
TOML
}

# containerd and the two images that every pod or the DNS needs.
runtime() {
  local image
  runtime_config
  start containerd containerd -c "$RUN/containerd.toml"
  wait_for 120 containerd ctr -a "$RUN/containerd.sock" version
  for image in pause coredns; do
    ctr -a "$RUN/containerd.sock" -n k8s.io images list -q | grep -qx "localhost/$image:1" && continue
    mkdir -p "$RUN/rootfs/$image"
    cp "$BIN/$image" "$RUN/rootfs/$image/"
    "$HERE/load-image.sh" "localhost/$image:1" "$RUN/rootfs/$image" "/$image"
    rm -r "$RUN/rootfs/$image"
  done
}

control_plane() {
  local etcd=http://127.0.0.1:$ETCD_PORT peer=http://127.0.0.1:$((ETCD_PORT + 1)) pki=$RUN/pki
  local client="--kube-api-qps=$CLIENT_QPS --kube-api-burst=$((CLIENT_QPS * 2)) --leader-elect=false --bind-address=127.0.0.1"
  start etcd "$BIN/etcd" --data-dir "$RUN/etcd" --listen-client-urls $etcd --advertise-client-urls $etcd \
    --listen-peer-urls $peer --initial-advertise-peer-urls $peer --initial-cluster default=$peer --unsafe-no-fsync
  # shellcheck disable=SC2086
  start apiserver "$BIN/kube-apiserver" --etcd-servers=$etcd --bind-address=$host --advertise-address=$host \
    --secure-port="$API_PORT" --endpoint-reconciler-type=$endpoints --cert-dir="$pki" \
    --tls-cert-file="$pki/apiserver.crt" --tls-private-key-file="$pki/apiserver.key" --client-ca-file="$pki/ca.crt" \
    --service-account-key-file="$pki/sa.key" --service-account-signing-key-file="$pki/sa.key" \
    --service-account-issuer=https://kubernetes.default.svc --service-cluster-ip-range=$SERVICE_CIDR \
    --authorization-mode=Node,RBAC --enable-admission-plugins=NodeRestriction --allow-privileged=true \
    --kubelet-client-certificate="$pki/admin.crt" --kubelet-client-key="$pki/admin.key" \
    --kubelet-certificate-authority="$pki/ca.crt" --kubelet-preferred-address-types=InternalIP $APISERVER_ARGS
  wait_for 60 "the API server" kube get --raw /readyz
  # shellcheck disable=SC2086
  start kcm "$BIN/kube-controller-manager" --kubeconfig="$RUN/kcm.kubeconfig" --root-ca-file="$pki/ca.crt" \
    --service-account-private-key-file="$pki/sa.key" --use-service-account-credentials --allocate-node-cidrs=false \
    --secure-port="$KCM_PORT" --cert-dir="$pki" $client
  # shellcheck disable=SC2086
  start sched "$BIN/kube-scheduler" --kubeconfig="$RUN/sched.kubeconfig" --secure-port="$SCHED_PORT" --cert-dir="$pki" $client
  wait_for 60 "the default service account" kube get serviceaccount default
}

kubelet_config() {
  cat >"$RUN/kubelet.yaml" <<YAML
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: $NODE_IP
cgroupDriver: cgroupfs
failCgroupV1: false          # both versions serve
failSwapOn: false
enforceNodeAllocatable: []
clusterDNS: [$DNS_VIP]
clusterDomain: cluster.local
containerRuntimeEndpoint: unix://$RUN/containerd.sock
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: $RUN/pki/ca.crt}}
authorization: {mode: Webhook}
tlsCertFile: $RUN/pki/kubelet.crt
tlsPrivateKeyFile: $RUN/pki/kubelet.key
podLogsDir: $RUN/podlogs
maxPods: 250
imageGCHighThresholdPercent: 100
evictionHard: {memory.available: 100Mi}
YAML
}

node_ready() { kube get node node1 --no-headers | grep -q ' Ready '; }

node() {
  local proxy_flags=()
  [ -e /proc/sys/net/bridge/bridge-nf-call-iptables ] || proxy_flags=(--masquerade-all)
  kubelet_config
  start kubelet "$BIN/kubelet" --config="$RUN/kubelet.yaml" --kubeconfig="$RUN/kubelet.kubeconfig" \
    --root-dir="$RUN/kubelet" --hostname-override=node1 --node-ip=$NODE_IP
  start proxy "$BIN/kube-proxy" --kubeconfig="$RUN/proxy.kubeconfig" --proxy-mode=iptables --cluster-cidr=$POD_CIDR \
    --hostname-override=node1 --healthz-bind-address=127.0.0.1:10256 --metrics-bind-address=127.0.0.1:10249 "${proxy_flags[@]}"
  "$HERE/volumes.sh" create
  start reclaim "$HERE/volumes.sh" reclaim "$RUN/volumes"
  sed "s/@DNS_VIP@/$DNS_VIP/" "$HERE/manifests/dns.yaml" | kube apply -f - >/dev/null
  wait_for 60 "the node" node_ready
  kube -n kube-system rollout status deployment coredns --timeout=90s >/dev/null
}

[ -z "$node" ] || as_root_or_say "a cluster with a node"
"$HERE/../packages.sh" plane ${node:+node image}
"$HERE/tools.sh" plane ${node:+node}
[ -z "$node" ] || refuse_second_node
runtime_pid=
exec 3>&2   # the trap may run inside a function whose output is thrown away
interrupted() {
  trap - INT TERM
  [ -z "$runtime_pid" ] || kill "$runtime_pid" 2>/dev/null || true
  "$HERE/down.sh" 2>&3
  die "interrupted; nothing is left running" 2>&3
}
[ -e "$RUN" ] || trap interrupted INT TERM   # a cluster that stood before stays
mkdir -p "$RUN"/{pki,log,pid,etcd}
: >"$RUN/.devcluster"
certificates
if [ -n "$node" ]; then
  echo "$RUN" >"$NODE_LOCK"
  network
  cgroups
  runtime &                 # while the control plane starts
  runtime_pid=$!
fi
control_plane
if [ -n "$node" ]; then
  wait $runtime_pid         # the kubelet ends at once where containerd does not answer yet
  node
fi
echo "cluster up: export KUBECONFIG=$RUN/admin.kubeconfig PATH=$BIN:\$PATH"
