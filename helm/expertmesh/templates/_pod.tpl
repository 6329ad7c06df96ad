{{/*
The pod of one role. Takes `root`, `role`, `command` (where it is not the role's name), `image`, `port` (the name of the one with the probes), `ports`, `ready` (the
path of readiness), `startSeconds`, `graceSeconds`, and for expert workers `group`.
*/}}
{{- define "expertmesh.pod" -}}
{{- $root := .root -}}
{{- $values := .root.Values -}}
{{- $role := .values | default (index $values .role) -}}
{{- $computes := has .role (list "attention" "experts") -}}
{{- $hasModel := ne .role "scheduler" -}}
{{- $ca := ternary (include "expertmesh.redisTlsSecret" .) (ternary "" $values.redis.external.caSecret $values.redis.enabled) (ne (include "expertmesh.redisTls" .) "") -}}
{{- $caKey := ternary "ca.crt" $values.redis.external.caKey $values.redis.enabled -}}
{{- $encrypts := and $computes (include "expertmesh.fabricTls" .) -}}
{{- $proves := or (eq .role "experts") (eq (include "expertmesh.layout" .) "colocated") -}}
{{- $exchanges := and $computes (ne (include "expertmesh.layout" .) "local") -}}
{{- $ranks := and (eq .role "attention") (eq (include "expertmesh.layout" .) "lockstep") -}}
{{- $watches := and (eq .role "scheduler") (include "expertmesh.autoscaled" .) -}}
{{- $ofDeployment := not (or (hasKey . "group") $ranks) -}}
metadata:
  labels:
    {{- include "expertmesh.podLabels" (merge (dict "labels" $role.podLabels) .) | nindent 4 }}
  annotations:
    {{- include "expertmesh.layered" (list $values.commonAnnotations $role.podAnnotations (dict "checksum/config" (include "expertmesh.config" . | sha256sum))) | nindent 4 }}
spec:
  serviceAccountName: {{ include "expertmesh.name" . | quote }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ .graceSeconds }}
  {{- with $values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- include "expertmesh.placement" (dict "root" $root "selector" . "values" $role "lostSeconds" (ternary $values.nodeLostSeconds nil $ofDeployment)) | nindent 2 }}
  securityContext: {{- include "expertmesh.securityContext" (list $values.podSecurityContext $role.podSecurityContext) | nindent 4 }}
  {{- if and $hasModel (eq $values.model.source "pvc") $values.model.pvc.prefetch.enabled }}
  initContainers:
    - name: wait-for-model
      image: {{ include "expertmesh.image" (dict "root" $root "image" $values.images.control) }}
      imagePullPolicy: {{ $values.images.control.pullPolicy }}
      args: [fetch, --wait, {{ include "expertmesh.modelPath" . | quote }}, --source, {{ $values.model.pvc.prefetch.source | quote }}]
      securityContext: {{- toYaml $values.containerSecurityContext | nindent 8 }}
      resources: {{- toYaml ($values.model.pvc.prefetch.waitResources | default dict) | nindent 8 }}
      terminationMessagePolicy: FallbackToLogsOnError
      volumeMounts:
        - {name: model, mountPath: /model, readOnly: true}
        - {name: tmp, mountPath: /tmp}
  {{- end }}
  containers:
    - name: {{ .role }}
      image: {{ include "expertmesh.image" (dict "root" $root "image" .image) }}
      imagePullPolicy: {{ .image.pullPolicy }}
      args: [{{ .command | default .role }}]
      env:
        # So that `kubectl exec POD -- expertmesh status`, `top` and `queue` speak of this release.
        - {name: EXPERTMESH_CONFIG, value: /etc/expertmesh/config/config.yaml}
        {{- include "expertmesh.redisEnv" . | nindent 8 }}
        {{- if $computes }}
        - name: EXPERTMESH_ADVERTISE
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        {{- range $name, $value := $values.fabric.ncclEnv }}
        - {name: {{ $name }}, value: {{ $value | quote }}}
        {{- end }}
        {{- end }}
        {{- if $ranks }}
        - name: EXPERTMESH_RANK
          valueFrom: {fieldRef: {fieldPath: "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']"}}
        - {name: EXPERTMESH_LOCKSTEP_ADDRESS, value: "$(LWS_LEADER_ADDRESS):7200"}
        - name: EXPERTMESH_NODE
          valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
        {{- end }}
        {{- if hasKey . "group" }}
        - {name: EXPERTMESH_EXPERT_GROUP, value: {{ .group | quote }}}
        - name: EXPERTMESH_POD
          valueFrom: {fieldRef: {fieldPath: metadata.name}}
        {{- end }}
        {{- if ($values.tracing).enabled }}
        - name: POD_NAME
          valueFrom: {fieldRef: {fieldPath: metadata.name}}
        - {name: OTEL_RESOURCE_ATTRIBUTES, value: "k8s.namespace.name={{ .root.Release.Namespace }},k8s.pod.name=$(POD_NAME)"}
        {{- end }}
        {{- with $role.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        {{- range $name, $port := .ports }}
        - {name: {{ $name }}, containerPort: {{ $port }}}
        {{- end }}
      {{- include "expertmesh.probes" (dict "port" .port "ready" .ready "startSeconds" .startSeconds "changes" $role.probes) | nindent 6 }}
      resources: {{- toYaml $role.resources | nindent 8 }}
      securityContext: {{- include "expertmesh.securityContext" (list $values.containerSecurityContext $role.containerSecurityContext) | nindent 8 }}
      terminationMessagePolicy: FallbackToLogsOnError
      volumeMounts:
        - {name: config, mountPath: /etc/expertmesh/config, readOnly: true}
        - {name: tmp, mountPath: /tmp}
        {{- if and $hasModel (ne $values.model.source "bundled") }}
        - {name: model, mountPath: /model, readOnly: true}
        {{- end }}
        {{- if $computes }}
        - {name: shm, mountPath: /dev/shm}
        {{- end }}
        {{- if $exchanges }}
        - {name: fabric, mountPath: /etc/expertmesh/fabric, readOnly: true}
        {{- end }}
        {{- if $encrypts }}
        - {name: fabric-tls, mountPath: /etc/expertmesh/fabric-tls, readOnly: true}
        {{- end }}
        {{- if and (eq .role "gateway") $values.auth.enabled }}
        - {name: keys, mountPath: /etc/expertmesh/keys, readOnly: true}
        {{- end }}
        {{- if $watches }}
        - {name: api-token, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
        {{- end }}
        {{- if $ca }}
        - {name: redis-ca, mountPath: /etc/expertmesh/redis-ca, readOnly: true}
        {{- end }}
        {{- with $role.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: config
      configMap: {name: {{ include "expertmesh.name" . | quote }}}
    - name: tmp
      emptyDir: {sizeLimit: {{ $values.tmpSize | default "2Gi" }}}
    {{- if and $hasModel (ne $values.model.source "bundled") }}
    - {{- include "expertmesh.modelVolume" . | nindent 6 }}
    {{- end }}
    {{- if $computes }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $values.fabric.shmSize }}}
    {{- end }}
    {{- if $exchanges }}
    - name: fabric
      secret:
        secretName: {{ include "expertmesh.fabricSecret" . | quote }}
        defaultMode: 0440
        items: [{key: {{ $values.fabric.key | quote }}, path: secret}]
    {{- end }}
    {{- if $encrypts }}
    - name: fabric-tls
      secret:
        secretName: {{ include "expertmesh.fabricTlsSecret" . | quote }}
        defaultMode: 0440
        items: [{key: ca.crt, path: ca.crt}{{ if $proves }}, {key: tls.crt, path: tls.crt}, {key: tls.key, path: tls.key}{{ end }}]
    {{- end }}
    {{- if and (eq .role "gateway") $values.auth.enabled }}
    - name: keys
      secret:
        secretName: {{ include "expertmesh.keysSecret" . | quote }}
        defaultMode: 0440
        items: [{key: {{ $values.auth.key | quote }}, path: keys.yaml}]
    {{- end }}
    {{- if $watches }}
    - name: api-token
      projected:
        defaultMode: 0440
        sources:
          - serviceAccountToken: {path: token, expirationSeconds: 3607}
          - configMap: {name: kube-root-ca.crt, items: [{key: ca.crt, path: ca.crt}]}
          - downwardAPI: {items: [{path: namespace, fieldRef: {fieldPath: metadata.namespace}}]}
    {{- end }}
    {{- if $ca }}
    - name: redis-ca
      secret:
        secretName: {{ $ca | quote }}
        defaultMode: 0440
        items: [{key: {{ $caKey | quote }}, path: ca.crt}]
    {{- end }}
    {{- with $role.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* The pod of an attention worker, in any kind of workload. Takes `root` and `role`. */}}
{{- define "expertmesh.attentionPod" -}}
{{- $values := .root.Values -}}
{{- $attention := $values.attention -}}
{{- $ports := dict "metrics" 9100 -}}
{{- $own := dict "graceSeconds" (add $attention.drainSeconds 15) -}}
{{- if eq (include "expertmesh.layout" .) "colocated" -}}
{{- range $seat := until (int $attention.workers) }}{{ $_ := set $ports (printf "fabric-%d" $seat) (add 7100 $seat) }}{{ end -}}
{{- /* Attention drains, then its seat leaves the table and answers what it has, each in as much time. */ -}}
{{- $own = dict "command" "workers" "graceSeconds" (add (mul 3 $attention.drainSeconds) 15) -}}
{{- end -}}
{{- include "expertmesh.pod" (merge (dict "image" $values.images.worker "port" "metrics" "ports" $ports "ready" "/ready" "startSeconds" 300) $own .) -}}
{{- end -}}

{{/* The nodes that a pod may run on. Takes `root`, `selector` (a dict for expertmesh.selector), `values`, and for expertmesh.tolerations `lostSeconds`. */}}
{{- define "expertmesh.placement" -}}
{{- $values := .values -}}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with $values.resourceClaims }}
resourceClaims: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with include "expertmesh.tolerations" (dict "given" $values.tolerations "lostSeconds" .lostSeconds) | fromYamlArray }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- if $values.topologySpreadConstraints }}
topologySpreadConstraints: {{- toYaml $values.topologySpreadConstraints | nindent 2 }}
{{- else if ne ($values.spread | default "off") "off" }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: {{ ternary "DoNotSchedule" "ScheduleAnyway" (eq $values.spread "hard") }}
    labelSelector:
      matchLabels: {{- include "expertmesh.selector" .selector | nindent 8 }}
{{- end }}
{{- end -}}

{{/*
Those that are `given`, and for how many seconds a lost node is borne, where none of them says so: by the rule of the API
server's DefaultTolerationSeconds. null leaves it to that. Pods of StatefulSets get none: they have no successor before
their node is gone for good, and a node that comes back late would only lose pods that had served on.
*/}}
{{- define "expertmesh.tolerations" -}}
{{- $all := .given | default list -}}
{{- if not (kindIs "invalid" .lostSeconds) -}}
{{- range $taint := list "node.kubernetes.io/not-ready" "node.kubernetes.io/unreachable" -}}
{{- $said := false -}}
{{- range $.given -}}
{{- if and (eq (.key | default $taint) $taint) (eq (.effect | default "NoExecute") "NoExecute") }}{{ $said = true }}{{ end -}}
{{- end -}}
{{- if not $said -}}
{{- $all = append $all (dict "key" $taint "operator" "Exists" "effect" "NoExecute" "tolerationSeconds" (int $.lostSeconds)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $all -}}
{{- end -}}

{{/* A container's security context from several, of which the later ones count. Capabilities are merged by themselves: adding one still drops the others. */}}
{{- define "expertmesh.securityContext" -}}
{{- $capabilities := list -}}
{{- range . }}{{ $capabilities = append $capabilities ((. | default dict).capabilities | default dict) }}{{ end -}}
{{- $merged := include "expertmesh.layered" $capabilities | fromYaml -}}
{{- include "expertmesh.layered" (append . (ternary (dict "capabilities" $merged) dict (gt (len $merged) 0))) -}}
{{- end -}}

{{/*
Startup: the process listens. Readiness: the role can do its part, see ARCHITECTURE.md. Liveness: its event loop turns; an
engine that hangs ends its process by itself (see --experts-timeout), and what is away elsewhere is no reason to restart.
*/}}
{{- define "expertmesh.probes" -}}
{{- $health := dict "path" "/health" "port" .port -}}
{{- $startup := dict "httpGet" $health "periodSeconds" 2 "timeoutSeconds" 5 "failureThreshold" (div .startSeconds 2) -}}
{{- $readiness := dict "httpGet" (dict "path" .ready "port" .port) "periodSeconds" 3 "timeoutSeconds" 5 "failureThreshold" 2 -}}
{{- $liveness := dict "httpGet" $health "periodSeconds" 10 "timeoutSeconds" 10 "failureThreshold" 6 -}}
startupProbe: {{- toYaml (mergeOverwrite $startup (.changes.startup | default dict)) | nindent 2 }}
readinessProbe: {{- toYaml (mergeOverwrite $readiness (.changes.readiness | default dict)) | nindent 2 }}
livenessProbe: {{- toYaml (mergeOverwrite $liveness (.changes.liveness | default dict)) | nindent 2 }}
{{- end -}}

{{- define "expertmesh.modelVolume" -}}
{{- $model := .root.Values.model -}}
name: model
{{- if eq $model.source "hostPath" }}
hostPath:
  path: {{ required "Give model.hostPath.path." $model.hostPath.path }}
  type: {{ $model.hostPath.type | quote }}
{{- else if eq $model.source "pvc" }}
persistentVolumeClaim: {claimName: {{ include "expertmesh.modelClaim" . | quote }}}
{{- else }}
image:
  reference: {{ required "Give model.image.reference." $model.image.reference }}
  pullPolicy: {{ $model.image.pullPolicy }}
{{- end }}
{{- end -}}

{{/*
Takes `root`, `kind`, `name` and `replicas` of a workload. Left out where something else counts the pods: an upgrade must not
set them back. Where KEDA counts them the upgrade names the number that it finds: to leave out what the release before gave
would set it to 1.
*/}}
{{- define "expertmesh.replicas" -}}
{{- if include "expertmesh.autoscaled" . -}}
{{- $api := .apiVersion | default "apps/v1" -}}
{{- $found := dict -}}
{{- if .root.Capabilities.APIVersions.Has $api }}{{ $found = lookup $api .kind .root.Release.Namespace .name }}{{ end -}}
{{- $spec := $found.spec | default dict -}}
{{- if hasKey $spec "replicas" -}}
replicas: {{ int $spec.replicas }}
{{- end -}}
{{- else if not (kindIs "invalid" .replicas) -}}
replicas: {{ .replicas }}
{{- end -}}
{{- end -}}

{{/* How a Deployment's pods are replaced, by the role's values. */}}
{{- define "expertmesh.updates" -}}
{{- $updates := (index .root.Values .role).rollingUpdate -}}
rollingUpdate: {maxSurge: {{ $updates.maxSurge }}, maxUnavailable: {{ $updates.maxUnavailable }}}
type: RollingUpdate
{{- end -}}
