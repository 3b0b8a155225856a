//! The errors of a sensor pod, as users read them.

use super::outbox::OutboxError;

#[test]
fn the_errors_of_a_sensor_pod() {
    let rows = variants!(
        "The outbox",
        [
            OutboxError::Full { dir: "/outbox".into() },
            OutboxError::Corrupted {
                file: "/outbox/outbox.db".into(),
                detail: "the last number is missing".into(),
            },
            OutboxError::Newer {
                file: "/outbox/outbox.db".into(),
                found: 9,
                known: 3,
            },
            OutboxError::Foreign {
                file: "/outbox/outbox.db".into(),
                owner: "7c5d".into(),
            },
            OutboxError::OnNetwork {
                dir: "/outbox".into(),
                kind: "nfs".into(),
            },
            OutboxError::Locked { dir: "/outbox".into() },
            OutboxError::Failed {
                dir: "/outbox".into(),
                detail: "permission denied".into(),
            },
        ]
    );
    assert_texts!("sensor-pod", "Errors of a sensor pod", rows);
}
