//! Each value of the chart with settings that show its effect.

/// For each value, a setting other than its default, and a text that then appears in what is rendered.
pub const EFFECTS: &[(&str, &[&str], &str)] = &[
    ("nameOverride", &["nameOverride=mark"], "app.kubernetes.io/name: mark"),
    ("fullnameOverride", &["fullnameOverride=mark"], "name: mark-metrics"),
    ("namespaceOverride", &["namespaceOverride=mark"], "namespace: mark"),
    (
        "image.registry",
        &["image.registry=registry.example.com", "image.repository=team/agentloop"],
        "image: registry.example.com/team/agentloop:0.1.0",
    ),
    (
        "image.repository",
        &["image.repository=example.com/a"],
        "image: example.com/a:0.1.0",
    ),
    ("image.tag", &["image.tag=v9"], "localhost/agentloop:v9"),
    (
        "image.digest",
        &[
            "image.tag=v9",
            "image.digest=sha256:bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb",
        ],
        "localhost/agentloop@sha256:bbbb",
    ),
    (
        "image.pullPolicy",
        &["image.pullPolicy=Never"],
        "imagePullPolicy: Never",
    ),
    (
        "imagePullSecrets",
        &["imagePullSecrets[0].name=registry"],
        "- name: registry",
    ),
    ("replicaCount", &["replicaCount=7"], "replicas: 7"),
    ("strategy.type", &["strategy.type=Recreate"], "type: Recreate"),
    (
        "strategy.rollingUpdate.maxSurge",
        &["strategy.rollingUpdate.maxSurge=50%"],
        "maxSurge: 50%",
    ),
    (
        "strategy.rollingUpdate.maxUnavailable",
        &["strategy.rollingUpdate.maxUnavailable=50%"],
        "maxUnavailable: 50%",
    ),
    (
        "revisionHistoryLimit",
        &["revisionHistoryLimit=3"],
        "revisionHistoryLimit: 3",
    ),
    (
        "leaderElection.leaseDurationSeconds",
        &["leaderElection.leaseDurationSeconds=77"],
        "value: '77'",
    ),
    (
        "leaderElection.renewIntervalSeconds",
        &["leaderElection.renewIntervalSeconds=7"],
        "value: '7'",
    ),
    (
        "watchNamespaces",
        &["watchNamespaces={team-a,team-b}"],
        "value: team-a,team-b",
    ),
    ("workers", &["workers=77"], "value: '77'"),
    ("logLevel", &["logLevel=debug"], "value: debug"),
    (
        "extraArgs",
        &["extraArgs[0]=--metrics-address=[::]:8080"],
        "- --metrics-address=[::]:8080",
    ),
    (
        "extraEnv",
        &["extraEnv[0].name=NO_PROXY", "extraEnv[0].value=.svc"],
        "- name: NO_PROXY",
    ),
    ("extraEnvFrom", &["extraEnvFrom[0].secretRef.name=mark"], "name: mark"),
    (
        "extraVolumes",
        &["extraVolumes[0].name=a", "extraVolumes[0].configMap.name=mark"],
        "name: mark",
    ),
    (
        "extraVolumeMounts",
        &["extraVolumeMounts[0].name=a", "extraVolumeMounts[0].mountPath=/mark"],
        "mountPath: /mark",
    ),
    ("podSecurityContext", &["podSecurityContext.fsGroup=77"], "fsGroup: 77"),
    ("securityContext", &["securityContext.runAsUser=77"], "runAsUser: 77"),
    (
        "startupProbe",
        &["startupProbe.initialDelaySeconds=77"],
        "initialDelaySeconds: 77",
    ),
    (
        "livenessProbe",
        &["livenessProbe.initialDelaySeconds=77"],
        "initialDelaySeconds: 77",
    ),
    (
        "readinessProbe",
        &["readinessProbe.initialDelaySeconds=77"],
        "initialDelaySeconds: 77",
    ),
    (
        "terminationGracePeriodSeconds",
        &["terminationGracePeriodSeconds=77"],
        "terminationGracePeriodSeconds: 77",
    ),
    ("resources", &["resources.limits.memory=777Mi"], "memory: 777Mi"),
    (
        "agents.imagePullSecrets",
        &[
            "agents.imagePullSecrets[0].name=registry",
            "agents.imagePullSecrets[1].name=mirror",
        ],
        "value: registry,mirror",
    ),
    (
        "agents.gateway.resources",
        &["agents.gateway.resources.limits.memory=771Mi"],
        "771Mi",
    ),
    (
        "agents.worker.resources",
        &["agents.worker.resources.limits.memory=772Mi"],
        "772Mi",
    ),
    ("sensor.resources", &["sensor.resources.limits.memory=773Mi"], "773Mi"),
    (
        "sensor.imagePullSecrets",
        &["sensor.imagePullSecrets[0].name=registry"],
        r#"value: '{"imagePullSecrets":[{"name":"registry"}]}'"#,
    ),
    (
        "sensor.podAnnotations",
        &["sensor.podAnnotations.a=mark"],
        r#"value: '{"podAnnotations":{"a":"mark"}}'"#,
    ),
    (
        "sensor.nodeSelector",
        &["sensor.nodeSelector.a=mark"],
        r#"value: '{"nodeSelector":{"a":"mark"}}'"#,
    ),
    (
        "sensor.tolerations",
        &["sensor.tolerations[0].key=mark"],
        r#"value: '{"tolerations":[{"key":"mark"}]}'"#,
    ),
    (
        "sensor.affinity",
        &["sensor.affinity.nodeAffinity.a=mark"],
        r#"value: '{"affinity":{"nodeAffinity":{"a":"mark"}}}'"#,
    ),
    (
        "sensor.priorityClassName",
        &["sensor.priorityClassName=mark"],
        r#"value: '{"priorityClassName":"mark"}'"#,
    ),
    (
        "egress.allowedCIDRs",
        &["egress.allowedCIDRs={10.96.0.0/12,fd00::/8}"],
        "value: 10.96.0.0/12,fd00::/8",
    ),
    (
        "egress.deniedCIDRs",
        &["egress.deniedCIDRs={203.0.113.0/24}"],
        "value: 203.0.113.0/24",
    ),
    (
        "egress.agents.privateAddresses",
        &["egress.agents.privateAddresses=Deny"],
        "value: Deny",
    ),
    (
        "egress.agents.allowedCIDRs",
        &["egress.agents.allowedCIDRs={10.97.0.0/16}"],
        "value: 10.97.0.0/16",
    ),
    (
        "egress.agents.deniedCIDRs",
        &["egress.agents.deniedCIDRs={203.0.114.0/24}"],
        "value: 203.0.114.0/24",
    ),
    (
        "prices",
        &[
            "prices.a-model.inputPerMillion=3.00",
            "prices.a-model.outputPerMillion=15.00",
        ],
        r#"{"a-model":{"inputPerMillion":"3.00","outputPerMillion":"15.00"}}"#,
    ),
    ("policy.requireBudget", &["policy.requireBudget=true"], "value: 'true'"),
    ("policy.agentPrices", &["policy.agentPrices=Deny"], "value: Deny"),
    ("policy.minOutputTokens", &["policy.minOutputTokens=77"], "value: '77'"),
    (
        "policy.allowedPriorityClasses",
        &["policy.allowedPriorityClasses={agents,batch}"],
        "value: agents,batch",
    ),
    (
        "policy.allowedAnnotationPrefixes",
        &["policy.allowedAnnotationPrefixes={example.com/,team.}"],
        "value: example.com/,team.",
    ),
    (
        "policy.allowedToolImages",
        &["policy.allowedToolImages={registry.example.com/,mcp/}"],
        "value: registry.example.com/,mcp/",
    ),
    (
        "approvals.webhook.url",
        &[
            "approvals.webhook.url=https://bridge.example.com/gates",
            "approvals.webhook.secretName=any",
        ],
        "value: https://bridge.example.com/gates",
    ),
    (
        "approvals.webhook.secretName",
        &[
            "approvals.webhook.url=https://bridge.example.com/gates",
            "approvals.webhook.secretName=mark",
        ],
        "secretName: mark",
    ),
    (
        "history.postgres.existingSecret",
        &["history.postgres.existingSecret=mark"],
        "secretName: mark",
    ),
    (
        "history.postgres.key",
        &["history.postgres.existingSecret=any", "history.postgres.key=mark"],
        "key: mark",
    ),
    (
        "history.postgres.caKey",
        &["history.postgres.existingSecret=any", "history.postgres.caKey=mark"],
        "key: mark",
    ),
    (
        "history.retentionDays",
        &["history.postgres.existingSecret=any", "history.retentionDays=7"],
        "value: '7'",
    ),
    (
        "telemetry.content",
        &["telemetry.otlp.endpoint=http://c:4318", "telemetry.content=true"],
        "name: OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT",
    ),
    (
        "telemetry.otlp.endpoint",
        &["telemetry.otlp.endpoint=http://collector:4318"],
        "value: http://collector:4318",
    ),
    (
        "telemetry.otlp.logs",
        &["telemetry.otlp.endpoint=http://c:4318", "telemetry.otlp.logs=true"],
        "name: OTEL_LOGS_EXPORTER",
    ),
    (
        "telemetry.otlp.metrics",
        &["telemetry.otlp.endpoint=http://c:4318", "telemetry.otlp.metrics=true"],
        "name: OTEL_METRICS_EXPORTER",
    ),
    (
        "telemetry.otlp.metricsIntervalSeconds",
        &[
            "telemetry.otlp.endpoint=http://c:4318",
            "telemetry.otlp.metrics=true",
            "telemetry.otlp.metricsIntervalSeconds=30",
        ],
        "value: '30000'",
    ),
    (
        "telemetry.otlp.headersSecretName",
        &[
            "telemetry.otlp.endpoint=http://c:4318",
            "telemetry.otlp.headersSecretName=mark",
        ],
        "value: mark",
    ),
    (
        "telemetry.otlp.caSecretName",
        &[
            "telemetry.otlp.endpoint=https://c:4318",
            "telemetry.otlp.caSecretName=mark",
        ],
        "secretName: mark",
    ),
    (
        "telemetry.otlp.resourceAttributes",
        &[
            "telemetry.otlp.endpoint=http://c:4318",
            "telemetry.otlp.resourceAttributes.cluster=a b",
        ],
        "value: cluster=a%20b",
    ),
    (
        "telemetry.otlp.tracesSampler",
        &[
            "telemetry.otlp.endpoint=http://c:4318",
            "telemetry.otlp.tracesSampler=traceidratio",
        ],
        "value: traceidratio",
    ),
    (
        "telemetry.otlp.tracesSamplerArg",
        &[
            "telemetry.otlp.endpoint=http://c:4318",
            "telemetry.otlp.tracesSamplerArg=0.25",
        ],
        "0.25",
    ),
    ("crds.enabled", &["crds.enabled=false"], ""),
    ("crds.keep", &["crds.keep=false"], ""),
    (
        "serviceAccount.create",
        &["serviceAccount.create=false", "serviceAccount.name=mine"],
        "serviceAccountName: mine",
    ),
    (
        "serviceAccount.name",
        &["serviceAccount.name=mine"],
        "serviceAccountName: mine",
    ),
    (
        "serviceAccount.annotations",
        &["serviceAccount.annotations.a=mark"],
        "a: mark",
    ),
    ("rbac.create", &["rbac.create=false"], ""),
    (
        "rbac.clusterScoped",
        &["rbac.clusterScoped=false", "crds.enabled=false", "watchNamespaces={a}"],
        "",
    ),
    ("rbac.aggregate", &["rbac.aggregate=false"], ""),
    ("rbac.approvalPolicy", &["rbac.approvalPolicy=false"], ""),
    ("rbac.controllerPolicy", &["rbac.controllerPolicy=false"], ""),
    ("rbac.identityPolicy", &["rbac.identityPolicy=false"], ""),
    (
        "rbac.sidecarImages",
        &["rbac.sidecarImages={docker.io/istio/}"],
        "c.image.startsWith('docker.io/istio/')",
    ),
    ("networkPolicy.enabled", &["networkPolicy.enabled=false"], ""),
    (
        "networkPolicy.linkFrom",
        &["networkPolicy.linkFrom[0].ipBlock.cidr=10.9.0.0/16"],
        "cidr: 10.9.0.0/16",
    ),
    (
        "networkPolicy.metricsFrom",
        &["networkPolicy.metricsFrom[0].podSelector.matchLabels.a=mark"],
        "a: mark",
    ),
    (
        "networkPolicy.pageFrom",
        &[
            "page.enabled=true",
            "networkPolicy.pageFrom[0].podSelector.matchLabels.a=mark",
        ],
        "a: mark",
    ),
    (
        "networkPolicy.egress",
        &["networkPolicy.egress[0].to[0].ipBlock.cidr=10.9.0.0/16"],
        "- Egress",
    ),
    (
        "podDisruptionBudget.enabled",
        &["podDisruptionBudget.enabled=false"],
        "",
    ),
    (
        "podDisruptionBudget.minAvailable",
        &["podDisruptionBudget.minAvailable=50%"],
        "minAvailable: 50%",
    ),
    ("page.enabled", &["page.enabled=true"], "name: agentloop-page"),
    (
        "page.hosts",
        &["page.enabled=true", "page.hosts={loops.example.com}"],
        "agentloop-page.agentloop-system.svc,loops.example.com",
    ),
    ("metrics.perObject", &["metrics.perObject=Minimal"], "value: Minimal"),
    (
        "metrics.authentication",
        &["metrics.authentication=Token"],
        "agentloop-metrics-reader",
    ),
    (
        "metrics.serviceMonitor.enabled",
        &["metrics.serviceMonitor.enabled=true"],
        "honorLabels: true",
    ),
    (
        "metrics.serviceMonitor.labels",
        &[
            "metrics.serviceMonitor.enabled=true",
            "metrics.serviceMonitor.labels.release=mark",
        ],
        "release: mark",
    ),
    (
        "metrics.serviceMonitor.interval",
        &[
            "metrics.serviceMonitor.enabled=true",
            "metrics.serviceMonitor.interval=77s",
        ],
        "interval: 77s",
    ),
    (
        "metrics.serviceMonitor.scrapeTimeout",
        &[
            "metrics.serviceMonitor.enabled=true",
            "metrics.serviceMonitor.scrapeTimeout=7s",
        ],
        "scrapeTimeout: 7s",
    ),
    (
        "metrics.serviceMonitor.bearerTokenSecret.name",
        &[
            "metrics.serviceMonitor.enabled=true",
            "metrics.serviceMonitor.bearerTokenSecret.name=mark",
        ],
        "name: mark",
    ),
    (
        "metrics.serviceMonitor.bearerTokenSecret.key",
        &[
            "metrics.serviceMonitor.enabled=true",
            "metrics.serviceMonitor.bearerTokenSecret.name=x",
            "metrics.serviceMonitor.bearerTokenSecret.key=mark",
        ],
        "key: mark",
    ),
    (
        "metrics.serviceMonitor.metricRelabelings",
        &[
            "metrics.serviceMonitor.enabled=true",
            "metrics.serviceMonitor.metricRelabelings[0].action=drop",
            "metrics.serviceMonitor.metricRelabelings[0].regex=agentloop_agent_.*",
            "metrics.serviceMonitor.metricRelabelings[0].sourceLabels={__name__}",
        ],
        "regex: agentloop_agent_.*",
    ),
    (
        "metrics.podMonitor.enabled",
        &["metrics.podMonitor.enabled=true"],
        "podMetricsEndpoints",
    ),
    (
        "metrics.podMonitor.labels",
        &[
            "metrics.podMonitor.enabled=true",
            "metrics.podMonitor.labels.release=mark",
        ],
        "release: mark",
    ),
    (
        "metrics.podMonitor.interval",
        &["metrics.podMonitor.enabled=true", "metrics.podMonitor.interval=77s"],
        "interval: 77s",
    ),
    (
        "metrics.podMonitor.scrapeTimeout",
        &["metrics.podMonitor.enabled=true", "metrics.podMonitor.scrapeTimeout=7s"],
        "scrapeTimeout: 7s",
    ),
    (
        "metrics.podMonitor.bearerTokenSecret.name",
        &[
            "metrics.podMonitor.enabled=true",
            "metrics.podMonitor.bearerTokenSecret.name=mark",
        ],
        "name: mark",
    ),
    (
        "metrics.podMonitor.bearerTokenSecret.key",
        &[
            "metrics.podMonitor.enabled=true",
            "metrics.podMonitor.bearerTokenSecret.name=x",
            "metrics.podMonitor.bearerTokenSecret.key=mark",
        ],
        "key: mark",
    ),
    (
        "metrics.podMonitor.metricRelabelings",
        &[
            "metrics.podMonitor.enabled=true",
            "metrics.podMonitor.metricRelabelings[0].action=drop",
        ],
        "action: drop",
    ),
    (
        "metrics.prometheusRule.enabled",
        &["metrics.prometheusRule.enabled=true"],
        "runbook_url: docs/runbooks/AgentloopOperatorDown.md",
    ),
    (
        "metrics.prometheusRule.labels",
        &[
            "metrics.prometheusRule.enabled=true",
            "metrics.prometheusRule.labels.release=mark",
        ],
        "release: mark",
    ),
    (
        "metrics.prometheusRule.annotations",
        &[
            "metrics.prometheusRule.enabled=true",
            "metrics.prometheusRule.annotations.note=mark",
        ],
        "note: mark",
    ),
    (
        "metrics.prometheusRule.runbookBaseURL",
        &[
            "metrics.prometheusRule.enabled=true",
            "metrics.prometheusRule.runbookBaseURL=https://wiki.example.com/mark/",
        ],
        "runbook_url: https://wiki.example.com/mark/AgentloopOperatorDown.md",
    ),
    (
        "metrics.prometheusRule.selector",
        &[
            "metrics.prometheusRule.enabled=true",
            r#"metrics.prometheusRule.selector=job="mark""#,
        ],
        r#"absent(agentloop_build_info{job="mark"})"#,
    ),
    (
        "dashboards.enabled",
        &["dashboards.enabled=true"],
        "grafana_dashboard: '1'",
    ),
    (
        "dashboards.labels",
        &["dashboards.enabled=true", "dashboards.labels.a=mark"],
        "a: mark",
    ),
    (
        "dashboards.annotations",
        &["dashboards.enabled=true", "dashboards.annotations.grafana_folder=mark"],
        "grafana_folder: mark",
    ),
    (
        "dashboards.namespace",
        &["dashboards.enabled=true", "dashboards.namespace=monitoring"],
        "namespace: monitoring",
    ),
    (
        "dashboards.grafanaOperator.enabled",
        &["dashboards.grafanaOperator.enabled=true"],
        "name: agentloop-fleet",
    ),
    (
        "dashboards.grafanaOperator.instanceSelector",
        &[
            "dashboards.grafanaOperator.enabled=true",
            "dashboards.grafanaOperator.instanceSelector.matchLabels.team=mark",
        ],
        "team: mark",
    ),
    (
        "dashboards.grafanaOperator.folder",
        &[
            "dashboards.grafanaOperator.enabled=true",
            "dashboards.grafanaOperator.folder=mark",
        ],
        "folder: mark",
    ),
    (
        "dashboards.grafanaOperator.allowCrossNamespaceImport",
        &[
            "dashboards.grafanaOperator.enabled=true",
            "dashboards.grafanaOperator.allowCrossNamespaceImport=true",
        ],
        "allowCrossNamespaceImport: true",
    ),
    ("commonLabels", &["commonLabels.a=mark"], "a: mark"),
    ("deploymentAnnotations", &["deploymentAnnotations.a=mark"], "a: mark"),
    ("podLabels", &["podLabels.a=mark"], "a: mark"),
    ("podAnnotations", &["podAnnotations.a=mark"], "a: mark"),
    ("nodeSelector", &["nodeSelector.a=mark"], "a: mark"),
    ("tolerations", &["tolerations[0].key=mark"], "- key: mark"),
    ("affinity", &["affinity.nodeAffinity.a=mark"], "a: mark"),
    (
        "topologySpreadConstraints",
        &[
            "topologySpreadConstraints[0].maxSkew=1",
            "topologySpreadConstraints[0].topologyKey=mark",
            "topologySpreadConstraints[0].whenUnsatisfiable=DoNotSchedule",
        ],
        "topologyKey: mark",
    ),
    (
        "priorityClassName",
        &["priorityClassName=mark"],
        "priorityClassName: mark",
    ),
    (
        "hostAliases",
        &["hostAliases[0].ip=192.0.2.7", "hostAliases[0].hostnames={mark}"],
        "- mark",
    ),
    ("dnsConfig", &["dnsConfig.searches={mark}"], "- mark"),
    (
        "extraObjects",
        &[
            "extraObjects[0].apiVersion=v1",
            "extraObjects[0].kind=ConfigMap",
            "extraObjects[0].metadata.name=mark-{{ .Release.Name }}",
            "extraObjects[0].metadata.labels.app\\.kubernetes\\.io/name=agentloop",
        ],
        "name: mark-agentloop",
    ),
];
