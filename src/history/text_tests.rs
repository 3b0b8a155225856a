//! The errors of the history, as users read them.

use super::error::{HistoryError, TargetError};

#[test]
fn the_errors_of_the_history() {
    let file = "/etc/agentloop-history/uri";
    let mut rows = variants!(
        "Connection strings",
        [
            TargetError::File {
                file: file.into(),
                error: std::io::ErrorKind::NotFound.into(),
            },
            TargetError::Malformed {
                file: file.into(),
                problem: "the setting sslcert is not supported".into(),
            },
            TargetError::TlsMode,
            TargetError::Tls("no supported version".into()),
            TargetError::NoRoot("verify-full"),
            TargetError::SystemRoots,
            TargetError::NoCertificate("/etc/agentloop-history/ca.crt".into()),
        ]
    );
    rows.extend(variants!(
        "Uploads",
        [
            HistoryError::Target(TargetError::SystemRoots),
            HistoryError::Unavailable("Connection refused (os error 111)".into()),
            HistoryError::Busy,
            HistoryError::NewerSchema { found: 2, known: 1 },
            HistoryError::Statement("42501".into()),
            HistoryError::Rejected("22P02".into()),
        ]
    ));
    assert_texts!("history", "Errors of the history", rows);
}
