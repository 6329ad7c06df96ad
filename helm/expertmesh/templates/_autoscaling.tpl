{{/* "true" where KEDA sets the replicas. */}}
{{- define "expertmesh.autoscaled" -}}
{{- if and .root.Values.autoscaling.enabled (.root.Capabilities.APIVersions.Has "keda.sh/v1alpha1") -}}
true
{{- end -}}
{{- end -}}

{{/* minReplicas and maxReplicas of a shard group: its own, or those of all groups. Takes `root` and `group`. */}}
{{- define "expertmesh.groupBounds" -}}
{{- $own := pick (get .root.Values.experts.perGroup (toString .group) | default dict) "minReplicas" "maxReplicas" -}}
{{- include "expertmesh.layered" (list .root.Values.autoscaling.experts $own) -}}
{{- end -}}

{{/* The scheduler's settings, and the targets that gateways count by. A shard group may have bounds of its own. */}}
{{- define "expertmesh.autoscalingConfig" -}}
{{- $scaling := .root.Values.autoscaling -}}
{{- if eq .role "gateway" -}}
target_ttft: {{ $scaling.targetTtftSeconds }}
target_tpot: {{ $scaling.targetTpotSeconds }}
{{- end }}
{{- if eq .role "scheduler" }}
autoscale: "on"
kubernetes_selector: {{ include "expertmesh.matchLabels" . | quote }}
sleep_after: {{ $scaling.sleepAfterSeconds }}
scale_down_after: {{ $scaling.scaleDownAfterSeconds }}
{{- if eq (include "expertmesh.layout" .) "disaggregated" }}
min_replicas: {{ $scaling.experts.minReplicas }}
max_replicas: {{ $scaling.experts.maxReplicas }}
{{- $own := list }}
{{- range $group, $_ := .root.Values.experts.perGroup }}
{{- $bounds := include "expertmesh.groupBounds" (dict "root" $.root "group" $group) | fromYaml }}
{{- $own = append $own (printf "%s=%d:%d" $group (int $bounds.minReplicas) (int $bounds.maxReplicas)) }}
{{- end }}
{{- with $own }}
shard_replicas: {{ join "," . | quote }}
{{- end }}
{{- end }}
min_attention: {{ $scaling.attention.minReplicas }}
max_attention: {{ $scaling.attention.maxReplicas }}
min_gateways: {{ $scaling.gateway.minReplicas }}
max_gateways: {{ $scaling.gateway.maxReplicas }}
{{- end }}
{{- end -}}

{{/* The release's labels, as `kubectl -l` takes them. */}}
{{- define "expertmesh.matchLabels" -}}
{{- $pairs := list -}}
{{- range $key, $value := include "expertmesh.selector" (dict "root" .root) | fromYaml }}{{ $pairs = append $pairs (printf "%s=%s" $key $value) }}{{ end -}}
{{- join "," $pairs -}}
{{- end -}}

{{/* Labels of the release's series, as Prometheus has them. */}}
{{- define "expertmesh.series" -}}
{{- $own := printf "namespace=%q,app_kubernetes_io_instance=%q" .root.Release.Namespace .root.Release.Name -}}
{{- .root.Values.autoscaling.prometheus.matchers | default $own -}}
{{- end -}}

{{/* Takes `root`, `role`, `shard` ("" but for experts), `kind`, `name` and perhaps `apiVersion` of the workload, `bounds`. Zero is asleep: gateways never are. */}}
{{- define "expertmesh.scaledObject" -}}
{{- $scaling := .root.Values.autoscaling -}}
{{- $sleeps := and (ne .role "gateway") (gt (float64 $scaling.sleepAfterSeconds) 0.0) -}}
{{- $own := dict "serverAddress" $scaling.prometheus.serverAddress "threshold" "1" "activationThreshold" "0" "ignoreNullValues" "false" "query" (printf "max(expertmesh_wanted_replicas{%s,role=%q,shard=%q})" (include "expertmesh.series" .) .role .shard) -}}
{{- with $scaling.prometheus.authModes }}{{ $_ := set $own "authModes" . }}{{ end -}}
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata: {{- include "expertmesh.metadata" (pick . "root" "role" "name" "group") | nindent 2 }}
spec:
  scaleTargetRef: {apiVersion: {{ .apiVersion | default "apps/v1" }}, kind: {{ .kind }}, name: {{ .name | quote }}}
  minReplicaCount: {{ ternary 0 (int .bounds.minReplicas) $sleeps }}
  maxReplicaCount: {{ .bounds.maxReplicas }}
  pollingInterval: {{ $scaling.pollingInterval }}
  cooldownPeriod: {{ $scaling.cooldownPeriod }}
  advanced:
    horizontalPodAutoscalerConfig:
      behavior: {{- toYaml $scaling.behavior | nindent 8 }}
  triggers:
    - type: prometheus
      metricType: AverageValue
      metadata: {{- include "expertmesh.layered" (list $scaling.prometheus.metadata $own) | nindent 8 }}
      {{- if $scaling.prometheus.authenticationRef }}
      authenticationRef: {{- toYaml $scaling.prometheus.authenticationRef | nindent 8 }}
      {{- else if $scaling.prometheus.existingSecret }}
      authenticationRef: {name: {{ include "expertmesh.name" (dict "root" .root "role" "prometheus") | quote }}}
      {{- end }}
{{- end -}}
