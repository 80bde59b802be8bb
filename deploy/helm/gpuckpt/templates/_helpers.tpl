{{/* Of the resources alone: a pod whose labels change with the chart's version would be stopped by each upgrade. */}}
{{- define "gpuckpt.labels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: gpuckpt
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "gpuckpt.image" -}}
{{ printf "%s%s%s" .Values.image.repository (hasPrefix "sha256:" .Values.image.tag | ternary "@" ":") .Values.image.tag | quote }}
{{- end }}

{{/* Where pods run, and with which image: of all three. */}}
{{- define "gpuckpt.placement" -}}
automountServiceAccountToken: false
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
- name: {{ . | quote }}
{{- end }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Of what each node needs: nodes with GPUs are often closed to pods that use none. */}}
{{- define "gpuckpt.nodeTolerations" -}}
tolerations:
- {key: nvidia.com/gpu, operator: Exists}
{{- with without .Values.tolerations (dict "key" "nvidia.com/gpu" "operator" "Exists") }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Of a pod that saves what runs in it. */}}
{{- define "gpuckpt.pod" -}}
{{ include "gpuckpt.placement" . }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 0 }}
{{- end }}
terminationGracePeriodSeconds: {{ int .Values.gracePeriod }}
enableServiceLinks: false
securityContext:
{{- if not .Values.withRights }}
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  fsGroup: 1000
  supplementalGroups: [2042]  # gpuckpt, whom the broker serves
{{- end }}
  # From the DaemonSet, or put on the nodes by whoever keeps them.
  seccompProfile: {type: Localhost, localhostProfile: gpuckpt.json}
{{- with .Values.serviceAccountName }}
serviceAccountName: {{ . | quote }}
{{- end }}
{{- if .Values.remote.keysSecret }}
initContainers:
# Keys have to be in a folder of the user's alone. It can be run again.
- name: keys
  image: {{ include "gpuckpt.image" . }}
  command: [sh, -c, umask 077 && mkdir -p /keys/own && cp -f /secret/* /keys/own]
  securityContext:
    runAsUser: 1000
    runAsGroup: 1000
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities: {drop: [ALL]}
  resources:
    requests: {cpu: 1m, memory: 16Mi}
    limits: {memory: 64Mi}
  volumeMounts:
  - {name: keys, mountPath: /keys}
  - {name: keys-secret, mountPath: /secret, readOnly: true}
{{- end }}
{{- end }}

{{/* The broker is root's, with these rights; the server and its kernels are the user jovyan's, with none. */}}
{{- define "gpuckpt.container" -}}
{{- $resources := deepCopy .Values.resources }}
{{- if gt (int .Values.gpus) 0 }}
{{- $gpus := dict "nvidia.com/gpu" (int .Values.gpus) }}
{{- $_ := set $resources "limits" (merge $gpus ($resources.limits | default dict)) }}
{{- end -}}
image: {{ include "gpuckpt.image" . }}
{{- if .Values.withRights }}
securityContext:
  runAsUser: 0
  allowPrivilegeEscalation: false
  appArmorProfile: {type: Unconfined}
  capabilities:
    drop: [ALL]
    add: [SYS_ADMIN, SYS_PTRACE, SYS_CHROOT, SETPCAP, SETUID, SETGID, CHECKPOINT_RESTORE, CHOWN]
{{- else }}
workingDir: /home/jovyan
securityContext:
  allowPrivilegeEscalation: false
  capabilities: {drop: [ALL]}
{{- end }}
resources: {{- toYaml $resources | nindent 2 }}
{{- with .Values.remote.existingSecret }}
envFrom:
- secretRef: {name: {{ . | quote }}}
{{- end }}
{{- end }}

{{- define "gpuckpt.env" -}}
{{- with .Values.remote.url }}
- {name: GPUCKPT_REMOTE, value: {{ . | quote }}}
{{- end }}
{{- if .Values.remote.keysSecret }}
- {name: GPUCKPT_KEYS, value: /run/gpuckpt-keys/own}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "gpuckpt.mounts" -}}
- {name: home, mountPath: /home/jovyan}
{{- if .Values.remote.keysSecret }}
- {name: keys, mountPath: /run/gpuckpt-keys}
{{- end }}
{{- if not .Values.withRights }}
- {name: broker, mountPath: /run/gpuckpt, readOnly: true}
{{- end }}
{{- end }}

{{/* Volumes are of the cluster, so their names have to differ between namespaces. */}}
{{- define "gpuckpt.broker" -}}
{{ printf "%s-%s-broker" .Release.Namespace .Release.Name | quote }}
{{- end }}

{{- define "gpuckpt.volumes" -}}
{{- if not .Values.storage.enabled }}
- name: home
  emptyDir: {}
{{- else if .Values.storage.existingClaim }}
- name: home
  persistentVolumeClaim: {claimName: {{ .Values.storage.existingClaim | quote }}}
{{- end }}
{{- with .Values.remote.keysSecret }}
- name: keys
  emptyDir: {medium: Memory}
- name: keys-secret
  secret: {secretName: {{ . | quote }}}
{{- end }}
{{- if not .Values.withRights }}
- name: broker
  persistentVolumeClaim: {claimName: {{ include "gpuckpt.broker" . }}}
{{- end }}
{{- end }}

{{- define "gpuckpt.claim" -}}
accessModes: [ReadWriteOnce]
{{- with .Values.storage.className }}
storageClassName: {{ . | quote }}
{{- end }}
resources: {requests: {storage: {{ .Values.storage.size | quote }}}}
{{- end }}
