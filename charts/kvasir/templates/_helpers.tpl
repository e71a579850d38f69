{{/* Name of everything in the release's own namespace: "kvasir-operator" for a release "kvasir". */}}
{{- define "kvasir.name" -}}
{{- if contains "kvasir" .Release.Name -}}
{{- printf "%s-operator" (.Release.Name | trunc 48 | trimSuffix "-") -}}
{{- else -}}
{{- printf "%s-kvasir-operator" (.Release.Name | trunc 41 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{/* Labels by which Services and policies find the operator's pods; they never change. */}}
{{- define "kvasir.selector" -}}
app.kubernetes.io/name: kvasir
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "kvasir.labels" -}}
{{ include "kvasir.selector" . }}
app.kubernetes.io/part-of: kvasir
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* Reference of an image: (dict "root" $ "image" .Values.images.worker). */}}
{{- define "kvasir.image" -}}
{{- $images := .root.Values.images -}}
{{- $repository := .image.repository -}}
{{- with $images.registry }}{{ $repository = printf "%s/%s" . $repository }}{{ end -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository (default .root.Chart.AppVersion $images.tag) -}}
{{- end -}}
{{- end -}}

{{/* Security of every container: the restricted Pod Security Standard, and a read-only root. */}}
{{- define "kvasir.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
privileged: false
readOnlyRootFilesystem: true
{{- end -}}

{{- define "kvasir.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* What the operator may do in a namespace that it serves. */}}
{{- define "kvasir.rules" -}}
- apiGroups: [kvasir.dev]
  resources: [modelservices]
  verbs: [get, list, watch]
- apiGroups: [kvasir.dev]
  resources: [modelservices/status, workerpools/status]
  verbs: [patch]
# An owner reference that blocks deletion of its owner needs this where the API server enforces it.
- apiGroups: [kvasir.dev]
  resources: [modelservices/finalizers]
  verbs: [update]
- apiGroups: [kvasir.dev]
  resources: [workerpools]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [configmaps, serviceaccounts, services]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
# Workers that span nodes, where the cluster has this API.
- apiGroups: [leaderworkerset.x-k8s.io]
  resources: [leaderworkersets]
  verbs: [get, list, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
# Each ModelService's routers get a Role to read EndpointSlices, and nobody can grant more than he
# may do.
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [get, list, watch]
# Patch: the annotations that say which worker drains, and which pod goes first.
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, patch]
- apiGroups: [""]
  resources: [events]
  verbs: [create, patch]
{{- end -}}
