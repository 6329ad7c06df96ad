{{/*
Ends an upgrade that changes what stands in Redis: shard groups that are in use, or the model. `found` is the ConfigMap of
the release's scheduler, if there is one.
*/}}
{{- define "expertmesh.unchanged" -}}
{{- with .found -}}
{{- $before := index (.data | default dict) "config.yaml" | default "{}" | fromYaml -}}
{{- $after := include "expertmesh.config" (dict "root" $.root "role" "scheduler") | fromYaml -}}
{{- $hint := "Give another redis.keyPrefix with it (what waits in the queue is left behind), or install another release." -}}
{{- if eq (toString $before.namespace) (toString $after.namespace) -}}
{{- if and $before.expert_groups $after.expert_groups (ne (toString $before.expert_groups) (toString $after.expert_groups)) -}}
{{- fail (printf "%s is %v in the installed release, not %v: groups that are in use stand. %s" (include "expertmesh.shardGroupsValue" $) $before.expert_groups $after.expert_groups $hint) -}}
{{- end -}}
{{- $model := get (.metadata.annotations | default dict) "expertmesh.io/model" -}}
{{- $new := include "expertmesh.modelIdentity" $ -}}
{{- if and $model (ne $model $new) -}}
{{- fail (printf "The installed release serves the model %s, not %s. %s" $model $new $hint) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Ends an upgrade that would leave what a long name without a hash has, secrets and queue. `found`: the ConfigMap of its scheduler. */}}
{{- define "expertmesh.sameName" -}}
{{- $label := "app.kubernetes.io/instance" -}}
{{- with (.found | default dict).metadata -}}
{{- if eq (get .labels $label) $.root.Release.Name -}}
{{- fail (printf "The installed release calls its objects %s, not %s: others would be made beside them, with another Redis and other secrets. Set fullnameOverride=%[1]s to keep them." (trimSuffix "-scheduler" .name) (include "expertmesh.fullname" $)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The layout. Without the value, as with values of an earlier chart, it is disaggregated. */}}
{{- define "expertmesh.layout" -}}
{{- .root.Values.layout | default "disaggregated" -}}
{{- end -}}

{{/* How many shard groups there are in Redis; empty where there are none (local, lockstep). */}}
{{- define "expertmesh.shardGroups" -}}
{{- $attention := .root.Values.attention -}}
{{- if eq (include "expertmesh.layout" .) "disaggregated" }}{{ .root.Values.experts.groups }}{{ end -}}
{{- if eq (include "expertmesh.layout" .) "colocated" }}{{ int $attention.colocated.groups | default (int $attention.workers) }}{{ end -}}
{{- end -}}

{{/* The value that sets the number of shard groups. */}}
{{- define "expertmesh.shardGroupsValue" -}}
{{- if eq (include "expertmesh.layout" .) "disaggregated" -}}
experts.groups
{{- else -}}
attention.colocated.groups{{ if not (int .root.Values.attention.colocated.groups) }} (0: as many as attention.workers){{ end }}
{{- end -}}
{{- end -}}

{{/* Settings of schedulers and attention workers for the layout. Pods have no memory in common, workers of one pod do. */}}
{{- define "expertmesh.layoutConfig" -}}
{{- $layout := include "expertmesh.layout" . -}}
layout: {{ $layout }}
{{- if has $layout (list "colocated" "lockstep") }}
workers: {{ .root.Values.attention.workers }}
{{- end }}
{{- if eq .role "attention" }}
{{- if ne $layout "colocated" }}
fabric_shared: "off"
{{- else }}
fabric_shared: {{ .root.Values.attention.colocated.shared | quote }}
expert_groups: {{ include "expertmesh.shardGroups" . }}
fabric_port: 7100
{{- end }}
{{- end }}
{{- end -}}

{{/* The configuration file of one role: what the chart decides over the role's settings over those of all. */}}
{{- define "expertmesh.config" -}}
{{- $values := .root.Values -}}
{{- $role := index $values .role -}}
{{- $seats := and (eq .role "attention") (eq (include "expertmesh.layout" .) "colocated") -}}
{{- $own := dict "host" $values.bindAddress "namespace" (include "expertmesh.keyPrefix" .) "log_format" "json" -}}
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
{{- end -}}
{{- $_ := set $own "metrics_port" 9100 -}}
{{- with ternary (include "expertmesh.shardGroups" .) "" (eq .role "scheduler") }}{{ $_ := set $own "expert_groups" (int .) }}{{ end -}}
{{- if include "expertmesh.autoscaled" . -}}
{{- $own = merge $own (include "expertmesh.autoscalingConfig" . | fromYaml) -}}
{{- end -}}
{{- if has .role (list "scheduler" "attention") -}}
{{- $own = merge $own (include "expertmesh.layoutConfig" . | fromYaml) -}}
{{- end -}}
{{- if eq .role "experts" -}}
{{- $own = merge $own (dict "fabric_port" 7100 "fabric_shared" "off") -}}
{{- end -}}
{{- if and (has .role (list "attention" "experts")) (ne (include "expertmesh.layout" .) "local") -}}
{{- $_ := set $own "fabric_secret_file" "/etc/expertmesh/fabric/secret" -}}
{{- if eq (include "expertmesh.layout" .) "disaggregated" }}{{ $_ := set $own "fabric_lane" $values.fabric.lane }}{{ end -}}
{{- end -}}
{{- if include "expertmesh.fabricTls" . -}}
{{- if or $seats (eq .role "experts") -}}
{{- $_ := set $own "fabric_tls_cert" "/etc/expertmesh/fabric-tls/tls.crt" -}}
{{- $_ := set $own "fabric_tls_key" "/etc/expertmesh/fabric-tls/tls.key" -}}
{{- end -}}
{{- if eq .role "attention" -}}
{{- $_ := set $own "fabric_tls_ca" "/etc/expertmesh/fabric-tls/ca.crt" -}}
{{- $_ := set $own "fabric_tls_name" (include "expertmesh.fabricName" .) -}}
{{- end -}}
{{- end -}}
{{- if ($values.tracing).enabled -}}
{{- $_ := set $own "otlp_endpoint" $values.tracing.endpoint -}}
{{- $_ := set $own "trace_sample" (float64 $values.tracing.sample) -}}
{{- end -}}
{{- include "expertmesh.layered" (list $values.config (ternary $values.experts.config dict $seats) $role.config $own) -}}
{{- end -}}

{{/* "true" where rows between workers are encrypted: those of expert workers and seats. */}}
{{- define "expertmesh.fabricTls" -}}
{{- if and (.root.Values.fabric.tls).enabled (has (include "expertmesh.layout" .) (list "disaggregated" "colocated")) }}true{{ end -}}
{{- end -}}

{{/* The name in the certificate of workers: one for all, which is no worker's address. */}}
{{- define "expertmesh.fabricName" -}}
{{- $of := ternary "experts" "attention" (eq (include "expertmesh.layout" .) "disaggregated") -}}
{{- (.root.Values.fabric.tls).serverName | default (printf "%s-%s.%s.svc" (include "expertmesh.fullname" .) $of .root.Release.Namespace) -}}
{{- end -}}

{{- define "expertmesh.redisEnv" -}}
{{- $redis := .root.Values.redis -}}
{{- $ca := ternary "?ssl_ca_certs=/etc/expertmesh/redis-ca/ca.crt" "" (ne (include "expertmesh.redisTls" .) "") -}}
{{- $place := printf "%s-redis:%s/0%s" (include "expertmesh.fullname" .) (include "expertmesh.redisPort" .) $ca -}}
{{- $scheme := ternary "rediss" "redis" (ne $ca "") -}}
{{- if and (include "expertmesh.redisAcl" .) (ne $redis.acl.login "default") }}
{{- $user := include "expertmesh.redisUser" . }}
- name: REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ include "expertmesh.redisUsersSecret" . | quote }}, key: {{ $user }}}}
- name: EXPERTMESH_REDIS_URL
  value: {{ $scheme }}://{{ $user }}:$(REDIS_PASSWORD)@{{ $place }}
{{- else if $redis.enabled }}
- name: REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ include "expertmesh.redisSecret" . | quote }}, key: {{ $redis.auth.key | quote }}}}
- name: EXPERTMESH_REDIS_URL
  value: {{ $scheme }}://:$(REDIS_PASSWORD)@{{ $place }}
{{- else if $redis.external.existingSecret }}
- name: EXPERTMESH_REDIS_URL
  valueFrom: {secretKeyRef: {name: {{ $redis.external.existingSecret | quote }}, key: {{ get ($redis.external.keys | default dict) .role | default $redis.external.key | quote }}}}
{{- else }}
- name: EXPERTMESH_REDIS_URL
  value: {{ required "Give redis.external.url or redis.external.existingSecret, or set redis.enabled." $redis.external.url | quote }}
{{- end }}
{{- if and (not $redis.enabled) $redis.external.caSecret }}
- {name: SSL_CERT_FILE, value: /etc/expertmesh/redis-ca/ca.crt}
{{- end }}
{{- end -}}
