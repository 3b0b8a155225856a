//! How benches print their results: lines that begin with `FIGURE`.

use std::time::Duration;

/// p50 and p99 in milliseconds.
pub fn figures(name: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    for share in [50, 99] {
        let time = times[(times.len() - 1) * share / 100].as_secs_f64() * 1e3;
        say(&format!("FIGURE {name}_p{share} {time:.2} ms"));
    }
}

/// One line.
#[expect(clippy::print_stdout, reason = "figures go to stdout")]
pub fn say(line: &str) {
    println!("{line}");
}
