//! Why a connection string is refused, and why rows are not stored.

use std::path::PathBuf;

use tokio_postgres::error::SqlState;

/// Why a connection string cannot be used. Never quotes it: it holds a password.
#[cfg_attr(test, derive(strum::EnumCount))]
#[derive(thiserror::Error, Debug)]
pub enum TargetError {
    /// The file cannot be read.
    #[error("cannot read {}: {error}", .file.display())]
    File {
        /// Path of the file.
        file: PathBuf,
        /// The error of the operating system.
        error: std::io::Error,
    },
    /// The file is not a connection string.
    #[error(
        "the connection string in {} cannot be used: {problem}. Correct it in its Secret, key history.postgres.key of the \
         chart's values: postgresql://user:password@host:5432/database?sslmode=verify-full with special characters as %40, or \
         key=value pairs as for libpq",
        .file.display()
    )]
    Malformed {
        /// Path of the file.
        file: PathBuf,
        /// What is wrong, without any text of the file that is not the name of a known setting.
        problem: String,
    },
    /// The mode of TLS is unknown or not supported.
    #[error(
        "the value of sslmode in the connection string is not supported: use disable, prefer, require, verify-ca or verify-full"
    )]
    TlsMode,
    /// TLS is not available.
    #[error("TLS cannot be set up: {0}")]
    Tls(String),
    /// The server's certificate cannot be verified without a CA.
    #[error(
        "sslmode={0} requires a CA to verify the server with: set sslrootcert, or give the file of the CA \
         (history.postgres.caKey)"
    )]
    NoRoot(&'static str),
    /// The roots of the operating system are not used.
    #[error("sslrootcert=system is not supported: give a file with the certificate of the CA")]
    SystemRoots,
    /// The file of the CA has no certificate.
    #[error("{} has no CA certificate in PEM format", .0.display())]
    NoCertificate(PathBuf),
}

/// Why rows were not stored.
#[cfg_attr(test, derive(strum::EnumCount))]
#[derive(thiserror::Error, Debug)]
pub enum HistoryError {
    /// The connection string became unusable.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// The database cannot be reached, or did not answer in time.
    #[error("the database of the history is not available: {0}")]
    Unavailable(String),
    /// Too many requests wait for the database.
    #[error("too many uploads of histories wait for the database; retry later")]
    Busy,
    /// A newer agentloop has migrated the tables.
    #[error(
        "the tables of the history have version {found} and this agentloop knows versions up to {known}: update the \
         controller"
    )]
    NewerSchema {
        /// Version of the tables.
        found: i32,
        /// The newest version that this agentloop knows.
        known: i32,
    },
    /// A statement failed for another reason than the rows, such as a missing privilege.
    #[error("the database of the history rejects a statement with SQLSTATE {0}")]
    Statement(String),
    /// The database does not accept the rows.
    #[error("the database of the history does not accept the rows: SQLSTATE {0}")]
    Rejected(String),
}

impl HistoryError {
    /// The error of a statement. Messages of the server are left out, because they can quote rows.
    pub(crate) fn of_statement(error: &tokio_postgres::Error) -> Self {
        let Some(code) = error.code() else {
            return Self::Unavailable(transport(error));
        };
        match code.code().get(..2) {
            // Cardinality, data, integrity: a worker that sends what no worker of this version does.
            Some("21" | "22" | "23") => Self::Rejected(code.code().into()),
            // Shutdown, resources, timeouts.
            Some("08" | "53" | "57" | "58") => Self::Unavailable(format!("SQLSTATE {}", code.code())),
            _ if [
                SqlState::T_R_SERIALIZATION_FAILURE,
                SqlState::T_R_DEADLOCK_DETECTED,
                SqlState::LOCK_NOT_AVAILABLE,
            ]
            .contains(code) =>
            {
                Self::Unavailable(format!("SQLSTATE {}", code.code()))
            }
            _ => Self::Statement(code.code().into()),
        }
    }

    /// The error of a connection, which no row has reached yet.
    pub(crate) fn of_connection(error: &tokio_postgres::Error) -> Self {
        match error.as_db_error() {
            Some(error) => Self::Unavailable(format!("{} (SQLSTATE {})", error.message(), error.code().code())),
            None => Self::Unavailable(transport(error)),
        }
    }
}

/// The innermost cause, which is the most specific.
fn transport(error: &tokio_postgres::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}
