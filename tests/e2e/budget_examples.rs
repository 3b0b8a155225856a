//! The examples of budgets do what their comments promise.

use serde_json::json;

use super::agents::{Agent, condition, status_used};
use super::budgets::{BUDGETS, until_budget};
use super::cluster::{Namespace, SYSTEM, shared};

fn example(name: &str) -> String {
    format!("{}/examples/{name}", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn the_team_budget_warns_is_spent_and_is_topped_up() {
    let Some(cluster) = shared() else { return };
    let namespace = Namespace::new(&cluster.system, "team-budget");
    let kubectl = &namespace.kubectl;
    kubectl.ok(&["apply", "-f", &example("team-budget.yaml")]);
    until_budget(kubectl, "team-research", "NearLimit", "True", 120);
    let spent = until_budget(kubectl, "team-research", "Exhausted", "True", 60);
    assert_eq!(spent["status"]["agents"], 2);
    let agents = [Agent::named(&namespace, "reader"), Agent::named(&namespace, "writer")];
    for agent in &agents {
        agent.until_condition("BudgetExhausted", "True", "BudgetExhausted", 60);
        agent.until("when it resumes", 30, |agent| {
            agent["status"]["loop"]["resumesAt"].as_str().map(|_| ())
        });
    }
    let calls = || {
        agents
            .iter()
            .map(|agent| status_used(&agent.object()).calls)
            .sum::<i64>()
    };
    assert_eq!(calls(), 20, "1,000 tokens each of 20,000");
    let top_up = json!({"spec": {"topUps": [{"id": "for-today", "tokens": 10000, "reason": "the report is due"}]}});
    kubectl.patch(BUDGETS, "team-research", &top_up);
    kubectl.until("the top-up is used", 90, BUDGETS, "team-research", |budget| {
        (budget["status"]["used"]["tokens"] == 30_000).then_some(())
    });
    // One of them may draw 15,000 of it and no more.
    for agent in &agents {
        assert!(
            status_used(&agent.object()).calls <= 15,
            "{} drew more than its part",
            agent.name
        );
    }
}

#[test]
fn the_platform_budget_holds_agents_of_another_namespace_until_its_limit_is_raised() {
    let Some(cluster) = shared() else { return };
    let file = example("platform-budget.yaml");
    let system = &cluster.system;
    system.in_namespace("").ok(&["apply", "-f", &file]);
    let gone = CleanupGuard(&file, system);
    let platform = system.in_namespace(SYSTEM);
    until_budget(&platform, "sandboxes", "Exhausted", "True", 120);
    let sandbox = system.in_namespace("sandbox");
    let agent = Agent {
        kubectl: &sandbox,
        name: "explorer".into(),
    };
    let held = agent.until_condition("BudgetExhausted", "True", "BudgetExhausted", 60);
    let message = held["message"].as_str().unwrap_or_default();
    assert!(
        message.contains("agentloop-system/sandboxes"),
        "whose limit it is: {message}"
    );
    assert_eq!(status_used(&agent.object()).calls, 10);
    platform.patch(BUDGETS, "sandboxes", &json!({"spec": {"limits": {"tokens": 50000}}}));
    agent.until("calls under the higher limit", 60, |agent| {
        (status_used(agent).calls > 10).then_some(())
    });
    drop(gone);
}

/// Deletes what the example made, also when the test fails.
struct CleanupGuard<'a>(&'a str, &'a crate::support::kubectl::Kubectl);

impl Drop for CleanupGuard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let said = self
                .1
                .in_namespace("sandbox")
                .run(&["describe", "agents.agentloop.dev,pods"]);
            eprintln!("{}{}", said.stdout, said.stderr);
        }
        let delete = ["delete", "--ignore-not-found", "--wait=false", "-f", self.0];
        self.1.in_namespace("").run(&delete);
    }
}

#[test]
fn the_daily_cost_limit_warns_at_its_percentage_counts_its_top_ups_and_pauses() {
    let Some(cluster) = shared() else { return };
    let namespace = Namespace::new(&cluster.system, "daily-cost");
    let kubectl = &namespace.kubectl;
    kubectl.ok(&["apply", "-f", &example("daily-cost-limit.yaml")]);
    let near = until_budget(kubectl, "analyst", "NearLimit", "True", 120);
    assert_eq!(
        near["status"]["limits"]["costMicroUSD"], 1_500_000,
        "the first top-up is in it"
    );
    let cost = near["status"]["used"]["costMicroUSD"].as_i64().unwrap_or(0);
    assert!(cost >= 1_125_000, "75 percent of $1.50, but {cost}");
    let agent = Agent::named(&namespace, "analyst");
    agent.until_condition("BudgetExhausted", "True", "BudgetExhausted", 60);
    let spent = until_budget(kubectl, "analyst", "Exhausted", "True", 30);
    assert_eq!(
        spent["status"]["used"]["costMicroUSD"], 1_500_000,
        "20 calls of 7.5 cents"
    );
    assert!(spent["status"]["window"]["resetsAt"].is_string(), "a day ends");
    assert_eq!(condition(&agent.object(), "Ready").expect("Ready")["status"], "True");
    let again = json!({"id": "again", "costUSD": "0.50", "reason": "quarter end"});
    let add = json!([{"op": "add", "path": "/spec/topUps/-", "value": again}]).to_string();
    kubectl.ok(&["patch", BUDGETS, "analyst", "--type=json", "-p", &add]);
    kubectl.until("the second top-up is used", 60, BUDGETS, "analyst", |budget| {
        (budget["status"]["used"]["costMicroUSD"].as_i64()? > 1_500_000).then_some(())
    });
}
