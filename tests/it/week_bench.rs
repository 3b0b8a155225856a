//! What a long life costs: a short version of the bench `week`.

#[path = "../../hack/bench/week/life.rs"]
mod life;
#[path = "../../hack/bench/week/prices.rs"]
mod prices;

use jiff::SignedDuration;
use life::{BUSY, QUIET, Routine};
use prices::{FIVE_MINUTES, FIVE_MINUTES_ONE_MARK, ONE_HOUR};

#[test]
fn a_day_of_wakes_costs_a_fifth_of_what_it_did_and_the_seventh_costs_what_the_second_does() {
    let before = life::before(QUIET, FIVE_MINUTES_ONE_MARK, 2)[1];
    let days = life::engine(QUIET, ONE_HOUR, 7);
    let (second, seventh) = (days[1], days[6]);
    assert!(
        seventh.nanodollars <= second.nanodollars / 10 * 11,
        "{seventh:?} and on the second day {second:?}"
    );
    assert!(
        seventh.nanodollars * 5 <= before.nanodollars,
        "{seventh:?} and before {before:?}"
    );
    assert!(seventh.wakes >= 140 && seventh.bytes < 200_000, "{seventh:?}");
    // Also where nothing stays in the cache from one wake to the next.
    let short = life::engine(QUIET, FIVE_MINUTES, 1)[0];
    assert!(short.nanodollars * 3 <= before.nanodollars, "{short:?}");
}

#[test]
fn a_busy_day_costs_less_than_half_of_what_it_did() {
    // Its first three hours, since a whole one takes minutes in a debug build. Before, a window was full after the first.
    let hours = Routine {
        day: SignedDuration::from_hours(3),
        ..BUSY
    };
    let before = life::before(hours, FIVE_MINUTES_ONE_MARK, 1)[0];
    let now = life::engine(hours, FIVE_MINUTES, 1)[0];
    assert!(
        now.nanodollars * 2 <= before.nanodollars,
        "{now:?} and before {before:?}"
    );
    assert!(now.wakes >= 80, "{now:?}");
}
