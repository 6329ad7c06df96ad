{{/*
What Secrets that this chart made hold: drawn at the first installation, never changed by an upgrade, not even where the values
give an entry another name. `found` is the Secret, if there is one.
*/}}

{{/* A Secret of one entry, called `key` by the value `setting`. Takes `name` (of the Secret) and `new` too. */}}
{{- define "expertmesh.kept" -}}
{{- $data := (.found | default dict).data -}}
{{- if not $data -}}
{{- .new | b64enc -}}
{{- else if get $data .key -}}
{{- get $data .key -}}
{{- else if eq (len $data) 1 -}}
{{- values $data | first -}}
{{- else -}}
{{- fail (printf "%s is %s, but the Secret %s that is kept has %s. Set %s to the one that is in use, or %sexistingSecret to a Secret of yours." .setting .key .name (keys $data | sortAlpha | join ", ") .setting (trimSuffix "key" .setting)) -}}
{{- end -}}
{{- end -}}

{{/* A password for each user of Redis: a later release that knows one more draws that alone. Takes `root` and `found`. */}}
{{- define "expertmesh.keptUsers" -}}
{{- $data := (.found | default dict).data | default dict -}}
{{- range include "expertmesh.redisUserNames" . | fromYamlArray }}
{{ . }}: {{ get $data . | default (randAlphaNum 40 | b64enc) }}
{{- end }}
{{- end -}}

{{/*
The entries for API keys: the file of hashed keys, and a key in plain text for `helm test`. Under other names they are known by
what they are. Without the plain one, which may have been taken away, none is made: its hash would not be in the file.
*/}}
{{- define "expertmesh.keptApiKeys" -}}
{{- $auth := .root.Values.auth -}}
{{- $plainKey := $auth.plainKey | default "api-key" -}}
{{- $data := (.found | default dict).data -}}
{{- $file := get ($data | default dict) $auth.key -}}
{{- $plain := get ($data | default dict) $plainKey -}}
{{- if not $data -}}
{{- $plain = printf "em-%s" (randAlphaNum 43) | b64enc -}}
{{- $file = printf "keys:\n- name: default\n  sha256: %s\n" (b64dec $plain | sha256sum) | b64enc -}}
{{- else -}}
{{- $files := list -}}
{{- range $value := $data }}{{ if hasKey (b64dec $value | fromYaml) "keys" }}{{ $files = append $files $value }}{{ end }}{{ end -}}
{{- if and (not $file) (ne (len $files) 1) -}}
{{- fail (printf "auth.key is %s, but the Secret %s that is kept has %s. Set auth.key to the one with the hashed keys in use, or auth.existingSecret to a Secret of yours." $auth.key .name (keys $data | sortAlpha | join ", ")) -}}
{{- end -}}
{{- $file = $file | default (first $files) -}}
{{- range $value := ternary dict $data (ne $plain "") }}{{ if contains (b64dec $value | sha256sum) (b64dec $file) }}{{ $plain = $value }}{{ end }}{{ end -}}
{{- end -}}
{{- with $plain -}}
{{ $plainKey }}: {{ . }}
{{ end -}}
{{ $auth.key }}: {{ $file }}
{{- end -}}
