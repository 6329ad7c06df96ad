{{/* Names and labels. Each takes a dict with `root`, and `role` where it concerns one. */}}

{{- define "expertmesh.fullname" -}}
{{- include "expertmesh.cut" (dict "text" (include "expertmesh.wholeName" .) "most" 40) -}}
{{- end -}}

{{- define "expertmesh.wholeName" -}}
{{- $name := default .root.Chart.Name .root.Values.nameOverride -}}
{{- if .root.Values.fullnameOverride -}}
{{- .root.Values.fullnameOverride -}}
{{- else if contains $name .root.Release.Name -}}
{{- .root.Release.Name -}}
{{- else -}}
{{- printf "%s-%s" .root.Release.Name $name -}}
{{- end -}}
{{- end -}}

{{- define "expertmesh.name" -}}
{{- printf "%s-%s" (include "expertmesh.fullname" .) .role -}}
{{- end -}}

{{/* Dicts, as YAML: of two with the same key the later counts, also where its value is false, 0 or empty. */}}
{{- define "expertmesh.layered" -}}
{{- $result := dict -}}
{{- range $layer := . -}}
{{- range $key, $value := $layer }}{{ $_ := set $result $key $value }}{{ end -}}
{{- end -}}
{{- toYaml $result -}}
{{- end -}}

{{/* A name that may be too long: cut, with a hash, so that different names stay different. Takes `text` and `most`. */}}
{{- define "expertmesh.cut" -}}
{{- if gt (len .text) (int .most) -}}
{{- printf "%s-%s" (trunc (int (sub .most 9)) .text) (sha256sum .text | trunc 8) -}}
{{- else -}}
{{- .text -}}
{{- end -}}
{{- end -}}

{{- define "expertmesh.selector" -}}
{{- $labels := dict "app.kubernetes.io/name" (default .root.Chart.Name .root.Values.nameOverride) "app.kubernetes.io/instance" .root.Release.Name -}}
{{- with .role }}{{ $_ := set $labels "app.kubernetes.io/component" . }}{{ end -}}
{{- if hasKey . "group" }}{{ $_ := set $labels "expertmesh.io/shard-group" (toString .group) }}{{ end -}}
{{- toYaml $labels -}}
{{- end -}}

{{/* Labels of an object; `labels` adds some. */}}
{{- define "expertmesh.labels" -}}
{{- $chart := printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" -}}
{{- $own := dict "app.kubernetes.io/version" (.root.Chart.AppVersion | replace "+" "_") "app.kubernetes.io/managed-by" .root.Release.Service "helm.sh/chart" $chart -}}
{{- include "expertmesh.layered" (list .root.Values.commonLabels (.labels | default dict) $own (include "expertmesh.selector" . | fromYaml)) -}}
{{- end -}}

{{/* Labels of a pod; `labels` adds some. None has the chart's version, for another one must not restart every worker. */}}
{{- define "expertmesh.podLabels" -}}
{{- include "expertmesh.layered" (list .root.Values.commonLabels (.labels | default dict) (include "expertmesh.selector" . | fromYaml)) -}}
{{- end -}}

{{/* Metadata of an object; `annotations` and `labels` add some. */}}
{{- define "expertmesh.metadata" -}}
name: {{ .name | default (include "expertmesh.name" .) | quote }}
namespace: {{ .root.Release.Namespace | quote }}
labels:
  {{- include "expertmesh.labels" . | nindent 2 }}
{{- if or .annotations .root.Values.commonAnnotations }}
annotations:
  {{- include "expertmesh.layered" (list .root.Values.commonAnnotations (.annotations | default dict)) | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "expertmesh.image" -}}
{{- $tag := .image.tag | default (.root.Chart.AppVersion | replace "+" "_") -}}
{{- with .image.digest | default (regexFind "sha256:[0-9a-f]+$" $tag) -}}
{{- printf "%s@%s" $.image.repository . -}}
{{- else -}}
{{- printf "%s:%s" .image.repository $tag -}}
{{- end -}}
{{- end -}}

{{/* Secrets: the one that is given, or the one that this chart makes. */}}
{{- define "expertmesh.redisSecret" -}}
{{- .root.Values.redis.auth.existingSecret | default (printf "%s-redis" (include "expertmesh.fullname" .)) -}}
{{- end -}}
{{- define "expertmesh.redisUsersSecret" -}}
{{- (.root.Values.redis.acl).existingSecret | default (printf "%s-redis-users" (include "expertmesh.fullname" .)) -}}
{{- end -}}
{{- define "expertmesh.redisTlsSecret" -}}
{{- (.root.Values.redis.tls).secretName | default (printf "%s-redis-tls" (include "expertmesh.fullname" .)) -}}
{{- end -}}
{{- define "expertmesh.fabricTlsSecret" -}}
{{- (.root.Values.fabric.tls).secretName | default (printf "%s-fabric-tls" (include "expertmesh.fullname" .)) -}}
{{- end -}}
{{- define "expertmesh.keysSecret" -}}
{{- .root.Values.auth.existingSecret | default (printf "%s-api-keys" (include "expertmesh.fullname" .)) -}}
{{- end -}}
{{- define "expertmesh.fabricSecret" -}}
{{- .root.Values.fabric.existingSecret | default (printf "%s-fabric" (include "expertmesh.fullname" .)) -}}
{{- end -}}

{{- define "expertmesh.keyPrefix" -}}
{{- .root.Values.redis.keyPrefix | default (include "expertmesh.cut" (dict "text" (printf "%s.%s" .root.Release.Namespace .root.Release.Name) "most" 64)) -}}
{{- end -}}

{{- define "expertmesh.modelClaim" -}}
{{- .root.Values.model.pvc.existingClaim | default (printf "%s-model" (include "expertmesh.fullname" .)) -}}
{{- end -}}

{{/*
Folder of the checkpoint as the containers see it. What the Job fetches has one of its own for each source and digests, so
that another model never overwrites files that workers have open.
*/}}
{{- define "expertmesh.modelPath" -}}
{{- $model := .root.Values.model -}}
{{- if eq $model.source "bundled" -}}
/opt/models/pocket
{{- else if and (eq $model.source "pvc") $model.pvc.prefetch.enabled -}}
{{- $source := required "Give model.pvc.prefetch.source." $model.pvc.prefetch.source -}}
{{- $name := $model.subPath | default (regexReplaceAll "@[^/]*$" $source "" | base) -}}
{{- printf "/model/%s/%s" (sha256sum (toJson (list $source $model.pvc.prefetch.sha256)) | trunc 8) $name | trimSuffix "/" -}}
{{- else -}}
{{- printf "/model/%s" $model.subPath | trimSuffix "/" -}}
{{- end -}}
{{- end -}}

{{/* Which checkpoint that is: another one needs another place in Redis, see expertmesh.unchanged. */}}
{{- define "expertmesh.modelIdentity" -}}
{{- $model := .root.Values.model -}}
{{- if eq $model.source "hostPath" -}}
{{- printf "%s/%s" $model.hostPath.path $model.subPath | trimSuffix "/" -}}
{{- else if eq $model.source "image" -}}
{{- printf "%s/%s" $model.image.reference $model.subPath | trimSuffix "/" -}}
{{- else if and (eq $model.source "pvc") $model.pvc.prefetch.enabled -}}
{{- $model.pvc.prefetch.source -}}
{{- else if eq $model.source "pvc" -}}
{{- printf "%s/%s" (include "expertmesh.modelClaim" .) $model.subPath | trimSuffix "/" -}}
{{- else -}}
{{- $model.source -}}
{{- end -}}
{{- end -}}
