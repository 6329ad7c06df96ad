{{- define "expertmesh.redisConf" -}}
dir /data
appendonly yes
appendfsync everysec
save ""
maxmemory-policy noeviction
{{- with .Values.redis.maxmemory }}
maxmemory {{ . }}
{{- end }}
{{- with .Values.redis.extraConfig }}
{{ . }}
{{- end }}
include /run/redis/auth.conf
{{- end -}}

{{/* The password goes into a file in memory: arguments are seen by whoever lists processes. */}}
{{- define "expertmesh.redisStart" -}}
umask 077
printf 'requirepass %s\n' "$REDISCLI_AUTH" > /run/redis/auth.conf
exec redis-server /etc/redis/redis.conf
{{- end -}}
