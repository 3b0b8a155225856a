#!/usr/bin/env bash
# user.sh NAME SUBJECT [ALT_NAMES]: a certificate signed by the cluster's CA -> $RUN/NAME.kubeconfig
# e.g. user.sh alice /O=devs/CN=alice; what alice may do is RBAC's business.
set -euo pipefail
. "$(dirname "$0")/settings.sh"
name=$1 subject=$2 alt_names=${3:-}
cd "$RUN/pki"
openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout "$name.key" -out "$name.csr" -subj "$subject" 2>/dev/null
openssl x509 -req -in "$name.csr" -CA ca.crt -CAkey ca.key -CAcreateserial -days 365 -out "$name.crt" -extfile <(
  echo "extendedKeyUsage=serverAuth,clientAuth"
  [ -z "$alt_names" ] || echo "subjectAltName=$alt_names"
) 2>/dev/null
cat >"$RUN/$name.kubeconfig" <<YAML
apiVersion: v1
kind: Config
clusters:
- name: devcluster
  cluster: {server: "$(cat "$RUN/server")", certificate-authority: $RUN/pki/ca.crt}
users:
- name: $name
  user: {client-certificate: $RUN/pki/$name.crt, client-key: $RUN/pki/$name.key}
contexts:
- name: devcluster
  context: {cluster: devcluster, user: $name}
current-context: devcluster
YAML
chmod 600 "$RUN/$name.kubeconfig" "$name.key"
