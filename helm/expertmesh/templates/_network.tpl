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
  ports: [{port: 6379}]
{{- else }}
- ports: [{port: {{ include "expertmesh.redisPort" . }}}]
  {{- with .root.Values.networkPolicy.redisTo }}
  to: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Of an external Redis: the value, or what its URL says. */}}
{{- define "expertmesh.redisPort" -}}
{{- $host := (urlParse (.root.Values.redis.external.url | default "redis://")).host -}}
{{- .root.Values.networkPolicy.redisPort | default (regexFind ":[0-9]+$" $host | trimPrefix ":" | default "6379") -}}
{{- end -}}

{{- define "expertmesh.ingressOfMetrics" -}}
{{- with .root.Values.networkPolicy.metricsFrom }}
- from: {{- toYaml . | nindent 4 }}
  ports: [{port: {{ $.port }}}]
{{- end }}
{{- end -}}

{{/* The ports that workers open for one another: NCCL and gloo choose theirs. */}}
{{- define "expertmesh.fabricPorts" -}}
{{- if eq .root.Values.fabric.lane "tcp" }}
ports: [{port: 7100}]
{{- end }}
{{- end -}}
