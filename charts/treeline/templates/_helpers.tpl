{{/* The short name of the release's objects. */}}
{{- define "treeline.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{/* The whole name of the release's objects: the release's name, unless it says the chart's already. */}}
{{- define "treeline.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- $name := include "treeline.name" . }}
{{- if contains $name .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}
{{- end }}

{{/* The name of the operator's own objects. */}}
{{- define "treeline.operatorName" -}}
{{ include "treeline.fullname" . }}-operator
{{- end }}

{{- define "treeline.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "treeline.operatorName" .) .Values.serviceAccount.name }}
{{- else }}
{{- required "serviceAccount.create is off: name the ServiceAccount to use in serviceAccount.name" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{/* The operator's pods by their labels. NetworkPolicies of pickers admit the operator by the first, so it never changes. */}}
{{- define "treeline.selectorLabels" -}}
app.kubernetes.io/name: treeline-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "treeline.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{ include "treeline.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/component: operator
app.kubernetes.io/part-of: treeline
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* One image: (list context image suffix-of-the-default-tag). */}}
{{- define "treeline.image" -}}
{{- $root := index . 0 }}
{{- $image := index . 1 }}
{{- $name := $image.repository }}
{{- with $root.Values.images.registry }}
{{- $name = printf "%s/%s" (trimSuffix "/" .) $name }}
{{- end }}
{{- if $image.digest }}
{{- printf "%s@%s" $name $image.digest }}
{{- else }}
{{- printf "%s:%s" $name (default (printf "%s%s" $root.Chart.AppVersion (index . 2)) $image.tag) }}
{{- end }}
{{- end }}

{{/* The rules of files/rbac.yaml for one place ("watched" or "own"), less what the values switch off. */}}
{{- define "treeline.rules" -}}
{{- $root := index . 0 }}
{{- range $i, $feature := index ($root.Files.Get "files/rbac.yaml" | fromYaml) (index . 1) }}
{{- if or (not .value) (get $root.Values.rbac (default "" .value)) }}
{{- if $i }}{{ "\n" }}{{ end }}
{{- range $j, $rule := .rules }}
{{- if $j }}{{ "\n" }}{{ else }}# {{ $feature.feature }}{{ "\n" }}{{ end }}
{{- range $k, $field := list "apiGroups" "resources" "resourceNames" "verbs" }}
{{- with get $rule $field }}
{{- if $k }}{{ "\n  " }}{{ else }}- {{ end }}{{ $field }}: {{ toJson . | replace "LEASE" (include "treeline.operatorName" $root) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Whether a monitor of this kind is to be made: "true" or nothing. */}}
{{- define "treeline.monitor" -}}
{{- $root := index . 0 }}
{{- if and (index . 2) ($root.Capabilities.APIVersions.Has (printf "monitoring.coreos.com/v1/%s" (index . 1))) }}true{{ end }}
{{- end }}
