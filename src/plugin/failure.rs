//! Why a command of the plugin fails, and what its process returns.

use std::io;

use crate::api::{GROUP, NamespacedName};

use super::cluster_errors;
use super::link::LinkFailure;

/// What the process returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitStatus {
    /// The command succeeded.
    Success,
    /// The command failed, the task failed, or a check found a problem.
    Failure,
    /// A limit ended the task.
    LimitReached,
    /// The task was accepted, and the command ended before the task did.
    OutcomeUnknown,
    /// The flags or arguments are wrong; nothing was done.
    Usage,
}

impl ExitStatus {
    /// Every status, as the reference lists them.
    pub const ALL: [Self; 5] = [
        Self::Success,
        Self::Failure,
        Self::LimitReached,
        Self::OutcomeUnknown,
        Self::Usage,
    ];

    /// The exit code.
    #[must_use]
    pub const fn code(self) -> u8 {
        match self {
            Self::Success => 0,
            Self::Failure => 1,
            Self::LimitReached => 2,
            Self::OutcomeUnknown => 3,
            Self::Usage => 64,
        }
    }

    /// When it is returned.
    #[must_use]
    pub const fn meaning(self) -> &'static str {
        match self {
            Self::Success => "the command succeeded; for `run`: the task completed",
            Self::Failure => "an error; for `run`: the task failed; for `check`: a check failed",
            Self::LimitReached => "`run`: a limit of the Agent ended the task",
            Self::OutcomeUnknown => {
                "`run`: the task was accepted, and the command ended before the task did; `run --id` continues"
            }
            Self::Usage => "wrong flags or arguments: nothing was done",
        }
    }
}

/// Why a command fails.
#[cfg_attr(test, derive(strum::EnumCount))]
#[derive(thiserror::Error, Debug)]
pub enum PluginError {
    /// The request cannot be fulfilled as it was made; the message says why.
    #[error("{0}")]
    Refused(String),
    /// The flags contradict each other, or the state of the objects.
    #[error("{0}")]
    Usage(String),
    /// No connection can be made with this kubeconfig.
    #[error("the kubeconfig cannot be used: {0}")]
    Kubeconfig(String),
    /// The API server rejects a request, or does not answer.
    #[error("cannot {action}: {problem}")]
    Cluster {
        /// What was tried.
        action: String,
        /// The message of the API server.
        problem: String,
        /// The user may not do this.
        is_forbidden: bool,
    },
    /// The controller rejects a request, or does not answer.
    #[error("{0}")]
    Link(#[from] LinkFailure),
    /// Standard input or output is not usable.
    #[error("cannot read or write: {0}")]
    Stream(#[from] io::Error),
    /// An object has no representation in the requested format.
    #[error("cannot format the output: {0}")]
    Format(String),
}

impl PluginError {
    /// A failed request to the API server.
    pub fn cluster(action: impl Into<String>, error: &kube::Error) -> Self {
        Self::Cluster {
            action: action.into(),
            problem: cluster_errors::problem(error),
            is_forbidden: is_forbidden(error),
        }
    }

    /// A kind that the cluster does not know. `plural`: its name in paths.
    #[must_use]
    pub fn not_installed(plural: &str) -> Self {
        Self::Refused(format!(
            "the cluster does not serve {plural}.{GROUP}: agentloop is not installed; see kubectl agentloop check"
        ))
    }

    /// An object that does not exist.
    #[must_use]
    pub fn not_found(kind: &str, name: &NamespacedName) -> Self {
        Self::Refused(format!(
            "{kind} {} does not exist in namespace {}",
            name.name, name.namespace
        ))
    }

    /// What the process returns.
    #[must_use]
    pub fn exit_status(&self) -> ExitStatus {
        match self {
            Self::Usage(_) => ExitStatus::Usage,
            Self::Refused(_)
            | Self::Kubeconfig(_)
            | Self::Cluster { .. }
            | Self::Link(_)
            | Self::Stream(_)
            | Self::Format(_) => ExitStatus::Failure,
        }
    }
}

/// The end of a command that only reads: the reader of a pipe that has read enough is no failure.
pub fn unless_closed(ended: Result<(), PluginError>) -> Result<(), PluginError> {
    match ended {
        Err(PluginError::Stream(error)) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        ended => ended,
    }
}

/// Whether an error of the API server says that the object does not exist.
#[must_use]
pub fn is_not_found(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 404)
}

/// Whether an error of the API server says that the path does not exist, rather than the object: the kind is not installed.
#[must_use]
pub fn is_of_unknown_path(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 404 && !cluster_errors::is_of_api(status))
}

/// Whether an error of the API server says that the user may not do this.
#[must_use]
pub fn is_forbidden(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 403)
}

/// Whether an error of the API server says that another client has changed the object.
#[must_use]
pub fn is_conflict(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 409)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_exit_status_has_a_code_of_its_own() {
        let codes = ExitStatus::ALL.map(ExitStatus::code);
        assert_eq!(codes, [0, 1, 2, 3, 64]);
    }

    #[test]
    fn a_closed_pipe_is_no_failure_of_reads_and_wrong_flags_differ_from_failures() {
        let of = |error: PluginError| error.exit_status();
        let closed = || PluginError::from(io::Error::from(io::ErrorKind::BrokenPipe));
        assert_eq!(of(closed()), ExitStatus::Failure);
        assert!(unless_closed(Err(closed())).is_ok());
        assert!(unless_closed(Err(PluginError::Refused(String::new()))).is_err());
        assert_eq!(of(io::Error::from(io::ErrorKind::NotFound).into()), ExitStatus::Failure);
        assert_eq!(of(PluginError::Usage(String::new())), ExitStatus::Usage);
        assert_eq!(of(PluginError::Refused(String::new())), ExitStatus::Failure);
    }
}
