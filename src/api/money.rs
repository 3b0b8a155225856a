//! Amounts of US dollars, as specs write them.

/// What is wrong with an amount of money.
#[derive(thiserror::Error, strum::EnumCount, Clone, Copy, Debug, PartialEq, Eq)]
pub enum MoneyProblem {
    /// Not digits, optionally followed by a point and digits.
    #[error("must be US dollars as a decimal number in quotes, such as \"3.00\"")]
    NotDecimal,
    /// Finer than a millionth of a dollar.
    #[error("must have at most six decimals")]
    TooFine,
    /// Larger than 64 bits.
    #[error("is too large; the largest amount is 9223372036854.775807")]
    TooLarge,
}

/// Parses US dollars into micro-dollars: digits, and at most six decimals after a point.
pub fn micro_usd(text: &str) -> Result<i64, MoneyProblem> {
    let digits = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    let (whole, decimals) = text.split_once('.').unwrap_or((text, "0"));
    if !digits(whole) || !digits(decimals) {
        return Err(MoneyProblem::NotDecimal);
    }
    if decimals.len() > 6 {
        return Err(MoneyProblem::TooFine);
    }
    format!("{whole}{decimals:0<6}")
        .parse()
        .map_err(|_| MoneyProblem::TooLarge)
}

/// Micro-dollars in a dollar.
const DOLLAR: i64 = 1_000_000;

/// Dollars and cents; further digits only where they are not zero.
#[must_use]
pub fn dollars(micro: i64) -> String {
    let (whole, rest) = (micro / DOLLAR, (micro % DOLLAR).abs());
    let digits = format!("{rest:06}");
    let more = digits.get(2..).unwrap_or_default().trim_end_matches('0');
    format!("${whole}.{}{more}", digits.get(..2).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_of_dollars_are_read_exactly_or_not_at_all() {
        for (text, amount) in [
            ("2.50", Some(2_500_000)),
            ("0.000001", Some(1)),
            ("25", Some(25_000_000)),
            ("0.0000001", None),
            ("-1", None),
            ("1.", None),
            ("", None),
        ] {
            assert_eq!(micro_usd(text).ok(), amount, "{text}");
        }
    }
}
