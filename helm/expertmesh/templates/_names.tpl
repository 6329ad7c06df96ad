{{/* Names and labels. Each takes a dict with `root`, and `role` where it concerns one. */}}

{{- define "expertmesh.fullname" -}}
{{- $name := default .root.Chart.Name .root.Values.nameOverride -}}
{{- if .root.Values.fullnameOverride -}}
{{- .root.Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains $name .root.Release.Name -}}
{{- .root.Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .root.Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "expertmesh.name" -}}
{{- printf "%s-%s" (include "expertmesh.fullname" .) .role -}}
{{- end -}}

{{- define "expertmesh.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .role }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- if hasKey . "group" }}
expertmesh.io/shard-group: {{ .group | quote }}
{{- end }}
{{- end -}}

{{- define "expertmesh.labels" -}}
{{ include "expertmesh.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Metadata of an object; `annotations` adds some. */}}
{{- define "expertmesh.metadata" -}}
name: {{ .name | default (include "expertmesh.name" .) }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "expertmesh.labels" . | nindent 2 }}
{{- with merge (dict) (.annotations | default dict) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "expertmesh.image" -}}
{{- if .image.digest -}}
{{- printf "%s@%s" .image.repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" .image.repository (.image.tag | default .root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{/* Secrets: the one that is given, or the one that this chart makes. */}}
{{- define "expertmesh.redisSecret" -}}
{{- .root.Values.redis.auth.existingSecret | default (printf "%s-redis" (include "expertmesh.fullname" .)) -}}
{{- end -}}
{{- define "expertmesh.keysSecret" -}}
{{- .root.Values.auth.existingSecret | default (printf "%s-api-keys" (include "expertmesh.fullname" .)) -}}
{{- end -}}
{{- define "expertmesh.fabricSecret" -}}
{{- .root.Values.fabric.existingSecret | default (printf "%s-fabric" (include "expertmesh.fullname" .)) -}}
{{- end -}}

{{/* What a Secret that this chart made holds under a key, or `new` at the first installation: never changed by an upgrade. */}}
{{- define "expertmesh.kept" -}}
{{- $found := lookup "v1" "Secret" .root.Release.Namespace .name -}}
{{- with ($found | default dict).data -}}
{{- get . $.key | default ($.new | b64enc) -}}
{{- else -}}
{{- .new | b64enc -}}
{{- end -}}
{{- end -}}

{{- define "expertmesh.keyPrefix" -}}
{{- .root.Values.redis.keyPrefix | default (printf "%s.%s" .root.Release.Namespace .root.Release.Name) | trunc 64 -}}
{{- end -}}

{{- define "expertmesh.modelClaim" -}}
{{- .root.Values.model.pvc.existingClaim | default (printf "%s-model" (include "expertmesh.fullname" .)) -}}
{{- end -}}

{{/* Folder of the checkpoint as the containers see it. */}}
{{- define "expertmesh.modelPath" -}}
{{- if eq .root.Values.model.source "bundled" -}}
/opt/models/pocket
{{- else -}}
{{- printf "/model/%s" .root.Values.model.subPath | trimSuffix "/" -}}
{{- end -}}
{{- end -}}
