//! Reasoning of a model is returned to its provider unchanged, also by the pod after the one that received it.

use pretty_assertions::assert_eq;
use serde_json::{Value, json};

use super::agents::{Agent, anthropic, openai};
use super::cluster::{Namespace, runtime, shared};
use crate::gateway::strict::{self, ProviderFlavor, StrictProvider};
use crate::support::clusters::host_for_pods;

const KINDS: [(&str, ProviderFlavor); 4] = [
    ("claude", ProviderFlavor::Claude),
    ("deepseek", ProviderFlavor::DeepSeek),
    ("gemini", ProviderFlavor::Gemini),
    ("mistral", ProviderFlavor::Mistral),
];
/// The request of the turn during which the pod goes: it repeats two answers.
const CUT: usize = 2;

#[test]
fn providers_that_refuse_lost_signatures_answer_a_turn_that_began_in_another_pod() {
    let Some(cluster) = shared() else { return };
    let namespace = Namespace::new(&cluster.system, "reasoning");
    let host = host_for_pods();
    let runtime = runtime();
    let agents = KINDS.map(|(name, kind)| {
        let (strict, address) = runtime.block_on(StrictProvider::start(&host, kind, Some(CUT)));
        let mut model = if kind == ProviderFlavor::Claude {
            anthropic("")
        } else {
            openai("")
        };
        overwrite(&mut model, strict::model(kind, address));
        model["contextTokens"] = 32_000.into();
        (Agent::apply(&namespace, name, &model, &json!({})), strict)
    });
    for (agent, strict) in &agents {
        let seen = runtime.block_on(strict.asked(CUT + 1, 90));
        assert_eq!(seen.refused, None, "{}", agent.name);
        agent
            .kubectl
            .ok(&["delete", "pod", &agent.name, "--wait=false", "--grace-period=5"]);
    }
    for (agent, strict) in &agents {
        let seen = runtime.block_on(strict.judged(120));
        assert_eq!(seen.refused, None, "{}", agent.name);
        agent.until_state("Sleeping", 60);
        let usage = &agent.object()["status"]["usage"];
        assert_eq!(usage["turns"], 1, "{}: one turn in two pods", agent.name);
    }
}

fn overwrite(model: &mut Value, with: Value) {
    let (Value::Object(model), Value::Object(with)) = (model, with) else {
        return;
    };
    model.extend(with);
}
