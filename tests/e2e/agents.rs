//! Agents in tests: their manifests, and what one reads of them.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::cluster::{self, AGENTS, Namespace};
use super::model_server::Used;
use crate::support::kubectl::Kubectl;

/// An Agent in a test's namespace.
pub struct Agent<'a> {
    pub kubectl: &'a Kubectl,
    pub name: String,
}

/// A manifest of an Agent; `spec` is merged over the smallest valid one. Models of tests say the same again and again:
/// loops are looked for only where a test asks for it.
pub fn manifest(name: &str, model: &Value, spec: &Value) -> String {
    let mut agent = json!({
        "apiVersion": "agentloop.dev/v1alpha1",
        "kind": "Agent",
        "metadata": {"name": name},
        "spec": {
            "instructions": "You watch a quiet system. Say in a few words what you do next.",
            "storage": {"size": "64Mi"},
            "model": model,
            "guardrails": {"loopDetection": {"mode": "Disabled"}},
        },
    });
    merge(&mut agent["spec"], spec);
    agent.to_string()
}

/// A model of an OpenAI-compatible server; its base address decides under which label its calls are recorded.
pub fn openai(base_url: &str) -> Value {
    json!({"api": "OpenAIChat", "name": "smollm2", "baseURL": base_url, "maxOutputTokens": 96, "contextTokens": 3000})
}

/// The same for a model that really computes: beside seven other tests on two cores a token may take a third of a second,
/// so an answer is short, and yet long enough to be caught under way.
pub fn computed(mut model: Value) -> Value {
    model["maxOutputTokens"] = COMPUTED_TOKENS.into();
    model
}

/// Tokens of one answer of a model that really computes.
pub const COMPUTED_TOKENS: u32 = 40;

/// Longest time until a new Agent turns, in seconds: beside seven other tests on two cores.
pub const STARTUP: u64 = 180;

/// The same for Anthropic messages.
pub fn anthropic(base_url: &str) -> Value {
    let mut model = openai(base_url);
    model["api"] = "AnthropicMessages".into();
    model
}

/// The Scripted model with the script of ConfigMap `name`.
pub fn scripted(name: &str) -> Value {
    json!({"api": "Scripted", "name": "scripted", "scripted": {"configMapKeyRef": {"name": name, "key": "script"}}})
}

/// A ConfigMap with a script.
pub fn script(name: &str, script: &Value) -> String {
    let data = json!({"script": script.to_string()});
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}).to_string()
}

fn merge(into: &mut Value, from: &Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (key, value) in from {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (into, from) => *into = from.clone(),
    }
}

impl<'a> Agent<'a> {
    /// Applies a manifest made by [`manifest`].
    pub fn apply(namespace: &'a Namespace, name: &str, model: &Value, spec: &Value) -> Self {
        namespace.kubectl.apply(&manifest(name, model, spec));
        Self::named(namespace, name)
    }

    /// An Agent that is there already.
    pub fn named(namespace: &'a Namespace, name: &str) -> Self {
        Self {
            kubectl: &namespace.kubectl,
            name: name.into(),
        }
    }

    /// The whole object, now.
    pub fn object(&self) -> Value {
        self.kubectl.get(AGENTS, &self.name).expect("the Agent exists")
    }

    /// Watches the Agent until `seen` gives something.
    pub fn until<T>(&self, what: &str, seconds: u64, seen: impl FnMut(&Value) -> Option<T>) -> T {
        self.kubectl.until(what, seconds, AGENTS, &self.name, seen)
    }

    /// Waits for a state of the loop.
    pub fn until_state(&self, state: &str, seconds: u64) -> Value {
        self.until(&format!("state {state}"), seconds, |agent| {
            (agent["status"]["loop"]["state"] == state).then(|| agent.clone())
        })
    }

    /// Waits for a condition with this status and reason; the condition.
    pub fn until_condition(&self, type_: &str, status: &str, reason: &str, seconds: u64) -> Value {
        self.until(&format!("{type_}={status} ({reason})"), seconds, |agent| {
            let found = condition(agent, type_)?;
            (found["status"] == status && found["reason"] == reason).then(|| found.clone())
        })
    }

    /// Waits until at least `turns` turns are completed.
    pub fn until_turns(&self, turns: i64, seconds: u64) -> Value {
        self.until(&format!("{turns} turns"), seconds, |agent| {
            (agent["status"]["usage"]["turns"].as_i64()? >= turns).then(|| agent.clone())
        })
    }

    /// Waits until the pod runs and all its containers are ready; another pod than `not`.
    pub fn until_pod(&self, not: Option<&Value>, seconds: u64) -> Value {
        self.kubectl.until("a running pod", seconds, "pods", &self.name, |pod| {
            let is_new = not.is_none_or(|old| old["metadata"]["uid"] != pod["metadata"]["uid"]);
            let ready = pod["status"]["conditions"]
                .as_array()?
                .iter()
                .find(|one| one["type"] == "Ready")?;
            let alive = pod["metadata"]["deletionTimestamp"].is_null();
            (is_new && alive && ready["status"] == "True").then(|| pod.clone())
        })
    }

    /// Waits until the container has been restarted `restarts` times, and runs.
    pub fn until_restarted(&self, container: &str, restarts: i64, seconds: u64) -> Value {
        let what = format!("restart {restarts} of {container}");
        self.kubectl.until(&what, seconds, "pods", &self.name, |pod| {
            let lists = ["containerStatuses", "initContainerStatuses"];
            let mut all = lists
                .iter()
                .flat_map(|list| pod["status"][list].as_array().into_iter().flatten());
            let found = all.find(|one| one["name"] == container)?;
            let running = found["state"]["running"].is_object() && found["ready"] == true;
            (running && found["restartCount"].as_i64()? >= restarts).then(|| pod.clone())
        })
    }

    /// Waits for an Event about this Agent; its message.
    pub fn until_event(&self, type_: &str, reason: &str, seconds: u64) -> String {
        let deadline = Instant::now() + Duration::from_secs(seconds);
        let mut seen = Vec::new();
        while Instant::now() < deadline {
            let about = format!("involvedObject.name={}", self.name);
            let watch = self.kubectl.watch("events", &["--field-selector", &about]);
            while let Some(event) = watch.next(deadline) {
                if event.object["type"] == type_ && event.object["reason"] == reason {
                    return event.object["message"].as_str().unwrap_or_default().to_owned();
                }
                seen.push(event.object["reason"].clone());
            }
            // The API server ends watches now and then.
            std::thread::park_timeout(Duration::from_millis(200));
        }
        panic!(
            "no {type_} Event {reason} about {} within {seconds} s, but {seen:?}",
            self.name
        );
    }

    /// Sets `spec.suspend`.
    pub fn suspend(&self, suspend: bool) {
        self.kubectl
            .patch(AGENTS, &self.name, &json!({"spec": {"suspend": suspend}}));
    }

    /// Suspends and waits until the pod is gone and the loop is reported stopped.
    pub fn stop(&self, seconds: u64) {
        self.suspend(true);
        self.kubectl.until_gone("pod", &self.name, seconds);
        self.until_state("Stopped", seconds);
    }

    /// Waits until status and Prometheus both say `used()`, which is asked again each time.
    pub fn until_counts(&self, system: &Kubectl, seconds: u64, used: impl Fn() -> Used) {
        self.until("the counts of the server", seconds, |agent| {
            (status_used(agent) == used()).then_some(())
        });
        let page = cluster::metrics(system);
        let (counted, expected) = (self.metrics_used(&page), used());
        assert_eq!(counted, expected, "Prometheus (left) differs from the server (right)");
    }

    /// What the metrics page says this Agent used.
    pub fn metrics_used(&self, page: &str) -> Used {
        let count = |name: &str, more: &[(&str, &str)]| {
            let mut labels = vec![("namespace", self.kubectl.namespace()), ("agent", self.name.as_str())];
            labels.extend(more);
            // Counts of tests are far below 2^53.
            #[allow(clippy::cast_possible_truncation)]
            let value = cluster::series(page, name, &labels).map(|value| value as i64);
            // Absent at 0.
            let value = value.or((name == "agentloop_agent_unknown_calls_total").then_some(0));
            value.unwrap_or_else(|| panic!("{name}{labels:?} is not on the page"))
        };
        let tokens = |type_| count("agentloop_agent_tokens_total", &[("type", type_)]);
        Used {
            calls: count("agentloop_agent_calls_total", &[]),
            unknown_calls: count("agentloop_agent_unknown_calls_total", &[]),
            input: tokens("input"),
            output: tokens("output"),
            cache_read: tokens("cache_read"),
            cache_write: tokens("cache_write"),
        }
    }
}

/// What an Agent's status says it used.
pub fn status_used(agent: &Value) -> Used {
    let usage = &agent["status"]["usage"];
    let count = |name: &str| usage[name].as_i64().unwrap_or(0);
    Used {
        calls: count("calls"),
        unknown_calls: count("unknownCalls"),
        input: count("inputTokens"),
        output: count("outputTokens"),
        cache_read: count("cacheReadTokens"),
        cache_write: count("cacheWriteTokens"),
    }
}

/// The condition of that type.
pub fn condition<'a>(agent: &'a Value, type_: &str) -> Option<&'a Value> {
    agent["status"]["conditions"]
        .as_array()?
        .iter()
        .find(|one| one["type"] == type_)
}
