//! Processes below a process, and their end.

use std::collections::HashMap;
use std::fs;

use rustix::process::{Pid, Signal, kill_process};

/// Kills all processes below one. A process that starts another one at the same moment may leave that one behind: repeat
/// until none is left.
pub(super) fn kill_descendants(of: Pid) -> Vec<Pid> {
    let found = descendants(of);
    for pid in &found {
        // It may have ended in the meantime.
        let _ = kill_process(*pid, Signal::KILL);
    }
    found
}

/// All processes below one, the parents first; also those that ended and were not reaped.
pub(super) fn descendants(of: Pid) -> Vec<Pid> {
    let mut children: HashMap<i32, Vec<i32>> = HashMap::new();
    for (pid, parent) in processes() {
        children.entry(parent).or_default().push(pid);
    }
    let mut found = Vec::new();
    let mut open = vec![of.as_raw_nonzero().get()];
    while let Some(parent) = open.pop() {
        for child in children.remove(&parent).unwrap_or_default() {
            found.extend(Pid::from_raw(child));
            open.push(child);
        }
    }
    found
}

/// The processes of this PID namespace with their parents.
fn processes() -> Vec<(i32, i32)> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter_map(|pid: i32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        Some((pid, parent(&stat)?))
    })
    .collect()
}

/// The parent in a line of `/proc/PID/stat`. The name before it may contain anything, also parentheses.
fn parent(stat: &str) -> Option<i32> {
    let (_, after) = stat.rsplit_once(')')?;
    after.split_ascii_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parent_is_found_behind_any_name() {
        assert_eq!(parent("12 (sh) S 7 12 12 0"), Some(7));
        assert_eq!(parent("12 (a) S 1 (b) R 8 12"), Some(8));
        assert_eq!(parent("12 (sh"), None);
    }

    #[test]
    fn a_child_is_a_descendant_and_ends_when_it_is_killed() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = Pid::from_child(&child);
        assert!(descendants(rustix::process::getpid()).contains(&pid));
        // Killing all descendants of this process would end those of other tests.
        kill_process(pid, Signal::KILL).unwrap();
        child.wait().unwrap();
        assert!(!descendants(rustix::process::getpid()).contains(&pid));
    }
}
