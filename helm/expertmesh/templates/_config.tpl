{{/* The configuration file of one role: what the chart decides over the role's knobs over those of all. */}}
{{- define "expertmesh.config" -}}
{{- $values := .root.Values -}}
{{- $role := index $values .role -}}
{{- $own := dict "host" "0.0.0.0" "namespace" (include "expertmesh.keyPrefix" .) "log_format" "json" -}}
{{- if ne .role "scheduler" -}}
{{- $_ := set $own "model" (include "expertmesh.modelPath" .) -}}
{{- with $values.model.name }}{{ $_ := set $own "served_model_name" . }}{{ end -}}
{{- end -}}
{{- if hasKey $role "drainSeconds" }}{{ $_ := set $own "drain_timeout" $role.drainSeconds }}{{ end -}}
{{- if eq .role "gateway" -}}
{{- $_ := set $own "port" 8000 -}}
{{- $_ := set $own "drain_delay" $role.drainDelaySeconds -}}
{{- $_ := set $own "auth" (ternary "required" "off" $values.auth.enabled) -}}
{{- if $values.auth.enabled }}{{ $_ := set $own "api_keys_file" "/etc/expertmesh/keys/keys.yaml" }}{{ end -}}
{{- else -}}
{{- $_ := set $own "metrics_port" 9100 -}}
{{- end -}}
{{- if and (eq .role "scheduler") (eq $values.attention.experts "tcp") -}}
{{- $_ := set $own "expert_groups" $values.experts.groups -}}
{{- end -}}
{{- if eq .role "attention" }}{{ $_ := set $own "experts" $values.attention.experts }}{{ end -}}
{{- if eq .role "experts" }}{{ $_ := set $own "fabric_port" 7100 }}{{ end -}}
{{- if and (has .role (list "attention" "experts")) (eq $values.attention.experts "tcp") -}}
{{- $_ := set $own "fabric_secret_file" "/etc/expertmesh/fabric/secret" -}}
{{- $_ := set $own "fabric_lane" $values.fabric.lane -}}
{{- end -}}
{{- toYaml (merge $own $role.config $values.config) -}}
{{- end -}}

{{- define "expertmesh.redisEnv" -}}
{{- $redis := .root.Values.redis -}}
{{- if $redis.enabled }}
- name: REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ include "expertmesh.redisSecret" . }}, key: {{ $redis.auth.key }}}}
- name: EXPERTMESH_REDIS_URL
  value: redis://:$(REDIS_PASSWORD)@{{ include "expertmesh.fullname" . }}-redis:6379/0
{{- else if $redis.external.existingSecret }}
- name: EXPERTMESH_REDIS_URL
  valueFrom: {secretKeyRef: {name: {{ $redis.external.existingSecret }}, key: {{ $redis.external.key }}}}
{{- else }}
- name: EXPERTMESH_REDIS_URL
  value: {{ required "Give redis.external.url or redis.external.existingSecret, or set redis.enabled." $redis.external.url | quote }}
{{- end }}
{{- end -}}
