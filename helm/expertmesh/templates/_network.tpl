{{/* A NetworkPolicy's peers that are pods of this release with one of `roles`. */}}
{{- define "expertmesh.peers" -}}
{{- range .roles }}
- podSelector:
    matchLabels: {{- include "expertmesh.selector" (dict "root" $.root "role" .) | nindent 6 }}
{{- end }}
{{- end -}}

{{- define "expertmesh.egressToRedis" -}}
{{- if .root.Values.redis.enabled }}
- to: {{- include "expertmesh.peers" (dict "root" .root "roles" (list "redis")) | nindent 4 }}
  ports: {{ include "expertmesh.redisOwnPorts" . }}
{{- else }}
- ports: {{ include "expertmesh.redisPorts" . }}
  {{- with .root.Values.networkPolicy.redisTo }}
  to: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Ports of an external Redis: the value, or that of its URL; with Sentinels their ports from the URL, and Redis' own. */}}
{{- define "expertmesh.redisPorts" -}}
{{- $url := .root.Values.redis.external.url | default "redis://" -}}
{{- $hosts := splitList "," (regexReplaceAll "^[^:]*://(?:[^/?]*@)?([^/?]*).*$" $url "${1}") -}}
{{- $default := ternary "26379" "6379" (contains "+sentinel:" $url) -}}
{{- $ports := list -}}
{{- range $hosts }}{{ $ports = append $ports (regexFind ":[0-9]+$" . | trimPrefix ":" | default $default) }}{{ end -}}
{{- if contains "+sentinel:" $url }}{{ $ports = append $ports (.root.Values.networkPolicy.redisPort | default "6379" | toString) }}
{{- else if .root.Values.networkPolicy.redisPort }}{{ $ports = list (toString .root.Values.networkPolicy.redisPort) }}{{ end -}}
[{{ range $i, $port := uniq $ports }}{{ if $i }}, {{ end }}{port: {{ $port }}}{{ end }}]
{{- end -}}

{{/* The hop of every role to the collector of traces, where they are on. */}}
{{- define "expertmesh.egressToCollector" -}}
{{- if (.root.Values.tracing).enabled }}
{{- $url := .root.Values.tracing.endpoint -}}
{{- $given := regexFind ":[0-9]+$" (regexReplaceAll "^[^:]*://([^/]*).*$" $url "${1}") | trimPrefix ":" }}
- ports: [{port: {{ $given | default (ternary "443" "80" (hasPrefix "https:" $url)) }}}]
  {{- with .root.Values.networkPolicy.tracingTo }}
  to: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "expertmesh.ingressOfMetrics" -}}
{{- with .root.Values.networkPolicy.metricsFrom }}
- from: {{- toYaml . | nindent 4 }}
  ports: [{port: {{ $.port }}}]
{{- end }}
{{- end -}}

{{/* The ports of the seats of a pod: the i-th has 7100 + i. */}}
{{- define "expertmesh.seatPorts" -}}
ports: [{port: 7100, endPort: {{ add 7099 .root.Values.attention.workers }}}]
{{- end -}}

{{/* The ports that workers open for one another: NCCL and gloo choose theirs. */}}
{{- define "expertmesh.fabricPorts" -}}
{{- if eq .root.Values.fabric.lane "tcp" }}
ports: [{port: 7100}]
{{- end }}
{{- end -}}
