//! Ports on loopback for servers that cannot choose one themselves.

use std::net::TcpListener;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU16, Ordering};

/// Below the ephemeral range of Linux (from 32,768) and of `NodePorts` (from 30,000): the kernel gives none of these to
/// a connection or to a listener on port 0 between the choice and the start of the server.
const FIRST: u16 = 20_000;
const COUNT: u16 = 9_000;

/// Begins at another place in each process, so that two runs side by side rarely try the same.
static NEXT: LazyLock<AtomicU16> = LazyLock::new(|| {
    let place = std::process::id().wrapping_mul(97) % u32::from(COUNT);
    AtomicU16::new(u16::try_from(place).unwrap())
});

/// A port that nothing listens on, and that no other test of this process gets.
pub fn free_port() -> u16 {
    loop {
        let place = NEXT.fetch_add(1, Ordering::Relaxed) % COUNT;
        let port = FIRST + place;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

#[test]
fn each_port_is_assigned_once_and_below_those_of_the_kernel() {
    let ports: std::collections::BTreeSet<u16> = (0..50).map(|_| free_port()).collect();
    assert_eq!(ports.len(), 50);
    assert!(ports.iter().all(|port| (FIRST..FIRST + COUNT).contains(port)));
}
