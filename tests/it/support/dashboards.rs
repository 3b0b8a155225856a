//! What the chart's dashboards ask Prometheus.
#![allow(dead_code)]

use serde_json::Value;

/// A query of a panel, with values for its variables.
#[derive(Debug)]
pub struct BoardQuery {
    /// Such as `agentloop / Operator: Memory B`.
    pub place: String,
    pub query: String,
    /// Asks for the present only, not for the time that the dashboard shows.
    pub is_instant: bool,
}

/// Values of the variables that select all series, of a Prometheus that scrapes once a second.
pub const EVERYTHING: [(&str, &str); 10] = [
    ("$controller_namespace", ".*"),
    ("$namespace", ".+"),
    ("$agent", ".+"),
    ("$budget", ".+"),
    ("$sensor", ".+"),
    ("$job", ".+"),
    ("$instance", ".+"),
    ("$__rate_interval", "5s"),
    ("$__interval", "1s"),
    ("$__range", "1m"),
];

/// All queries of all dashboards. The variables are replaced in this order, so that none may begin with a former one.
pub fn queries(variables: &[(&str, &str)]) -> Vec<BoardQuery> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/charts/agentloop/dashboards");
    let mut queries = Vec::new();
    for file in std::fs::read_dir(folder).expect("the dashboards") {
        let text = std::fs::read_to_string(file.expect("a file").path()).expect("a dashboard");
        let board: Value = serde_json::from_str(&text).expect("JSON");
        for panel in board["panels"].as_array().expect("panels") {
            for target in panel["targets"].as_array().into_iter().flatten() {
                let text = |value: &Value| value.as_str().expect("a text").to_owned();
                let (board, panel, id) = (text(&board["title"]), text(&panel["title"]), text(&target["refId"]));
                queries.push(BoardQuery {
                    place: format!("{board}: {panel} {id}"),
                    query: with_values(text(&target["expr"]), variables),
                    is_instant: target["instant"] == true,
                });
            }
        }
    }
    queries
}

fn with_values(query: String, variables: &[(&str, &str)]) -> String {
    let query = variables
        .iter()
        .fold(query, |query, (variable, value)| query.replace(variable, value));
    assert!(!query.contains('$'), "a variable without a value: {query}");
    query
}
