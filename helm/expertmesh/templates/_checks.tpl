{{/*
Values that contradict one another: each define says in lines what is wrong, and any line ends the rendering. What is switched
off as a whole (its `enabled`, expert workers by layout) may keep its settings: a values file then has a switch. What
concerns one value alone stands in its `# @schema`, what only a cluster knows in expertmesh.unchanged and expertmesh.kept.
*/}}
{{- define "expertmesh.checks" -}}
{{- $said := list -}}
{{- range $part := list "renamed" "redis" "tls" "model" "secrets" "groups" "workers" "scaling" "prometheus" "tracing" "objects" -}}
{{- range include (printf "expertmesh.checks.%s" $part) $ | splitList "\n" -}}
{{- with trim . }}{{ $said = append $said . }}{{ end -}}
{{- end -}}
{{- end -}}
{{- with $said }}{{ fail (printf "invalid values:\n%s" (uniq . | join "\n")) }}{{ end -}}
{{- end -}}

{{/* Names of an earlier chart and of an earlier server's settings: files/renamed.yaml has what to say now. */}}
{{- define "expertmesh.checks.renamed" -}}
{{- $names := .Files.Get "files/renamed.yaml" | fromYaml -}}
{{- range $path, $now := $names.values }}
{{- $found := $.Values }}
{{- range $part := splitList "." $path }}{{ if kindIs "map" $found }}{{ $found = get $found $part }}{{ end }}{{ end }}
{{- if ne (toString $found) "" }}
{{ $path }} is no longer a value. {{ $now }}{{ if not $.Values.layout }} With --reset-then-reuse-values instead of --reuse-values the defaults are this chart's.{{ end }}
{{- end }}
{{- end }}
{{- range $name, $config := dict "config" .Values.config "gateway.config" .Values.gateway.config "scheduler.config" .Values.scheduler.config "attention.config" .Values.attention.config "experts.config" .Values.experts.config }}
{{- range $setting := keys ($config | default dict) | sortAlpha }}{{ with get $names.settings $setting }}
{{ $name }}.{{ $setting }} is no longer a setting. {{ . }} (An option such as --max-num-seqs is max_num_seqs here.)
{{- end }}{{ end }}
{{- end }}
{{- end -}}

{{- define "expertmesh.checks.redis" -}}
{{- $redis := .Values.redis -}}
{{- $policy := .Values.networkPolicy -}}
{{- if $redis.enabled -}}
{{- range $name := list "url" "existingSecret" "caSecret" }}{{ if index $redis.external $name }}
redis.external.{{ $name }} is given, but redis.enabled=true runs a Redis of the chart's, and that is used. Set redis.enabled=false for the external one, or leave redis.external.{{ $name }} empty.
{{- end }}{{ end }}
{{- range $name := list "redisTo" "redisPort" }}{{ if and $policy.enabled (index $policy $name) }}
networkPolicy.{{ $name }} says where an external Redis is, but redis.enabled=true runs one of the chart's. Set redis.enabled=false with redis.external, or leave networkPolicy.{{ $name }} out.
{{- end }}{{ end }}
{{- with $redis.acl }}{{ if and .enabled (eq (.login | default "role") "default") (not .defaultUser) }}
redis.acl.login=default has pods log in as a user that redis.acl.defaultUser=false turns away. Set redis.acl.defaultUser=true for as long, or leave redis.acl.login=role.
{{- end }}{{ end }}
{{- else }}
{{- if regexMatch "^[^/]*//[^/?]*:[^/?]*@|[?&](sentinel_)?password=" $redis.external.url }}
redis.external.url carries a password, which would stand in the pods of every role. Put the whole URL into a Secret: kubectl create secret generic NAME --from-file=redis-url=FILE, then redis.external.existingSecret=NAME and redis.external.url without it.
{{- end }}
{{- if and $redis.external.keys (not $redis.external.existingSecret) }}
redis.external.keys names entries of a Secret, but redis.external.existingSecret is empty. Give that, or leave redis.external.keys out.
{{- end }}
{{- if and $redis.external.caSecret $redis.external.url (not $redis.external.existingSecret) (not (hasPrefix "rediss" $redis.external.url)) }}
redis.external.caSecret is {{ $redis.external.caSecret }}, but redis.external.url asks for no TLS. Begin that with rediss:// (rediss+sentinel:// for Sentinels), or leave redis.external.caSecret empty.
{{- end }}
{{- end }}
{{- end -}}

{{- define "expertmesh.checks.tracing" -}}
{{- $tracing := .Values.tracing | default dict -}}
{{- if and $tracing.enabled (not $tracing.endpoint) }}
tracing.enabled is true, but nothing says where traces go. Give tracing.endpoint, the collector's address for OTLP over HTTP.
{{- end }}
{{- end -}}

{{/* Where a certificate comes from, of Redis and of the workers. */}}
{{- define "expertmesh.checks.tls" -}}
{{- range $name, $used := dict "redis" (include "expertmesh.redisTls" (dict "root" $)) "fabric" (include "expertmesh.fabricTls" (dict "root" $)) }}
{{- $tls := (index $.Values $name).tls | default dict }}
{{- if $used }}
{{- if and $tls.certManager.enabled (not $tls.certManager.issuerRef.name) }}
{{ $name }}.tls.certManager.enabled is true, but {{ $name }}.tls.certManager.issuerRef has no name. Give the issuer, as {name: mesh, kind: Issuer}.
{{- else if not (or $tls.certManager.enabled $tls.secretName) }}
{{ $name }}.tls.enabled is true, but nothing says where the certificate is. Give {{ $name }}.tls.secretName, or {{ $name }}.tls.certManager with enabled and an issuerRef.
{{- end }}
{{- end }}
{{- end }}
{{- if (.Values.fabric.tls).enabled }}
{{- if and (include "expertmesh.fabricTls" (dict "root" $)) (eq .Values.fabric.lane "nccl") }}
fabric.lane is {{ .Values.fabric.lane }}, which cannot be encrypted, but fabric.tls.enabled is true. Set fabric.lane to auto or tcp, or fabric.tls.enabled=false.
{{- end }}
{{- if eq (include "expertmesh.layout" (dict "root" $)) "lockstep" }}
fabric.tls.enabled is true, but layout=lockstep passes rows by NCCL or gloo, which cannot be encrypted. Choose another layout, or set fabric.tls.enabled=false.
{{- end }}
{{- end }}
{{- end -}}

{{/* Each source reads its own values, and another's would be passed over. */}}
{{- define "expertmesh.checks.model" -}}
{{- $model := .Values.model -}}
{{- $mine := dict "hostPath" (list "path" "type") "pvc" (list "existingClaim" "storageClassName") "image" (list "reference") -}}
{{- range $source, $names := omit $mine $model.source }}
{{- range $name := $names }}{{ with index $model $source $name }}
model.{{ $source }}.{{ $name }} is {{ . }}, but model.source is {{ $model.source }}, which does not read it. Set model.source={{ $source }}, or leave model.{{ $source }}.{{ $name }} empty.
{{- end }}{{ end }}
{{- end }}
{{- if and $model.pvc.prefetch.enabled (ne $model.source "pvc") }}
model.pvc.prefetch.enabled is true, but model.source is {{ $model.source }}, so nothing is fetched. Set model.source=pvc, or model.pvc.prefetch.enabled=false.
{{- end }}
{{- if and $model.subPath (eq $model.source "bundled") }}
model.subPath is {{ $model.subPath }}, but model.source is bundled, the one model in the images. Set model.source to hostPath, pvc or image, or leave model.subPath empty.
{{- end }}
{{- if and (eq $model.source "pvc") $model.pvc.existingClaim $model.pvc.storageClassName }}
model.pvc.storageClassName is {{ $model.pvc.storageClassName }}, for a claim that the chart makes, but model.pvc.existingClaim is {{ $model.pvc.existingClaim }}, and none is made. Leave one of them empty.
{{- end }}
{{- end -}}

{{- define "expertmesh.checks.secrets" -}}
{{- $auth := .Values.auth -}}
{{- if and $auth.enabled (eq $auth.key ($auth.plainKey | default (ternary "" "api-key" (ne $auth.existingSecret "")))) }}
auth.key and auth.plainKey are both {{ $auth.key }}: one is the file of hashed keys, the other a key in plain text. Give them different names.
{{- end }}
{{- end -}}

{{- define "expertmesh.checks.groups" -}}
{{- $experts := .Values.experts -}}
{{- if eq (include "expertmesh.layout" (dict "root" $)) "disaggregated" -}}
{{- range $number, $_ := $experts.perGroup }}
{{- if not (regexMatch "^(0|[1-9][0-9]*)$" $number | ternary (lt (atoi $number) (int $experts.groups)) false) }}
experts.perGroup names group {{ $number }}, but experts.groups is {{ int $experts.groups }}: groups are counted from 0. Raise experts.groups, or leave that group out.
{{- end }}
{{- end }}
{{- end -}}
{{- include "expertmesh.checks.claims" (dict "name" "attention" "values" .Values.attention) }}
{{- if eq (include "expertmesh.layout" (dict "root" $)) "disaggregated" -}}
{{- range $group := until (int $experts.groups) }}
{{- $own := get $experts.perGroup (toString $group) | default dict }}
{{- $name := ternary (printf "experts.perGroup.%d" $group) "experts" (or (hasKey $own "resources") (hasKey $own "resourceClaims")) }}
{{- include "expertmesh.checks.claims" (dict "name" $name "values" (include "expertmesh.layered" (list $experts $own) | fromYaml)) }}
{{- end }}
{{- end -}}
{{- end -}}

{{/* Several attention workers in a pod. Settings that they do not have are refused: `expertmesh workers` would refuse some of them. */}}
{{- define "expertmesh.checks.workers" -}}
{{- $attention := .Values.attention -}}
{{- $layout := include "expertmesh.layout" (dict "root" $) -}}
{{- if and (eq $layout "lockstep") (lt (int $attention.workers) 2) }}
attention.workers is {{ $attention.workers }}, but layout=lockstep has groups of 2 or more that compute together. Raise attention.workers, or choose another layout.
{{- end }}
{{- if eq $layout "colocated" -}}
{{- $groups := int $attention.colocated.groups }}
{{- if gt $groups (int $attention.workers) }}
attention.colocated.groups is {{ $groups }}, but attention.workers is {{ $attention.workers }}, of which each holds one group. Raise attention.workers, or lower attention.colocated.groups.
{{- end }}
{{- $gpus := 0 }}{{ $kinds := list }}
{{- range $name, $count := $attention.resources.limits | default dict }}{{ if hasPrefix "nvidia.com/" $name }}
{{- $gpus = add $gpus (int $count) }}{{ $kinds = append $kinds (printf "%s: %d" $name (int $count)) }}
{{- end }}{{ end }}
{{- if and $gpus (ne (int $gpus) (int $attention.workers)) }}
attention.resources.limits has {{ join ", " $kinds }}, but attention.workers is {{ $attention.workers }}, of which each takes one of the pod's GPUs. Make them equal.
{{- end }}
{{- if eq .Values.fabric.lane "nccl" }}
fabric.lane is {{ .Values.fabric.lane }}, but layout=colocated passes rows by shared memory and over TCP alone. Set fabric.lane to auto or tcp.
{{- end }}
{{- range $name, $config := dict "config" .Values.config "attention.config" $attention.config "experts.config" .Values.experts.config }}
{{- if contains ":" (get $config "device" | default "") }}
{{ $name }}.device is {{ $config.device }}, one device for all {{ $attention.workers }} workers of a pod. Set it to auto, cuda or cpu: the i-th worker takes the i-th GPU.
{{- end }}
{{- range $setting := list "overlap" "expert_slots" "expert_slices" "lockstep_exchange" }}{{ if hasKey $config $setting }}
{{ $name }}.{{ $setting }} is given, but workers with layout=colocated have no choice about it. Leave it out, or choose another layout.
{{- end }}{{ end }}
{{- end }}
{{- end -}}
{{- end -}}

{{/* What the one container uses of the pod's claims. A claim that no container names may be meant: drivers of network devices
set up the whole pod. Takes `name` and `values`. */}}
{{- define "expertmesh.checks.claims" -}}
{{- $pod := list }}{{ range .values.resourceClaims }}{{ $pod = append $pod .name }}{{ end -}}
{{- $used := list }}{{ range (.values.resources | default dict).claims }}{{ $used = append $used .name }}{{ end -}}
{{- range $claim := $used }}{{ if not (has $claim $pod) }}
{{ $.name }}.resources.claims has {{ $claim }}, which the pod does not claim. Add {{ $claim }} to {{ $.name }}.resourceClaims, or drop it.
{{- end }}{{ end }}
{{- end -}}

{{- define "expertmesh.checks.scaling" -}}
{{- $scaling := .Values.autoscaling -}}
{{- if $scaling.enabled -}}
{{- $bounds := dict "autoscaling.gateway" $scaling.gateway "autoscaling.attention" $scaling.attention "autoscaling.experts" $scaling.experts }}
{{- if ne (include "expertmesh.layout" (dict "root" $)) "disaggregated" }}{{ $_ := unset $bounds "autoscaling.experts" }}{{ end }}
{{- range $group, $own := ternary .Values.experts.perGroup dict (eq (include "expertmesh.layout" (dict "root" $)) "disaggregated") }}
{{- if or (hasKey $own "minReplicas") (hasKey $own "maxReplicas") }}{{ $_ := set $bounds (printf "experts.perGroup.%s" $group) (include "expertmesh.groupBounds" (dict "root" $ "group" $group) | fromYaml) }}{{ end }}
{{- end }}
{{- range $name, $each := $bounds }}{{ if gt (int $each.minReplicas) (int $each.maxReplicas) }}
{{ $name }}: minReplicas {{ $each.minReplicas }} is more than maxReplicas {{ $each.maxReplicas }}{{ if hasPrefix "experts" $name }} (one of them may be that of autoscaling.experts){{ end }}. Lower one or raise the other.
{{- end }}{{ end }}
{{- end -}}
{{- end -}}

{{/* How KEDA asks Prometheus. The values are required whether or not the cluster has KEDA. */}}
{{- define "expertmesh.checks.prometheus" -}}
{{- $prometheus := .Values.autoscaling.prometheus -}}
{{- if .Values.autoscaling.enabled -}}
{{- if not $prometheus.serverAddress }}
Give autoscaling.prometheus.serverAddress: KEDA asks Prometheus how many replicas are wanted.
{{- end }}
{{- if not (or .Values.metrics.podMonitor.enabled $prometheus.matchers) }}
autoscaling needs the scheduler's metrics in Prometheus: set metrics.podMonitor.enabled, or say in autoscaling.prometheus.matchers which labels they have there.
{{- end }}
{{- if and $prometheus.authModes (not (or $prometheus.authenticationRef $prometheus.existingSecret)) }}
autoscaling.prometheus.authModes is {{ $prometheus.authModes }} and needs authenticationRef or existingSecret beside it.
{{- end }}
{{- if and $prometheus.existingSecret $prometheus.authenticationRef }}
autoscaling.prometheus.existingSecret is {{ $prometheus.existingSecret }}, but authenticationRef names a TriggerAuthentication that is there already, and that is used. Leave one of them empty.
{{- else if and $prometheus.existingSecret (not $prometheus.authModes) }}
autoscaling.prometheus.existingSecret is {{ $prometheus.existingSecret }}, but without autoscaling.prometheus.authModes KEDA uses nothing of it. Give authModes (basic, bearer, tls, custom), or leave existingSecret empty.
{{- end }}
{{- $modes := nospace $prometheus.authModes | splitList "," }}
{{- if and (has "basic" $modes) (has "bearer" $modes) }}
autoscaling.prometheus.authModes has both basic and bearer, of which KEDA takes one. Leave the other out.
{{- end }}
{{- $needs := dict "basic" (list "username") "bearer" (list "bearerToken") "tls" (list "cert" "key") "custom" (list "customAuthHeader" "customAuthValue") }}
{{- range $mode := ternary $modes list (and (ne $prometheus.existingSecret "") (not $prometheus.authenticationRef)) }}
{{- range $key := get $needs $mode | default list }}{{ if not (has $key $prometheus.secretKeys) }}
autoscaling.prometheus.authModes has {{ $mode }}, which needs {{ $key }}, but autoscaling.prometheus.secretKeys is {{ join ", " $prometheus.secretKeys }}. Add {{ $key }}, and have it in the Secret {{ $prometheus.existingSecret }}.
{{- end }}{{ end }}
{{- end }}
{{- range $key := list "authModes" "query" "serverAddress" "threshold" "activationThreshold" "ignoreNullValues" }}{{ if hasKey $prometheus.metadata $key }}
autoscaling.prometheus.metadata.{{ $key }} is given, but the chart sets it {{ has $key (list "authModes" "serverAddress") | ternary (printf "from autoscaling.prometheus.%s: use that" $key) "itself: leave it out" }}.
{{- end }}{{ end }}
{{- end -}}
{{- end -}}

{{/* What the API server would refuse, after other objects are made. */}}
{{- define "expertmesh.checks.objects" -}}
{{- $name := include "expertmesh.fullname" (dict "root" $) -}}
{{- if contains "." $name }}
The release is called {{ .Release.Name }}, and a Service must not have a dot in its name, as in {{ $name }}-gateway. Give fullnameOverride, or the release another name.
{{- end }}
{{- /* Aggregation of APIs is in each cluster, and not in what helm assumes where it sees none. */}}
{{- $apis := .Capabilities.APIVersions }}
{{- if and (eq (include "expertmesh.layout" (dict "root" $)) "lockstep") ($apis.Has "apiregistration.k8s.io/v1") (not ($apis.Has "leaderworkerset.x-k8s.io/v1")) }}
layout=lockstep makes a LeaderWorkerSet, which this cluster does not know. Install its controller (https://lws.sigs.k8s.io), or set layout to disaggregated, colocated or local.
{{- end }}
{{- range $role := list "gateway" "scheduler" "attention" }}
{{- $updates := (index $.Values $role).rollingUpdate }}
{{- if and (regexMatch "^0+%?$" (toString $updates.maxSurge)) (regexMatch "^0+%?$" (toString $updates.maxUnavailable)) }}
{{ $role }}.rollingUpdate.maxSurge and {{ $role }}.rollingUpdate.maxUnavailable are both 0, so that no pod could ever be replaced. Give one of them 1 or more.
{{- end }}
{{- end }}
{{- $service := .Values.gateway.service }}
{{- if and $service.nodePort (eq $service.type "ClusterIP") }}
gateway.service.nodePort is {{ $service.nodePort }}, but gateway.service.type is ClusterIP, which has no port on nodes. Set gateway.service.type to NodePort or LoadBalancer, or leave gateway.service.nodePort out.
{{- end }}
{{- end -}}
