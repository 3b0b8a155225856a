#!/usr/bin/env bash
# deploy.sh: installs or upgrades agentloop in the cluster of the current kube context, or of CONTEXT.
# IMAGE=repository:tag is an image that the cluster can pull.
set -euo pipefail
image=${IMAGE:-}
. "$(dirname "$0")/lib.sh"
[ -n "$image" ] || die "IMAGE=repository:tag is missing: the image which the cluster is to pull (see 'make image')"
"$ROOT/hack/devcluster/tools.sh" helm
helm upgrade --install agentloop "$ROOT/charts/agentloop" ${CONTEXT:+--kube-context "$CONTEXT"} \
  --namespace agentloop-system --create-namespace --wait --timeout 180s \
  --set image.repository="${image%:*}" --set image.tag="${image##*:}"
