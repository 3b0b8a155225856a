//! Dashboards: rows of panels, variables, annotations, and links between the dashboards.

use serde_json::{Value, json};

use super::panel::{DashboardPanel, datasource};
use crate::telemetry::registry::Metric;

/// Width of a dashboard.
const COLUMNS: u32 = 24;
/// Tag of all dashboards, by which they link to each other.
const TAG: &str = "agentloop";
/// Shortest step of the queries of annotations: two scrapes at intervals of a minute.
const ANNOTATION_STEP: &str = "120s";

/// A variable whose values are those of a label.
#[derive(Clone, Copy, Debug)]
pub struct DashboardVariable {
    /// Name of the variable. Links pass the value to dashboards that have one of the same name.
    pub name: &'static str,
    /// What the user reads.
    pub title: &'static str,
    /// A metric that has the label.
    pub metric: &'static Metric,
    /// The label.
    pub label: &'static str,
    /// Labels by whose variables, which are before it, its values are filtered.
    pub within: &'static [(&'static str, &'static str)],
    /// What *All* stands for in a query; `None`: the values that were found, for labels that other programs have as well.
    pub all: Option<&'static str>,
}

impl DashboardVariable {
    /// The namespaces that a metric has series of.
    pub const fn namespace(metric: &'static Metric) -> Self {
        Self {
            name: "namespace",
            title: "Namespace",
            metric,
            label: "namespace",
            within: &[],
            all: Some(".+"),
        }
    }

    /// The objects of the chosen namespaces. The label has the name of the variable.
    pub const fn in_namespace(name: &'static str, title: &'static str, metric: &'static Metric) -> Self {
        Self {
            name,
            title,
            metric,
            label: name,
            within: &[("namespace", "namespace")],
            all: Some(".+"),
        }
    }

    /// Targets that export a metric which no other program has.
    pub const fn of_target(
        name: &'static str,
        title: &'static str,
        (metric, label): (&'static Metric, &'static str),
        within: &'static [(&'static str, &'static str)],
    ) -> Self {
        Self {
            name,
            title,
            metric,
            label,
            within,
            all: None,
        }
    }
}

/// A line over all panels when something happened.
#[derive(Clone, Debug)]
pub struct Annotation {
    pub name: &'static str,
    pub color: &'static str,
    pub query: String,
    pub title: &'static str,
}

/// A dashboard.
#[derive(Clone, Debug)]
pub struct Dashboard {
    /// Last part of the uid and of the file's name.
    pub name: &'static str,
    pub title: &'static str,
    pub description: &'static str,
    pub variables: Vec<DashboardVariable>,
    pub annotations: Vec<Annotation>,
    pub rows: Vec<(&'static str, Vec<DashboardPanel>)>,
}

impl Dashboard {
    pub fn file_name(&self) -> String {
        format!("agentloop-{}.json", self.name)
    }

    pub fn to_json(&self) -> Value {
        json!({
            "id": null,
            "uid": format!("agentloop-{}", self.name),
            "title": self.title,
            "description": self.description,
            "tags": [TAG, "ai-agents"],
            "editable": false,
            "graphTooltip": 1,
            "schemaVersion": 39,
            "version": 1,
            "timezone": "browser",
            "refresh": "30s",
            "time": {"from": "now-6h", "to": "now"},
            "links": [{
                "type": "dashboards", "title": "agentloop", "tags": [TAG], "asDropdown": true, "includeVars": true,
                "keepTime": true, "targetBlank": false, "icon": "external link", "tooltip": "", "url": "",
            }],
            "templating": {"list": self.variables_json()},
            "annotations": {"list": self.annotations.iter().map(annotation).collect::<Vec<_>>()},
            "panels": self.panels(),
        })
    }

    fn variables_json(&self) -> Vec<Value> {
        let source = json!({
            "type": "datasource", "name": "datasource", "label": "Data Source", "query": "prometheus", "current": {},
            "hide": 0, "refresh": 1, "regex": "", "options": [],
        });
        std::iter::once(source)
            .chain(self.variables.iter().map(variable))
            .collect()
    }

    /// Panels of a row flow from left to right; a panel without room begins the next line.
    fn panels(&self) -> Vec<Value> {
        let (mut panels, mut y) = (Vec::new(), 0);
        for (title, row) in &self.rows {
            let id = panels.len() + 1;
            panels.push(json!({
                "type": "row", "id": id, "title": title, "collapsed": false, "panels": [],
                "gridPos": {"h": 1, "w": COLUMNS, "x": 0, "y": y},
            }));
            y += 1;
            let (mut x, mut line) = (0, 0);
            for panel in row {
                if x + panel.width > COLUMNS {
                    (x, y) = (0, y + line);
                    line = 0;
                }
                panels.push(panel.to_json(panels.len() + 1, (x, y)));
                x += panel.width;
                line = line.max(panel.height);
            }
            y += line;
        }
        panels
    }
}

fn variable(variable: &DashboardVariable) -> Value {
    let DashboardVariable {
        name,
        title,
        metric,
        label,
        within,
        all,
    } = variable;
    let filters = within
        .iter()
        .map(|(label, variable)| format!("{label}=~\"${variable}\""));
    let filters = filters.collect::<Vec<_>>().join(",");
    let filter = if filters.is_empty() {
        filters
    } else {
        format!("{{{filters}}}")
    };
    let query = format!("label_values({}{filter}, {label})", metric.name);
    let mut json = json!({
        "type": "query", "name": name, "label": title, "datasource": datasource(),
        "query": {"query": query, "refId": name}, "definition": query,
        // On a change of the time range.
        "refresh": 2,
        "multi": true, "includeAll": true,
        "current": {"selected": true, "text": ["All"], "value": ["$__all"]},
        "sort": 1, "hide": 0, "regex": "", "options": [],
    });
    if let Some(all) = all {
        json["allValue"] = json!(all);
    }
    json
}

fn annotation(annotation: &Annotation) -> Value {
    let Annotation {
        name,
        color,
        query,
        title,
    } = annotation;
    json!({
        "name": name, "datasource": datasource(), "enable": true, "hide": false, "iconColor": color,
        "expr": query, "titleFormat": title, "step": ANNOTATION_STEP,
    })
}
