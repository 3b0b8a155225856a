//! What a long life costs: a short version of the bench `week`.

#[path = "../../hack/bench/week/life.rs"]
mod life;
#[path = "../../hack/bench/week/prices.rs"]
mod prices;

use life::QUIET;
use prices::{FIVE_MINUTES, FIVE_MINUTES_ONE_MARK, ONE_HOUR};

#[test]
fn a_day_of_wakes_costs_a_fifth_of_what_it_did_and_the_third_costs_what_the_second_does() {
    let before = life::before(QUIET, FIVE_MINUTES_ONE_MARK, 2)[1];
    let days = life::engine(QUIET, ONE_HOUR, 3);
    for pair in days[1..].windows(2) {
        let (one, next) = (pair[0].nanodollars, pair[1].nanodollars);
        assert!(next <= one / 10 * 11, "{one} and then {next}");
    }
    let now = days[2];
    assert!(
        now.nanodollars * 5 <= before.nanodollars,
        "{now:?} and before {before:?}"
    );
    assert!(now.wakes >= 140 && now.bytes < 200_000, "{now:?}");
    // Also where nothing stays in the cache from one wake to the next.
    let short = life::engine(QUIET, FIVE_MINUTES, 1)[0];
    assert!(short.nanodollars * 3 <= before.nanodollars, "{short:?}");
}
