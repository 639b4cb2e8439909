{{- define "polyrl.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "polyrl.labels" -}}
app.kubernetes.io/name: polyrl-trainer
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- /* A table of TOML in one line. */ -}}
{{- define "polyrl.table" -}}
{ {{- range $key, $value := . }}{{ if ne $key (keys $ | sortAlpha | first) }}, {{ end }}{{ $key | toJson }} = {{ $value | toString | toJson }}{{ end -}} }
{{- end -}}

{{- /* What the chart says in place of the recipe: where the run listens, and where its workers come from. */ -}}
{{- define "polyrl.settings" -}}
- manager.host=0.0.0.0
- manager.port=5000
- manager.address={{ include "polyrl.name" . }}.{{ .Release.Namespace }}.svc
- weights.port=5100
- fleet.provider=kubernetes
- {{ printf "fleet.provider_args.image=%s" (.Values.workerImage | default .Values.image) | toJson }}
- fleet.provider_args.gpus={{ .Values.worker.gpus }}
- fleet.provider_args.grace_s={{ .Values.worker.graceSeconds }}
{{- with .Values.worker.resources }}
- {{ printf "fleet.provider_args.resources=%s" (include "polyrl.table" .) | toJson }}
{{- end }}
{{- with .Values.worker.nodeSelector }}
- {{ printf "fleet.provider_args.node_selector=%s" (include "polyrl.table" .) | toJson }}
{{- end }}
{{- with .Values.models.existingClaim }}
- {{ printf "fleet.provider_args.claims=%s" (include "polyrl.table" (dict . "/models")) | toJson }}
{{- end }}
{{- range .Values.settings }}
- {{ . | toJson }}
{{- end }}
{{- end -}}
