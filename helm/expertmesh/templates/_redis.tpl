{{- define "expertmesh.redisConf" -}}
dir /data
appendonly yes
appendfsync everysec
save ""
# The file is rewritten before it is half as long again, so that both fit on the volume.
auto-aof-rewrite-percentage 50
auto-aof-rewrite-min-size 32mb
maxmemory-policy noeviction
{{- with .Values.redis.maxmemory }}
maxmemory {{ . }}
{{- end }}
{{- with include "expertmesh.redisTls" (dict "root" $) }}
port {{ ternary 6379 0 (default false $.Values.redis.tls.plaintext) }}
tls-port 6380
tls-cert-file /etc/redis-tls/tls.crt
tls-key-file /etc/redis-tls/tls.key
tls-ca-cert-file /etc/redis-tls/ca.crt
tls-auth-clients no
{{- end }}
{{- with .Values.redis.extraConfig }}
{{ . }}
{{- end }}
include /run/redis/auth.conf
{{- end -}}

{{/* "true" where the chart's Redis has users of roles, or speaks TLS. Values of an earlier chart know neither. */}}
{{- define "expertmesh.redisAcl" -}}
{{- if and .root.Values.redis.enabled (.root.Values.redis.acl).enabled }}true{{ end -}}
{{- end -}}
{{- define "expertmesh.redisTls" -}}
{{- if and .root.Values.redis.enabled (.root.Values.redis.tls).enabled }}true{{ end -}}
{{- end -}}

{{/* The users of the chart's Redis but `default`, without passwords: helm/generate.py writes the file from services/queue/acl.py. */}}
{{- define "expertmesh.redisUsers" -}}
{{- .root.Files.Get "files/redis-users.acl" | replace "{KEYPREFIX}" (printf "{%s}" (include "expertmesh.keyPrefix" .)) -}}
{{- end -}}

{{/* Names of the users, as a YAML list. */}}
{{- define "expertmesh.redisUserNames" -}}
{{- $names := list -}}
{{- range .root.Files.Lines "files/redis-users.acl" }}{{ if . }}{{ $names = append $names (splitList " " . | rest | first) }}{{ end }}{{ end -}}
{{- toYaml $names -}}
{{- end -}}

{{/* The user of a role's pods. Takes `root` and `role`. */}}
{{- define "expertmesh.redisUser" -}}
{{- ternary "workers" .role (and (eq .role "attention") (eq (include "expertmesh.layout" .) "colocated")) -}}
{{- end -}}

{{- define "expertmesh.redisPort" -}}
{{- if include "expertmesh.redisTls" . }}6380{{ else }}6379{{ end -}}
{{- end -}}

{{/* Ports in the policies: the one in use, and the one for pods of an earlier release. */}}
{{- define "expertmesh.redisOwnPorts" -}}
[{port: {{ include "expertmesh.redisPort" . }}}{{ if and (include "expertmesh.redisTls" .) .root.Values.redis.tls.plaintext }}, {port: 6379}{{ end }}]
{{- end -}}

{{/* `redis-cli` within the pod, whose password comes by REDISCLI_AUTH. Takes `root` and `user`. */}}
{{- define "expertmesh.redisCli" -}}
redis-cli{{ if include "expertmesh.redisAcl" . }} --user {{ .user }}{{ end }}{{ if include "expertmesh.redisTls" . }} -h localhost -p 6380 --tls --cacert /etc/redis-tls/ca.crt{{ end -}}
{{- end -}}

{{/* Passwords go into a file in memory, users' as hashes: arguments are seen by whoever lists processes. */}}
{{- define "expertmesh.redisStart" -}}
{{- $scope := dict "root" . -}}
{{- $users := include "expertmesh.redisUserNames" $scope | fromYamlArray -}}
umask 077
{{- if include "expertmesh.redisAcl" $scope }}
hash() { printf %s "$1" | sha256sum | cut -d' ' -f1; }
sed{{ range $users }} -e "s/^user {{ . }} on/& #$(hash "$PASSWORD_{{ upper . }}")/"{{ end }} /etc/redis/users.acl > /run/redis/users.acl
case $(redis-server --version) in *' v=6.'*) sed -i 's/%R~/~/g' /run/redis/users.acl;; esac # it knows no keys for reading alone
{{- if .Values.redis.acl.defaultUser }}
echo "user default on #$(hash "$PASSWORD_DEFAULT") ~* &* +@all" >> /run/redis/users.acl
{{- else }}
echo 'user default off' >> /run/redis/users.acl
{{- end }}
echo 'aclfile /run/redis/users.acl' > /run/redis/auth.conf
{{- else }}
printf 'requirepass %s\n' "$REDISCLI_AUTH" > /run/redis/auth.conf
{{- end }}
{{- if include "expertmesh.redisTls" $scope }}
files() { cat /etc/redis-tls/tls.crt /etc/redis-tls/tls.key /etc/redis-tls/ca.crt | sha256sum; }
renew() { # has the server read a renewed certificate: by itself it reads one only as it starts
  known=$(files)
  while sleep 60 && kill -0 $$; do # as long as the server, which has this shell's number
    found=$(files)
    [ "$found" = "$known" ] && continue
    {{ include "expertmesh.redisCli" (merge (dict "user" "renewal") $scope) }} config set tls-cert-file /etc/redis-tls/tls.crt tls-key-file /etc/redis-tls/tls.key tls-ca-cert-file /etc/redis-tls/ca.crt | grep -qx OK && known=$found && echo 'renewed certificate in use'
  done
}
({{ if include "expertmesh.redisAcl" $scope }}export REDISCLI_AUTH="$PASSWORD_RENEWAL"; {{ end }}renew) &
{{- end }}
{{- if include "expertmesh.redisAcl" $scope }}
unset REDISCLI_AUTH PASSWORD_DEFAULT{{ range $users }} PASSWORD_{{ upper . }}{{ end }}
{{- end }}
exec redis-server /etc/redis/redis.conf
{{- end -}}

{{/* Environment of Redis' container: the passwords of all users, and that of the probe. */}}
{{- define "expertmesh.redisServerEnv" -}}
{{- $secret := include "expertmesh.redisSecret" . -}}
{{- $users := include "expertmesh.redisUsersSecret" . -}}
{{- $key := .root.Values.redis.auth.key -}}
{{- if include "expertmesh.redisAcl" . }}
- name: REDISCLI_AUTH
  valueFrom: {secretKeyRef: {name: {{ $users | quote }}, key: probe}}
{{- range include "expertmesh.redisUserNames" . | fromYamlArray }}
- name: PASSWORD_{{ upper . }}
  valueFrom: {secretKeyRef: {name: {{ $users | quote }}, key: {{ . }}}}
{{- end }}
{{- if .root.Values.redis.acl.defaultUser }}
- name: PASSWORD_DEFAULT
  valueFrom: {secretKeyRef: {name: {{ $secret | quote }}, key: {{ $key | quote }}}}
{{- end }}
{{- else }}
- name: REDISCLI_AUTH
  valueFrom: {secretKeyRef: {name: {{ $secret | quote }}, key: {{ $key | quote }}}}
{{- end }}
{{- end -}}
