//! `spec.guardrails.activeHours`: the hours of the week in which a loop may call its model.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Hours in which the loop may take turns. A window belongs to the day on which it starts. A time that is skipped when
/// clocks are set forward is taken as the moment of the change; of a time that occurs twice when clocks are set back,
/// the first occurrence counts.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.start != self.end").message(
    "spec.guardrails.activeHours.start and end are the same: for whole days use start \"00:00\" and end \"24:00\""
))]
pub struct ActiveHoursSpec {
    /// IANA time zone of `start` and `end`. Defaults to UTC.
    #[serde(default = "utc")]
    #[schemars(length(min = 1, max = 64))]
    #[x_kube(validation = Rule::new("self.matches('^[A-Za-z][A-Za-z0-9_+-]*(/[A-Za-z0-9_+-]+)*$')").message(
        "spec.guardrails.activeHours.timeZone must be a name of the IANA time zone database, such as Europe/Berlin or UTC"
    ))]
    pub time_zone: String,
    /// Days on which a window starts, `Monday` to `Sunday`. Absent: every day.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(min = 1, max = 7), extend("x-kubernetes-list-type" = "set"))]
    pub days: Vec<DayOfWeek>,
    /// Start of the window, a quoted time from `"00:00"` to `"23:59"`.
    #[schemars(length(min = 1, max = 5))]
    #[x_kube(validation = Rule::new("self.matches('^([01][0-9]|2[0-3]):[0-5][0-9]$')").message(
        "spec.guardrails.activeHours.start must be a time of day in quotes, such as \"08:00\""
    ))]
    pub start: String,
    /// End of the window, a quoted time from `"00:00"` to `"24:00"`. If earlier than `start`, the window ends on the
    /// next day.
    #[schemars(length(min = 1, max = 5))]
    #[x_kube(validation = Rule::new("self.matches('^(([01][0-9]|2[0-3]):[0-5][0-9]|24:00)$')").message(
        "spec.guardrails.activeHours.end must be a time of day in quotes, such as \"23:00\", or \"24:00\""
    ))]
    pub end: String,
}

fn utc() -> String {
    "UTC".into()
}

/// A day of the week.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, strum::AsRefStr)]
pub enum DayOfWeek {
    /// Monday.
    Monday,
    /// Tuesday.
    Tuesday,
    /// Wednesday.
    Wednesday,
    /// Thursday.
    Thursday,
    /// Friday.
    Friday,
    /// Saturday.
    Saturday,
    /// Sunday.
    Sunday,
}
