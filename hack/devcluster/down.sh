#!/usr/bin/env bash
# down.sh [--keep]: stops the cluster of $RUN, by its pid files and the shims of its containerd, and undoes what it did to
# the machine: mounts, network namespaces, cgroups, bridge, packet rules. Then removes $RUN; --keep leaves the files, and
# up.sh brings the same cluster back.
set -uo pipefail
. "$(dirname "$0")/settings.sh"
[ -e "$RUN" ] || exit 0
[ -f "$RUN/.devcluster" ] || die "$RUN is not the directory of a cluster; not touching it"

# stop NAME...: TERM to the process groups, after 5 s KILL.
stop() {
  local name pid pids=() tries=50
  for name; do
    pid=$(alive "$name") && pids+=("$pid")
    rm -f "$RUN/pid/$name"
  done
  [ ${#pids[@]} -gt 0 ] || return 0
  for pid in "${pids[@]}"; do kill -- "-$pid" 2>/dev/null; done
  for pid in "${pids[@]}"; do
    while [ -d "/proc/$pid" ] && [ $tries -gt 0 ]; do sleep 0.1; tries=$((tries - 1)); done
    [ ! -d "/proc/$pid" ] || kill -9 -- "-$pid" 2>/dev/null
  done
}

shims() {
  local dir
  for dir in /proc/[0-9]*; do
    { tr '\0' ' ' <"$dir/cmdline"; } 2>/dev/null | grep -q "containerd-shim.* -address $RUN/containerd.sock" && echo "${dir#/proc/}"
  done
}

# A container outlives its shim, so both are ended. A container's first process takes its pid namespace with it.
stop_containers() {
  local tasks=$RUN/containerd/state/io.containerd.runtime.v2.task/k8s.io file pid pids=() containers namespaces cgroups
  containers=$(ls "$tasks" 2>/dev/null)
  namespaces=$(grep -rhoE --include=config.json 'netns/cni-[0-9a-f-]+' "$tasks" 2>/dev/null | sort -u)
  for file in "$tasks"/*/init.pid; do   # these files end without a newline
    [ ! -f "$file" ] || pids+=("$(cat "$file")")
  done
  cgroups=$(for pid in "${pids[@]}"; do sed 's/^[^:]*:[^:]*://' "/proc/$pid/cgroup" 2>/dev/null; done | grep -c '^/kubepods')
  pid=$(shims)
  stop containerd
  # shellcheck disable=SC2086
  [ -z "$pid" ] || kill -9 $pid 2>/dev/null
  for pid in "${pids[@]}"; do
    grep -q kubepods "/proc/$pid/cgroup" 2>/dev/null && kill -9 "$pid" 2>/dev/null
  done
  sleep 0.3
  unmount
  for file in $namespaces; do delete_namespace "/run/$file"; done
  for file in $containers; do rm -f /var/lib/cni/results/*-"$file"-*; done
  [ "$cgroups" = 0 ] || remove_cgroups
}

# Where /run/netns was mounted over itself meanwhile, `ip netns delete` cannot see the mount beneath.
delete_namespace() {
  ip netns delete "${1##*/}" 2>/dev/null && return
  umount -l "$1" 2>/dev/null
  rm -f "$1" 2>/dev/null
}

# Deepest first; three passes, since mounts hide each other.
unmount() {
  local pass mount
  for pass in 1 2 3; do
    awk -v prefix="$RUN/" 'index($5, prefix) == 1 { print $5 }' /proc/self/mountinfo | sort -r |
      while read -r mount; do umount -l "$mount" 2>/dev/null; done
  done
}

remove_cgroups() {
  local hierarchy
  for hierarchy in /sys/fs/cgroup /sys/fs/cgroup/*; do
    [ ! -d "$hierarchy/kubepods" ] || find "$hierarchy/kubepods" -depth -type d -exec rmdir {} + 2>/dev/null
  done
}

restore_network() {
  "$BIN/kube-proxy" --cleanup >/dev/null 2>&1
  iptables -D FORWARD -i cni0 -o cni0 -j ACCEPT 2>/dev/null
  ip link delete cni0 2>/dev/null
  [ ! -f "$RUN/ip_forward" ] || sysctl -qw net.ipv4.ip_forward="$(cat "$RUN/ip_forward")"
  rm -f "$RUN/ip_forward"
}

stop reclaim kubelet proxy
if [ "$(cat "$NODE_LOCK" 2>/dev/null)" = "$RUN" ]; then
  stop_containers
  restore_network
  rm -f "$NODE_LOCK"
fi
stop kwok sched kcm apiserver   # the API server waits for its watchers: expect the KILL
stop etcd
[ "${1:-}" != --keep ] || exit 0
! grep -q " $RUN/" /proc/self/mountinfo || die "mounts are left under $RUN, so it stays; look with: grep $RUN /proc/self/mountinfo"
rm -rf --one-file-system "$RUN"
