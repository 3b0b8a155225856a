//! The errors of the controller, as users read them in its log.

use std::io;
use std::time::Duration;

use super::budget::record_writer::RecordConflictError;
use super::process::ControllerError;
use super::runtime::error::ReconcileError;
use super::tls::certificates::LinkCertificateError;

fn refused() -> kube::Error {
    kube::Error::LinesCodecMaxLineLengthExceeded
}

fn timeout(action: &'static str) -> ReconcileError {
    let limit = Duration::from_secs(10);
    ReconcileError::Timeout { action, limit }
}

#[test]
fn the_errors_of_the_controller() {
    let mut rows = variants!(
        "Reconciles",
        [
            timeout("get a Secret"),
            ReconcileError::Api {
                action: "get a Secret",
                source: Box::new(refused()),
            },
            ReconcileError::Both {
                first: Box::new(timeout("create a Pod")),
                second: Box::new(timeout("create a PersistentVolumeClaim")),
            },
        ]
    );
    rows.extend(variants!(
        "Certificates of the link",
        [
            LinkCertificateError::Api(refused()),
            LinkCertificateError::Unreadable,
            LinkCertificateError::Conflicts,
            LinkCertificateError::Certificate(rcgen::Error::CouldNotParseCertificate),
            LinkCertificateError::Tls(rustls::Error::General("no key".into())),
        ]
    ));
    rows.extend(variants!(
        "The process",
        [
            ControllerError::Listen {
                address: ([0, 0, 0, 0], 8443).into(),
                error: io::ErrorKind::AddrInUse.into(),
            },
            ControllerError::Client(refused()),
            ControllerError::Metrics(prometheus::Error::AlreadyReg),
            ControllerError::LeadLost("another replica holds the Lease"),
            ControllerError::Deposed(RecordConflictError {
                kind: "AgentBudget",
                namespace: "shop".into(),
                name: "team".into(),
                expected: 3,
                found: 4,
            }),
            ControllerError::PartEnded("the reconciler of Sensors"),
        ]
    ));
    assert_texts!("controller", "Errors of the controller", rows);
}
