//! The conditions and Events of Agents, and the messages of their validation, as users read them.

use std::collections::BTreeMap;
use std::sync::Arc;

use agentloop_texts::TextRows;
use jiff::SignedDuration;
use k8s_openapi::api::core::v1::{Pod, ResourceRequirements};
use serde_json::{Value, json};

use super::super::apply::{AppliedPlan, PodObstacle};
use super::super::claims::WorkspaceProblem;
use super::super::context::ReconcilerSettings;
use super::super::gateway_loop_detection::detect;
use super::super::validate::{AgentReferences, ModelReferences, ReferenceLookup, validate};
use super::*;
use crate::api::condition::LoopSign;
use crate::api::goal::GoalEnd;
use crate::controller::budget::assignment::WindowedLimit;
use crate::controller::kstatus::assert_computed;
use crate::controller::policy::PlatformPolicy;
use crate::controller::runtime::watched_pod::WatchedPod;
use crate::link::messages::{DetectedLoop, RequestStats};
use crate::link::pod::{AgentEgress, MAX_SKILL_BYTES};

/// An Agent with these fields in its spec.
fn agent_with(fields: &Value) -> Agent {
    let mut object = serde_json::to_value(agent(false)).unwrap();
    for (field, value) in fields.as_object().unwrap() {
        object["spec"][field] = value.clone();
    }
    serde_json::from_value(object).unwrap()
}

/// The state of a pod with this status.
fn pod_with(status: &Value) -> PodState {
    let metadata = json!({"name": "coast"});
    let object: Pod = serde_json::from_value(json!({"metadata": metadata, "status": status})).unwrap();
    let mut pod = PodState::of(&object);
    pod.owner = Some("u".into());
    pod.epoch = 2;
    pod
}

fn running() -> PodState {
    pod_with(&json!({"conditions": [{"type": "Ready", "status": "True"}]}))
}

fn waiting(reason: &str) -> PodState {
    pod_with(&json!({"containerStatuses": [{
        "name": "worker", "image": "registry.example/agentloop:1", "imageID": "", "ready": false, "restartCount": 3,
        "state": {"waiting": {"reason": reason}},
        "lastState": {"terminated": {"exitCode": 1, "reason": "Error"}},
    }]}))
}

fn pods() -> Vec<PodState> {
    vec![
        pod_with(&json!({})),
        pod_with(&json!({"phase": "Failed", "reason": "Evicted", "message": "the node was low on memory"})),
        pod_with(&json!({"phase": "Unknown"})),
        pod_with(&json!({"conditions": [
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes are available"},
        ]})),
        waiting("ImagePullBackOff"),
        waiting("CrashLoopBackOff"),
        waiting("CreateContainerConfigError"),
    ]
}

fn obstacles() -> Vec<PodObstacle> {
    let all = [
        PodObstacle::Foreign,
        PodObstacle::Refused("exceeded quota: pods".into()),
        PodObstacle::SharedTaken("<ConfigMap of another owner>".into()),
        PodObstacle::NodeLost("node-1".into()),
        PodObstacle::ClaimEnding("coast-state".into()),
        PodObstacle::ClaimForeign("coast-state".into()),
    ];
    for obstacle in &all {
        // A new variant needs an example above.
        match obstacle {
            PodObstacle::Foreign
            | PodObstacle::Refused(_)
            | PodObstacle::SharedTaken(_)
            | PodObstacle::NodeLost(_)
            | PodObstacle::ClaimEnding(_)
            | PodObstacle::ClaimForeign(_) => {}
        }
    }
    all.into()
}

/// What the controller finds in the counters of a gateway.
fn finding(mode: &str, identical: u32) -> Option<LoopFinding> {
    let agent = agent_with(&json!({"guardrails": {"loopDetection": {"mode": mode}}}));
    let mut last_report = reported(LoopState::Running);
    last_report.report.pulse = Some(RequestStats {
        identical,
        hash: "00ff00ff00ff00ff".into(),
        tokens: 60_000,
    });
    let hour = WindowedLimit {
        tokens: 100_000,
        seconds: 3600,
    };
    detect(&agent, &AgentStatus::default(), Some(&last_report), &[hour])
}

/// Situations of a loop that reports.
fn reported_cases() -> Vec<Case> {
    let of = |last_report| Case {
        last_report: Some(last_report),
        ..Case::default()
    };
    let mut cases = vec![Case::default(), of(reported(LoopState::Starting))];
    for reason in PauseReason::iter() {
        let mut last_report = held(LoopState::Paused, reason);
        last_report.report.loop_.as_mut().unwrap().reasons[0].message = format!("<message of the pause {reason}>");
        cases.push(of(last_report.clone()));
        last_report.report.loop_.as_mut().unwrap().resumes_at = Some(now() + SignedDuration::from_mins(5));
        cases.push(of(last_report));
    }
    for kind in FailureKind::iter() {
        let mut last_report = failing(kind);
        last_report.report.model.as_mut().unwrap().message = format!("<message of the failed call: {kind}>");
        cases.push(of(last_report));
    }
    let mut answered = reported(LoopState::Running);
    answered.report.model = Some(ModelReport {
        failure: None,
        message: String::new(),
    });
    cases.push(of(answered));
    let mut detected = reported(LoopState::Running);
    detected.report.loop_.as_mut().unwrap().detected = Some(DetectedLoop {
        sign: LoopSign::RepeatedCall,
        message: "<message of the loop>".into(),
    });
    cases.push(of(detected));
    let mut light = failing(FailureKind::AuthenticationFailed);
    light.report.loop_.as_mut().unwrap().light_model = light.report.model.take().map(|report| ModelReport {
        message: "<message of the gateway>".into(),
        ..report
    });
    cases.push(Case {
        light: true,
        ..of(light)
    });
    cases.extend(GoalEnd::iter().map(goal_tests::ended_by));
    cases.extend([Some(30), None].map(goal_tests::doubtful));
    for outcome in LoopOutcome::iter() {
        let mut ended = reported(LoopState::Stopped);
        let report = ended.report.loop_.as_mut().unwrap();
        report.outcome = Some(outcome);
        report.detected = (outcome == LoopOutcome::Failed).then(|| DetectedLoop {
            sign: LoopSign::RepeatedCall,
            message: "<message of the loop>".into(),
        });
        cases.push(Case {
            intent: Intent::Rest(RestReason::Completed),
            ..of(ended)
        });
    }
    cases
}

/// Situations that the controller sees from outside.
fn observed() -> Vec<Case> {
    let mut cases: Vec<Case> = pods()
        .into_iter()
        .map(|pod| Case {
            pod: Some(pod),
            last_report: None,
            ..Case::default()
        })
        .collect();
    cases.extend(obstacles().into_iter().map(|obstacle| Case {
        obstacle: Some(obstacle),
        ..Case::default()
    }));
    cases.extend(InvalidReason::iter().map(|reason| Case {
        verdict: Err(InvalidAgent {
            reason,
            message: "<message of the validation>".into(),
        }),
        pod: None,
        last_report: None,
        intent: Intent::Create,
        ..Case::default()
    }));
    for (enforce, identical) in [(false, 5), (true, 5), (false, 0)] {
        cases.push(Case {
            finding: finding(if enforce { "Enforce" } else { "Warn" }, identical),
            enforce,
            ..Case::default()
        });
    }
    for pod in [None, Some(pod(PodReason::Running))] {
        cases.push(Case {
            suspend: true,
            intent: Intent::Rest(RestReason::Suspended),
            last_report: None,
            pod,
            ..Case::default()
        });
    }
    for intent in [
        Intent::KeepOutdated(true),
        Intent::Replace(ReplaceReason::Outdated),
        Intent::Create,
    ] {
        cases.push(Case {
            pod: (intent != Intent::Create).then(|| pod(PodReason::Running)),
            intent,
            ..Case::default()
        });
    }
    cases.push(Case {
        silent: true,
        ..Case::default()
    });
    for sensor_problems in [vec!["prices"], vec!["prices", "mail"]] {
        let problem = |name: &str| (name.to_owned(), "<message of the Sensor>".to_owned());
        cases.push(Case {
            sensor_problems: Some(sensor_problems.into_iter().map(problem).collect()),
            ..Case::default()
        });
    }
    cases
}

fn statuses() -> Vec<AgentStatus> {
    let situations = reported_cases().into_iter().chain(observed());
    let with_text = |mut case: Case| {
        let runs = case.pod.as_ref().is_some_and(|pod| pod.reason == PodReason::Running);
        case.pod = if runs { Some(running()) } else { case.pod };
        case.status()
    };
    let mut all: Vec<AgentStatus> = situations.map(with_text).collect();
    for fields in [
        json!({"continuous": {"preCheck": {"enabled": true}}}),
        json!({"storage": {"ephemeral": true}}),
        json!({"model": {
            "api": "OpenAIChat", "name": "m", "baseURL": "http://models/v1", "apiKeySecretRef": {"name": "key", "key": "k"},
        }}),
    ] {
        let case = Case {
            pod: Some(running()),
            ..Case::default()
        };
        all.push(case.status_of(&agent_with(&fields)));
    }
    all
}

#[test]
fn kstatus_reads_each_status_of_an_agent_as_its_conditions_mean_it() {
    use KstatusVerdict::{Current, Failed, InProgress};
    assert_computed("Agent", &statuses(), &[Current, Failed, InProgress]);
}

#[test]
fn the_texts_of_conditions_of_agents() {
    let mut rows = TextRows::new();
    let statuses = statuses();
    let kstatus = [ConditionType::Ready, ConditionType::Reconciling, ConditionType::Stalled];
    for type_ in ConditionType::iter().filter(|type_| !kstatus.contains(type_)) {
        let found = statuses.iter().filter_map(|status| find(&status.conditions, type_));
        for condition in found.filter(|condition| condition.reason != "Inactive") {
            let name = format!("{} {}", condition.status, condition.reason);
            rows.push(text!(type_.as_ref(), name, condition.message));
        }
    }
    for status in &statuses {
        let ready = find(&status.conditions, ConditionType::Ready).unwrap();
        let also = kstatus
            .into_iter()
            .skip(1)
            .find(|type_| find(&status.conditions, *type_).is_some());
        let also = also.map_or_else(String::new, |type_| format!(", {}", type_.as_ref()));
        let mut others = status
            .conditions
            .iter()
            .filter(|other| kstatus.iter().all(|type_| type_.as_ref() != other.type_));
        let copied = others.find(|other| other.message == ready.message);
        let message = copied.map_or_else(
            || ready.message.clone(),
            |other| format!("(the message of {})", other.type_),
        );
        rows.push(text!(
            "Ready",
            format!("{} {}{also}", ready.status, ready.reason),
            message
        ));
    }
    let of_others = [
        ConditionType::Connected,
        ConditionType::NearLimit,
        ConditionType::Exhausted,
    ];
    for type_ in ConditionType::iter().filter(|type_| !kstatus.contains(type_) && !of_others.contains(type_)) {
        assert!(
            rows.iter().any(|(section, ..)| section == type_.as_ref()),
            "{type_:?} has no example"
        );
    }
    assert_texts!("agent-conditions", "Conditions of Agents", rows);
}

#[test]
fn the_texts_of_events_of_agents() {
    let mut rows = TextRows::new();
    let mut add = |event: KubeEvent| {
        let type_ = if event.warning { "Warning" } else { "Normal" };
        rows.push(text!(type_, format!("{} {}", event.reason, event.action), event.note));
    };
    let calm = Case::default().status();
    for status in statuses() {
        events::from_status(&calm, &status).into_iter().for_each(&mut add);
        events::from_status(&status, &calm).into_iter().for_each(&mut add);
    }
    for reason in [
        ReplaceReason::Outdated,
        ReplaceReason::Stopped,
        ReplaceReason::Ended,
        ReplaceReason::Foreign,
    ] {
        events::from_pod(&AppliedPlan {
            replaced: Some(reason),
            ..AppliedPlan::default()
        })
        .into_iter()
        .for_each(&mut add);
    }
    events::from_pod(&AppliedPlan {
        pod: Some(pod(PodReason::Starting)),
        created: Some(Arc::new(
            serde_json::from_value::<WatchedPod>(json!({"metadata": {}})).unwrap(),
        )),
        ..AppliedPlan::default()
    })
    .into_iter()
    .for_each(&mut add);
    add(events::volume_restored(2));
    rows.sort_by_key(|(type_, ..)| type_ == "Warning");
    assert_texts!("agent-events", "Events of Agents", rows);
}

/// An invalid spec, and what its references are.
fn invalid_agents() -> Vec<(Agent, AgentReferences)> {
    let none = AgentReferences::default;
    let mut long_name = agent(false);
    long_name.metadata.name = Some("a".repeat(64));
    let mut all = vec![(long_name, none())];
    for fields in [
        json!({"instructions": "x".repeat(130_000)}),
        json!({"guardrails": {"activeHours": {"timeZone": "Mars/Base", "start": "08:00", "end": "23:00"}}}),
        json!({"pod": {"priorityClassName": "system-node-critical"}}),
        json!({"pod": {"annotations": {"example.com/a": "b"}}}),
        json!({"tools": {"builtin": ["Shell"], "toolbox": {"image": "docker.io/other:1"}}}),
    ] {
        all.push((agent_with(&fields), none()));
    }
    let key = json!({"name": "x", "key": "k"});
    let reference = json!({"configMapKeyRef": key});
    let keyed = agent_with(&json!({"model": {"api": "OpenAIChat", "name": "m", "apiKeySecretRef": key}}));
    for lookup in [ReferenceLookup::NoObject, ReferenceLookup::NoKey] {
        let model = ModelReferences {
            key: Some(lookup),
            script: None,
        };
        all.push((keyed.clone(), AgentReferences { model, ..none() }));
    }
    let model = ModelReferences {
        key: None,
        script: Some(ReferenceLookup::Found(Err(
            "turns: has 0 entries; write 1 to 1000".into()
        ))),
    };
    let scripted = agent_with(&json!({"model": {"api": "Scripted", "name": "m", "scripted": reference}}));
    all.push((scripted, AgentReferences { model, ..none() }));
    let instructed = agent_with(&json!({"instructionsFrom": reference}));
    for lookup in [
        ReferenceLookup::NoObject,
        ReferenceLookup::NoKey,
        ReferenceLookup::Found(String::new()),
        ReferenceLookup::Found("x".repeat(40_000)),
    ] {
        let references = AgentReferences {
            instructions: Some(lookup),
            ..none()
        };
        all.push((instructed.clone(), references));
    }
    let skilled = agent_with(&json!({"skills": [{"name": "mail", "configMapKeyRef": key}]}));
    for text in [String::new(), "x".repeat(MAX_SKILL_BYTES + 1)] {
        let references = AgentReferences {
            skills: vec![ReferenceLookup::Found(text)],
            ..none()
        };
        all.push((skilled.clone(), references));
    }
    let sources = json!([{"secretRef": {"name": "s"}}, {"configMapRef": {"name": "c"}}]);
    let container = json!({"image": "team.example.com/mcp:1", "command": ["serve"], "envFrom": sources});
    let from_image = agent_with(&json!({"tools": {"servers": [{"name": "hub", "container": container}]}}));
    for index in 0..2 {
        let field = format!("spec.tools.servers[hub].container.envFrom[{index}]");
        let environment = BTreeMap::from([(field, false)]);
        all.push((from_image.clone(), AgentReferences { environment, ..none() }));
    }
    let claimed = agent_with(&json!({"workspace": {"claimName": "files"}}));
    for lookup in [
        ReferenceLookup::NoObject,
        ReferenceLookup::Found(Some(WorkspaceProblem::InUse("was created for Agent tide".into()))),
        ReferenceLookup::Found(Some(WorkspaceProblem::NotLabelled)),
    ] {
        let references = AgentReferences {
            workspace: Some(lookup),
            ..none()
        };
        all.push((claimed.clone(), references));
    }
    let server = json!({"name": "hub", "url": "https://hub/mcp", "headersSecretRef": {"name": "hub"}});
    let with_hub = agent_with(&json!({"tools": {"servers": [server]}}));
    for lookup in [
        ReferenceLookup::NoObject,
        ReferenceLookup::Found(vec![]),
        ReferenceLookup::Found(vec!["Host".to_owned()]),
    ] {
        let references = AgentReferences {
            headers: BTreeMap::from([("hub".to_owned(), lookup)]),
            ..none()
        };
        all.push((with_hub.clone(), references));
    }
    let model =
        json!({"api": "OpenAIChat", "name": "m", "baseURL": "https://m/v1", "tls": {"caSecretRef": {"name": "x"}}});
    let private = agent_with(&json!({"model": model}));
    for lookup in [ReferenceLookup::NoObject, ReferenceLookup::NoKey] {
        let references = AgentReferences {
            authorities: BTreeMap::from([("spec.model.tls.caSecretRef".to_owned(), lookup)]),
            ..none()
        };
        all.push((private.clone(), references));
    }
    all
}

#[test]
fn the_texts_of_the_validation_of_agents() {
    let mut strict = ReconcilerSettings {
        image: "i".into(),
        image_pull_policy: None,
        link_url: "https://link:8443".into(),
        egress: AgentEgress::default(),
        controller_namespace: "agentloop-system".into(),
        watch_namespaces: Vec::new(),
        gateway_resources: ResourceRequirements::default(),
        gateway_environment: Vec::new(),
        otlp_ca_secret: None,
        worker_resources: ResourceRequirements::default(),
        image_pull_secrets: Vec::new(),
        workers: 1,
        policy: PlatformPolicy::default(),
    };
    strict.policy.pods.annotation_prefixes = vec!["team.example.com/".into()];
    strict.policy.pods.tool_images = vec!["team.example.com/".into()];
    let mut rows = TextRows::new();
    for (agent, references) in invalid_agents() {
        let found = validate(&agent, &references, &strict).unwrap_err();
        rows.push(text!("Accepted=False", found.reason.as_ref(), found.message));
    }
    let of_budgets = [
        InvalidReason::BudgetNotFound,
        InvalidReason::BudgetRequired,
        InvalidReason::PriceUnknown,
        InvalidReason::BudgetUnavailable,
    ];
    for reason in InvalidReason::iter().filter(|reason| !of_budgets.contains(reason)) {
        assert!(
            rows.iter().any(|(_, name, _)| name == reason.as_ref()),
            "{reason:?} has no example"
        );
    }
    assert_texts!("agent-validation", "Validation of Agents by the controller", rows);
}
