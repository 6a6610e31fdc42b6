{{/* Names, labels and parts of pods that several templates share. Arguments that are lists begin with the root context. */}}

{{- define "perdure.labels" -}}
{{- $root := index . 0 -}}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
app.kubernetes.io/part-of: perdure
{{ include "perdure.selector" . }}
{{- end }}

{{/* [root, component] */}}
{{- define "perdure.selector" -}}
app.kubernetes.io/name: perdure
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* [root, suffix]: the name of an object that belongs to the whole cluster. */}}
{{- define "perdure.clusterName" -}}
{{- $root := index . 0 -}}
{{ printf "%s-%s-%s" $root.Release.Namespace $root.Release.Name (index . 1) }}
{{- end }}

{{/* What worker pods are labelled with. A namespace has no dot in its name, so no two releases have the same. */}}
{{- define "perdure.installation" -}}
{{ .Release.Namespace }}.{{ .Release.Name }}
{{- end }}

{{/* [root, image] */}}
{{- define "perdure.image" -}}
{{- $root := index . 0 -}}
{{- $image := index . 1 -}}
{{- $name := ternary (printf "%s/%s" ($root.Values.image.registry | trimSuffix "/") $image.repository) $image.repository (ne $root.Values.image.registry "") -}}
{{- if $image.digest -}}
{{ $name }}@{{ $image.digest }}
{{- else -}}
{{ $name }}:{{ $image.tag | default $root.Values.image.tag | default $root.Chart.AppVersion }}
{{- end -}}
{{- end }}

{{- define "perdure.dsnSecret" -}}
{{- if .Values.quickstart.enabled -}}{{ .Release.Name }}-postgres{{- else -}}{{ .Values.postgres.dsnSecret.name }}{{- end -}}
{{- end }}

{{- define "perdure.dsnEnv" -}}
- name: PERDURE_DSN
  valueFrom:
    secretKeyRef:
      name: {{ include "perdure.dsnSecret" . }}
      key: {{ ternary "dsn" .Values.postgres.dsnSecret.key .Values.quickstart.enabled }}
{{- with .Values.postgres }}
{{- $mode := .sslMode | default (ternary "verify-full" "" (ne .caSecret.name "")) }}
{{- if $mode }}
- name: PGSSLMODE
  value: {{ $mode }}
{{- end }}
{{- if .caSecret.name }}
- name: PGSSLROOTCERT
  value: /etc/perdure/postgres-ca/ca.crt
{{- end }}
{{- if .clientSecret.name }}
- name: PGSSLCERT
  value: /etc/perdure/postgres-client/tls.crt
- name: PGSSLKEY
  value: /etc/perdure/postgres-client/tls.key
{{- end }}
{{- end }}
{{- end }}

{{/* What a container that talks to Postgres sees of its pod's volumes. A list, perhaps empty. */}}
{{- define "perdure.dsnMounts" -}}
{{- if .Values.postgres.caSecret.name }}
- { name: postgres-ca, mountPath: /etc/perdure/postgres-ca, readOnly: true }
{{- end }}
{{- if .Values.postgres.clientSecret.name }}
- { name: postgres-client, mountPath: /etc/perdure/postgres-client, readOnly: true }
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "perdure.dsnVolumes" -}}
{{- with .Values.postgres.caSecret }}
{{- if .name }}
- name: postgres-ca
  secret:
    secretName: {{ .name }}
    # The authorities only: the key may lie beside them.
    items: [{ key: {{ .key | quote }}, path: ca.crt }]
{{- end }}
{{- end }}
{{- with .Values.postgres.clientSecret }}
{{- if .name }}
- name: postgres-client
  secret:
    secretName: {{ .name }}
    defaultMode: 0440
    items: [{ key: {{ .certificateKey | quote }}, path: tls.crt }, { key: {{ .keyKey | quote }}, path: tls.key }]
{{- end }}
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "perdure.tlsSecret" -}}
{{- if eq .Values.tls.mode "Secret" -}}{{ .Values.tls.secret.name }}{{- else -}}{{ .Release.Name }}-gateway-tls{{- end -}}
{{- end }}

{{- define "perdure.gatewayUrl" -}}
{{ .Values.gateway.url | default (printf "https://%s-gateway.%s.svc" .Release.Name .Release.Namespace) }}
{{- end }}

{{/* DNS names of the gateway, a JSON list. */}}
{{- define "perdure.gatewayNames" -}}
{{- $service := printf "%s-gateway" .Release.Name -}}
{{- $own := list (printf "%s.%s.svc" $service .Release.Namespace) (printf "%s.%s.svc.cluster.local" $service .Release.Namespace) (printf "%s.%s" $service .Release.Namespace) $service "localhost" -}}
{{ concat $own .Values.tls.extraNames | uniq | toJson }}
{{- end }}

{{/* What Pod Security "restricted" asks of a pod; the user is the images'. */}}
{{- define "perdure.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile: { type: RuntimeDefault }
{{- end }}

{{- define "perdure.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end }}

{{- define "perdure.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{/* [root, component, values of the component] */}}
{{- define "perdure.placement" -}}
{{- $values := index . 2 -}}
topologySpreadConstraints:
  {{- range $key := list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - maxSkew: 1
    topologyKey: {{ $key }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "perdure.selector" $ | nindent 8 }}
  {{- end }}
{{- range $field := list "nodeSelector" "tolerations" "affinity" }}
{{- with index $values $field }}
{{ $field }}: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{/* Pods start before the migration Job has ended; this holds them back. The rest of the world is in docs/adr/0006. */}}
{{- define "perdure.waitForSchema" -}}
- name: wait-for-schema
  image: {{ include "perdure.image" (list . .Values.image.operator) }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  args: [wait-for-schema]
  env: {{- include "perdure.dsnEnv" . | nindent 4 }}
  terminationMessagePolicy: FallbackToLogsOnError
  resources: {{- toYaml .Values.migrations.resources | nindent 4 }}
  securityContext: {{- include "perdure.containerSecurity" . | nindent 4 }}
  {{- with include "perdure.dsnMounts" . | trim }}
  volumeMounts: {{- . | nindent 4 }}
  {{- end }}
{{- end }}

{{- define "perdure.probes" -}}
readinessProbe:
  httpGet: { path: /readyz, port: metrics }
  periodSeconds: 3
  timeoutSeconds: 3
livenessProbe:
  httpGet: { path: /healthz, port: metrics }
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end }}

{{/*
[root, name of the ServiceAccount without the release's, component, rules, annotations]: a Role with its binding in every watched namespace,
or a ClusterRole in cluster mode. Named after release and namespace also there: two releases may serve one namespace's neighbours.
*/}}
{{- define "perdure.grant" -}}
{{- $root := index . 0 -}}
{{- $name := index . 1 -}}
{{- $component := index . 2 -}}
{{- $rules := index . 3 -}}
{{- $annotations := index . 4 -}}
{{- $places := $root.Values.watchNamespaces | default (list "") -}}
{{- range $namespace := $places }}
{{- $kind := ternary "Role" "ClusterRole" (ne $namespace "") }}
{{- $full := include "perdure.clusterName" (list $root $name) }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ $kind }}
metadata:
  name: {{ $full }}
  {{- with $namespace }}
  namespace: {{ . }}
  {{- end }}
  labels: {{- include "perdure.labels" (list $root $component) | nindent 4 }}
  {{- with $annotations }}
  annotations: {{- . | nindent 4 }}
  {{- end }}
rules: {{- $rules | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ $kind }}Binding
metadata:
  name: {{ $full }}
  {{- with $namespace }}
  namespace: {{ . }}
  {{- end }}
  labels: {{- include "perdure.labels" (list $root $component) | nindent 4 }}
  {{- with $annotations }}
  annotations: {{- . | nindent 4 }}
  {{- end }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: {{ $kind }}
  name: {{ $full }}
subjects:
  - kind: ServiceAccount
    name: {{ printf "%s-%s" $root.Release.Name $name }}
    namespace: {{ $root.Release.Namespace }}
{{- end }}
{{- end }}
