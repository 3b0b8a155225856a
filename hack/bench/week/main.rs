//! What a long life costs: `cargo bench --bench week`, part of `make bench`.
//!
//! A week of wakes, and busy days, by the engine's rules and by those before them, with the prices and the prompt cache of a
//! provider, see `prices.rs`.

mod life;
mod prices;

use life::{BUSY, Day, QUIET, Routine};
use prices::{Caching, FIVE_MINUTES, FIVE_MINUTES_ONE_MARK, ONE_HOUR};

/// The days of a loop under some rules.
type Live = fn(Routine, Caching, usize) -> Vec<Day>;

#[expect(clippy::print_stdout, reason = "figures go to stdout")]
fn main() {
    let rules: [(&str, Live, Caching); 4] = [
        ("before", life::before, FIVE_MINUTES_ONE_MARK),
        ("before_1h", life::before, ONE_HOUR),
        ("now_5m", life::engine, FIVE_MINUTES),
        ("now_1h", life::engine, ONE_HOUR),
    ];
    for (routine, of, days) in [("week", QUIET, 7), ("busy", BUSY, 2)] {
        for (name, live, caching) in rules {
            for (day, spent) in live(of, caching, days).into_iter().enumerate() {
                println!(
                    "FIGURE {routine}_{name}_day{} {:.2} USD, {} tokens a wake, {} summaries, {} bytes kept",
                    day + 1,
                    dollars(spent),
                    spent.input / spent.wakes.max(1),
                    spent.summaries,
                    spent.bytes,
                );
            }
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
fn dollars(day: Day) -> f64 {
    day.nanodollars as f64 / 1e9
}
