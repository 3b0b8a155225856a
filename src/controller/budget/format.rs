//! Formats amounts, windows and times for columns and messages. Pure.

use jiff::Timestamp;
use strum::IntoEnumIterator;

use crate::api::amount::{Amount, AmountKind, LimitAmounts};
use crate::api::budget::{BudgetWindow, CalendarPeriod, CalendarWindow, RollingWindow};
pub use crate::api::money::dollars;
use crate::support::text::short_number;

/// Rounded, with its unit, for a column: `1.2M tokens`, `$7.42`.
#[must_use]
pub fn short(kind: AmountKind, amount: i64) -> String {
    match noun(kind) {
        Some(noun) => format!("{} {noun}", short_number(amount)),
        None => dollars(amount),
    }
}

/// Rounded, without its unit: `1.2M`, `$7.42`.
#[must_use]
pub fn number(kind: AmountKind, amount: i64) -> String {
    match kind {
        AmountKind::Cost => dollars(amount),
        AmountKind::Tokens | AmountKind::InputTokens | AmountKind::OutputTokens | AmountKind::Calls => {
            short_number(amount)
        }
    }
}

/// Exact, with its unit, for a message: `1000000 tokens`, `$7.42`.
#[must_use]
pub fn exact(kind: AmountKind, amount: i64) -> String {
    match noun(kind) {
        Some(noun) => format!("{amount} {noun}"),
        None => dollars(amount),
    }
}

fn noun(kind: AmountKind) -> Option<&'static str> {
    match kind {
        AmountKind::Tokens => Some("tokens"),
        AmountKind::InputTokens => Some("input tokens"),
        AmountKind::OutputTokens => Some("output tokens"),
        AmountKind::Calls => Some("calls"),
        AmountKind::Cost => None,
    }
}

/// The [`AmountKind`]s that are not zero: `500 tokens and $2.00`.
#[must_use]
pub fn amount(amount: &Amount) -> String {
    let parts: Vec<String> = AmountKind::iter()
        .filter(|kind| amount.get(*kind) != 0)
        .map(|kind| exact(kind, amount.get(kind)))
        .collect();
    if parts.is_empty() {
        "nothing".into()
    } else {
        parts.join(" and ")
    }
}

/// The kinds that are not zero, as the JSON fields of a top-up.
#[must_use]
pub fn fields(amount: &Amount) -> String {
    let parts: Vec<String> = AmountKind::iter()
        .filter(|kind| amount.get(*kind) != 0)
        .map(|kind| match kind {
            AmountKind::Cost => format!("\"costUSD\":\"{}\"", dollars(amount.cost).trim_start_matches('$')),
            AmountKind::Tokens | AmountKind::InputTokens | AmountKind::OutputTokens | AmountKind::Calls => {
                format!("\"{kind}\":{}", amount.get(kind))
            }
        })
        .collect();
    parts.join(",")
}

/// A quarter of each limit, rounded up: the default [`Amount`] of a top-up.
#[must_use]
pub fn quarter(limits: &LimitAmounts) -> Amount {
    Amount::from_fn(|kind| limits.get(kind).map_or(0, |limit| limit / 4 + i64::from(limit % 4 > 0)))
}

/// A [`BudgetWindow`] for a column: `1h`, `daily Europe/Berlin`, `lifetime`.
#[must_use]
pub fn window(window: &BudgetWindow) -> String {
    if let Some(rolling) = &window.rolling {
        return seconds(rolling.seconds);
    }
    if let Some(calendar) = &window.calendar {
        return format!("{} {}", calendar.period.as_ref().to_lowercase(), calendar.time_zone);
    }
    "lifetime".into()
}

fn seconds(seconds: i64) -> String {
    let units = [(86_400, "d"), (3600, "h"), (60, "m")];
    let whole = units.iter().find(|(unit, _)| seconds % unit == 0 && seconds >= *unit);
    whole.map_or_else(
        || format!("{seconds}s"),
        |(unit, name)| format!("{}{name}", seconds / unit),
    )
}

/// Rounds up to a whole second.
#[must_use]
pub fn whole_second(moment: Timestamp) -> Timestamp {
    let second = moment.as_second();
    let up = i64::from(moment.subsec_nanosecond() > 0);
    Timestamp::from_second(second.saturating_add(up)).unwrap_or(moment)
}

/// A time for a column: without the date where the window is at most a day long.
#[must_use]
pub fn clock(moment: Timestamp, of: &BudgetWindow) -> String {
    let a_day = |rolling: &RollingWindow| rolling.seconds <= 86_400;
    let daily = |calendar: &CalendarWindow| calendar.period == CalendarPeriod::Daily;
    let soon = of.rolling.as_ref().is_some_and(a_day) || of.calendar.as_ref().is_some_and(daily);
    let format = if soon { "%H:%M UTC" } else { "%Y-%m-%d %H:%M UTC" };
    moment.strftime(format).to_string()
}

/// The part of a limit that is used, in whole percent, rounded down, so that 100 means all of it. All of a limit of 0
/// is used.
#[must_use]
pub fn percent(used: i64, limit: i64) -> i128 {
    if limit == 0 {
        return 100;
    }
    i128::from(used) * 100 / i128::from(limit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::budget::LifetimeWindow;

    #[test]
    fn money_shows_cents_and_what_is_less_than_a_cent() {
        for (micro, text) in [
            (0, "$0.00"),
            (7_420_000, "$7.42"),
            (1, "$0.000001"),
            (25_000_100, "$25.0001"),
            (999_999_999_999_999, "$999999999.999999"),
        ] {
            assert_eq!(dollars(micro), text);
        }
    }

    #[test]
    fn amounts_name_their_kinds() {
        let sum = Amount {
            tokens: 500,
            cost: 2_000_000,
            ..Amount::ZERO
        };
        assert_eq!(amount(&sum), "500 tokens and $2.00");
        assert_eq!(fields(&sum), "\"tokens\":500,\"costUSD\":\"2.00\"");
        assert_eq!(amount(&Amount::ZERO), "nothing");
        assert_eq!(short(AmountKind::InputTokens, 1_250_000), "1.2M input tokens");
        assert_eq!(number(AmountKind::Cost, 10_000), "$0.01");
    }

    #[test]
    fn percent_is_rounded_down_and_all_of_nothing() {
        assert_eq!((percent(999, 1000), percent(1000, 1000)), (99, 100));
        assert_eq!((percent(0, 0), percent(0, 5)), (100, 0));
        assert_eq!(percent(i64::MAX, 1), i128::from(i64::MAX) * 100);
    }

    #[test]
    fn a_quarter_of_any_limit_is_something() {
        let limits = LimitAmounts {
            tokens: Some(1),
            calls: Some(8),
            cost: Some(10),
            ..LimitAmounts::default()
        };
        let quarter = quarter(&limits);
        assert_eq!(
            (quarter.tokens, quarter.calls, quarter.cost, quarter.input_tokens),
            (1, 2, 3, 0)
        );
    }

    #[test]
    fn windows_read_as_in_the_column() {
        let empty = BudgetWindow {
            rolling: None,
            calendar: None,
            lifetime: None,
        };
        for (seconds, text) in [(3600, "1h"), (90, "90s"), (86_400 * 7, "7d"), (5400, "90m")] {
            let rolling = BudgetWindow {
                rolling: Some(RollingWindow { seconds }),
                ..empty.clone()
            };
            assert_eq!(window(&rolling), text);
        }
        let calendar = CalendarWindow {
            period: CalendarPeriod::Daily,
            time_zone: "Europe/Berlin".into(),
        };
        let daily = BudgetWindow {
            calendar: Some(calendar),
            ..empty.clone()
        };
        assert_eq!(window(&daily), "daily Europe/Berlin");
        let lifetime = BudgetWindow {
            lifetime: Some(LifetimeWindow {}),
            ..empty
        };
        assert_eq!(window(&lifetime), "lifetime");
    }
}
