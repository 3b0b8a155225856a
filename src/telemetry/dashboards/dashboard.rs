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
    /// Name of the variable and of the label.
    pub name: &'static str,
    /// What the user reads.
    pub label: &'static str,
    /// A metric that has the label.
    pub metric: &'static Metric,
    /// The variable before it, by which its values are filtered.
    pub within: Option<&'static str>,
}

impl DashboardVariable {
    /// The namespaces that a metric has series of.
    pub const fn namespace(metric: &'static Metric) -> Self {
        Self {
            name: "namespace",
            label: "Namespace",
            metric,
            within: None,
        }
    }

    /// The objects of the chosen namespaces.
    pub const fn in_namespace(name: &'static str, label: &'static str, metric: &'static Metric) -> Self {
        Self {
            name,
            label,
            metric,
            within: Some("namespace"),
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
        label,
        metric,
        within,
    } = variable;
    let filter = within.map_or(String::new(), |before| format!("{{{before}=~\"${before}\"}}"));
    let query = format!("label_values({}{filter}, {name})", metric.name);
    json!({
        "type": "query", "name": name, "label": label, "datasource": datasource(),
        "query": {"query": query, "refId": name}, "definition": query,
        // On a change of the time range.
        "refresh": 2,
        "multi": true, "includeAll": true, "allValue": ".+",
        "current": {"selected": true, "text": ["All"], "value": ["$__all"]},
        "sort": 1, "hide": 0, "regex": "", "options": [],
    })
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
