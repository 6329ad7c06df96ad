{{/* Whether there is a load generator. */}}
{{- define "expertmesh.loads" -}}
{{- if or .root.Values.loadgen.enabled .root.Values.loadgen.onTest }}yes{{ end -}}
{{- end -}}

{{- define "expertmesh.loadgenClaim" -}}
{{- .root.Values.loadgen.results.existingClaim | default (printf "%s-loadgen" (include "expertmesh.fullname" .)) -}}
{{- end -}}

{{/*
The pod of the Job that sends load. With results on a volume each pod's file is named after the Job's pod, which no other run
has. A failed pod stays, with its last words, and is not started again: a run that is repeated is another run.
*/}}
{{- define "expertmesh.loadgenPod" -}}
{{- $values := .root.Values -}}
{{- $loadgen := $values.loadgen -}}
metadata:
  labels:
    {{- include "expertmesh.layered" (list $loadgen.podLabels (include "expertmesh.selector" . | fromYaml)) | nindent 4 }}
  {{- with $loadgen.podAnnotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  restartPolicy: Never
  serviceAccountName: {{ include "expertmesh.name" . | quote }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- with $values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- include "expertmesh.placement" (dict "root" .root "values" $loadgen) | nindent 2 }}
  securityContext: {{- toYaml $values.podSecurityContext | nindent 4 }}
  containers:
    - name: loadgen
      image: {{ include "expertmesh.image" (dict "root" .root "image" $values.images.control) | quote }}
      imagePullPolicy: {{ $values.images.control.pullPolicy }}
      command: [expertmesh-load]
      args:
        - run
        - {{ printf "http://%s-gateway:%d" (include "expertmesh.fullname" .) (int $values.gateway.service.port) | quote }}
        - --wait
        - {{ $loadgen.waitSeconds | quote }}
        {{- if gt (int $loadgen.shards) 1 }}
        - --shard
        - {{ printf "$(JOB_COMPLETION_INDEX)/%d" (int $loadgen.shards) | quote }}
        - --start-at
        - {{ printf "next:%d" (int $loadgen.startEverySeconds) | quote }}
        {{- end }}
        {{- if $loadgen.results.enabled }}
        - --out
        - /results/$(POD).json
        {{- end }}
        {{- range $word := $loadgen.args }}
        {{- /* Helm has numbers as floats: a million would be 1e+06. */}}
        {{- if kindIs "float64" $word }}{{ if eq $word (floor $word) }}{{ $word = int64 $word }}{{ end }}{{ end }}
        - {{ toString $word | quote }}
        {{- end }}
      env:
        - name: POD
          valueFrom: {fieldRef: {fieldPath: metadata.name}}
        {{- if and $values.auth.enabled $values.auth.plainKey }}
        - name: OPENAI_API_KEY
          valueFrom: {secretKeyRef: {name: {{ include "expertmesh.keysSecret" . | quote }}, key: {{ $values.auth.plainKey | quote }}, optional: true}}
        {{- end }}
        {{- with $loadgen.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      resources: {{- toYaml $loadgen.resources | nindent 8 }}
      securityContext: {{- toYaml $values.containerSecurityContext | nindent 8 }}
      terminationMessagePolicy: FallbackToLogsOnError
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        {{- if $loadgen.results.enabled }}
        - {name: results, mountPath: /results}
        {{- end }}
        {{- with $loadgen.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: {sizeLimit: {{ $values.tmpSize | default "2Gi" }}}
    {{- if $loadgen.results.enabled }}
    - name: results
      persistentVolumeClaim: {claimName: {{ include "expertmesh.loadgenClaim" . | quote }}}
    {{- end }}
    {{- with $loadgen.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
