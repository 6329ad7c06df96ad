{{/* The pod of the Job that fetches the model. A failed one stays, with its last words. */}}
{{- define "expertmesh.fetchPod" -}}
{{- $values := .root.Values -}}
{{- $fetch := $values.model.pvc.prefetch -}}
metadata:
  labels:
    {{- include "expertmesh.layered" (list $fetch.podLabels (include "expertmesh.selector" . | fromYaml)) | nindent 4 }}
  {{- with $fetch.podAnnotations }}
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
  {{- include "expertmesh.placement" (dict "root" .root "values" $fetch) | nindent 2 }}
  securityContext: {{- toYaml $values.podSecurityContext | nindent 4 }}
  containers:
    - name: fetch
      image: {{ include "expertmesh.image" (dict "root" .root "image" $values.images.control) | quote }}
      imagePullPolicy: {{ $values.images.control.pullPolicy }}
      args:
        - fetch
        - {{ include "expertmesh.modelPath" . | quote }}
        - --source
        - {{ $fetch.source | quote }}
        {{- range $file, $digest := $fetch.sha256 }}
        - --sha256
        - {{ printf "%s=%s" $file $digest | quote }}
        {{- end }}
      {{- with $fetch.extraEnv }}
      env: {{- toYaml . | nindent 8 }}
      {{- end }}
      resources: {{- toYaml $fetch.resources | nindent 8 }}
      securityContext: {{- toYaml $values.containerSecurityContext | nindent 8 }}
      terminationMessagePolicy: FallbackToLogsOnError
      volumeMounts:
        - {name: model, mountPath: /model}
        - {name: tmp, mountPath: /tmp}
        {{- with $fetch.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - {{- include "expertmesh.modelVolume" . | nindent 6 }}
    - name: tmp
      emptyDir: {sizeLimit: {{ $values.tmpSize | default "2Gi" }}}
    {{- with $fetch.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
