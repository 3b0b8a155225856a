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

{{/* What Prometheus presents to /metrics: a dict with `monitor` (its values), `name` (of these values) and `root`. */}}
{{- define "agentloop.scrapeAuthorization" -}}
{{- $secret := .monitor.bearerTokenSecret -}}
{{- if $secret.name }}
authorization:
  type: Bearer
  credentials: {name: {{ $secret.name }}, key: {{ $secret.key }}}
{{- else if eq .root.Values.metrics.authentication "Token" }}
{{- fail (printf "metrics.%s.bearerTokenSecret.name is required with metrics.authentication: Token: Prometheus must present a token" .name) }}
{{- end }}
{{- end }}
