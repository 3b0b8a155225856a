//! The errors of limits, as users read them.

use super::price::MoneyProblem;
use super::window::WindowError;

#[test]
fn the_errors_of_limits() {
    let mut rows = variants!(
        "Amounts of money",
        [MoneyProblem::NotDecimal, MoneyProblem::TooFine, MoneyProblem::TooLarge]
    );
    rows.extend(variants!(
        "Windows",
        [WindowError::NotOne, WindowError::Zone("Mars/Base".into())]
    ));
    assert_texts!("ledger", "Errors of limits", rows);
}
