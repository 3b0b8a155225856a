//! Panels: what is drawn from which queries.

use serde_json::{Value, json};

use super::query::metrics_in;
use crate::telemetry::registry::MetricSource;

/// Colors of the states of loops, the same on all dashboards.
pub const STATE_COLORS: [(&str, &str); 6] = [
    ("Starting", "yellow"),
    ("Running", "green"),
    ("Sleeping", "blue"),
    ("Paused", "orange"),
    ("Stopping", "purple"),
    ("Stopped", "text"),
];

/// Shortest step of queries over time. Grafana takes it for the scrape interval, in place of that of the data source: rates are over
/// four of these at least, which two scrapes at intervals of a minute are in.
const SHORTEST_STEP: &str = "30s";

/// Unit of the values of a panel, as an id of Grafana.
#[derive(Clone, Copy, Debug)]
pub enum PanelUnit {
    Count,
    PerMinute,
    Seconds,
    Bytes,
    UsDollars,
    /// From 0 to 1.
    Share,
    /// Milliseconds since the Unix epoch, shown as the time since then or until then.
    Timestamp,
    Cores,
}

impl PanelUnit {
    pub const fn id(self) -> &'static str {
        match self {
            Self::Count | Self::Cores => "short",
            Self::PerMinute => "opm",
            Self::Seconds => "s",
            Self::Bytes => "bytes",
            Self::UsDollars => "currencyUSD",
            Self::Share => "percentunit",
            Self::Timestamp => "dateTimeFromNow",
        }
    }
}

/// One query and how its series are called.
#[derive(Clone, Debug)]
pub struct PanelQuery {
    query: String,
    legend: String,
}

/// Series of a query, named by a legend such as `{{namespace}}/{{agent}}`.
pub fn panel_query(query: impl Into<String>, legend: &str) -> PanelQuery {
    PanelQuery {
        query: query.into(),
        legend: legend.into(),
    }
}

/// A column of a table whose rows are the label sets that its queries share.
#[derive(Clone, Debug)]
pub struct TableColumn {
    pub title: &'static str,
    pub query: String,
    pub unit: PanelUnit,
}

#[derive(Clone, Debug)]
enum PanelKind {
    Stat {
        /// Value from which on the panel is orange.
        warn_from: Option<f64>,
    },
    TimeSeries {
        stacked: bool,
    },
    BarGauge,
    /// Numbers with a text and a color each.
    StateTimeline,
    Table {
        columns: Vec<TableColumn>,
    },
}

/// A panel without its place on the dashboard.
#[derive(Clone, Debug)]
pub struct DashboardPanel {
    title: &'static str,
    description: &'static str,
    unit: PanelUnit,
    form: PanelKind,
    targets: Vec<PanelQuery>,
    /// Columns of the dashboard's 24.
    pub width: u32,
    /// Height in grid units of 30 pixels.
    pub height: u32,
}

impl DashboardPanel {
    fn new(
        form: PanelKind,
        title: &'static str,
        unit: PanelUnit,
        description: &'static str,
        targets: Vec<PanelQuery>,
    ) -> Self {
        let (width, height) = match form {
            PanelKind::Stat { .. } => (4, 4),
            PanelKind::Table { .. } | PanelKind::StateTimeline => (24, 8),
            PanelKind::TimeSeries { .. } | PanelKind::BarGauge => (8, 8),
        };
        Self {
            title,
            description,
            unit,
            form,
            targets,
            width,
            height,
        }
    }

    /// One number: the value of one query at the end of the time shown.
    pub fn stat(title: &'static str, unit: PanelUnit, description: &'static str, query: String) -> Self {
        let form = PanelKind::Stat { warn_from: None };
        Self::new(form, title, unit, description, vec![panel_query(query, title)])
    }

    /// A number that turns orange from this value on.
    pub fn warning(title: &'static str, description: &'static str, query: String, warn_from: f64) -> Self {
        let form = PanelKind::Stat {
            warn_from: Some(warn_from),
        };
        Self::new(
            form,
            title,
            PanelUnit::Count,
            description,
            vec![panel_query(query, title)],
        )
    }

    /// Lines over time.
    pub fn lines(title: &'static str, unit: PanelUnit, description: &'static str, targets: Vec<PanelQuery>) -> Self {
        Self::new(
            PanelKind::TimeSeries { stacked: false },
            title,
            unit,
            description,
            targets,
        )
    }

    /// Areas over time, one above the other.
    pub fn stacked(title: &'static str, unit: PanelUnit, description: &'static str, targets: Vec<PanelQuery>) -> Self {
        Self::new(
            PanelKind::TimeSeries { stacked: true },
            title,
            unit,
            description,
            targets,
        )
    }

    /// Bars from 0 to 1.
    pub fn bars(title: &'static str, description: &'static str, targets: Vec<PanelQuery>) -> Self {
        Self::new(PanelKind::BarGauge, title, PanelUnit::Share, description, targets)
    }

    /// The state of loops over time. The query has the value 1 for the first of [`STATE_COLORS`], and so on.
    pub fn states(title: &'static str, description: &'static str, query: String, legend: &str) -> Self {
        let targets = vec![panel_query(query, legend)];
        Self::new(PanelKind::StateTimeline, title, PanelUnit::Count, description, targets)
    }

    /// A table with a row for each label set of its queries.
    pub fn table(title: &'static str, description: &'static str, columns: Vec<TableColumn>) -> Self {
        let targets = columns.iter().map(|column| panel_query(&*column.query, "")).collect();
        Self::new(
            PanelKind::Table { columns },
            title,
            PanelUnit::Count,
            description,
            targets,
        )
    }

    pub const fn wide(mut self, width: u32) -> Self {
        self.width = width;
        self
    }

    /// The panel with this id at this place.
    pub fn to_json(&self, id: usize, (x, y): (u32, u32)) -> Value {
        let mut panel = json!({
            "type": self.kind(),
            "id": id,
            "title": self.title,
            "description": format!("{}{}", self.description, self.required_level()),
            "datasource": datasource(),
            "gridPos": {"h": self.height, "w": self.width, "x": x, "y": y},
            "fieldConfig": {"defaults": self.defaults(), "overrides": self.overrides()},
            "options": self.options(),
            "targets": self.targets_json(),
        });
        if let PanelKind::Table { columns } = &self.form {
            panel["transformations"] = transformations(columns);
        }
        panel
    }

    /// At which levels of `metrics.perObject` the panel has data, if not at each.
    fn required_level(&self) -> &'static str {
        let of_objects = |source| {
            matches!(
                source,
                MetricSource::Agents | MetricSource::Budgets | MetricSource::Sensors
            )
        };
        let needs_full = self.targets.iter().filter_map(|panel_query| {
            let metrics = metrics_in(&panel_query.query).into_iter();
            let metrics: Vec<_> = metrics.filter(|metric| of_objects(metric.source)).collect();
            (!metrics.is_empty()).then(|| metrics.iter().any(|metric| !metric.is_minimal()))
        });
        let needs_full: Vec<bool> = needs_full.collect();
        match (needs_full.contains(&true), needs_full.contains(&false)) {
            (false, false) => "",
            (true, false) => " Requires `metrics.perObject: Full`.",
            (false, true) => " Requires `metrics.perObject: Full` or `Minimal`.",
            (true, true) => " Requires `metrics.perObject: Full`; a part of it is shown with `Minimal`.",
        }
    }

    const fn kind(&self) -> &'static str {
        match self.form {
            PanelKind::Stat { .. } => "stat",
            PanelKind::TimeSeries { .. } => "timeseries",
            PanelKind::BarGauge => "bargauge",
            PanelKind::StateTimeline => "state-timeline",
            PanelKind::Table { .. } => "table",
        }
    }

    fn defaults(&self) -> Value {
        let mut defaults = json!({"unit": self.unit.id()});
        if !matches!(self.unit, PanelUnit::Timestamp) {
            defaults["min"] = json!(0);
        }
        let steps = |steps: &[(&str, Option<f64>)]| {
            let steps = steps
                .iter()
                .map(|(color, value)| json!({"color": color, "value": value}));
            json!({"mode": "absolute", "steps": steps.collect::<Vec<_>>()})
        };
        match &self.form {
            PanelKind::Stat { warn_from: Some(from) } => {
                defaults["thresholds"] = steps(&[("green", None), ("orange", Some(*from))]);
                defaults["color"] = json!({"mode": "thresholds"});
            }
            // Without a color of its own, Grafana shows each number from 80 on in red.
            PanelKind::Stat { warn_from: None } => defaults["color"] = json!({"mode": "fixed", "fixedColor": "text"}),
            PanelKind::TimeSeries { stacked } => {
                let stacking = if *stacked { "normal" } else { "none" };
                defaults["custom"] = json!({
                    "drawStyle": "line", "lineWidth": 1, "fillOpacity": if *stacked { 40 } else { 10 },
                    "showPoints": "never", "spanNulls": false, "stacking": {"mode": stacking, "group": "A"},
                });
            }
            PanelKind::BarGauge => {
                defaults["max"] = json!(1);
                defaults["thresholds"] = steps(&[("green", None), ("orange", Some(0.8)), ("red", Some(1.0))]);
                defaults["color"] = json!({"mode": "thresholds"});
            }
            PanelKind::StateTimeline => {
                let options = STATE_COLORS.iter().enumerate().map(|(index, (text, color))| {
                    let option = json!({"text": text, "color": color, "index": index});
                    ((index + 1).to_string(), option)
                });
                let options: serde_json::Map<_, _> = options.collect();
                defaults["mappings"] = json!([{"type": "value", "options": options}]);
                defaults["custom"] = json!({"fillOpacity": 80, "lineWidth": 0});
            }
            PanelKind::Table { .. } => {}
        }
        defaults
    }

    fn overrides(&self) -> Value {
        let by_name = |name: &str, id: &str, value: Value| {
            json!({
                "matcher": {"id": "byName", "options": name},
                "properties": [{"id": id, "value": value}],
            })
        };
        let overrides: Vec<Value> = match &self.form {
            PanelKind::Table { columns } => columns
                .iter()
                .map(|column| by_name(column.title, "unit", json!(column.unit.id())))
                .collect(),
            PanelKind::TimeSeries { .. }
                if self.targets.iter().any(|panel_query| panel_query.legend == "{{state}}") =>
            {
                STATE_COLORS
                    .iter()
                    .map(|(state, color)| by_name(state, "color", json!({"mode": "fixed", "fixedColor": color})))
                    .collect()
            }
            PanelKind::Stat { .. } | PanelKind::TimeSeries { .. } | PanelKind::BarGauge | PanelKind::StateTimeline => {
                Vec::new()
            }
        };
        json!(overrides)
    }

    fn options(&self) -> Value {
        let reduce = json!({"calcs": ["lastNotNull"], "fields": "", "values": false});
        match self.form {
            PanelKind::Stat { .. } => json!({
                "reduceOptions": reduce, "colorMode": "value", "graphMode": "none", "textMode": "auto",
                "orientation": "auto", "justifyMode": "auto",
            }),
            PanelKind::TimeSeries { .. } => json!({
                "legend": {"displayMode": "list", "placement": "bottom", "showLegend": true, "calcs": []},
                "tooltip": {"mode": "multi", "sort": "desc"},
            }),
            PanelKind::BarGauge => json!({
                "reduceOptions": reduce, "displayMode": "gradient", "orientation": "horizontal", "showUnfilled": true,
                "valueMode": "color",
            }),
            PanelKind::StateTimeline => json!({
                "mergeValues": true, "showValue": "auto", "alignValue": "left", "rowHeight": 0.9,
                "legend": {"displayMode": "list", "placement": "bottom", "showLegend": true},
                "tooltip": {"mode": "single", "sort": "none"},
            }),
            PanelKind::Table { .. } => json!({"showHeader": true, "sortBy": []}),
        }
    }

    fn targets_json(&self) -> Value {
        let is_table = matches!(self.form, PanelKind::Table { .. });
        // A range query would go on showing what has ended: a former leader, an object that was deleted.
        let is_instant = is_table || matches!(self.form, PanelKind::Stat { .. } | PanelKind::BarGauge);
        let targets = self.targets.iter().zip('A'..).map(|(panel_query, id)| {
            let mut json = json!({
                "datasource": datasource(), "expr": panel_query.query, "legendFormat": panel_query.legend, "refId": id.to_string(),
            });
            if is_instant {
                json["instant"] = json!(true);
                json["range"] = json!(false);
            } else {
                json["interval"] = json!(SHORTEST_STEP);
            }
            if is_table {
                json["format"] = json!("table");
            }
            json
        });
        Value::Array(targets.collect())
    }
}

/// Joins the results of the queries of a table on their labels, and names the columns.
fn transformations(columns: &[TableColumn]) -> Value {
    let names = columns.iter().zip('A'..).map(|(column, id)| {
        // A merge names the values of several queries after them.
        let name = if columns.len() == 1 {
            "Value".to_owned()
        } else {
            format!("Value #{id}")
        };
        (name, json!(column.title))
    });
    let names: serde_json::Map<_, _> = names.collect();
    json!([
        {"id": "merge", "options": {}},
        {"id": "organize", "options": {"excludeByName": {"Time": true}, "indexByName": {}, "renameByName": names}},
    ])
}

/// The data source that the user chose.
pub fn datasource() -> Value {
    json!({"type": "prometheus", "uid": "${datasource}"})
}
