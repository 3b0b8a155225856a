//! The errors of the link, as users read them.

use super::client::LinkError;
use super::messages::{PodRefusal, RefusalCode};

#[test]
fn the_errors_of_the_link() {
    let refusal = PodRefusal {
        code: RefusalCode::Fenced,
        message: "another pod with epoch 4 holds this Agent".into(),
    };
    let rows = variants!(
        "Requests of a pod",
        [
            LinkError::Refused(refusal),
            LinkError::File {
                path: "/var/run/agentloop/ca.crt".into(),
                problem: "is not UTF-8 text".into(),
            },
            LinkError::Transport("connection refused".into()),
            LinkError::Unreadable("status 502 without a readable refusal".into()),
        ]
    );
    assert_texts!("link", "Errors of the link", rows);
}
