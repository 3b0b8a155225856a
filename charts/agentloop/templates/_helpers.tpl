{{/* Name of the chart: in a label, and in the names of objects. */}}
{{- define "agentloop.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 63 | trimSuffix "-" -}}
{{- end }}

{{/* Name of the objects of this release. Room is left for what names add, such as -metrics. */}}
{{- define "agentloop.fullname" -}}
{{- $name := include "agentloop.name" . -}}
{{- $full := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- .Values.fullnameOverride | default $full | trunc 50 | trimSuffix "-" -}}
{{- end }}

{{/* Namespace of the objects of this release. */}}
{{- define "agentloop.namespace" -}}
{{- .Values.namespaceOverride | default .Release.Namespace -}}
{{- end }}

{{/* Name of its objects outside namespaces: unique per namespace where several releases may share a cluster. */}}
{{- define "agentloop.clusterName" -}}
{{- if .Values.watchNamespaces }}{{ printf "%s-%s" (include "agentloop.fullname" .) (include "agentloop.namespace" .) }}{{ else }}{{ include "agentloop.fullname" . }}{{ end -}}
{{- end }}

{{- define "agentloop.selectorLabels" -}}
app.kubernetes.io/name: {{ include "agentloop.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: controller
{{- end }}

{{- define "agentloop.labels" -}}
{{ include "agentloop.labelsWith" (dict "root" . "labels" dict) }}
{{- end }}

{{/* The labels of an object that has its own: a dict with `root` and `labels`, which take precedence over commonLabels. They are
merged, since a key may occur only once: Helm accepts a repetition, and Kustomize and Flux do not. */}}
{{- define "agentloop.labelsWith" -}}
{{ include "agentloop.selectorLabels" .root }}
app.kubernetes.io/part-of: agentloop
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- /* Not by `merge`, which takes an empty value for none. */}}
{{- $merged := dict }}
{{- range $labels := list .root.Values.commonLabels .labels }}
{{- range $key, $value := $labels }}
{{- $_ := set $merged $key $value }}
{{- end }}
{{- end }}
{{- with $merged }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "agentloop.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}{{ .Values.serviceAccount.name | default (include "agentloop.fullname" .) }}{{ else }}{{ required "serviceAccount.name is required when serviceAccount.create is false" .Values.serviceAccount.name }}{{ end -}}
{{- end }}

{{/* Registry and repository of the image. */}}
{{- define "agentloop.repository" -}}
{{- with .Values.image.registry }}{{ . }}/{{ end }}{{ .Values.image.repository -}}
{{- end }}

{{- define "agentloop.image" -}}
{{- $repository := include "agentloop.repository" . -}}
{{- if .Values.image.digest }}{{ printf "%s@%s" $repository .Values.image.digest }}{{ else }}{{ printf "%s:%s" $repository (.Values.image.tag | default .Chart.AppVersion) }}{{ end -}}
{{- end }}

{{/* Binds the controller's service account to the role of the same name. */}}
{{- define "agentloop.subjects" -}}
subjects:
- kind: ServiceAccount
  name: {{ include "agentloop.serviceAccountName" . }}
  namespace: {{ include "agentloop.namespace" . }}
{{- end }}

{{/* What the controller does in each namespace with Agents. No wider than what the tests see it use. */}}
{{- define "agentloop.agentRules" -}}
# It patches one annotation, with the answers to gates that arrive over its API; rbac.controllerPolicy allows no other change.
- apiGroups: [agentloop.dev]
  resources: [agents]
  verbs: [get, list, watch, patch]
- apiGroups: [agentloop.dev]
  resources: [agents/status]
  verbs: [get, patch]
{{ include "agentloop.budgetRules" . }}
- apiGroups: [agentloop.dev]
  resources: [sensors]
  verbs: [list, watch]
- apiGroups: [agentloop.dev]
  resources: [sensors/status]
  verbs: [get, patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, delete]
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get, create]
- apiGroups: [""]
  resources: [configmaps, serviceaccounts]
  verbs: [get]
# An object that is applied has its name in the request, so that its creation can be limited to it too.
- apiGroups: [""]
  resources: [configmaps]
  resourceNames: [agentloop-link-ca]
  verbs: [create, patch, delete]
- apiGroups: [""]
  resources: [serviceaccounts]
  resourceNames: [agentloop-agent, agentloop-sensor]
  verbs: [create, patch, delete]
- apiGroups: [""]
  resources: [secrets]
  verbs: [get]
# Of Sensors with a pod of their own.
- apiGroups: [apps]
  resources: [statefulsets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, patch]
{{- end }}

{{/* What the controller does where budgets are. */}}
{{- define "agentloop.budgetRules" -}}
- apiGroups: [agentloop.dev]
  resources: [agentbudgets]
  verbs: [list, watch]
- apiGroups: [agentloop.dev]
  resources: [agentbudgets/status]
  verbs: [get, patch]
{{- end }}

{{/* What the controller does outside namespaces. */}}
{{- define "agentloop.clusterRules" -}}
- apiGroups: [""]
  resources: [nodes]
  verbs: [get]
- apiGroups: [""]
  resources: [namespaces]
  verbs: [list, watch]
- apiGroups: [authentication.k8s.io]
  resources: [tokenreviews]
  verbs: [create]
- apiGroups: [authorization.k8s.io]
  resources: [subjectaccessreviews]
  verbs: [create]
{{- end }}

{{/* Annotations of what `helm test` creates. The pod of a failed test stays until the next one, to be read. */}}
{{- define "agentloop.test.hook" -}}
helm.sh/hook: test
helm.sh/hook-weight: {{ . | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end }}

{{/* Limits a policy to the namespaces of this release: in those of another release its controller answers, under its own account. */}}
{{- define "agentloop.servedNamespaces" -}}
{{- with .Values.watchNamespaces }}
{{- $served := append . (include "agentloop.namespace" $) | uniq }}
matchResources:
  namespaceSelector:
    matchExpressions:
    - {key: kubernetes.io/metadata.name, operator: In, values: {{ toJson $served }}}
{{- end }}
{{- end }}

{{/* The places of an expression of servers in CEL, as [name, host, port, path]: those of urls, and of containers on a port of the pod.
  `*` may be any. A host is compared without a last dot, and every address of the pod's loopback is localhost. An address in another
  form than the usual ones may be any, and so may a path with `..` or an escape. From a path, empty parts and those that are a dot
  are removed, since a server may leave them out. */}}
{{- define "agentloop.serverPlaces" -}}
{{ . }}.map(s, [string(s.name), has(s.url) ? string(s.url) : has(s.container) && has(s.container.port) ?
'http://localhost:' + string(s.container.port) + string(s.container.?path.orValue('/mcp')) : ''])
.filter(p, p[1] != '').map(p, !isURL(p[1]) ? [p[0], '*', '*', '*'] : [p[0],
[url(p[1]).getHostname().lowerAscii()].map(h, h.endsWith('.') ? h.substring(0, size(h) - 1) : h)
.map(h, isIP(h) ? (ip(h).isLoopback() || ip(h).isUnspecified() ? 'localhost' : string(ip(h))) :
h.contains(':') || h.matches('(^|[.])(0x[0-9a-f]*|[0-9]+)$') ? '*' : h)[0],
url(p[1]).getPort() != '' ? string(int(url(p[1]).getPort())) : url(p[1]).getScheme() == 'https' ? '443' : '80',
[url(p[1]).getEscapedPath()].map(e, e.contains('..') || e.contains('%') ? '*' :
e.split('/').filter(part, !(part in ['', '.'])).join('/'))[0]])
{{- end }}

{{/* Name of the metrics Service in the certificate of /metrics. */}}
{{- define "agentloop.metricsHost" -}}
{{ printf "%s-metrics.%s.svc" (include "agentloop.fullname" .) (include "agentloop.namespace" .) }}
{{- end }}

{{/* How Prometheus connects to /metrics, and what it presents: a dict with `monitor` (its values), `name` (of these values) and
  `root`. The ConfigMap has the certificate of the authority alone. */}}
{{- define "agentloop.scrapeConnection" -}}
{{- $secret := .monitor.bearerTokenSecret -}}
{{- if eq .root.Values.metrics.authentication "Token" }}
scheme: https
tlsConfig:
  ca:
    configMap: {name: agentloop-metrics-ca, key: ca.crt}
  serverName: {{ include "agentloop.metricsHost" .root }}
{{- end }}
{{- if $secret.name }}
authorization:
  type: Bearer
  credentials: {name: {{ $secret.name }}, key: {{ $secret.key }}}
{{- else if eq .root.Values.metrics.authentication "Token" }}
{{- fail (printf "metrics.%s.bearerTokenSecret.name is required with metrics.authentication: Token: Prometheus must present a token" .name) }}
{{- end }}
{{- end }}

{{/* The environment of the controller, as far as the chart sets it. Those who take it see which names extraEnv may not have. */}}
{{- define "agentloop.environment" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
- name: AGENTLOOP_IMAGE
  value: {{ include "agentloop.image" . | quote }}
- name: AGENTLOOP_IMAGE_PULL_POLICY
  value: {{ .Values.image.pullPolicy }}
- name: AGENTLOOP_LINK_URL
  value: https://agentloop-link.{{ include "agentloop.namespace" . }}.svc:8443
- name: AGENTLOOP_WATCH_NAMESPACES
  value: {{ join "," .Values.watchNamespaces | quote }}
- name: AGENTLOOP_METRICS_PER_OBJECT
  value: {{ .Values.metrics.perObject }}
- name: AGENTLOOP_METRICS_AUTHENTICATION
  value: {{ .Values.metrics.authentication | quote }}
{{- if eq .Values.metrics.authentication "Token" }}
- name: AGENTLOOP_METRICS_HOSTS
  value: {{ include "agentloop.metricsHost" . | quote }}
{{- end }}
{{- if .Values.page.enabled }}
- name: AGENTLOOP_PAGE_ADDRESS
  value: "[::]:8444"
- name: AGENTLOOP_PAGE_HOSTS
  value: {{ prepend (.Values.page.hosts | default list) (printf "%s-page.%s.svc" (include "agentloop.fullname" .) (include "agentloop.namespace" .)) | join "," | quote }}
{{- end }}
- name: AGENTLOOP_WORKERS
  value: {{ .Values.workers | quote }}
- name: AGENTLOOP_LEASE_DURATION_SECONDS
  value: {{ int .Values.leaderElection.leaseDurationSeconds | quote }}
- name: AGENTLOOP_LEASE_RENEW_SECONDS
  value: {{ int .Values.leaderElection.renewIntervalSeconds | quote }}
- name: AGENTLOOP_GATEWAY_RESOURCES
  value: {{ toJson .Values.agents.gateway.resources | quote }}
- name: AGENTLOOP_WORKER_RESOURCES
  value: {{ toJson .Values.agents.worker.resources | quote }}
- name: AGENTLOOP_SENSOR_RESOURCES
  value: {{ toJson .Values.sensor.resources | quote }}
{{- with .Values.agents.imagePullSecrets }}
{{- $names := list }}
{{- range . }}
{{- $names = append $names .name }}
{{- end }}
- name: AGENTLOOP_AGENT_IMAGE_PULL_SECRETS
  value: {{ join "," $names | quote }}
{{- end }}
{{- with omit .Values.sensor "resources" }}
{{- $template := dict }}
{{- range $key, $value := . }}
{{- if $value }}
{{- $_ := set $template $key $value }}
{{- end }}
{{- end }}
{{- with $template }}
{{- /* The kubelet expands `$(NAME)` in values; a JSON escape leaves no `$`. */}}
- name: AGENTLOOP_SENSOR_POD
  value: {{ toJson . | replace "$" "\\u0024" | quote }}
{{- end }}
{{- end }}
- name: AGENTLOOP_EGRESS_ALLOWED_CIDRS
  value: {{ join "," .Values.egress.allowedCIDRs | quote }}
- name: AGENTLOOP_EGRESS_DENIED_CIDRS
  value: {{ join "," .Values.egress.deniedCIDRs | quote }}
- name: AGENTLOOP_AGENT_EGRESS_PRIVATE_ADDRESSES
  value: {{ .Values.egress.agents.privateAddresses }}
- name: AGENTLOOP_AGENT_EGRESS_ALLOWED_CIDRS
  value: {{ join "," .Values.egress.agents.allowedCIDRs | quote }}
- name: AGENTLOOP_AGENT_EGRESS_DENIED_CIDRS
  value: {{ join "," .Values.egress.agents.deniedCIDRs | quote }}
{{- if .Values.prices }}
- name: AGENTLOOP_PRICES_FILE
  value: /etc/agentloop/prices.json
{{- end }}
- name: AGENTLOOP_REQUIRE_BUDGET
  value: {{ .Values.policy.requireBudget | quote }}
- name: AGENTLOOP_AGENT_PRICES
  value: {{ .Values.policy.agentPrices }}
- name: AGENTLOOP_MIN_OUTPUT_TOKENS
  value: {{ int .Values.policy.minOutputTokens | quote }}
- name: AGENTLOOP_ALLOWED_PRIORITY_CLASSES
  value: {{ join "," .Values.policy.allowedPriorityClasses | quote }}
- name: AGENTLOOP_ALLOWED_ANNOTATION_PREFIXES
  value: {{ join "," .Values.policy.allowedAnnotationPrefixes | quote }}
- name: AGENTLOOP_ALLOWED_TOOL_IMAGES
  value: {{ join "," .Values.policy.allowedToolImages | quote }}
{{- with .Values.approvals.webhook.url }}
- name: AGENTLOOP_APPROVAL_WEBHOOK_URL
  value: {{ . | quote }}
- name: AGENTLOOP_APPROVAL_WEBHOOK_SECRET_FILE
  value: /etc/agentloop-webhook/secret
{{- end }}
{{- if .Values.history.postgres.existingSecret }}
- name: AGENTLOOP_HISTORY_POSTGRES_FILE
  value: /etc/agentloop-history/uri
{{- if .Values.history.postgres.caKey }}
- name: AGENTLOOP_HISTORY_POSTGRES_CA_FILE
  value: /etc/agentloop-history/ca.crt
{{- end }}
- name: AGENTLOOP_HISTORY_RETENTION_DAYS
  value: {{ int .Values.history.retentionDays | quote }}
{{- end }}
{{- with .Values.telemetry.otlp }}
{{- if .endpoint }}
# The controller passes these to the gateways of Agents, except for those of metrics, headers and certificates.
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ .endpoint | quote }}
{{- if $.Values.telemetry.content }}
- name: OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT
  value: "true"
{{- end }}
{{- if .logs }}
- name: OTEL_LOGS_EXPORTER
  value: otlp
{{- end }}
{{- if .metrics }}
- name: OTEL_METRICS_EXPORTER
  value: otlp
- name: OTEL_METRIC_EXPORT_INTERVAL
  value: {{ mul 1000 (int .metricsIntervalSeconds) | quote }}
{{- end }}
- name: OTEL_TRACES_SAMPLER
  value: {{ .tracesSampler }}
{{- with .tracesSamplerArg }}
- name: OTEL_TRACES_SAMPLER_ARG
  value: {{ . | quote }}
{{- end }}
{{- with .resourceAttributes }}
{{- $pairs := list }}
{{- range $key, $value := . }}
{{- $pairs = append $pairs (printf "%s=%s" ($key | urlquery) ($value | urlquery | replace "+" "%20")) }}
{{- end }}
- name: OTEL_RESOURCE_ATTRIBUTES
  value: {{ join "," $pairs | quote }}
{{- end }}
{{- with .headersSecretName }}
- name: AGENTLOOP_OTLP_HEADERS_SECRET
  value: {{ . | quote }}
- name: OTEL_EXPORTER_OTLP_HEADERS
  valueFrom:
    secretKeyRef: {name: {{ . | quote }}, key: headers, optional: true}
{{- end }}
{{- with .caSecretName }}
- name: AGENTLOOP_OTLP_CA_SECRET
  value: {{ . | quote }}
- name: OTEL_EXPORTER_OTLP_CERTIFICATE
  value: /etc/agentloop-otlp/ca.crt
{{- end }}
{{- end }}
{{- end }}
- name: RUST_LOG
  value: {{ .Values.logLevel | quote }}
{{- end }}
