//! Whatever a valid spec holds survives the API server: the schema has every field that the code can write.

use std::collections::BTreeMap;

use agentloop::api::agent::{
    AccessMode, ActiveHoursSpec, Agent, AgentMode, AgentSpec, AgentStorage, BudgetRef, ContinuousSpec, DayOfWeek,
    DetectionMode, ExhaustionPolicy, FieldType, GoalSpec, GuardrailsSpec, HeartbeatSpec, HotField, HotStateSpec,
    KeyRef, LimitedResource, LoopDetection, LoopSpec, MemorySpec, ModelApi, ModelSpec, OutputLimitParameter,
    PodSettings, PreCheckSpec, PromptCache, RateLimit, ReasoningEffort, ReasoningSpec, RetentionPolicy, SkillSpec,
    StructuredOutput, TextSource, ToolCalling, TotalLimits, UpdateStrategy, WorkspaceSpec,
};
use agentloop::api::price::{LongContextPrice, ModelPrice};
use agentloop::api::server_tls::ServerTls;
use agentloop::api::toolbox::{
    BuiltinTools, EnvironmentSource, EnvironmentVariable, HttpToolSettings, ObjectRef, ToolContainer, ToolboxSpec,
};
use agentloop::api::tools::{
    ApprovalDefault, ApprovalRules, DeclaredEffect, DefinitionChanges, OnUnknownOutcome, SecretRef, ToolApproval,
    ToolRules, ToolServer, ToolsSpec, WhilePending,
};
use k8s_openapi::api::core::v1::ResourceRequirements;
use proptest::option;
use proptest::prelude::*;
use serde_json::json;

use super::goals::{goals, uses_light_model};
use super::reader::Schema;

fn total() -> impl Strategy<Value = TotalLimits> {
    let cost = "[0-9]{1,9}(\\.[0-9]{1,6})?";
    prop_oneof![
        (0_i64..=1_000_000_000_000_000, option::of(cost)).prop_map(|(tokens, cost_usd)| TotalLimits {
            tokens: Some(tokens),
            cost_usd,
        }),
        cost.prop_map(|cost| TotalLimits {
            tokens: None,
            cost_usd: Some(cost),
        }),
    ]
}

fn key() -> impl Strategy<Value = KeyRef> {
    ("[a-z]{1,20}", "[-._a-zA-Z0-9]{1,20}").prop_map(|(name, key)| KeyRef { name, key })
}

fn text() -> impl Strategy<Value = TextSource> {
    key().prop_map(|config_map_key_ref| TextSource { config_map_key_ref })
}

fn skills() -> impl Strategy<Value = Vec<SkillSpec>> {
    let skills = prop::collection::btree_map("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", key(), 0..=4);
    skills.prop_map(|skills| {
        skills
            .into_iter()
            .map(|(name, config_map_key_ref)| SkillSpec {
                name,
                config_map_key_ref,
            })
            .collect()
    })
}

fn server() -> impl Strategy<Value = (ModelApi, Option<String>, Option<KeyRef>, Option<TextSource>)> {
    prop_oneof![
        text().prop_map(|script| (ModelApi::Scripted, None, None, Some(script))),
        (
            "https?://[a-z]{1,9}(:[1-9][0-9]{0,3})?(/[a-z0-9]{0,9})?",
            option::of(key())
        )
            .prop_map(|(url, key)| (ModelApi::OpenAIChat, Some(url), key, None)),
        ("https?://[a-z]{1,9}(/[a-z]{0,9})?", option::of(key())).prop_map(|(url, key)| (
            ModelApi::AnthropicMessages,
            Some(url),
            key,
            None
        )),
        ("https?://[a-z]{1,9}/v1", option::of(key())).prop_map(|(url, key)| (
            ModelApi::OpenAIResponses,
            Some(url),
            key,
            None
        )),
    ]
}

prop_compose! {
    fn price()(
        prices in prop::collection::vec("[0-9]{1,7}(\\.[0-9]{1,6})?", 4),
        rest in option::of("[0-9]{1,7}"),
        above_input_tokens in 1_i64..=10_000_000,
        is_long in any::<bool>(),
    ) -> ModelPrice {
        ModelPrice {
            input_per_million: prices[0].clone(),
            output_per_million: prices[1].clone(),
            cache_read_per_million: rest.clone(),
            cache_write_per_million: rest.clone(),
            cache_write_1h_per_million: rest.clone(),
            long_context: is_long.then(|| LongContextPrice {
                above_input_tokens,
                input_per_million: prices[2].clone(),
                output_per_million: prices[3].clone(),
                cache_read_per_million: rest.clone(),
                cache_write_per_million: rest.clone(),
                cache_write_1h_per_million: rest,
            }),
        }
    }
}

/// TLS settings with this Secret, if the URL allows any.
fn tls(url: Option<&String>, roots: Option<String>) -> Option<ServerTls> {
    let name = roots.filter(|_| url.is_some_and(|url| url.starts_with("https://")))?;
    Some(ServerTls {
        ca_secret_ref: SecretRef { name },
    })
}

prop_compose! {
    fn model()(
        (api, base_url, api_key_secret_ref, scripted) in server(),
        name in "[a-z0-9:/-]{1,40}",
        max_output_tokens in 16_u32..=1_000_000,
        more_context in 1_u32..9_000_000,
        temperature in option::of("[01]\\.[0-9]{1,4}"),
        stream in any::<bool>(),
        timeout_seconds in 1_u32..=3600,
        idle_share in 1_u32..=3600,
        headers in prop::collection::btree_map("x-[a-z]{1,20}", "[!-~]{1,20}", 0..4),
        extra in prop::collection::btree_map("x_[a-z]{1,20}", any::<Option<bool>>(), 0..4),
        parameter in any::<bool>(),
        price in option::of(price()),
        structured in any::<bool>(),
        told in prop::sample::select(vec![StructuredOutput::Disabled, StructuredOutput::WithoutTools, StructuredOutput::Always]),
        reasons in prop::sample::select(vec![None, Some(false), Some(true)]),
        cached in prop::sample::select(vec![PromptCache::Auto, PromptCache::Disabled, PromptCache::OneHour]),
        roots in option::of("[a-z]{1,20}"),
    ) -> ModelSpec {
        let is_scripted = api == ModelApi::Scripted;
        let is_anthropic = api == ModelApi::AnthropicMessages;
        let reasoning = reasons.filter(|_| !is_scripted).map(|by_budget| {
            let by_budget = by_budget && is_anthropic && max_output_tokens.min(more_context) > 1024;
            ReasoningSpec {
                effort: (!by_budget).then_some(ReasoningEffort::Low),
                budget_tokens: by_budget.then_some(1024),
            }
        });
        ModelSpec {
            output_limit_parameter: if parameter && api == ModelApi::OpenAIChat {
                OutputLimitParameter::MaxTokens
            } else {
                OutputLimitParameter::Auto
            },
            tool_calling: if structured && api == ModelApi::OpenAIChat {
                ToolCalling::Structured
            } else {
                ToolCalling::Native
            },
            headers: if is_scripted { BTreeMap::new() } else { headers },
            extra_body: extra.into_iter().filter(|_| !is_scripted).map(|(name, value)| (name, json!({"a": value}))).collect(),
            price,
            api,
            name,
            tls: tls(base_url.as_ref(), roots),
            base_url,
            api_key_secret_ref,
            max_output_tokens,
            context_tokens: (max_output_tokens + more_context).max(256),
            temperature: temperature.filter(|text| !is_anthropic || (reasoning.is_none() && text.starts_with('0'))),
            prompt_cache: if is_anthropic || (cached == PromptCache::Disabled && !is_scripted) { cached } else { PromptCache::Auto },
            reasoning,
            stream,
            timeout_seconds,
            stream_idle_timeout_seconds: idle_share.min(timeout_seconds),
            scripted,
            image_input: None,
            structured_output: match (api, told) {
                (ModelApi::Scripted, _) => StructuredOutput::Disabled,
                (ModelApi::OpenAIChat, StructuredOutput::Always) if structured => StructuredOutput::WithoutTools,
                _ => told,
            },
        }
    }
}

prop_compose! {
    fn storage()(
        mebibytes in 16_u32..=16_000_000,
        storage_class_name in option::of("[a-z]{0,10}"),
        once_per_pod in any::<bool>(),
        retain in any::<bool>(),
        ephemeral in any::<bool>(),
    ) -> AgentStorage {
        AgentStorage {
            size: format!("{mebibytes}Mi"),
            storage_class_name,
            access_mode: if once_per_pod { AccessMode::ReadWriteOncePod } else { AccessMode::ReadWriteOnce },
            retention_policy: if retain { RetentionPolicy::Retain } else { RetentionPolicy::Delete },
            ephemeral,
        }
    }
}

prop_compose! {
    fn rules()(
        effect in option::of(prop_oneof![Just(DeclaredEffect::Read), Just(DeclaredEffect::Write), Just(DeclaredEffect::Destructive)]),
        idempotent in option::of(any::<bool>()),
        timeout_seconds in 1_u32..=3600,
        on_unknown_outcome in prop_oneof![
            Just(OnUnknownOutcome::TellModel),
            Just(OnUnknownOutcome::Retry),
            Just(OnUnknownOutcome::Ask),
        ],
        approval in option::of(prop_oneof![Just(ToolApproval::Never), Just(ToolApproval::Always)]),
        condition in option::of("[ -~]{1,1024}"),
    ) -> ToolRules {
        ToolRules {
            name: String::new(),
            effect,
            idempotent,
            timeout_seconds,
            on_unknown_outcome,
            approval,
            approval_condition: condition.filter(|_| approval != Some(ToolApproval::Always)),
        }
    }
}

prop_compose! {
    fn tool_server()(
        container in option::of(tool_container()),
        url in "https?://[a-z]{1,9}(:[1-9][0-9]{0,3})?(/[a-z0-9]{0,9})?(\\?[a-z]{1,5}=[a-z]{0,5})?",
        secret in option::of("[a-z]{1,20}"),
        roots in option::of("[a-z]{1,20}"),
        required_grant in option::of("[a-z]([-a-z0-9]{0,30}[a-z0-9])?"),
        trusted in any::<bool>(),
        only in prop::collection::btree_set("[!-~]{1,20}", 0..3),
        definition_changes in prop_oneof![Just(DefinitionChanges::Allow), Just(DefinitionChanges::Ask)],
        rules in prop::collection::btree_map("[!-~]{1,20}", rules(), 0..3),
    ) -> ToolServer {
        ToolServer {
            name: String::new(),
            headers_secret_ref: secret.filter(|_| container.is_none()).map(|name| SecretRef { name }),
            tls: tls(Some(&url).filter(|_| container.is_none()), roots),
            url: container.is_none().then_some(url),
            container,
            required_grant,
            trusted,
            only: only.into_iter().collect(),
            definition_changes,
            tools: rules.into_iter().map(|(name, rules)| ToolRules { name, ..rules }).collect(),
        }
    }
}

prop_compose! {
    fn tool_container()(
        image in "[!-~]{1,30}",
        command in prop::collection::vec("[!-~]{1,9}", 1..4),
        args in prop::collection::vec(".{0,9}", 0..3),
        env in prop::collection::btree_map("[A-Z][A-Z0-9_]{0,9}", ".{0,9}", 0..3),
        secrets in prop::collection::vec("[a-z]{1,9}", 0..3),
        port in option::of(1_u16..),
        path in option::of("/[a-z/]{0,9}"),
    ) -> ToolContainer {
        let secret_ref = |name| EnvironmentSource { secret_ref: Some(ObjectRef { name }), config_map_ref: None };
        ToolContainer {
            image,
            command,
            args,
            env: env.into_iter().map(|(name, value)| EnvironmentVariable { name, value }).collect(),
            env_from: secrets.into_iter().map(secret_ref).collect(),
            path: path.filter(|_| port.is_some()),
            port,
            resources: None,
        }
    }
}

prop_compose! {
    fn tools()(
        servers in prop::collection::btree_map("[a-z]([-a-z0-9]{0,30}[a-z0-9])?", tool_server().boxed(), 0..3),
        max_result_bytes in 256_u32..=1_048_576,
        [default, after_untrusted_content] in prop::array::uniform2(prop_oneof![
            Just(ApprovalDefault::Never),
            Just(ApprovalDefault::Destructive),
            Just(ApprovalDefault::Write),
            Just(ApprovalDefault::Always),
        ]),
        timeout_seconds in 60_u32..=604_800,
        while_pending in prop_oneof![Just(WhilePending::Pause), Just(WhilePending::Continue)],
        grants in prop::collection::btree_set("[a-z]([-a-z0-9]{0,30}[a-z0-9])?", 0..3),
        builtin in prop::sample::subsequence(vec![BuiltinTools::Shell, BuiltinTools::Files, BuiltinTools::HTTP], 0..=3),
        image in "[!-~]{1,30}",
        hosts in prop::collection::btree_set("(\\*\\.)?[a-z][a-z0-9]{0,8}(:[1-9][0-9]{0,3})?", 1..4),
        toolbox_rules in prop::collection::btree_map(
            prop::sample::select(vec!["shell", "read_file", "write_file", "http_request"]), rules(), 0..3,
        ),
    ) -> ToolsSpec {
        let toolbox = ToolboxSpec {
            image: Some(image),
            http: Some(HttpToolSettings { allowed_hosts: hosts.into_iter().collect() }),
            resources: None,
            tools: toolbox_rules.into_iter().map(|(name, rules)| ToolRules { name: name.into(), ..rules }).collect(),
        };
        ToolsSpec {
            toolbox: (!builtin.is_empty()).then_some(toolbox),
            builtin,
            servers: servers.into_iter().map(|(name, server)| ToolServer { name, ..server }).collect(),
            max_result_bytes,
            approval: ApprovalRules { default, after_untrusted_content, timeout_seconds, while_pending },
            grants: grants.into_iter().collect(),
        }
    }
}

fn entries() -> impl Strategy<Value = BTreeMap<String, String>> {
    prop::collection::btree_map("example\\.com/[a-z]{1,20}", "[a-z0-9]{0,20}", 0..4)
}

prop_compose! {
    fn pod()(
        limits in option::of(prop::collection::btree_map("cpu|memory", "[1-9][0-9]{0,3}(m|Mi|Gi)?", 0..3)),
        node_selector in entries(),
        scheduled in any::<bool>(),
        runtime_class_name in option::of("[a-z]{1,20}"),
        priority_class_name in option::of("[a-z]{1,20}"),
        labels in entries(),
        annotations in entries(),
        update_strategy in prop_oneof![
            Just(UpdateStrategy::WhenIdle), Just(UpdateStrategy::Immediate), Just(UpdateStrategy::OnDelete)
        ],
    ) -> PodSettings {
        let quantities = |limits: BTreeMap<String, String>| serde_json::from_value(json!({"limits": limits})).unwrap();
        let mut pod: PodSettings = serde_json::from_value(if scheduled { scheduling() } else { json!({}) }).unwrap();
        pod.resources = limits.map(quantities).or(pod.resources);
        pod.node_selector = node_selector;
        pod.runtime_class_name = runtime_class_name;
        pod.priority_class_name = priority_class_name;
        pod.labels = labels;
        pod.annotations = annotations;
        pod.update_strategy = update_strategy;
        pod
    }
}

/// Each embedded Kubernetes type, with fields deep inside.
fn scheduling() -> serde_json::Value {
    let term = json!({"labelSelector": {"matchExpressions": [{"key": "a", "operator": "In", "values": ["b"]}]},
        "topologyKey": "zone", "namespaces": ["n"], "matchLabelKeys": ["k"]});
    json!({
        "resources": {"requests": {"cpu": "1"}},
        "tolerations": [{"key": "a", "operator": "Equal", "value": "b", "effect": "NoExecute", "tolerationSeconds": 3}],
        "affinity": {
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
                {"matchExpressions": [{"key": "a", "operator": "Gt", "values": ["1"]}]}]}},
            "podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [
                {"weight": 1, "podAffinityTerm": term}]},
            "podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]},
        },
        "topologySpreadConstraints": [{"maxSkew": 1, "minDomains": 2, "topologyKey": "zone",
            "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {"matchLabels": {"a": "b"}}}],
        "imagePullSecrets": [{"name": "registry"}],
    })
}

prop_compose! {
    fn hot_field()(
        r#type in prop_oneof![
            Just(FieldType::Object), Just(FieldType::Number), Just(FieldType::String), Just(FieldType::Boolean),
            Just(FieldType::Array)
        ],
        ttl_seconds in option::of(1_u32..=2_592_000),
        max_items in option::of(1_u32..=1000),
        refresh_tool in option::of("[!-~]{1,128}"),
    ) -> HotField {
        let max_items = max_items.filter(|_| r#type == FieldType::Array);
        HotField { name: String::new(), r#type, ttl_seconds, max_items, refresh_tool }
    }
}

fn memory() -> impl Strategy<Value = MemorySpec> {
    (1024_u32..=65_536).prop_map(|max_bytes| MemorySpec { max_bytes })
}

fn hot_state() -> impl Strategy<Value = HotStateSpec> {
    let fields = prop::collection::btree_map("[a-zA-Z][a-zA-Z0-9_]{0,62}", hot_field(), 0..=4);
    fields.prop_map(|fields| HotStateSpec {
        fields: fields
            .into_iter()
            .map(|(name, field)| HotField { name, ..field })
            .collect(),
    })
}

prop_compose! {
    fn active_hours()(
        zone in prop_oneof![Just("UTC"), Just("America/Argentina/Buenos_Aires")],
        days in prop::collection::btree_set(prop_oneof![Just(DayOfWeek::Monday), Just(DayOfWeek::Saturday), Just(DayOfWeek::Sunday)], 0..4),
        (hour, minute, length) in (0_u32..24, 0_u32..60, 1_u32..24),
    ) -> ActiveHoursSpec {
        let start = format!("{hour:02}:{minute:02}");
        let end = if hour == 0 && minute == 0 { "24:00".into() } else { format!("{:02}:{minute:02}", (hour + length) % 24) };
        ActiveHoursSpec { time_zone: zone.into(), days: days.into_iter().collect(), start, end }
    }
}

fn heartbeat() -> impl Strategy<Value = HeartbeatSpec> {
    (10_u32..=2_592_000, "\\PC{1,80}").prop_map(|(every_seconds, prompt)| HeartbeatSpec { every_seconds, prompt })
}

fn workspace() -> impl Strategy<Value = WorkspaceSpec> {
    let made = (
        option::of((1_u32..=1024).prop_map(|size| format!("{size}Mi"))),
        option::of("[a-z]{0,8}"),
    );
    prop_oneof![
        made.prop_map(|(size, storage_class_name)| WorkspaceSpec {
            size,
            storage_class_name,
            claim_name: None
        }),
        "[a-z]{1,20}".prop_map(|name| WorkspaceSpec {
            claim_name: Some(name),
            ..WorkspaceSpec::default()
        }),
    ]
}

prop_compose! {
    fn pre_check()(enabled in any::<bool>(), prompt in option::of("\\PC{1,80}")) -> PreCheckSpec {
        PreCheckSpec { enabled, prompt }
    }
}

fn rate_limits() -> impl Strategy<Value = Vec<RateLimit>> {
    let resource = prop_oneof![
        Just(LimitedResource::LLMCalls),
        Just(LimitedResource::LLMTokens),
        Just(LimitedResource::Actions),
        Just(LimitedResource::DiskWriteBytes),
        Just(LimitedResource::BandwidthBytes)
    ];
    let keys = prop::collection::btree_map((resource, 1_u32..=86_400), 1_u64..=1_000_000_000_000, 0..=8);
    keys.prop_map(|limits| {
        let limit = |((resource, window_seconds), amount)| RateLimit {
            resource,
            amount,
            window_seconds,
        };
        limits.into_iter().map(limit).collect()
    })
}

prop_compose! {
    fn spec()(
        suspend in any::<bool>(),
        (prompt, skills) in (prop_oneof!["\\PC{1,80}".prop_map(Ok), text().prop_map(Err)], skills().boxed()),
        (model, light_model, pre_check) in (model().boxed(), option::of(model().boxed()).boxed(), option::of(pre_check()).boxed()),
        min_delay_milliseconds in 1_u32..=3_600_000,
        delays in 0_u32..=3_600_000,
        (max_consecutive_errors, max_calls_per_turn, actions_per_minute) in (1_u32..=1000, 1_u32..=1000, 1_u32..=600),
        max_consecutive_tool_failures in option::of(1_u32..=1000),
        history_tokens in 1000_u32..=10_000_000,
        (max_sleep_seconds, max_consecutive_turns, heartbeat) in (1_u32..=2_592_000, 1_u32..=10_000, option::of(heartbeat()).boxed()),
        rate_limits in rate_limits().boxed(),
        exhaustion_policy in prop_oneof![Just(ExhaustionPolicy::Skip), Just(ExhaustionPolicy::Block)],
        (idle_timeout_seconds, active_hours) in (1_u32..=2_592_000, option::of(active_hours()).boxed()),
        (tokens_per_hour, total) in (option::of(0_i64..=1_000_000_000_000_000), option::of(total()).boxed()),
        mode in prop_oneof![Just(DetectionMode::Enforce), Just(DetectionMode::Warn), Just(DetectionMode::Disabled)],
        exempt_tools in prop::collection::btree_set("[!-~]{1,20}", 0..4),
        budgets in prop::collection::btree_set("[a-z]{1,20}", 0..4),
        (tools, hot_state, goal, memory) in (
            tools().boxed(), hot_state().boxed(), option::of(goals().boxed()).boxed(), option::of(memory().boxed()),
        ),
        (storage, workspace) in (storage().boxed(), option::of(workspace()).boxed()),
        pod in pod().boxed(),
    ) -> AgentSpec {
        let goal = goal.filter(|goal: &GoalSpec| {
            let commands = goal.acceptance_criteria.iter().any(|criterion| criterion.command.is_some());
            let has_model = light_model.is_some() || !uses_light_model(goal);
            let has_files = goal.artifacts.is_empty() || tools.builtin.contains(&BuiltinTools::Files);
            has_model && has_files && (!commands || tools.builtin.contains(&BuiltinTools::Shell))
        });
        AgentSpec {
            mode: if goal.is_some() { AgentMode::Goal } else { AgentMode::Continuous },
            suspend,
            instructions: prompt.clone().ok(),
            instructions_from: prompt.err(),
            skills,
            model,
            light_model,
            r#loop: LoopSpec {
                min_delay_milliseconds,
                max_delay_milliseconds: delays.max(min_delay_milliseconds),
                max_consecutive_errors,
                exhaustion_policy,
                history_tokens,
            },
            continuous: ContinuousSpec {
                max_sleep_seconds,
                heartbeat,
                pre_check: pre_check.filter(|check| !check.enabled || !hot_state.fields.is_empty()),
            },
            task: None,
            goal,
            tools,
            hot_state,
            memory,
            guardrails: GuardrailsSpec {
                max_consecutive_turns,
                max_calls_per_turn,
                actions_per_minute,
                max_consecutive_tool_failures,
                idle_timeout_seconds,
                active_hours,
                rate_limits,
                tokens_per_hour,
                total,
                loop_detection: LoopDetection {
                    mode,
                    exempt_tools: exempt_tools.into_iter().collect(),
                },
            },
            budget_refs: budgets.into_iter().map(|name| BudgetRef { name }).collect(),
            storage,
            workspace,
            pod,
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn a_valid_spec_loses_nothing_at_the_api_server_and_keeps_all_rules(spec in spec().boxed()) {
        let schema = Schema::of_agents();
        let agent = Agent::new("x", spec);
        let object = serde_json::to_value(&agent).unwrap();
        prop_assert_eq!(schema.unknown_fields(&object), Vec::<String>::new());
        let verdict = schema.check_rules(&object, Some(&object));
        prop_assert!(verdict.is_ok(), "{:?} of {}", verdict, object);
        // A run without a cluster takes it too.
        prop_assert_eq!(schema.problems(&object, Some(&object)), Vec::<String>::new());
        let read: Agent = serde_json::from_value(object).unwrap();
        prop_assert_eq!(read.spec, agent.spec);
    }
}

#[test]
fn resources_are_the_kubernetes_type_without_device_claims() {
    let resources: ResourceRequirements = serde_json::from_value(json!({"claims": [{"name": "gpu"}]})).unwrap();
    let mut agent = Agent::new(
        "x",
        serde_json::from_value(super::samples::scripted()["spec"].clone()).unwrap(),
    );
    agent.spec.pod.resources = Some(resources);
    let object = serde_json::to_value(&agent).unwrap();
    assert_eq!(
        Schema::of_agents().unknown_fields(&object),
        ["spec.pod.resources.claims"]
    );
}
