//! What a worker's journal costs, how soon a worker wakes, how soon it comes back, and how soon it works on a task: `cargo bench --bench worker`, part
//! of `make bench`.
#![allow(clippy::expect_used, reason = "a bench that cannot run ends")]

mod journal;
mod process;
#[path = "../process.rs"]
mod role;
mod tasks;

use std::path::Path;
use std::time::Duration;

fn main() {
    if let Some(dir) = std::env::var_os(journal::TRACED) {
        journal::traced(Path::new(&dir));
        return;
    }
    journal::figures();
    process::figures();
}

/// p50 and p99 in milliseconds.
#[expect(clippy::print_stdout, reason = "figures go to stdout")]
fn say(name: &str, times: &mut [Duration]) {
    times.sort_unstable();
    for share in [50, 99] {
        let time = times[(times.len() - 1) * share / 100].as_secs_f64() * 1e3;
        println!("FIGURE {name}_p{share} {time:.3} ms");
    }
}
